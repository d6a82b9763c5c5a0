"""Python in a child process whose C++ operations are made for the instructions named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from batchinfer_kernels.cpu import build
from support.forked_python import ForkedPython

TESTS = Path(__file__).parents[1]
# Tests that hold for all of them.
OPERATIONS = [
    str(TESTS / "kernels" / name)
    for name in (
        "test_cpu_kernels.py",
        "test_cpu_rows.py",
        "test_cpu_layers.py",
        "test_sparse.py",
        "test_int4.py",
        "test_gqa.py",
        "test_compressed.py",
        "test_hyper_streams.py",
        "test_expert_forms.py",
    )
]
# Of test_cpu_layers all kinds of weights of one model: its layers are made of the operations that the other files test.
# Of the vocabularies to draw from those of up to 4,097 tokens: an odd number of whole vectors and one value over.
OFTEN = "not 129280 and not (test_cpu_layers and (test_fused_layers or test_a_decode_step) and not ({}))".format(
    " or ".join(f"[v3-{dtype}]" for dtype in ("float32", "bfloat16", "fp8", "int4"))
)


def variables_for(instructions: str, **others: str) -> dict[str, str]:
    """The environment of a process with these instructions that finds the tests' modules."""
    paths = os.pathsep.join(str(path) for path in (TESTS.parent, TESTS.parent / "kernels", TESTS))
    return {**os.environ, build.CHOICE: instructions, "PYTHONPATH": paths, **others}


def run_code_with(instructions: str, code: str, *arguments: str, **variables: str) -> str:
    """Run Python code, forked with torch loaded, and return its output; it must succeed."""
    process = ForkedPython(code, arguments, variables_for(instructions, **variables), TESTS.parent)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said.strip()


def run_with(instructions: str, *arguments: str) -> str:
    """Run Python with these arguments and return its output; it must succeed."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        env=variables_for(instructions),
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def run_tests_with(instructions: str, *arguments: str, which: str = "") -> None:
    """Run these tests; all must pass, none may be skipped. Tests of Triton are left out.

    Args:
        which: as after pytest's -k.
    """
    chosen = f"not triton and ({which})" if which else "not triton"
    said = run_with(instructions, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", chosen, *arguments)
    assert "passed" in said
    assert "skipped" not in said
