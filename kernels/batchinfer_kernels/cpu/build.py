"""Compilation of the C++ operations on first use, and loading of the library.

The sources are compiled for the best of INSTRUCTION_SETS that the processor has, or for the one that the environment
variable BATCHINFER_CPU_FEATURES names. All libraries give the same bits, except in bfloat16 with AMX's tiles
(`numerics`); the library's name differs.

The library is kept per user, under a digest of its sources, flags and target:

    ~/.cache/batchinfer/kernels/            ($XDG_CACHE_HOME instead of ~/.cache when set)
        <digest>.so                         complete or absent: written next to its name, synced, renamed
        <digest>.lock                       held during a build; the kernel drops it with its holder
        <digest>.failed                     why the last build failed, for processes that waited for it
        <digest>.building.<random>/         a build in progress, or the leftover of a killed one

A wheel for one platform has the libraries of all instruction sets for one release of torch (`compile_all`). They are
copied to the cache in place of a compilation, and checked as if they had been compiled.
"""

import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from batchinfer_kernels.cpu import compilers
from batchinfer_kernels.cpu import instructions as instruction_sets
from batchinfer_kernels.cpu.compilers import Step
from batchinfer_kernels.cpu.instructions import (
    CHOICE,
    INSTRUCTION_SETS,
    BuildError,
    InstructionSet,
    choose,
    may_use_tiles,
    processor_features,
)
from batchinfer_kernels.cpu.trust import check_private, why_not_trusted

SOURCES = Path(__file__).parent / "csrc"
COMPILED = Path(__file__).parent / "compiled"  # torch-<release>/<digest>.so, in a wheel for one platform
COMPILE_S = 300
COMPILE_FOR_WHEEL_S = 3600  # of one instruction set: the machine that builds a wheel may be busy
CHECK_S = 120  # for the tiles of a new library; the check takes less than a second, starting the process some more
_WAIT_S = 2 * COMPILE_S + CHECK_S

# Pairs of bfloat16 are read as 32 bits, hence no strict aliasing.
# Contraction off: where a product and a sum become one rounding is written down in the sources, not left to a compiler.
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-w")
_TORCH = ("-lc10", "-ltorch_cpu")
# Units that include torch's headers are compiled as one, since reading these takes longer than compiling the rest, and
# with few optimisations: their loops go over rows, requests and experts, not over the values of a row.
_WITH_TORCH = ("layers", "speculation", "bindings", "compressed_bindings", "screen_bindings")
# Two fifths less of the compiler's time than -O3 (-O1: a quarter). GCC collects its garbage beyond 1 GB only, which
# saves a fifth.
_QUICKLY = ("-Og", "--param", "ggc-min-expand=100", "--param", "ggc-min-heapsize=1048576")
# Small units of the others are compiled together: reading the compiled header takes longer than compiling some of them.
_TOGETHER = (
    ("tasks", "threads", "mla_prefill", "sparse", "streams"),
    ("draw", "linear", "most_likely", "rope", "rows"),
    ("angles", "gate", "gqa_prefill", "pack", "paged_decode", "pairs", "sampling", "tile_check"),
)
_SHARED = "for_kernels.h"  # of the others, compiled once


class _UnfitError(RuntimeError):
    """No library can be made for these instructions here, but perhaps for others; the message gives the reason."""


CLEAR_REST = "\r\033[J"  # escape code of terminals: this line and those below
_UNKNOWN_TO_COMPILER: dict[str, str] = {}  # instruction set by name to the compiler's message; of this process
# In the messages of compilers and assemblers for flags and instructions newer than themselves.
_UNKNOWN = ("unrecognized", "unknown argument", "no such instruction")


@functools.cache
def why_not() -> str | None:
    """Load the library (building it first when needed); return None, or the reason why that failed.

    Every call in a process returns the first call's answer.
    """
    try:
        _load()
    except (BuildError, OSError) as error:
        return " ".join(str(error).split())
    return None


@functools.cache
def instructions() -> InstructionSet:
    """Return the instruction set of the library here; every call in a process returns the same one.

    Raises:
        BuildError: the processor lacks all sets, or the one that was named.
    """
    return choose(INSTRUCTION_SETS, os.environ.get(CHOICE), why_not_for)


def why_not_for(known: InstructionSet) -> str | None:
    """Return why no library for these instructions can be used here, as far as is known yet, or None."""
    if reason := known.why_not(processor_features()):
        return reason
    if known.needs_permission and not may_use_tiles():
        return "the kernel does not permit the use of its tiles"
    if known.name in _UNKNOWN_TO_COMPILER:
        return f"the compiler does not know its instructions ({_UNKNOWN_TO_COMPILER[known.name]})"
    if known.tiles and (refused := _refusal_file(known)).exists():
        said = " ".join(refused.read_text(encoding="utf-8").split())
        return f"its tiles cannot be relied on ({said}); delete {refused} to have them tried again"
    return None


def explain() -> str:
    """Describe the instructions in use and why no better ones are, or why there are no C++ operations."""
    reason = why_not()
    if reason is not None:
        return f"not in use: {reason}"
    multiplies_pairs = "avx512_bf16" in instructions().features and not instructions().tiles
    is_slow = multiplies_pairs and not torch.ops.batchinfer_cpu.pairs_are_quick()
    return explain_choice() + ("; bfloat16 in float32, as avx512_bf16 is slower on this processor" if is_slow else "")


def explain_choice() -> str:
    """Describe the instructions that a library is or would be made for, and why no better ones are."""
    return instruction_sets.explain(INSTRUCTION_SETS, os.environ.get(CHOICE), instructions(), why_not_for)


def library(*, may_copy: bool = True) -> Path:
    """Return the path of the library, copying or building it first if it is not in the cache; safe for many processes.

    Args:
        may_copy: take the wheel's library if there is one.

    Raises:
        BuildError: no suitable processor, no compiler, no cache folder that this user alone can write, or the compiler
            failed.
    """
    started = time.time()
    folder = _cache_folder()
    path = folder / f"{_digest(instructions())}.so"
    if folder.is_dir():
        check_private(folder)
    if path.exists():
        return path
    shipped = COMPILED / f"torch-{torch_release()}" / path.name
    source = shipped if may_copy and shipped.is_file() else _compiler()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _raise_if_failed_since(started, path.with_suffix(".failed"))
                _build(source, path)
    except _UnfitError as error:
        _tell(f"the C++ operations are not used for {instructions().name} here: {error}")
        instructions.cache_clear()
        return library(may_copy=may_copy)
    except OSError as error:
        raise BuildError(f"the cache folder {folder} cannot be used: {error.strerror or error}") from error
    return path


def _load() -> None:
    """Load the library; rebuild it once if it exists and cannot be loaded."""
    path = library()
    loaded = path.stat().st_ino
    try:
        reason = why_not_trusted(path)
        if reason is not None:
            raise OSError(f"it {reason}")
        torch.ops.load_library(str(path))
    except OSError as error:
        _tell(f"{path} cannot be loaded ({error}); building it again")
        with _locked(path.with_suffix(".lock")):
            if path.exists() and path.stat().st_ino == loaded:  # else another process has done it meanwhile
                path.unlink()
        path = library(may_copy=False)  # the wheel's may be what cannot be loaded here
        torch.ops.load_library(str(path))
    # the machine that built the library has checked its own tiles; another one may share the cache
    if instructions().tiles and not _tiles_agree():
        raise BuildError(
            f"the tiles of this processor ({platform.node()}) do not add up as {path} promises; set {CHOICE}=avx512"
        )


def _tell(words: str) -> None:
    """Print a line to stderr; on a terminal, in place of a progress line that another process has drawn there."""
    print(f"{CLEAR_REST if sys.stderr.isatty() else ''}{words}", file=sys.stderr, flush=True)


def _tiles_agree() -> bool:
    """Return whether products in tiles have the promised order of sums here, with the loaded library."""
    return bool(torch.ops.batchinfer_cpu.tiles_agree(False))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "batchinfer" / "kernels"
    except RuntimeError as error:
        raise BuildError(f"there is no home folder for a cache ({error}); set XDG_CACHE_HOME") from error


def _compiler() -> list[str]:
    """Return the C++ compiler as the start of a command: $CXX, else the usual names."""
    named = os.environ.get("CXX")
    try:
        commands = [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]
    except ValueError as error:
        raise BuildError(f"CXX is {named}, which is no command: {error}") from None
    for command in commands:
        if command and shutil.which(command[0]):
            return command
    raise BuildError(
        f"no C++ compiler on this machine ({named or 'c++, g++, clang++'}); install one or set CXX{_other_release()}"
    )


def _other_release() -> str:
    """Return a clause on the wheel's libraries if all are for other releases of torch, else ""."""
    releases = [folder.name.removeprefix("torch-") for folder in COMPILED.glob("torch-*")]
    if not releases or torch_release() in releases:
        return ""
    return f", or torch {' or '.join(releases)}, for which this wheel has them compiled (here is {torch_release()})"


def numerics(dtype: torch.dtype | None = None) -> str:
    """Name the family of libraries that give the same bits: all made of these sources, with tiles or without.

    Processors, other instruction sets, compilers and versions of torch are not part of the name: every sum has one
    order, written down in the sources, and calls no library. Tiles have another order of sums; float32 never uses them.
    """
    family = "amx" if instructions().tiles and dtype is not torch.float32 else "fma"
    return f"cpu-{family}-{_digest_of()[:16]}"


def _digest(chosen: InstructionSet) -> str:
    """Name everything that decides what the library computes and where it can be loaded."""
    linked = (*_TORCH, _loaded_cpp_library() is not None)  # not its path: an update of that library changes nothing
    return _digest_of(torch_release(), platform.machine(), *_FLAGS, *chosen.flags, *linked)


def torch_release() -> str:
    """Return torch's version without the name of its accelerator: the library uses nothing in which these differ."""
    return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", torch.__version__)


def _refusal_file(chosen: InstructionSet) -> Path:
    """Return the path of the file that says why the library for these instructions is not used on this machine."""
    return _cache_folder() / f"{_digest(chosen)}.refused"


@functools.cache
def _digest_of(*parts: object) -> str:
    """Return a digest of the sources and of `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\0".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(f"{source.name}\0".encode() + source.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a build; raise BuildError after _WAIT_S if another process keeps it."""
    deadline = time.monotonic() + _WAIT_S
    with open(path, "a", encoding="utf-8") as file:  # not inherited by the compiler, so it goes with this process
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has held {path} for {_WAIT_S} s; end it") from None
                time.sleep(0.05)
        yield


def _raise_if_failed_since(started: float, failed: Path) -> None:
    """Raise the error of a build that failed while this process waited for it: the same build would fail again."""
    if failed.exists() and failed.stat().st_mtime >= started:
        raise BuildError(failed.read_text(encoding="utf-8"))


def _build(source: list[str] | Path, path: Path) -> None:
    """Compile or copy in a temporary folder next to `path` and rename the result; the caller holds the lock.

    Args:
        source: the compiler's command, or a compiled library.
        path: the library to make.
    """
    for leftover in path.parent.glob(f"{path.stem}.building.*"):  # of killed builds: only one runs at a time
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}.building.", dir=path.parent))
    try:
        if isinstance(source, Path):
            built = Path(shutil.copyfile(source, folder / source.name))
        else:
            _tell(f"compiling the C++ operations for {instructions().name}: once on this machine, up to a minute")
            built = _compile_if_known(source, folder)
        if instructions().tiles:
            _check_tiles(built)
        built.chmod(0o700)
        _sync(built)
        os.replace(built, path)
        _sync(path.parent)
    except BuildError as error:
        path.with_suffix(".failed").write_text(str(error), encoding="utf-8")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_ASK_TILES = """
import sys, torch
torch.ops.load_library(sys.argv[1])
sys.exit(0 if torch.ops.batchinfer_cpu.tiles_agree(False) else "their sums have another order or value than expected")
"""


def _check_tiles(built: Path) -> None:
    """Check the tiles' products in a child process, which they may crash.

    A failure is kept in the cache for later processes.

    Raises:
        _UnfitError: the results do not have the order of sums that the sources promise.
    """
    said = _find_tile_failure(built)
    if said is not None:
        reason = f"{said[:200]} (on {platform.node()})"
        _refusal_file(instructions()).write_text(reason, encoding="utf-8")
        raise _UnfitError(reason)


def _find_tile_failure(built: Path) -> str | None:
    """Return the last words of the checking process if it failed, crashed or took too long, else None."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TILES, str(built)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=CHECK_S,
        )
    except subprocess.TimeoutExpired:
        return f"the process took longer than {CHECK_S} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with {done.returncode}"


def _compile_if_known(compiler: list[str], folder: Path) -> Path:
    """Compile; report instructions newer than the compiler as unfit, unless the environment names them.

    Raises:
        BuildError: the compiler failed.
        _UnfitError: the compiler does not know the flags or the instructions.
    """
    try:
        return _compile(compiler, folder, chosen := instructions())
    except BuildError as error:
        last = instruction_sets.slowest(INSTRUCTION_SETS)
        if os.environ.get(CHOICE) or chosen == last or not any(word in str(error) for word in _UNKNOWN):
            raise
        _UNKNOWN_TO_COMPILER[chosen.name] = str(error)
        raise _UnfitError(str(error)) from error


def compile_all(folder: Path) -> None:
    """Compile the libraries of all instruction sets of this kind of processor, for the wheel's folder COMPILED.

    Raises:
        BuildError: there is no compiler, or one that does not know a set.
    """
    target = folder / f"torch-{torch_release()}"
    target.mkdir(parents=True, exist_ok=True)
    for known in (known for known in INSTRUCTION_SETS if not known.for_tests):
        with tempfile.TemporaryDirectory(prefix="batchinfer-") as scratch:
            built = _compile(_compiler(), Path(scratch), known, COMPILE_FOR_WHEEL_S)
            shutil.copyfile(built, target / f"{_digest(known)}.so")


def _compile(compiler: list[str], folder: Path, chosen: InstructionSet, limit_s: float = COMPILE_S) -> Path:
    """Compile all sources and link them; return the library in `folder`."""
    torch_folder = Path(torch.__file__).parent
    flags = (*_FLAGS, *chosen.flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    includes = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    compiling = [*compiler, *flags, *includes]
    sources = {source.stem: source for source in sorted(SOURCES.glob("*.cpp"))}
    objects, steps = [], []

    def add(source: Path, *, included: list[str], needs: Path | None = None) -> None:
        objects.append(made := folder / f"{source.stem}.o")
        steps.append(Step([*compiling, *included, "-c", str(source), "-o", str(made)], made, needs))

    shared, compiled = SOURCES / _SHARED, folder / f"{_SHARED}.gch"
    needs = None
    included: list[str] = []
    if shared.exists():
        # a compiler that cannot use the compiled header reads the header itself
        _write_includes(folder / _SHARED, [shared])
        steps.append(Step([*compiling, "-x", "c++-header", str(shared), "-o", str(compiled)], compiled))
        needs, included = compiled, ["-include", str(folder / _SHARED)]
    for names in (_WITH_TORCH, *_TOGETHER):
        if parts := [sources.pop(name) for name in names if name in sources]:
            _write_includes(whole := folder / parts[0].name, parts)
            if names == _WITH_TORCH:  # without the shared header, with flags of their own
                add(whole, included=[*_QUICKLY])
            else:
                add(whole, included=included, needs=needs)
    for name in sorted(sources):
        add(sources[name], included=included, needs=needs)
    compilers.run(steps, limit_s, folder)
    built = folder / "kernels.so"
    libraries = [*_TORCH, *([loaded] if (loaded := _loaded_cpp_library()) is not None else [])]
    linking = [*compiler, "-shared", *map(str, objects), f"-L{torch_folder / 'lib'}", *libraries]
    compilers.run([Step([*linking, "-o", str(built)], built)], limit_s, folder)
    return built


def _write_includes(path: Path, parts: list[Path]) -> None:
    path.write_bytes(b"".join(b'#include "%b"\n' % os.fsencode(part) for part in parts))


@functools.cache
def _loaded_cpp_library() -> str | None:
    """Return the path of the C++ library that torch loaded into this process, to link the operations with it.

    Some compilers link a C++ library of their own statically. Two such libraries in one process share some of their
    state: numbers go missing from error messages, or the process ends.
    """
    try:
        maps = os.fsdecode(Path("/proc/self/maps").read_bytes()).split("\n")
    except OSError:  # no Linux; elsewhere there is but one
        return None
    loaded = (line[line.index("/") :] for line in maps if "/libstdc++.so" in line)
    return next((path for path in loaded if Path(path).is_file()), None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
