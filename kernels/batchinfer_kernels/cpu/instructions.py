"""The instruction sets that the C++ operations can be compiled for, and the choice between them.

A reason why a set is not chosen is a clause that can follow "not amx: ".
"""

import ctypes
import functools
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CHOICE = "BATCHINFER_CPU_FEATURES"  # names a set in the environment
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: asm/unistd_64.h, asm/prctl.h
_ARM_FEATURES = {"asimddp": (16, 1 << 20), "i8mm": (26, 1 << 13)}  # bits of AT_HWCAP and AT_HWCAP2


class BuildError(RuntimeError):
    """The C++ operations cannot be built or loaded here; the message is one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of processor features, by Linux's names, and the compiler flags that use them.

    tiles: products in bfloat16 use 16 x 16 tiles, whose sums have an order of their own (csrc/amx_tiles.h).
    for_tests: used only when named.
    """

    name: str
    features: tuple[str, ...]
    flags: tuple[str, ...]
    tiles: bool = False
    for_tests: bool = False

    @property
    def needs_permission(self) -> bool:
        """Whether the kernel must first permit the process to use the tiles' registers."""
        return "amx_tile" in self.features

    def why_not(self, found: frozenset[str]) -> str | None:
        """Return why a processor with these features cannot run the set, or None."""
        missing = ", ".join(feature for feature in self.features if feature not in found)
        return f"the processor has no {missing}" if missing else None


_AVX2, _AVX2_FLAGS = ("avx2", "fma"), ("-mavx2", "-mfma")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")

# The fastest first. A compiler puts what its flags name anywhere, so each set has flags for its own features alone.
FOR_X86 = (
    InstructionSet(
        "amx",
        (*_AVX512, "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        tiles=True,
    ),
    InstructionSet(
        "avx512", (*_AVX512, "avx512_bf16", "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni")
    ),
    InstructionSet("avx512-vnni", (*_AVX512, "avx512_vnni"), (*_AVX512_FLAGS, "-mavx512vnni")),
    InstructionSet("avx512-base", _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2-vnni", (*_AVX2, "avx_vnni"), (*_AVX2_FLAGS, "-mavxvnni")),
    InstructionSet("avx2", _AVX2, _AVX2_FLAGS),
    # speed does not matter here: -O1 builds the library in two thirds of the time
    InstructionSet(
        "amx-plain", _AVX2, (*_AVX2_FLAGS, "-DBATCHINFER_TILES_IN_PLAIN", "-O1"), tiles=True, for_tests=True
    ),
)
FOR_ARM = (
    InstructionSet("neon-i8mm", ("asimddp", "i8mm"), ("-march=armv8.2-a+dotprod+i8mm",)),
    InstructionSet("neon", ("asimddp",), ("-march=armv8.2-a+dotprod",)),
)
INSTRUCTION_SETS = FOR_ARM if platform.machine() == "aarch64" else FOR_X86


def choose(
    sets: Sequence[InstructionSet], named: str | None, why_not: Callable[[InstructionSet], str | None]
) -> InstructionSet:
    """Return the first usable set, or the named one.

    Args:
        sets: the fastest first.
        named: "" and None: any but those for tests.
        why_not: returns the reason why a set cannot be used here, or None.

    Raises:
        BuildError: no set has that name, or no set can be used; the message is the reason of the last one tried.
    """
    if named and named not in {known.name for known in sets}:
        raise BuildError(f"{CHOICE} is {named!r}; use {' or '.join(known.name for known in _for_all(sets))}")
    reason = None
    for known in [known for known in sets if known.name == named] if named else _for_all(sets):
        reason = why_not(known)
        if reason is None:
            return known
    raise BuildError(reason)


def explain(
    sets: Sequence[InstructionSet],
    named: str | None,
    chosen: InstructionSet,
    why_not: Callable[[InstructionSet], str | None],
) -> str:
    """Describe the chosen set, and why no faster one was chosen; arguments as for `choose`."""
    if named:
        return f"for {chosen.name}, as {CHOICE} says"
    faster = _for_all(sets[: sets.index(chosen)])
    return "; ".join([f"for {chosen.name}", *(f"not {known.name}: {why_not(known)}" for known in faster)])


def slowest(sets: Sequence[InstructionSet]) -> InstructionSet:
    """Return the last set that is not for tests."""
    return _for_all(sets)[-1]


def _for_all(sets: Sequence[InstructionSet]) -> list[InstructionSet]:
    return [known for known in sets if not known.for_tests]


@functools.cache
def processor_features() -> frozenset[str]:
    """Return this processor's features, by the names that instruction sets use.

    Raises:
        BuildError: the processor is of another kind, or its features are unknown.
    """
    machine = platform.machine()
    if machine not in ("x86_64", "AMD64", "aarch64"):
        raise BuildError(f"they are for x86-64 and 64-bit Arm with Linux, this processor is {machine or 'unknown'}")
    if machine == "aarch64":
        ask = ctypes.CDLL(None).getauxval
        ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(name for name, (entry, bit) in _ARM_FEATURES.items() if ask(entry) & bit)
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        raise BuildError("the processor's features are only known on Linux, from /proc/cpuinfo") from None
    return frozenset(flags.split())


@functools.cache
def may_use_tiles() -> bool:
    """Ask the kernel for the tiles' registers, once per process, and return whether it agreed.

    Threads that start later may use the tiles, too.
    """
    return ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
