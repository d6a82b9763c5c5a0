"""A random FP8 checkpoint of a published model's exact shape, or of fewer of its layers, for starts and memory.

    python tests/bench/large_checkpoint.py FOLDER [--like glm-4.7-flash | deepseek-v2-lite] [--layers N]

GLM-4.7-Flash's is 30.6 GB large, DeepSeek-V2-Lite's 16.1 GB.

The tokenizer is that of the random model. Then `batchinfer convert FOLDER NEW --dtype int4`, and jobs over both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.model.config import load_model_config  # noqa: E402
from batchinfer.model.tensor_names import SCALE_SUFFIX, expected_tensors  # noqa: E402
from support.paths import RANDOM_MODEL  # noqa: E402
from support.published_shapes import GLM_FLASH, V2_LITE  # noqa: E402

SHAPES = {"glm-4.7-flash": GLM_FLASH, "deepseek-v2-lite": V2_LITE}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def random_tensors(name: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return a weight as large as in a trained model, projections in FP8 with their scales."""
    if len(shape) == 1:
        return {name: torch.ones(shape, dtype=torch.bfloat16)}
    if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
        return {name: (torch.randn(shape) / shape[1] ** 0.5).bfloat16()}
    # sign and mantissa at random, magnitudes from 1/2 to 15/16
    values = (torch.randint(0, 256, shape, dtype=torch.uint8) & 0x87 | 0x30).view(torch.float8_e4m3fn)
    scales = torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 1.4 / shape[1] ** 0.5)
    return {name: values, name + SCALE_SUFFIX: scales}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", choices=list(SHAPES), default="glm-4.7-flash")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, options.folder / file)
    shape = SHAPES[options.like]
    config = shape | {"num_hidden_layers": options.layers or shape["num_hidden_layers"], "quantization_config": FP8}
    (options.folder / "config.json").write_text(json.dumps(config, indent=1))
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in expected_tensors(load_model_config(options.folder)):
        words = name.split(".")
        part = f"layer-{int(words[2]):05d}" if words[1] == "layers" else "ends"
        if part not in parts and part != "ends":
            _write(options.folder, {key: parts.pop(key) for key in list(parts)})
        parts.setdefault(part, {}).update(random_tensors(name, shape))
    _write(options.folder, parts)


def _write(folder: Path, parts: dict[str, dict[str, torch.Tensor]]) -> None:
    for part, tensors in parts.items():
        save_file(tensors, folder / f"{part}.safetensors")


if __name__ == "__main__":
    main()
