"""The C++ operations are built once, by one process, and whatever ends a build leaves nothing in the way."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchinfer_kernels.cpu import build, compilers
from batchinfer_kernels.cpu.compilers import Step
from batchinfer_kernels.cpu.instructions import FOR_ARM, FOR_X86
from support.forked_python import ForkedPython

KERNELS = Path(build.__file__).parents[2]
ROOT = Path(__file__).parents[2]


# The build, in processes of their own. Most get a compiler that is a script: what it makes is not loaded.

ASK = "from batchinfer_kernels.cpu import build; print(build.why_not())"
MAKE = "from batchinfer_kernels.cpu import build; print(build.library())"


@pytest.fixture
def supported():
    try:
        build.instructions()
    except build.BuildError as error:
        pytest.skip(f"the C++ operations cannot run here: {error}")


def without_tiles():
    """The best instructions here whose library is not tried before it is used: scripts make none that could be."""
    return next(known.name for known in build.INSTRUCTION_SETS if not known.tiles and build.why_not_for(known) is None)


def start(code, cache, **environment):
    variables = {
        **os.environ,
        **({build.CHOICE: without_tiles()} if "CXX" in environment else {}),
        "PYTHONPATH": f"{KERNELS}{os.pathsep}{ROOT}",
        "XDG_CACHE_HOME": str(cache),
        **environment,
    }
    return ForkedPython(code, [], variables, ROOT)


def library_and_cache(cache):
    """Return this process's library, and the folder where a process with this cache looks for its own."""
    folder = cache / "batchinfer/kernels"
    folder.mkdir(parents=True)
    return build.library(), folder


def answer(process):
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    lines = [line for line in output.splitlines() if not line.startswith("compiling the C++ operations")]
    return "\n".join(lines).strip()


def write_compiler(folder, body):
    """A compiler that notes each call in `calls`, then does `body` ($out: the file to make)."""
    path = folder / "compiler"
    path.unlink(missing_ok=True)  # one that still runs cannot be written to
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/calls\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n{body}\n'
    )
    path.chmod(0o755)
    return str(path)


# A compiler whose work is done by a process that it starts.
SLOW = "sleep 600 & echo $! >> {}/numbers; wait"


def numbers_in(folder, count):
    """Return the process numbers of `count` slow compilers, once all have started."""
    wait_until(lambda: (folder / "numbers").exists() and len((folder / "numbers").read_text().split()) == count)
    return (folder / "numbers").read_text().split()


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_calls(folder):
    return len((folder / "calls").read_text().splitlines())


def entries(cache):
    return sorted(path.suffix or path.name for path in (cache / "batchinfer/kernels").iterdir())


# A command for each unit (some are compiled as one), one for the header that others share, and one that links them.
NUM_COMMANDS = len(list(build.SOURCES.glob("*.cpp"))) + 2
NUM_COMMANDS -= sum(len(names) - 1 for names in (build._WITH_TORCH, *build._TOGETHER))


# Which instructions the library uses: what the processor has, and what was named.

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"}
AVX512_WITH_PRODUCTS = {*AVX512, "avx512_bf16", "avx512_vnni"}
AMX = {*AVX512_WITH_PRODUCTS, "amx_tile", "amx_bf16", "amx_int8"}


def chosen(monkeypatch, features, named=None, sets=FOR_X86):
    monkeypatch.setattr(build, "INSTRUCTION_SETS", sets)
    monkeypatch.setattr(build, "processor_features", lambda: frozenset(features))
    monkeypatch.delenv(build.CHOICE, raising=False)
    if named is not None:
        monkeypatch.setenv(build.CHOICE, named)
    return build.instructions.__wrapped__().name


@pytest.mark.parametrize(
    ("features", "named", "expected"),
    [
        (AMX, None, "amx"),
        (AMX, "avx512", "avx512"),
        (AVX512_WITH_PRODUCTS, None, "avx512"),
        (AVX512_WITH_PRODUCTS, "", "avx512"),
        (AVX512_WITH_PRODUCTS, "avx2", "avx2"),
        (AVX512 | {"avx512_vnni"}, None, "avx512-vnni"),
        (AVX512, None, "avx512-base"),
        (AVX2 | {"avx_vnni"}, None, "avx2-vnni"),
        (AVX2, None, "avx2"),
    ],
)
def test_the_best_instructions_are_taken_or_those_that_were_named(monkeypatch, features, named, expected):
    monkeypatch.setattr(build, "may_use_tiles", lambda: True)
    assert chosen(monkeypatch, features, named) == expected


@pytest.mark.parametrize(
    ("features", "named", "expected"),
    [({"asimddp", "i8mm"}, None, "neon-i8mm"), ({"asimddp", "i8mm"}, "neon", "neon"), ({"asimddp"}, None, "neon")],
)
def test_an_arm_processor_has_sets_of_its_own(monkeypatch, features, named, expected):
    assert chosen(monkeypatch, features, named, FOR_ARM) == expected
    with pytest.raises(build.BuildError, match=r"the processor has no asimddp$"):
        chosen(monkeypatch, {"asimd"}, sets=FOR_ARM)
    with pytest.raises(build.BuildError, match=r"BATCHINFER_CPU_FEATURES is 'avx2'; use neon-i8mm or neon$"):
        chosen(monkeypatch, features, "avx2", FOR_ARM)


def test_an_arm_processor_is_asked_for_what_it_has(monkeypatch):
    words = {16: 1 << 20 | 1 << 1, 26: 1 << 14}

    class Library:
        def __init__(self, _):
            self.getauxval = lambda entry: words[entry]

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr("ctypes.CDLL", Library)
    assert build.processor_features.__wrapped__() == {"asimddp"}


def test_tiles_that_the_kernel_does_not_give_are_left(monkeypatch):
    monkeypatch.setattr(build, "may_use_tiles", lambda: False)
    assert chosen(monkeypatch, AMX) == "avx512"
    with pytest.raises(build.BuildError, match="the kernel does not permit the use of its tiles"):
        chosen(monkeypatch, AMX, "amx")


@pytest.mark.parametrize(
    ("features", "named", "reason"),
    [
        ({"avx", "fma"}, None, "the processor has no avx2$"),
        ({"sse4_2"}, None, "the processor has no avx2, fma$"),
        (AVX512, "avx512", "the processor has no avx512_bf16, avx512_vnni$"),
        (
            AVX2,
            "sse2",
            "BATCHINFER_CPU_FEATURES is 'sse2'; use amx or avx512 or avx512-vnni or avx512-base or avx2-vnni or avx2$",
        ),
    ],
)
def test_a_processor_that_lacks_them_is_the_reason(monkeypatch, features, named, reason):
    with pytest.raises(build.BuildError, match=reason):
        chosen(monkeypatch, features, named)


def test_another_kind_of_processor_is_the_reason(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    expected = r"^they are for x86-64 and 64-bit Arm with Linux, this processor is riscv64$"
    with pytest.raises(build.BuildError, match=expected):
        build.processor_features.__wrapped__()


@pytest.mark.usefixtures("supported")
def test_without_a_compiler_the_reason_says_so(tmp_path):
    reason = answer(start(ASK, tmp_path, PATH=str(tmp_path), CXX=""))
    assert reason == "no C++ compiler on this machine (c++, g++, clang++); install one or set CXX"


@pytest.mark.usefixtures("supported")
def test_a_cache_that_cannot_be_written_is_the_reason(tmp_path):
    (tmp_path / "file").touch()
    reason = answer(start(ASK, tmp_path / "file", CXX=write_compiler(tmp_path, "touch $out")))
    assert reason == f"the cache folder {tmp_path}/file/batchinfer/kernels cannot be used: Not a directory"


@pytest.mark.usefixtures("supported")
def test_a_compiler_that_fails_is_the_reason_and_is_asked_again_next_time(tmp_path):
    compiler = write_compiler(tmp_path, "echo 'kernels.h:1: error: no such word' >&2; exit 3")
    for attempt in (1, 2):
        reason = answer(start(ASK, tmp_path, CXX=compiler))
        assert reason == f"{compiler} failed with code 3: kernels.h:1: error: no such word"
        assert num_calls(tmp_path) >= attempt
    assert entries(tmp_path) == [".failed", ".lock"]
    write_compiler(tmp_path, "touch $out")
    assert answer(start(MAKE, tmp_path, CXX=compiler)).endswith(".so")


@pytest.mark.usefixtures("supported")
def test_processes_that_start_at_once_build_once(tmp_path):
    compiler = write_compiler(tmp_path, "sleep 0.5; touch $out")
    paths = {answer(process) for process in [start(MAKE, tmp_path, CXX=compiler) for _ in range(4)]}
    assert len(paths) == 1
    assert num_calls(tmp_path) == NUM_COMMANDS
    assert entries(tmp_path) == [".lock", ".so"]


@pytest.mark.usefixtures("supported")
def test_units_without_torch_take_the_header_that_was_compiled_before_them(tmp_path):
    answer(start(MAKE, tmp_path, CXX=write_compiler(tmp_path, "touch $out")))
    calls = [shlex.split(line) for line in (tmp_path / "calls").read_text().splitlines()]
    (header,) = [number for number, call in enumerate(calls) if "c++-header" in call]
    made = calls[header][-1]
    taking = [number for number, call in enumerate(calls) if "-include" in call]
    assert {calls[number][calls[number].index("-include") + 1] + ".gch" for number in taking} == {made}
    assert min(taking) > header
    (with_torch,) = [call for number, call in enumerate(calls) if "-c" in call and number not in taking]
    optimised = [word for word in with_torch if word.startswith("-O")]
    assert optimised == ["-O3", "-Og"]  # the last one counts


@pytest.mark.all  # make test: processes that start at once, above
def test_a_build_that_failed_while_others_waited_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", write_compiler(tmp_path, "touch $out"))
    no_tiles = [known for known in build.INSTRUCTION_SETS if known.name == without_tiles()]
    monkeypatch.setattr(build, "instructions", lambda: no_tiles[0])
    failed = (build._cache_folder() / build._digest(build.instructions())).with_suffix(".failed")
    failed.parent.mkdir(parents=True)
    failed.write_text("not today")
    os.utime(failed, (time.time() + 1000,) * 2)  # after this process began to ask
    with pytest.raises(build.BuildError, match="not today"):
        build.library()
    assert not (tmp_path / "calls").exists()
    os.utime(failed, (0, 0))  # long ago
    assert build.library().exists()


@pytest.mark.all  # make test: processes that start at once, above
@pytest.mark.usefixtures("supported")
def test_a_build_that_was_killed_leaves_nothing_in_the_way(tmp_path):
    slow = start(MAKE, tmp_path, CXX=write_compiler(tmp_path, SLOW.format(tmp_path)))
    workers = numbers_in(tmp_path, min(len(os.sched_getaffinity(0)), 3))  # others wait for the header
    slow.send_signal(signal.SIGKILL)
    slow.communicate(timeout=60)
    wait_until(lambda: not any(map(is_running, workers)))
    assert any("building" in path.name for path in (tmp_path / "batchinfer/kernels").iterdir())
    assert answer(start(MAKE, tmp_path, CXX=write_compiler(tmp_path, "touch $out"))).endswith(".so")
    assert entries(tmp_path) == [".lock", ".so"]


def test_a_compiler_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    compiler = write_compiler(tmp_path, SLOW.format(tmp_path))
    with pytest.raises(build.BuildError, match=r"^/.*/compiler took longer than 3 s$"):
        compilers.run([Step([compiler, "-o", "none"], tmp_path / "none")], 3, tmp_path)
    wait_until(lambda: not any(map(is_running, numbers_in(tmp_path, 1))))


@pytest.mark.all  # make test: a compiler that takes too long, above
@pytest.mark.usefixtures("supported")
def test_compilers_that_are_ended_leave_no_temporary_files(tmp_path):
    scratch, body = tmp_path / "scratch", 'touch "$TMPDIR/cc.s"; sleep 1; kill -9 $$'
    scratch.mkdir()
    assert "failed with code 137" in answer(
        start(ASK, tmp_path, CXX=write_compiler(tmp_path, body), TMPDIR=str(scratch))
    )
    assert list(scratch.iterdir()) == []
    assert entries(tmp_path) == [".failed", ".lock"]


@pytest.mark.usefixtures("supported")
def test_a_name_of_a_compiler_that_is_no_command_is_the_reason(tmp_path):
    said = answer(start(ASK, tmp_path, CXX="g++ '-O2"))
    assert said == "CXX is g++ '-O2, which is no command: No closing quotation"


def test_a_compiler_that_gets_no_process_is_the_reason_and_not_the_cache(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(compilers.subprocess, "Popen", refuse)
    with pytest.raises(build.BuildError, match=r"^c\+\+ cannot be run: Resource temporarily unavailable$"):
        compilers.run([Step(["c++"], tmp_path / "none")], 60, tmp_path)


def noting(name, does, folder, needs=None):
    """A step that notes its name at its start and in capitals at its end."""
    lines = ["import sys, time", "note = lambda name: open(sys.argv[1], 'a').write(name)"]
    code = "\n".join([*lines, f"note({name!r})", does, f"note({name.upper()!r})"])
    return Step([sys.executable, "-c", code, str(folder / "notes")], folder / name, needs)


def test_a_step_waits_for_what_it_needs_and_others_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    steps = [
        noting("a", "while 'C' not in open(sys.argv[1]).read(): time.sleep(0.01)", tmp_path),
        noting("b", "0", tmp_path, tmp_path / "a"),
        noting("c", "0", tmp_path),
    ]
    compilers.run(steps, 60, tmp_path)
    notes = (tmp_path / "notes").read_text()
    assert notes.index("C") < notes.index("A") < notes.index("b")


def test_no_more_steps_run_side_by_side_than_there_are_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    compilers.run([noting(name, "0", tmp_path) for name in "abc"], 60, tmp_path)
    assert (tmp_path / "notes").read_text() == "aAbBcC"


def test_a_step_whose_need_fails_does_not_begin(tmp_path):
    steps = [noting("a", "sys.exit('an error')", tmp_path), noting("b", "0", tmp_path, tmp_path / "a")]
    with pytest.raises(build.BuildError, match=r"failed with code 1: an error$"):
        compilers.run(steps, 60, tmp_path)
    assert (tmp_path / "notes").read_text() == "a"


REFUSE = """
import pathlib, sys, torch
from batchinfer_kernels.cpu import build
build.SOURCES = pathlib.Path(sys.argv[1])
torch.ops.load_library(str(build._compile(build._compiler(), build.SOURCES, build.instructions())))
try:
    torch.ops.batchinfer_refusal.refuse(7)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.all  # make test: built with the system's, above
@pytest.mark.usefixtures("supported")
def test_a_compiler_with_a_standard_library_of_its_own_does_not_bring_it_along(tmp_path, monkeypatch):
    """Some link it statically, and with two in a process messages lack their numbers, or bring it down."""
    shutil.copy(ROOT / "tests/support/refusal.cpp", tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    own = shlex.join([*build._compiler(), "-static-libstdc++"])
    command = [sys.executable, "-c", REFUSE, str(tmp_path)]
    environment = {**os.environ, "CXX": own, "PYTHONPATH": str(KERNELS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "it has 7 rows\n"), done.stderr


@pytest.fixture
def other_cpp_library(tmp_path):
    """A copy of the C++ library that is loaded here, in a folder of an odd name."""
    if (loaded := build._loaded_cpp_library()) is None:
        pytest.skip("there is no libstdc++ in this process")
    # no UTF-8, and what only Python takes for the end of a line
    folder = tmp_path / os.fsdecode(b"named\xff\xe2\x80\xa8so")
    folder.mkdir()
    return shutil.copy(loaded, folder / "libstdc++.so.6.0.99")


@pytest.mark.all  # make test: built with the system's, above
@pytest.mark.usefixtures("supported")
def test_the_standard_library_may_lie_in_a_folder_of_any_name(tmp_path, other_cpp_library):
    sources = tmp_path / "sources"
    sources.mkdir()
    shutil.copy(ROOT / "tests/support/refusal.cpp", sources)
    ask = f"{REFUSE}\nprint(ascii(build._loaded_cpp_library()))"
    environment = {**os.environ, "LD_PRELOAD": str(other_cpp_library), "PYTHONPATH": str(KERNELS)}
    done = subprocess.run(
        [sys.executable, "-c", ask, str(sources)], env=environment, capture_output=True, text=True, check=False
    )
    expected = ["it has 7 rows", ascii(str(other_cpp_library))]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr


@pytest.mark.all  # make test: the next but one
@pytest.mark.usefixtures("supported", "cpp")
def test_a_built_library_stays_good_when_the_standard_library_is_another_one(tmp_path, other_cpp_library):
    """A system was updated, or another node of the cluster has another one; there may be no compiler any more."""
    built, folder = library_and_cache(tmp_path)
    shutil.copy(built, folder)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(other_cpp_library),
        "PYTHONPATH": str(KERNELS),
        "CXX": "/nowhere/c++",
    }
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "None\n", done.stderr


@pytest.mark.usefixtures("supported", "cpp")
def test_a_built_library_needs_no_compiler_and_no_writing(tmp_path):
    built, folder = library_and_cache(tmp_path)
    shutil.copy(built, folder)
    folder.chmod(0o555)
    assert answer(start(ASK, tmp_path, PATH=str(tmp_path))) == "None"
    assert [path.name for path in folder.iterdir()] == [built.name]


@pytest.mark.parametrize(("name", "is_said"), [("avx512", True), ("amx", False), ("avx512-vnni", False)])
def test_slow_pairs_are_told_where_products_would_be_made_of_them(monkeypatch, name, is_said):
    (known,) = [known for known in FOR_X86 if known.name == name]
    monkeypatch.setattr(build, "why_not", lambda: None)
    monkeypatch.setattr(build, "instructions", lambda: known)
    pairs = SimpleNamespace(pairs_are_quick=lambda: False)
    monkeypatch.setattr(build.torch, "ops", SimpleNamespace(batchinfer_cpu=pairs))
    monkeypatch.setenv(build.CHOICE, name)
    assert ("bfloat16 in float32" in build.explain()) == is_said
    pairs.pairs_are_quick = lambda: True
    assert "float32" not in build.explain()


@pytest.fixture
def shipped(tmp_path):
    """Return this process's library where a wheel for one platform has it."""
    built = build.library()
    file = tmp_path / "compiled" / f"torch-{build.torch_release()}" / built.name
    file.parent.mkdir(parents=True)
    return Path(shutil.copyfile(built, file))


def ask_with_wheel(tmp_path, compiler):
    """Return why the library cannot be used where the wheel has a folder of compiled libraries."""
    code = "from pathlib import Path; from batchinfer_kernels.cpu import build; "
    code += f"build.COMPILED = Path({str(tmp_path / 'compiled')!r})"
    same = {build.CHOICE: build.instructions().name}
    return answer(start(f"{code}; print(build.why_not())", tmp_path, CXX=compiler, **same))


@pytest.mark.usefixtures("supported", "cpp")
def test_a_library_of_the_wheel_needs_no_compiler(tmp_path, shipped):
    assert ask_with_wheel(tmp_path, "no-such-compiler") == "None"
    cached = tmp_path / "batchinfer/kernels" / shipped.name
    assert cached.read_bytes() == shipped.read_bytes()
    assert cached.stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("supported", "cpp")
def test_a_library_of_the_wheel_that_cannot_be_loaded_is_built(tmp_path, shipped):
    shipped.write_bytes(b"\0" * 1000)
    said = ask_with_wheel(tmp_path, write_compiler(tmp_path, f"cp {build.library()} $out")).splitlines()
    assert "building it again" in said[0]
    assert said[-1] == "None"
    assert num_calls(tmp_path) == NUM_COMMANDS


@pytest.mark.usefixtures("supported", "cpp")
def test_a_wheel_for_another_torch_is_named_where_there_is_no_compiler(tmp_path, shipped):
    shipped.parent.rename(shipped.parent.with_name("torch-2.0.1"))
    reason = ask_with_wheel(tmp_path, "no-such-compiler")
    assert "install one or set CXX, or torch 2.0.1, for which this wheel has them compiled" in reason


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", "2.13.0"), ("2.13.0+cu130", "2.13.0"), ("2.13.0", "2.13.0"), ("2.14.0a0+git1f", "2.14.0a0+git1f")],
)
def test_builds_of_a_torch_release_for_any_accelerator_share_a_library(monkeypatch, version, release):
    monkeypatch.setattr(build.torch, "__version__", version)
    assert build.torch_release() == release


@pytest.mark.usefixtures("supported", "cpp")
def test_a_damaged_library_is_built_again(tmp_path):
    built, folder = library_and_cache(tmp_path)
    (folder / built.name).write_bytes(b"\0" * 1000)
    same = {build.CHOICE: build.instructions().name}  # with tiles, too, as this library is a real one
    again = start(ASK, tmp_path, CXX=write_compiler(tmp_path, f"cp {built} $out"), **same)
    said, last = answer(again).splitlines()[0], (folder / built.name).read_bytes()
    assert "cannot be loaded" in said
    assert "building it again" in said
    assert last == built.read_bytes()
    assert num_calls(tmp_path) == NUM_COMMANDS
    assert answer(start(ASK, tmp_path, PATH=str(tmp_path), **same)) == "None"


@pytest.mark.usefixtures("supported")
def test_the_library_and_its_folder_are_for_this_user_only(tmp_path):
    previous = os.umask(0)
    try:
        path = Path(answer(start(MAKE, tmp_path, CXX=write_compiler(tmp_path, "touch $out"))))
    finally:
        os.umask(previous)
    assert [item.stat().st_mode & 0o077 for item in (path, path.parent)] == [0, 0]


@pytest.mark.usefixtures("supported", "cpp")
@pytest.mark.parametrize("spoil", ["every user", "another user"])
def test_no_library_is_loaded_from_a_folder_that_others_may_write(tmp_path, spoil):
    built, folder = library_and_cache(tmp_path)
    shutil.copy(built, folder)
    if spoil == "every user":
        folder.chmod(0o1777)
    elif os.getuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        pytest.skip("NOT TESTED: only root can give a folder away")
    said = answer(start(ASK, tmp_path))
    assert f"the cache folder {folder}" in said
    assert f"chmod go-w {folder}" in said
    assert "XDG_CACHE_HOME" in said
