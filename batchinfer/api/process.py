"""The caller's side of the process that runs commands: start, progress, errors and interrupts."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from batchinfer import own_process, records
from batchinfer.api.call_folder import call_folder
from batchinfer.api.display import Display, Progress, display_of
from batchinfer.api.settings import working_folder
from batchinfer.config import JobConfig, dump_job
from batchinfer.records import BatchinferError, ConfigError, ExitCode, InterruptedRunError

WORDS_BYTES = 4096  # of the end of stderr, for a process that ended without an error event
STOP_AGAIN_S = 0.2  # between requests to stop, because a request may come before the job handles signals
SHOWN, QUIET = "shown", "quiet"  # before a job's path: whether its messages are on the terminal
LOOK_S = 1.0  # between looks at the lines of a job that reports no progress
_log = logging.getLogger("batchinfer")


class OwnProcess:
    """`python -m batchinfer.api.command` (see there) with these arguments.

    Args:
        uses_terminal: whether stderr is that of this process; else `new_lines` returns its lines.
    """

    def __init__(self, *arguments: str, uses_terminal: bool) -> None:
        working_folder()  # the process starts in it
        self._rest = b""  # bytes read from the pipe after the last complete line
        self._read_bytes = 0  # of stderr
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this)
        ours, theirs = os.pipe()
        self._events = os.fdopen(ours, "rb", buffering=0)
        # the same module search path as here, also for ranks: the working folder only if it is in this process's path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        self._process = subprocess.Popen(
            own_process.command("batchinfer.api.command", str(theirs), str(self._stderr.fileno()), *arguments),
            env=environment,
            pass_fds=[theirs, self._stderr.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if uses_terminal else self._stderr,
        )
        os.close(theirs)

    def send(self, line: str) -> None:
        """Write a line to the process's standard input; do nothing if the process has ended."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), os.fsencode(line) + b"\n")

    def read(self, within_s: float) -> list[dict[str, Any]] | None:
        """Return the events since the last call, waiting up to `within_s` for one; None after the last event."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        if not poll.poll(within_s * 1000):
            return []
        received = self._events.read(1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        return list(map(json.loads, lines)) if received else None

    @property
    def is_ending(self) -> bool:
        """Whether the process accepts no more jobs."""
        assert self._process.stdin is not None
        return self._process.stdin.closed or self._process.poll() is not None

    def wait(self) -> int:
        """Wait for the process to end; return its exit code, or minus the number of the signal that ended it."""
        return self._process.wait()

    def words(self) -> str:
        """Return the end of the process's stderr, without what was on the terminal."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), WORDS_BYTES, max(0, size - WORDS_BYTES)).decode(errors="replace")

    def let_end(self) -> None:
        """Close standard input, so that the process ends soon; a running job is stopped as by Ctrl-C."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def new_lines(self) -> list[str]:
        """Return the complete lines of stderr since the last call, without those on the terminal."""
        found = os.pread(self._stderr.fileno(), 1 << 20, self._read_bytes)
        whole, end, _ = found.rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines()


class CommandProcess:
    """`batchinfer plan` or `run` over a job; leaving the `with` block early stops the command as Ctrl-C does.

    The command's lines go to the logger "batchinfer" (warnings with their level), unless they are on the terminal.

    Args:
        progress: how progress is shown; a function is called in the caller's thread.
        held: a process for several commands, in which the command runs; None: start a process for this command.
    """

    def __init__(self, command: str, job: JobConfig, progress: Progress, *, held: OwnProcess | None = None) -> None:
        self._command, self._job, self._held = command, job, held
        self._display = display_of(progress)
        self._error: dict[str, Any] | None = None
        self._code: int | None = None

    def __enter__(self) -> "CommandProcess":
        with ExitStack() as stack:
            file = stack.enter_context(call_folder()) / "job.toml"
            file.write_text(dump_job(self._job), encoding="utf-8")
            if self._held is None:
                self.process = OwnProcess(self._command, str(file), uses_terminal=self._display.uses_terminal)
            else:
                self.process = self._held
                self.process.send(f"{SHOWN if self._display.uses_terminal else QUIET} {file}")
            self._files = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        self._display = Display()
        try:
            while self._held is not None and self._code is None:
                self._held.send("stop")
                self._read(STOP_AGAIN_S)
        except BaseException:
            self.process.let_end()  # interrupted while waiting for the end
            raise
        finally:
            self._files.close()
            if self._held is None:
                self.process.let_end()
                self.process.wait()

    def ended(self, within_s: float = LOOK_S) -> bool:
        """Wait for the next event; return whether the command has ended.

        Args:
            within_s: longest wait in seconds.

        Raises:
            BatchinferError, InterruptedRunError: the command failed, or was stopped.
        """
        self._read(within_s)
        if self._code is None:
            return False
        self._check(self._code)
        return True

    def _read(self, within_s: float) -> None:
        events = self.process.read(within_s)
        if events is None:
            self._code = self.process.wait()
        for event in events or ():
            self._error = event.get("error", self._error)
            self._code = event.get("ended", self._code)
            if "progress" in event:
                self._display.count(*event["progress"])
        for line in self.process.new_lines():
            _log.log(logging.WARNING if line.startswith("warning:") else logging.INFO, "%s", line)
            self._display.line(line)

    def _check(self, code: int) -> None:
        if code in (ExitCode.OK, ExitCode.ROW_ERRORS):
            return
        if self._error is not None:
            raise _error_of(**self._error)
        words = "" if self._display.uses_terminal else self.process.words()
        last = words.strip().rpartition("\n")[2].removeprefix("error: ") or "its words are above"
        if code == ExitCode.INTERRUPTED:
            raise InterruptedRunError(f"batchinfer {self._command} was stopped: {last}")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else "failed"
        kind = ConfigError if code == ExitCode.BAD_JOB else BatchinferError
        failure = kind(f"batchinfer {self._command} {how}: {last}")
        failure.add_note(words)
        raise failure


def _error_of(classes: list[str], message: str, attributes: dict[str, str]) -> BatchinferError:
    """Return the error of an error event; for a class that is not in records.py, the nearest base class."""
    kind = next(found for name in classes if (found := getattr(records, name, None)) is not None)
    error: BatchinferError = kind.__new__(kind, message)
    vars(error).update({name: Path(value) if name == "path" else value for name, value in attributes.items()})
    return error
