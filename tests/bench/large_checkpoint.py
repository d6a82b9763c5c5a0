"""A random checkpoint of a published model's exact shape, or of fewer of its layers, for starts, memory and GPUs.

    python tests/bench/large_checkpoint.py FOLDER [--layers N] [--dtype fp8 | bfloat16]
                        [--like glm-4.7-flash | deepseek-v2-lite | qwen3-30b-a3b | gpt-oss-20b]

GLM-4.7-Flash's is 30.6 GB large in FP8 and 59.9 GB in bfloat16, DeepSeek-V2-Lite's 16.1 GB in FP8, Qwen3-30B-A3B's
31.1 GB in FP8. gpt-oss-20b has its experts in MXFP4, 13.8 GB with all else in bfloat16.

The tokenizer is that of the sample model. Then `batchinfer convert FOLDER NEW --dtype int4`, and jobs over both.
Weights are pieces of one block of random numbers, each from another place of it: only the disk takes time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.model.config import load_model_config  # noqa: E402
from batchinfer.model.tensor_names import SCALE_SUFFIX, expected_tensors  # noqa: E402
from support.published_shapes import FP8, GLM_FLASH, GPT_OSS_20B, QWEN3_MOE, V2_LITE  # noqa: E402

SHAPES = {
    "glm-4.7-flash": GLM_FLASH,
    "deepseek-v2-lite": V2_LITE,
    "qwen3-30b-a3b": QWEN3_MOE,
    "gpt-oss-20b": GPT_OSS_20B,
}
SAMPLE_MODEL = TESTS.parent / "sample_data" / "model"
# Values of a block. No width of a weight divides this number, so rows of a weight that is larger are not the same rows.
_BLOCK = 2**24 + 43
_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: where its values begin in the block of its kind."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    block: memoryview

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return functools.reduce(int.__mul__, self.shape, self.dtype.itemsize)


@functools.cache
def _block(dtype: torch.dtype, scale: float) -> memoryview:
    """Return random values as bytes; `scale` 0: ones."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.float8_e4m3fn:  # sign and mantissa at random, magnitudes from 1/2 to 15/16
        values = torch.randint(0, 256, (_BLOCK,), dtype=torch.uint8, generator=generator) & 0x87 | 0x30
    elif dtype is torch.uint8:  # pairs of FP4 values, or their exponents if there is a scale
        values = torch.randint(0, 256, (_BLOCK,), dtype=dtype, generator=generator)
        values = torch.full_like(values, 127 + round(math.log2(scale))) if scale < 1 else values
    elif scale == 0:
        values = torch.ones(2**16, dtype=dtype)
    elif dtype is torch.float32:  # of FP8 weights: the same for all of them
        values = torch.full((2**16,), scale)
    else:
        values = _normal().mul(scale).to(dtype)
    return memoryview(values.view(torch.uint8).numpy()).cast("B")


@functools.cache
def _normal() -> torch.Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(1))


def random_tensors(name: str, shape: tuple[int, ...], *, fp8: bool, fp4: bool) -> list[Tensor]:
    """Return a weight as large as in a trained model, with its scales where it is in FP8 or, of an expert, in FP4."""
    if len(shape) == 1:
        return [Tensor(name, shape, torch.bfloat16, 0, _block(torch.bfloat16, 0))]
    start = random.Random(name).randrange(_BLOCK)
    if fp4 and ".experts." in name and name.endswith(".weight"):
        groups = (shape[0], shape[1] // 32)
        exponents = _block(torch.uint8, shape[1] ** -0.5 / 4)
        return [
            Tensor(f"{name}_blocks", (*groups, 16), torch.uint8, start, _block(torch.uint8, 1)),
            Tensor(f"{name}_scales", groups, torch.uint8, 0, exponents),
        ]
    if not fp8 or (not name.endswith("_proj.weight") and "kv_a_proj" not in name):
        return [Tensor(name, shape, torch.bfloat16, start, _block(torch.bfloat16, shape[1] ** -0.5))]
    scales = (-(-shape[0] // 128), -(-shape[1] // 128))
    return [
        Tensor(name, shape, torch.float8_e4m3fn, start, _block(torch.float8_e4m3fn, 1)),
        Tensor(name + SCALE_SUFFIX, scales, torch.float32, 0, _block(torch.float32, 1.4 / shape[1] ** 0.5)),
    ]


def write_checkpoint(folder: Path, shape: dict[str, Any], *, fp8: bool, tokenizer: Path = SAMPLE_MODEL) -> int:
    """Write a new model folder of this config.json, by as many threads as there are cores; return its bytes."""
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder / file)
    fp4 = "quantization_config" in shape  # gpt-oss
    config = shape | ({"quantization_config": FP8} if fp8 and not fp4 else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    parts: dict[str, list[Tensor]] = {}
    for name, dims in expected_tensors(load_model_config(folder)):
        words = name.split(".")
        part = f"layer-{int(words[2]):05d}" if words[1] == "layers" else "ends"
        parts.setdefault(part, []).extend(random_tensors(name, dims, fp8=fp8 and not fp4, fp4=fp4))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sizes = [pool.submit(_write, folder / f"{part}.safetensors", tensors) for part, tensors in parts.items()]
        return sum(size.result() for size in sizes)


def _write(path: Path, tensors: Iterable[Tensor]) -> int:
    """Write a file in the format of safetensors; return its bytes."""
    header, end = {}, 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.num_bytes]
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            at, left = tensor.start * tensor.dtype.itemsize, tensor.num_bytes
            while left:
                left -= file.write(tensor.block[at : at + left])
                at = 0  # the block once more, from its beginning
        return file.tell()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", choices=list(SHAPES), default="glm-4.7-flash")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--dtype", choices=("fp8", "bfloat16"), default="fp8")
    options = parser.parse_args()
    shape = SHAPES[options.like]
    num_layers = options.layers or shape["num_hidden_layers"]
    layers = {"num_hidden_layers": num_layers}
    if "layer_types" in shape:
        layers["layer_types"] = shape["layer_types"][:num_layers]
    num_bytes = write_checkpoint(options.folder, shape | layers, fp8=options.dtype == "fp8")
    print(f"{options.folder}: {num_bytes / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
