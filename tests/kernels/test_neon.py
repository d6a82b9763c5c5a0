"""Grouped-query attention compiled for 64-bit Arm and emulated: the bits of AVX2.

tests/arm/emulate.sh does the same for whole models of latent attention; it needs Python and torch for Arm.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.instructions import FOR_ARM, FOR_X86, slowest

PROGRAM = Path(__file__).parents[1] / "support" / "grouped_attention.cpp"
PARTS = ("attention", "paged_decode", "gqa_prefill", "rope", "rows", "pairs", "strips")
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = pytest.mark.all  # make test: test_gqa, with the instructions of this processor


@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor")
def test_grouped_attention_has_the_bits_of_avx2_on_arm(tmp_path):
    for tool, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}; install {package}")
    (avx2,) = (known for known in FOR_X86 if known.name == "avx2")
    commands = {"avx2": (build._compiler(), avx2.flags), "neon": ([ARM_COMPILER], slowest(FOR_ARM).flags)}
    sources = [PROGRAM, *(build.SOURCES / f"{part}.cpp" for part in PARTS)]
    for name, (compiler, flags) in commands.items():
        command = [*compiler, *build._FLAGS, "-O1", *flags, f"-I{build.SOURCES}", "-static", *map(str, sources)]
        subprocess.run([*command, "-o", str(tmp_path / name)], check=True)
    here = subprocess.run([tmp_path / "avx2"], capture_output=True, text=True, check=True).stdout
    arm = subprocess.run([EMULATOR, tmp_path / "neon"], capture_output=True, text=True, check=True).stdout
    assert len(set(here.split())) == 14  # seven forms in two dtypes
    assert arm == here
