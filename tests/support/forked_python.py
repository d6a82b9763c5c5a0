"""Python code in a child process forked with torch loaded: importing torch takes longer than most such code.

Only for code that does not ask how a process starts or ends, needs no compiler of torch and no model of transformers
(ranks put those off), and for variables that are read when it runs: OMP_NUM_THREADS and those of torch are not.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from support.rank_forge import Forked


class ForkedPython:
    """A substitute for subprocess.Popen of `python -c`, as far as tests use it; stderr goes where stdout goes."""

    def __init__(self, code: str, arguments: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        self._output, end = Pipe(duplex=False)
        self._forked = Forked(_run, code, list(arguments), dict(variables), str(folder), end)
        end.close()

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self._forked.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end and return the output.

        Raises:
            TimeoutError: it has not closed its output in this time; it is killed.
        """
        deadline, said = time.monotonic() + timeout, b""
        while self._output.poll(max(0.0, deadline - time.monotonic())):
            part = os.read(self._output.fileno(), 1 << 16)
            if not part:
                self._output.close()
                self._forked.wait()
                return said.decode(), None
            said += part
        self.send_signal(signal.SIGKILL)
        raise TimeoutError(f"after {timeout} s it has said {said.decode(errors='replace')}")


def _run(code: str, arguments: list[str], variables: dict[str, str], folder: str, output: Connection) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[:0] = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["-c", *arguments]
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
