"""Weights of any size that take no room: a whole header, and a hole in the place of the values."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from batchinfer.model.config import load_model_config
from batchinfer.model.tensor_names import expected_tensors

BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}


def write_hollow_weights(folder: Path, dtype: str = "BF16") -> Path:
    """model.safetensors with every tensor that the folder's config.json asks for; plans read headers and samples."""
    header, end = {}, 0
    for name, shape in expected_tensors(load_model_config(folder)):
        start, end = end, end + prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return path
