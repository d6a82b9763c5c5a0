"""Tests of the C++ operations with GCC's sanitizers: reads or writes outside of memory and undefined behaviour fail.

    python tests/support/sanitized.py [arguments of pytest]

The operations are compiled for this processor, into a cache folder that is deleted at the end. Several minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
OPERATIONS = (
    "test_cpu_rows", "test_cpu_kernels", "test_cpu_layers", "test_expert_forms", "test_gqa", "test_compressed",
    "test_sparse", "test_int4", "test_fp8_pages", "test_hyper_streams", "test_screened", "test_threads",
)  # fmt: skip
# Vectors are loaded from any address on purpose. With -O3 compiling takes several times as long as with -O1.
COMPILER = """#!/bin/sh
unset LD_PRELOAD
exec g++ "$@" -O1 -g1 -fsanitize=address,undefined -fno-sanitize=alignment,vptr -fno-sanitize-recover=undefined
"""
# Python itself leaves memory behind.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def main(arguments: list[str]) -> int:
    """Compile the operations, run the tests and return pytest's exit code."""
    if shutil.which("g++") is None:
        sys.exit("the sanitizers are GCC's, and there is no g++ here; install it")
    files = [str(TESTS / "kernels" / f"{name}.py") for name in OPERATIONS]
    with tempfile.TemporaryDirectory(prefix="batchinfer-sanitized-") as scratch:
        compiler = Path(scratch) / "compiler"
        compiler.write_text(COMPILER, encoding="utf-8")
        compiler.chmod(0o700)
        env = {**os.environ, **OPTIONS, "XDG_CACHE_HOME": scratch, "CXX": str(compiler)}
        making = "from batchinfer_kernels.cpu.build import library; print(library())"
        made = subprocess.run([sys.executable, "-c", making], env=env, stdout=subprocess.PIPE, text=True, check=False)
        if made.returncode:
            sys.exit("the operations cannot be compiled with sanitizers; the reason stands above")
        for call in (b"__asan_report", b"__ubsan_handle"):
            if call not in Path(made.stdout.strip()).read_bytes():
                sys.exit(f"the compiled operations do not call {call.decode()}")
        # before all other libraries, some of whose functions both replace
        found = [_library(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
        tests = [sys.executable, "-m", "pytest", "-m", "not slow", "-n", "2", *files, *arguments]
        return subprocess.run(tests, env={**env, "LD_PRELOAD": ":".join(found)}, check=False).returncode


def _library(name: str) -> str:
    """Return the path of one of GCC's libraries."""
    asked = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():  # g++ prints the name of a library that it does not have
        sys.exit(f"g++ has no {name}; install the sanitizers of this GCC")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
