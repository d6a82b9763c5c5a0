"""The process of a command as its caller sees it: start, progress, errors, and the end that an interrupt brings."""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from batchinfer import records
from batchinfer.config import JobConfig, dump_job
from batchinfer.records import BatchinferError, ConfigError, ExitCode, InterruptedRunError

Progress = Callable[[str, int, int], object]  # called with a title ("work", for example), done, total
WORDS_BYTES = 4096  # of what the process wrote last, for an error that it could not tell
_log = logging.getLogger("batchinfer")


class CommandProcess:
    """`batchinfer plan` or `run` over a job, from `with` to its end; leaving before that stops it as Ctrl-C does.

    On a terminal it shows what the command shows. Elsewhere its lines go to the logger "batchinfer", warnings as such.

    Args:
        progress: called in the caller's thread; nothing is shown then.
    """

    def __init__(self, command: str, job: JobConfig, progress: Progress | None) -> None:
        self._command, self._job, self._progress = command, job, progress
        self._error: dict[str, Any] | None = None
        self._rest = b""  # of the pipe, behind its last whole line
        self._is_quiet = progress is not None or not _is_terminal()
        self._logged = 0  # bytes of stderr

    def __enter__(self) -> "CommandProcess":
        self._file = tempfile.NamedTemporaryFile("w", prefix="batchinfer-", suffix=".toml", encoding="utf-8")
        self._file.write(dump_job(self._job))
        self._file.flush()
        self._stderr = tempfile.TemporaryFile()
        self._events, theirs = os.pipe()
        arguments = [str(theirs), self._command, self._file.name]
        # the same modules as here, also in ranks: nothing of the working folder unless this process looks there, too
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        environment["PYTHONSAFEPATH"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "batchinfer.api.command", *arguments],
            env=environment,
            pass_fds=[theirs],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr if self._is_quiet else None,
        )
        os.close(theirs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._events)
        try:
            if self._process.poll() is None:
                # not SIGINT, which a terminal has sent already: two of them end a command without a commit
                self._process.send_signal(signal.SIGTERM)
                self._process.wait()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._stderr.close()
            self._file.close()

    def ended(self, within_s: float | None = None) -> bool:
        """Wait for something to happen; whether the process has ended.

        Args:
            within_s: at most so long; None: as long as it takes.

        Raises:
            BatchinferError, InterruptedRunError: it has not ended well, as the command would have said.
        """
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        if not poll.poll(None if within_s is None else within_s * 1000):
            return False
        received = os.read(self._events, 1 << 16)
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        if self._is_quiet:
            self._log_lines()
        if received:
            return False
        self._check(self._process.wait())
        return True

    def _take(self, event: dict[str, Any]) -> None:
        self._error = event.get("error", self._error)
        if self._progress is not None and "progress" in event:
            self._progress(*event["progress"])

    def _log_lines(self) -> None:
        found = os.pread(self._stderr.fileno(), 1 << 20, self._logged)
        whole, end, _ = found.rpartition(b"\n")
        self._logged += len(whole) + len(end)
        for line in whole.decode(errors="replace").splitlines():
            _log.log(logging.WARNING if line.startswith("warning:") else logging.INFO, "%s", line)

    def _check(self, code: int) -> None:
        if code in (ExitCode.OK, ExitCode.ROW_ERRORS):
            return
        if self._error is not None:
            raise _error_of(**self._error)
        size = os.fstat(self._stderr.fileno()).st_size
        words = os.pread(self._stderr.fileno(), WORDS_BYTES, max(0, size - WORDS_BYTES)).decode(errors="replace")
        last = words.strip().rpartition("\n")[2].removeprefix("error: ") or "its words are above"
        if code == ExitCode.INTERRUPTED:
            raise InterruptedRunError(f"batchinfer {self._command} was stopped: {last}")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        kind = ConfigError if code == ExitCode.BAD_JOB else BatchinferError
        failure = kind(f"batchinfer {self._command} ended {how}: {last}")
        failure.add_note(words)
        raise failure


def _is_terminal() -> bool:
    """Whether the process would write to the terminal that this one's messages go to."""
    own = sys.__stderr__
    return own is not None and sys.stderr is own and own.isatty()


def _error_of(classes: list[str], message: str, attributes: dict[str, str]) -> BatchinferError:
    """The error that the process has told of; one of a class that only it knows is the nearest of records.py."""
    kind = next(found for name in classes if (found := getattr(records, name, None)) is not None)
    error: BatchinferError = kind.__new__(kind, message)
    vars(error).update({name: Path(value) if name == "path" else value for name, value in attributes.items()})
    return error
