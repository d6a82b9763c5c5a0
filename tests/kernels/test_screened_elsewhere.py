"""Words by screening, compiled for other processors without torch: on each those of the exact product."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.instructions import FOR_ARM, FOR_X86, InstructionSet, slowest

PROGRAM = Path(__file__).parents[1] / "support" / "screened_words.cpp"
PARTS = ("screen", "linear", "strips", "byte_strips", "pack", "pairs", "sampling", "draw")
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.all,  # make test: test_screened, with the instructions of this processor
    pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86-64 processor"),
]


def words_by(folder: Path, compiler: list[str], flags: tuple[str, ...], run: list[str]) -> list[str]:
    """Compile the program, run it, and return its digests: of bfloat16 and of float32."""
    sources = [PROGRAM, *(build.SOURCES / f"{part}.cpp" for part in PARTS)]
    command = [*compiler, *build._FLAGS, *flags, "-O1", f"-I{build.SOURCES}", "-static", *map(str, sources)]
    subprocess.run([*command, "-o", str(folder / "words")], check=True)
    ended = subprocess.run([*run, folder / "words"], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout.split()


def x86(name: str) -> InstructionSet:
    (found,) = (known for known in FOR_X86 if known.name == name)
    return found


@pytest.mark.skipif(bool(x86("avx2").why_not(build.processor_features())), reason="no AVX2 here")
def test_words_are_those_of_the_exact_product_with_avx2_and_in_tiles(tmp_path):
    words = words_by(tmp_path, build._compiler(), x86("avx2").flags, [])
    tiles = words_by(tmp_path, build._compiler(), (*x86("avx2").flags, "-DBATCHINFER_TILES_IN_PLAIN"), [])
    assert len(words) == 2
    assert tiles[1] == words[1], "float32 is never multiplied in tiles"


def test_words_are_those_of_the_exact_product_on_arm(tmp_path):
    for tool, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}; install {package}")
    assert len(words_by(tmp_path, [ARM_COMPILER], slowest(FOR_ARM).flags, [EMULATOR])) == 2
