"""Processes of batchinfer's own: their start, what they leave out, their streams; never for a caller's process."""

import codecs
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
    """Arrow imports pandas, where it is installed, at the first list that becomes an array: 0.2 s and 40 MB."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def command(module: str, *arguments: str) -> list[str]:
    """What starts a module of batchinfer as a process: this interpreter, which imports nothing of the working folder.

    That is wherever somebody keeps data: a file there may have the name of any module.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with_parent(by: signal.Signals) -> None:
    """Have this process get a signal when the one that started it ends; that it has ended before shows nowhere."""
    import ctypes  # few processes need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def settle() -> None:
    """Keep libraries from work that nothing here uses, and from what the environment means otherwise or cannot mean."""
    # a command makes many small things that stay until its end: looking through them all the time finds little
    gc.set_threshold(50_000, 20, 20)
    # nothing here multiplies with numpy, whose threads would be busy waiting for work while others start
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # nor does numba, which is not imported with 0 of them
    os.environ["NUMBA_NUM_THREADS"] = "1"
    # a relative path counts as unset, as the XDG specification has it; libraries would take it
    if not os.path.isabs(os.environ.get("XDG_CACHE_HOME", "/")):
        del os.environ["XDG_CACHE_HOME"]
    sys.meta_path.insert(0, _NoPandas())


class WaitingFile(io.FileIO):
    """Waits for room also where another program, which has the same terminal or pipe, wants no waiting."""

    def write(self, data: Any, /) -> int:
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class Output(WaitingFile):
    """For stdout: says where it was that something could not be written, on a full disk behind `> FILE`."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from None


class Log(WaitingFile):
    """For stderr: nothing ends because its log is on a full disk, or goes to somebody who has left."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def stream(kind: type[WaitingFile], of: TextIO) -> TextIO:
    """The stream as before, by such a file; as it is where it is no file.

    On a console that is not UTF-8, characters that it lacks are no error: a finished run would end with one.
    """
    if not isinstance(of, io.TextIOWrapper):
        return of
    of.flush()
    raw = io.BufferedWriter(kind(of.fileno(), "w", closefd=False))
    is_lacking = of.errors == "strict" or codecs.lookup(of.encoding).name != "utf-8"
    errors = "backslashreplace" if is_lacking else of.errors
    return io.TextIOWrapper(raw, of.encoding, errors, line_buffering=of.line_buffering or kind is Log)
