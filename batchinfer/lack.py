"""What the machine does not give to this process, as a sentence, where something failed for that."""

import errno
import os
import resource
import sys
import tempfile
from types import TracebackType


def lack(error: BaseException) -> str | None:
    """What was lacking, and what to do; None where the error is another one."""
    if isinstance(error, BlockingIOError) or str(error) == "can't start new thread":
        processes = _limit(resource.RLIMIT_NPROC)
        limits = f"`ulimit -u` is {'unlimited' if processes is None else processes}, "
        if memory := _limit(resource.RLIMIT_AS):  # where a thread's stack has to be, too
            limits += f"`ulimit -v` {memory // 1024}, "
        return (
            f"no more processes or threads can be started ({limits}a container may have a limit of its own); raise "
            "that limit, and run the same command to go on"
        )
    if (memory := _limit(resource.RLIMIT_AS)) and _is_of_memory(error):
        return (
            f"more memory cannot be had (`ulimit -v` is {memory // 1024}); raise that limit (`ulimit -v unlimited` "
            "takes it away), and run the same command to go on"
        )
    if isinstance(error, FileNotFoundError):
        if not os.path.exists("/proc/self"):
            return "/proc is not mounted, which tells what processes take; mount it: `mount -t proc proc /proc`"
        try:
            tempfile.gettempdir()
        except FileNotFoundError:
            return "there is no folder that can be written for temporary files; set TMPDIR to one"
    return None


def tell_of_rank(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For sys.excepthook of a rank, which has nobody to tell before it is connected: the sentence, else a traceback."""
    if (lacking := lack(error)) is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"a rank has ended: {lacking}", file=sys.stderr)


def _is_of_memory(error: BaseException) -> bool:
    """Whether it may be one; libraries that cannot be loaded do not all say why."""
    signs = ("bad alloc", "Allocation failure", "shared object")  # of C++, of DuckDB, of what cannot be loaded
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in signs):
        return True
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def _limit(kind: int) -> int | None:
    limit, _ = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit
