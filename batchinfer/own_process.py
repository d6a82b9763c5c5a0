"""Settings of batchinfer's own processes: start, interpreter, streams; never applied to a caller's process."""

import gc
import io
import os
import select
import signal
import sys
from importlib.abc import MetaPathFinder
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1


class _NoPandas(MetaPathFinder):
    """An import hook that hides pandas, which Arrow imports at the first list that becomes an array (0.2 s, 40 MB)."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of batchinfer, without imports from the working folder.

    The working folder holds the user's data: a file there may have the name of any module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with_parent(by: signal.Signals) -> None:
    """Send this process a signal when its parent ends; a parent that has ended before is not noticed."""
    import ctypes  # slow, and needed by few processes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def configure_interpreter() -> None:
    """Switch off unused work of libraries."""
    # a command makes many small objects that stay until its end: frequent collections would find little
    gc.set_threshold(50_000, 20, 20)
    # nothing here multiplies with numpy, whose threads would spin while waiting for work
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.meta_path.insert(0, _NoPandas())


class WaitingFile(io.FileIO):
    """A file that waits for room even if another program has set the same terminal or pipe to non-blocking."""

    def write(self, data: Any, /) -> int:
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class Output(WaitingFile):
    """The file behind stdout: an error names standard output, for example on a full disk behind `> FILE`."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


class Log(WaitingFile):
    """The file behind stderr: errors of writing are ignored, so that a full disk or a closed pipe ends nothing."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def wrap_stream(kind: type[WaitingFile], of: TextIO) -> TextIO:
    """Return the stream with its file replaced by one of this kind; a stream without a file is returned as is.

    Characters that a console's encoding lacks are escaped: an error would fail a finished run.
    """
    if not isinstance(of, io.TextIOWrapper):
        return of
    of.flush()
    raw = io.BufferedWriter(kind(of.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, of.encoding, "backslashreplace", line_buffering=of.line_buffering or kind is Log)
