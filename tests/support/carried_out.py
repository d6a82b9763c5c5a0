"""The instructions of AMX on a processor that has none: carried out by tile_instructions.cpp, one by one."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.instructions import FOR_X86

SOURCE = Path(__file__).parent / "tile_instructions.cpp"
NAME = "amx-carried-out"
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
(_AVX2,) = [known for known in FOR_X86 if known.name == "avx2"]
CARRIED_OUT = replace(_AVX2, name=NAME, flags=(*_AVX2.flags, *_AMX_FLAGS, "-O1"), tiles=True, for_tests=True)


def compile_with(*arguments: str) -> None:
    """Compile tile_instructions.cpp with what else the arguments name."""
    command = [*build._compiler(), *build._FLAGS, *CARRIED_OUT.flags, *arguments, str(SOURCE)]
    subprocess.run(command, check=True)


def permit() -> None:
    """Let this process, which has tile_instructions.cpp preloaded, name these instructions."""
    build.INSTRUCTION_SETS = (*build.INSTRUCTION_SETS, CARRIED_OUT)
