"""Compilers as child processes: side by side, with a time limit, never outliving the process that started them.

A compiler starts child processes, which do the work and would survive the compiler or the waiting process. So each
compiler has a leader process above it. The leader kills the whole group as soon as its pipe is closed, on purpose or
because the other end died.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from batchinfer_kernels.cpu.instructions import BuildError

_POLL_S = 0.02

_LEADER = """
import os, signal, subprocess, sys, threading
def end_with_pipe():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=end_with_pipe, daemon=True).start()
try:
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
except OSError as error:
    sys.exit(f"it cannot be run: {error.strerror}")
sys.exit(code if code >= 0 else 128 - code)
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A command that begins once those before it that make `needs` have ended."""

    command: list[str]
    makes: Path
    needs: Path | None = None


def run(steps: Sequence[Step], limit_s: float, scratch: Path) -> None:
    """Run the steps in this order, as many side by side as there are processors, until all end.

    Args:
        limit_s: seconds for all steps together.
        scratch: folder for temporary files; killed commands leave some behind.

    Raises:
        BuildError: a command failed or took too long; the message ends with its first error line.
    """
    at_once = len(os.sched_getaffinity(0))
    deadline = time.monotonic() + limit_s
    other_end, pipe = os.pipe()
    running: list[_Running] = []
    waiting = list(steps)
    try:
        while waiting or running:
            coming = {step.makes for step in waiting} | {one.step.makes for one in running}
            ready = [step for step in waiting if step.needs not in coming]
            for step in ready[: at_once - len(running)]:
                waiting.remove(step)
                running.append(_Running(step, other_end, scratch))
            for one in [one for one in running if one.has_ended()]:
                running.remove(one)
                one.check()
            if time.monotonic() > deadline:
                raise BuildError(f"{steps[0].command[0]} took longer than {limit_s:.0f} s")
            time.sleep(_POLL_S)
    except OSError as error:
        raise BuildError(f"{steps[0].command[0]} cannot be run: {error.strerror}") from error
    finally:
        os.close(other_end)
        os.close(pipe)
        for one in running:
            one.wait()


class _Running:
    """A step's process, below its leader; what it says is in a file without a name."""

    def __init__(self, step: Step, pipe: int, scratch: Path) -> None:
        self.step = step
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace", dir=scratch)  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-I", "-S", "-c", _LEADER, *step.command],
                env={**os.environ, "TMPDIR": str(scratch)},
                stdin=pipe,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                process_group=0,
            )
        except OSError:
            self._errors.close()
            raise

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def check(self) -> None:
        """Raise BuildError with the first error line if the process, which has ended, failed."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        code = self.wait()
        if code:
            first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
            raise BuildError(f"{self.step.command[0]} failed with code {code}: {first}")

    def wait(self) -> int:
        self._errors.close()
        return self._process.wait()
