"""The threads of the C++ operations: every task runs once, and no thread that has no core holds up the others.

The checks that need tasks of a special kind are in task_checks.cpp; where a thread might wait for ever, it gives up
after a minute and says what for. Whatever changes a process for good happens in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from batchinfer_kernels.cpu import build
from support.forked_python import ForkedPython

pytestmark = pytest.mark.usefixtures("cpp")
TESTS = Path(__file__).parents[1]
CHECKS = TESTS / "support" / "task_checks.cpp"
WORKER_NAME = "batchinfer"
PATIENCE_S = 60


class Checks:
    """task_checks.cpp as functions that raise what was thrown there."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name):
        return getattr(self._library, name)

    def count(self, num_tasks, *, all_at_once=False):
        """Return how often each task ran, and the number of threads."""
        counts = (ctypes.c_int64 * num_tasks)()
        num_threads = self.call("count_tasks", num_tasks, counts, all_at_once)
        return list(counts), num_threads

    def call(self, name, *arguments):
        """Call a function that says in its last arguments what was thrown."""
        message = ctypes.create_string_buffer(500)
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        typed = [ctypes.c_int64(value) if isinstance(value, int) else value for value in arguments]
        result = function(*typed, message, ctypes.c_int64(len(message)))
        if message.value:
            raise RuntimeError(message.value.decode())
        return result


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The checks as a library."""
    path = tmp_path_factory.mktemp("checks") / "checks.so"
    torch_folder = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [
            *build._compiler(),
            *(
                "-std=c++20",
                "-O1",
                "-shared",
                "-fPIC",
                f"-I{build.SOURCES}",
                str(CHECKS),
            ),
            *(str(build.library()), f"-Wl,-rpath,{torch_folder}", "-o", str(path)),
        ],
        check=True,
    )
    return path


@pytest.fixture
def checks(path):
    return Checks(path)


def workers():
    """The thread numbers of this process's workers."""
    found = []
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (folder / "comm").read_text().strip() == WORKER_NAME:
                found.append(int(folder.name))
    return found


def wait_until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


PATHS = os.pathsep.join(str(folder) for folder in (TESTS.parent, TESTS.parent / "kernels", TESTS, TESTS / "kernels"))


def in_a_process(code, path):
    """The code with what it needs before it."""
    start = f"from test_threads import *; checks = Checks({str(path)!r}); torch.set_num_threads(2)"
    return f"{start}; assert build.why_not() is None\n{code}"


def run_apart(code, path):
    """Run code that must succeed in a child process; return its output."""
    process = ForkedPython(in_a_process(code, path), [], {**os.environ, "PYTHONPATH": PATHS}, TESTS.parent)
    said, _ = process.communicate(timeout=5 * PATIENCE_S)
    assert process.returncode == 0, said
    return said.split()


def run_from_start_to_end(code, path):
    """Run code as run_apart does, in a process that Python starts and ends as it does for users."""
    subprocess.run(
        [sys.executable, "-c", in_a_process(code, path)],
        env={**os.environ, "PYTHONPATH": PATHS},
        timeout=5 * PATIENCE_S,
        check=True,
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_every_task_runs_once_on_no_more_threads_than_torch_has(checks, threads, num_threads):
    threads(num_threads)
    for num_tasks in (0, 1, 2, 3, 7, 64, 1000):
        counts, used = checks.count(num_tasks)
        assert counts == [1] * num_tasks
        assert used <= min(num_threads, num_tasks)


def test_as_many_threads_as_torch_has_take_part_whenever_that_changes(checks, threads):
    for num_threads in (2, 4, 3, 1, 4, 2):
        threads(num_threads)
        assert checks.count(num_threads, all_at_once=True) == ([1] * num_threads, num_threads)
    wait_until(lambda: len(workers()) == 1)  # those of larger teams have gone


def test_workers_that_sleep_are_woken(checks, threads):
    threads(4)
    for _ in range(20):
        time.sleep(0.002)  # 100 times as long as they stay awake
        assert checks.count(4, all_at_once=True) == ([1] * 4, 4)


def test_many_short_calls_lose_no_task(checks, threads):
    threads(4)
    for call in range(2000):
        assert checks.count(call % 7)[0] == [1] * (call % 7)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_a_slow_worker_holds_up_its_own_task_alone(checks, threads, num_threads):
    threads(num_threads)
    checks.call("one_slow_worker", 100)


HELD = """
import signal
torch.set_num_threads(3)
checks.count(3, all_at_once=True)
checks.hold_on(signal.SIGUSR1)
for thread in workers():
    ctypes.CDLL(None).tgkill(os.getpid(), thread, signal.SIGUSR1)
wait_until(lambda: checks.num_threads_held() == 2)
for _ in range(10):
    counts, used = checks.count(50)
    assert counts == [1] * 50 and used == 1
checks.release()
print(*checks.count(3, all_at_once=True)[0])
"""


@pytest.mark.all  # make test: a slow worker, above
def test_workers_that_get_no_core_hold_nobody_up(path):
    # a signal's handler keeps them from running anything else, as other processes would
    assert run_apart(HELD, path) == ["1", "1", "1"]


def test_what_a_task_throws_is_thrown_by_the_call(checks, threads):
    for num_threads in (1, 2, 4):
        threads(num_threads)
        with pytest.raises(RuntimeError, match=r"^task 5$"):
            checks.call("throwing", 50, 5, 1000, False)
        with pytest.raises(RuntimeError, match=r"^task \d+$"):
            checks.call("throwing", 50, 0, 1, False)
        assert checks.count(50)[0] == [1] * 50
    with pytest.raises(RuntimeError, match=r"^task \d+$"):
        checks.call("throwing", 50, 0, 1, True)  # on a worker
    assert checks.count(50)[0] == [1] * 50


def test_a_call_from_within_a_task_runs_there(checks, threads):
    for num_threads in (1, 2, 4):
        threads(num_threads)
        assert checks.call("nested", 20, 30) == 600


def test_a_call_while_another_thread_makes_one_does_not_wait_for_it(checks, threads):
    threads(2)
    assert checks.call("call_within_call", 20) == 20


def test_many_threads_may_call_at_once(checks, threads):
    threads(2)
    results = []

    def call():
        torch.set_num_threads(2)  # torch keeps it per thread
        results.extend(checks.count(37)[0] == [1] * 37 for _ in range(200))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [True] * 800


@pytest.mark.parametrize("way", [0, 1, 2], ids=["over threads", "too short for threads", "from a task"])
def test_subnormal_numbers_are_zero_in_all_tasks_and_nowhere_else(checks, threads, way):
    for num_threads in (1, 2, 4):
        threads(num_threads)
        for num_tasks in (1, 2, 50):
            assert checks.call("zeros", num_tasks, way, False) == num_tasks
            assert not checks.caller_takes_subnormals_for_zero()
        with pytest.raises(RuntimeError, match="thrown"):
            checks.call("zeros", 50, way, True)
        assert not checks.caller_takes_subnormals_for_zero()


FORK = """
checks.count(2, all_at_once=True)
if BUSY:  # the fork comes while another thread makes calls
    threading.Thread(target=checks.call_for_ever, args=(10,), daemon=True).start()
for _ in range(FORKS):
    child = os.fork()
    if child == 0:
        is_well = checks.count(2, all_at_once=True) == ([1, 1], 2) and len(workers()) == 1
        os._exit(0 if is_well else 1)
    assert os.waitpid(child, 0)[1] == 0
print(*(checks.count(2, all_at_once=True) if not BUSY else checks.count(2))[0], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a call"])
def test_a_forked_process_has_workers_of_its_own(path, busy):
    code = FORK.replace("BUSY", str(busy)).replace("FORKS", "20" if busy else "2")
    assert run_apart(code, path)[-2:] == ["1", "1"]


@pytest.mark.parametrize(
    "then",
    [
        "",
        pytest.param("time.sleep(0.01)", marks=pytest.mark.slow),
        pytest.param("sys.exit()", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_process_ends_whatever_its_workers_do(path, then):
    begin = "threading.Thread(target=checks.call_for_ever, args=(10,), daemon=True).start()\n"
    run_from_start_to_end(f"checks.count(2)\n{then}", path)
    run_from_start_to_end(f"{begin}checks.count(2)\n{then}", path)


NO_THREADS = """
import resource
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
try:
    torch.set_num_threads(4)
    checks.count(10)
except RuntimeError as error:
    print(str(error).replace(" ", "_"))
resource.setrlimit(resource.RLIMIT_AS, before)
print(*checks.count(4, all_at_once=True)[0])
"""


def test_threads_that_cannot_be_had_are_an_error_and_the_next_call_tries_again(path):
    said, *counts = run_apart(NO_THREADS, path)
    assert said.startswith("the_C++_operations_want_3_threads_more:_")
    assert said.endswith("set_OMP_NUM_THREADS_to_fewer")
    assert counts == ["1"] * 4
