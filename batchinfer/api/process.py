"""The caller's side of the process that runs commands: start, progress, errors and interrupts."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from batchinfer import own_process, records
from batchinfer.api.call_folder import call_folder
from batchinfer.config import JobConfig, dump_job
from batchinfer.records import BatchinferError, ConfigError, ExitCode, InterruptedRunError

Progress = Callable[[str, int, int], object]  # called with a title ("work", for example), done, total
WORDS_BYTES = 4096  # of the end of stderr, for a process that ended without an error event
STOP_AGAIN_S = 0.2  # between requests to stop, because a request may come before the job handles signals
_log = logging.getLogger("batchinfer")


class OwnProcess:
    """`python -m batchinfer.api.command` (see there) with these arguments.

    Args:
        is_quiet: whether stderr's lines go to the logger "batchinfer" (warnings with their level), else to stderr.
    """

    def __init__(self, *arguments: str, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._rest = b""  # bytes read from the pipe after the last complete line
        self._logged = 0  # bytes of stderr that were logged
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this)
        ours, theirs = os.pipe()
        self._events = os.fdopen(ours, "rb", buffering=0)
        # the same module search path as here, also for ranks: the working folder only if it is in this process's path
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        self._process = subprocess.Popen(
            own_process.command("batchinfer.api.command", str(theirs), *arguments),
            env=environment,
            pass_fds=[theirs],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr if is_quiet else None,
        )
        os.close(theirs)

    def send(self, line: str) -> None:
        """Write a line to the process's standard input; do nothing if the process has ended."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), os.fsencode(line) + b"\n")

    def read(self, within_s: float | None) -> list[dict[str, Any]] | None:
        """Return the events since the last call, waiting up to `within_s` for one; None after the last event."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        if not poll.poll(None if within_s is None else within_s * 1000):
            return []
        received = self._events.read(1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        if self._is_quiet:
            self._log_lines()
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
        """Return the end of the process's stderr, "" if it was not redirected to the logger."""
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), WORDS_BYTES, max(0, size - WORDS_BYTES)).decode(errors="replace")

    def let_end(self) -> None:
        """Close standard input, so that the process ends soon; a running job is stopped as by Ctrl-C."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _log_lines(self) -> None:
        found = os.pread(self._stderr.fileno(), 1 << 20, self._logged)
        whole, end, _ = found.rpartition(b"\n")
        self._logged += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            _log.log(logging.WARNING if line.startswith("warning:") else logging.INFO, "%s", line)


class CommandProcess:
    """`batchinfer plan` or `run` over a job; leaving the `with` block early stops the command as Ctrl-C does.

    On a terminal, the command's messages are shown unless `progress` is given.

    Args:
        progress: called in the caller's thread.
        held: a process for several commands, in which the command runs; None: start a process for this command.
    """

    def __init__(
        self, command: str, job: JobConfig, progress: Progress | None, *, held: OwnProcess | None = None
    ) -> None:
        self._command, self._job, self._progress, self._held = command, job, progress, held
        self._error: dict[str, Any] | None = None
        self._code: int | None = None

    def __enter__(self) -> "CommandProcess":
        with ExitStack() as stack:
            file = stack.enter_context(call_folder()) / "job.toml"
            file.write_text(dump_job(self._job), encoding="utf-8")
            if self._held is None:
                is_quiet = self._progress is not None or not is_terminal()
                self.process = OwnProcess(self._command, str(file), is_quiet=is_quiet)
            else:
                self.process = self._held
                self.process.send(str(file))
            self._files = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress = None
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

    def ended(self, within_s: float | None = None) -> bool:
        """Wait for the next event; return whether the command has ended.

        Args:
            within_s: longest wait in seconds; None: no limit.

        Raises:
            BatchinferError, InterruptedRunError: the command failed, or was stopped.
        """
        self._read(within_s)
        if self._code is None:
            return False
        self._check(self._code)
        return True

    def _read(self, within_s: float | None) -> None:
        events = self.process.read(within_s)
        if events is None:
            self._code = self.process.wait()
        for event in events or ():
            self._error = event.get("error", self._error)
            self._code = event.get("ended", self._code)
            if self._progress is not None and "progress" in event:
                self._progress(*event["progress"])

    def _check(self, code: int) -> None:
        if code in (ExitCode.OK, ExitCode.ROW_ERRORS):
            return
        if self._error is not None:
            raise _error_of(**self._error)
        words = self.process.words()
        last = words.strip().rpartition("\n")[2].removeprefix("error: ") or "its words are above"
        if code == ExitCode.INTERRUPTED:
            raise InterruptedRunError(f"batchinfer {self._command} was stopped: {last}")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        kind = ConfigError if code == ExitCode.BAD_JOB else BatchinferError
        failure = kind(f"batchinfer {self._command} ended {how}: {last}")
        failure.add_note(words)
        raise failure


def is_terminal() -> bool:
    """Return whether this process's stderr is a terminal, to which a child process would write, too."""
    own = sys.__stderr__
    return own is not None and sys.stderr is own and own.isatty()


def _error_of(classes: list[str], message: str, attributes: dict[str, str]) -> BatchinferError:
    """Return the error of an error event; for a class that is not in records.py, the nearest base class."""
    kind = next(found for name in classes if (found := getattr(records, name, None)) is not None)
    error: BatchinferError = kind.__new__(kind, message)
    vars(error).update({name: Path(value) if name == "path" else value for name, value in attributes.items()})
    return error
