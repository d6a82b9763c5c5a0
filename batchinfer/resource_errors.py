"""Errors caused by a resource limit of the machine, explained as a sentence."""

import errno
import resource
import sys
import tempfile
from types import TracebackType


def explain_resource_error(error: BaseException) -> str | None:
    """Return the missing resource and the remedy as a sentence; None for any other error."""
    if isinstance(error, BlockingIOError) or str(error) == "can't start new thread":
        processes = _limit(resource.RLIMIT_NPROC)
        limits = f"`ulimit -u` is {'unlimited' if processes is None else processes}, "
        if memory := _limit(resource.RLIMIT_AS):  # thread stacks count, too
            limits += f"`ulimit -v` {memory // 1024}, "
        return (
            f"no more processes or threads can be started ({limits}a container may have a limit of its own); raise "
            "that limit, and run the same command to go on"
        )
    if (memory := _limit(resource.RLIMIT_AS)) and _is_of_memory(error):
        return (
            f"no more memory can be allocated (`ulimit -v` is {memory // 1024}); raise that limit (`ulimit -v "
            "unlimited` removes it), and run the same command to go on"
        )
    if isinstance(error, FileNotFoundError):
        try:
            tempfile.gettempdir()
        except FileNotFoundError:
            return "no folder for temporary files can be written; set TMPDIR to one that can"
    return None


def report_rank_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the explanation, else a traceback: sys.excepthook of a rank that is not connected to its controller yet."""
    if (explained := explain_resource_error(error)) is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"a rank has ended: {explained}", file=sys.stderr)


def _is_of_memory(error: BaseException) -> bool:
    """Return whether the error may be one of memory; libraries that cannot be loaded do not all give the reason."""
    signs = ("bad alloc", "Allocation failure", "shared object")  # of C++, of DuckDB, of the dynamic loader
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
        return True
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def _limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit
