"""Compiles DeepGEMM's FP8 products for an H200 at DeepSeek-V3's shapes, where nvcc and the library's headers are.

DeepGEMM compiles a product when it is first called, on the GPU machine. This does the same with its own templates and
flags, at block sizes that its heuristics choose from, and says what each takes of a GPU. Signature and flags are those
of sgl-deep-gemm 0.1.2 (`sm90_fp8_gemm_1d2d_impl`; csrc/jit/compiler.hpp of DeepGEMM).

    python tests/support/compile_deep_gemm.py [FOLDER]      a line of JSON per product; FOLDER: of the wheel
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
_FLAGS = (
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "--diag-suppress=39,161,174,177,186,940",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--ptxas-options=--register-usage-level=10,--verbose",
    "-cubin",
)
_SOURCE = """
#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
using namespace deep_gemm;
void* instantiate() {{
  auto kernel = &sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, {columns}, {depth}, {groups},
    {block_rows}, {block_columns}, 128, 128, 128, {swizzle}, {stages}, 128, {threads}, 1, false, 132,
    GemmType::{layout}, epilogue::transform::EpilogueIdentity>;
  return reinterpret_cast<void*>(kernel);
}}
"""


@dataclass(frozen=True)
class Product:
    """One instantiation: rows times `groups` weights [columns, depth], in one of DeepGEMM's layouts."""

    name: str
    layout: str
    columns: int
    depth: int
    groups: int
    block_rows: int
    block_columns: int
    stages: int

    @property
    def source(self) -> str:
        """A warp group of 128 threads for 64 rows; results are swizzled over as many bytes as a block's row has."""
        values = asdict(self) | {
            "threads": 128 * (self.block_rows // 64),
            "swizzle": min(128, 2 * self.block_columns & -(2 * self.block_columns)),
        }
        return _SOURCE.format(**values)


PRODUCTS = (
    Product("queries", "Normal", 24576, 1536, 1, 128, 128, 5),
    Product("latents", "Normal", 576, 7168, 1, 64, 64, 8),
    Product("experts of prefill, gate and up", "MGroupedContiguous", 4096, 7168, 9, 128, 128, 5),
    Product("experts of decode, gate and up", "MGroupedMasked", 4096, 7168, 2, 64, 128, 6),
    Product("experts of decode, down", "MGroupedMasked", 7168, 2048, 2, 64, 128, 6),
)


def nvcc() -> str | None:
    """The compiler that DeepGEMM would take."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return str(home / "bin/nvcc") if (home / "bin/nvcc").exists() else shutil.which("nvcc")


def wheel(folder: Path = ROOT / "gpu-wheels") -> Path | None:
    """DeepGEMM's wheel, where tests/gpu/pack.sh has put it."""
    return next(iter(sorted(folder.glob("sgl_deep_gemm-*.whl"))), None)


def headers(into: Path, folder: Path = ROOT / "gpu-wheels") -> Path | None:
    """The folder of headers of the library that is installed, or of its wheel; None: there is neither."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is not None and spec.origin and (Path(spec.origin).parent / "include/deep_gemm/impls").is_dir():
        return Path(spec.origin).parent / "include"
    found = wheel(folder)
    if found is None:
        return None
    with zipfile.ZipFile(found) as archive:
        archive.extractall(into, [name for name in archive.namelist() if name.startswith("deep_gemm/include/")])
    return into / "deep_gemm/include"


def why_not() -> str | None:
    """Return why nothing can be compiled here, or None."""
    if nvcc() is None:
        return "no nvcc here"
    if importlib.util.find_spec("deep_gemm") is None and wheel() is None:
        return "no headers of DeepGEMM here; tests/gpu/pack.sh fetches its wheel"
    return None


def compiled(folder: Path = ROOT / "gpu-wheels") -> Iterator[dict[str, object]]:
    """Registers and spilled bytes of each product.

    Raises:
        RuntimeError: nvcc refuses one; the message is its own.
    """
    compiler = nvcc()
    with TemporaryDirectory() as scratch:
        include = headers(Path(scratch), folder)
        assert compiler is not None
        assert include is not None
        for product in PRODUCTS:
            source = Path(scratch) / "product.cu"
            source.write_text(product.source)
            command = [compiler, *_FLAGS, "-I", str(include), str(source), "-o", str(source.with_suffix(".cubin"))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{product.name}: {done.stderr[-2000:]}")
            registers, spilled = (
                sum(map(int, re.findall(pattern, done.stderr)))
                for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill")
            )
            yield {"name": product.name, "registers": registers, "spilled_bytes": spilled}


if __name__ == "__main__":
    if (reason := why_not()) is not None and len(sys.argv) < 2:
        sys.exit(reason)
    for line in compiled(*map(Path, sys.argv[1:])):
        print(json.dumps(line), flush=True)
