"""One thread for torch here and in every process that tests start: quick also on a busy machine. And a KV store.

The folders of tests are in memory where it has room: a small job waits longer for its fsyncs than it computes.

The variables CI and BUILD_NUMBER are removed: where one is set, pytest prints every difference of two values that are
not equal, which takes hours for megabytes of bytes.

Without a GPU Triton runs in its interpreter; it must know before anything imports it.
"""

import os

from batchinfer.host_info import free_memory_bytes, matrix_library_settings

os.environ.update(matrix_library_settings() | dict(os.environ))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as ranks are started

import gc
import multiprocessing.process
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from hashlib import sha256
from pathlib import Path
from types import FrameType

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from batchinfer.data import tokenizer_process
from batchinfer.kv_store.disk import DiskStore
from batchinfer.launch import local_ranks
from batchinfer.stop_signals import StopSignal
from support import rank_forge
from support.browser import Browser, NoBrowserError, install
from support.kv_stores import open_store
from support.open_encoders import close_all
from support.other_user import open_folder
from support.paths import ROOT

HAS_GPU = Path("/dev/nvidiactl").exists()
HANDLE_SIGNAL = StopSignal._handle
LEFT_OUT = "the time of --until was up"
for variable in ("CI", "BUILD_NUMBER"):
    os.environ.pop(variable, None)
MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30  # many times what the folders of three workers hold at once

if MEMORY.is_dir() and min(shutil.disk_usage(MEMORY).free, free_memory_bytes()) > ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Every process of this run of pytest inherits this variable, by which the run finds its orphans at its end.
SESSION_VARIABLE = "BATCHINFER_TESTS_SESSION"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:
    os.environ[SESSION_VARIABLE] = str(os.getpid())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-processes", action="store_true", help="fail every test that starts a process")
    parser.addoption("--until", type=float, metavar="TIME", help="begin no test after this time, in seconds since 1970")
    parser.addoption("--order", metavar="TEXT", help="run files in an order that depends on this text alone")


@pytest.fixture(scope="session", autouse=True)
def no_processes(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fail tests that start a process, if `--no-processes` is given: `make check` stays quick."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("this test starts a process, so its file must leave tests/check.txt")

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("--no-processes"):
            patch.setattr(subprocess.Popen, "__init__", refuse)
            patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
            patch.setattr(os, "fork", refuse)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_ranks() -> Iterator[None]:
    """Fork ranks and tokenizers of in-process commands instead of starting them, if there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            rank_forge.open_forge()
            patch.setattr(local_ranks, "start_ranks", rank_forge.start_ranks)
            patch.setattr(tokenizer_process, "start_process", rank_forge.start_tokenizer)
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Libraries set variables when a test imports them; with those no rank of later tests could be forked."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture(scope="module", autouse=True)
def shared_encoders_end() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_ends_pytest(request: pytest.FixtureRequest) -> Iterator[None]:
    """End pytest at Ctrl-C also while a command of a test runs in this process and handles the signal itself."""

    def handle_and_end(stop: StopSignal, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            request.session.shouldstop = "interrupted by Ctrl-C"
        HANDLE_SIGNAL(stop, number, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "_handle", handle_and_end)
        yield


@pytest.fixture
def own_interrupts() -> Iterator[None]:
    """Let a test send SIGINT to its own process: the signal does not end pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "_handle", HANDLE_SIGNAL)
        yield


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    """Give SIGINT back to Python after each test: a command that ran in this process has set its own handler."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """A KV store in tmp_path / "kv"."""
    with closing(open_store(tmp_path / "kv")) as store:
        yield store


@pytest.fixture
def everyones_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    with open_folder() as folder:
        yield folder


@pytest.fixture
def threads():
    """Sets torch's number of threads; the old one comes back."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cpp() -> None:
    """The C++ operations, or the reason why there are none."""
    from batchinfer_kernels.cpu import build

    reason = build.why_not()
    if reason is not None:
        pytest.skip(f"the C++ operations cannot run here: {reason}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real browser, from Debian's packages if need be."""
    try:
        install()
    except NoBrowserError as error:
        reason = f"NOT TESTED IN A REAL BROWSER: {error}"
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    with Browser() as browser:
        yield browser


# In this order before all others: with these at the end one worker would go on alone for minutes.
LONG_FILES = (
    "test_cluster",
    "test_cpu_avx2",
    "test_cpu_tiles",
    "test_faults",
    "test_kept_model",
    "test_stored_runs",
    "test_generation",
    "test_speculation",
    "test_real_slurm",
    "test_triton_engine",
    "test_resume",
    "test_hard_cases",
    "test_scoring",
    "test_process",
    "test_nodes",
    "test_object_stores",
    "test_cpu_build",
    "test_expert_balance",
    "test_chaos",
    "test_json_lines",
    "test_cpu_engine",
    "test_lm_eval",
    "test_elastic",
    "test_gpu_check",
    "test_encoders",
    "test_waste",
    "test_text_memo",
    "test_newcomer",
    "test_damage",
    "test_bad_places",
    "test_balanced_run",
    "test_end_to_end",
    "test_against_transformers",
    "test_drafting",
    "test_convert",
    "test_prefix_stream",
    "test_fp8_engine",
    "test_cli",
    "test_same_bits",
    "test_strangers",
    "test_families",
    "test_figures_of_runs",
    "test_status",
    "test_run_in_bucket",
    "test_bucket_claims",
    "test_dense_models",
    "test_plan",
    "test_k8s",
    "test_triton_sparse_models",
    "test_structured_outputs",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests are no garbage: nothing looks through them while they come, nor afterwards."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # for libraries that report objects which are left at the end
    if not IS_WORKER:
        kill_orphans()


def kill_orphans() -> None:
    """Kill the processes of this run that outlive it, such as commands of a worker that Ctrl-C has ended."""
    mark = f"{SESSION_VARIABLE}={os.getpid()}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            is_ours = mark in (process / "environ").read_bytes().split(b"\0")
            # a resource tracker removes the shared memory of its process, then it ends by itself
            if is_ours and b"resource_tracker" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of tests/long.txt to `make test-rest`; long files first, for `pytest -n`, or in --order."""
    left = set((ROOT / "tests" / "long.txt").read_text().splitlines())
    for item in items:
        if not left.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker(pytest.mark.all)
    order = config.getoption("--order")
    if order is not None:
        items.sort(key=lambda item: sha256(f"{order} {item.nodeid.partition('::')[0]}".encode()).digest())
        return
    place = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG_FILES)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests --until has left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report for report in skipped if LEFT_OUT in str(report.longrepr)]
    if left_out:
        num_files = len({report.nodeid.partition("::")[0] for report in left_out})
        terminalreporter.write_line(f"NOT RUN, as time was up: {len(left_out)} tests of {num_files} files")
