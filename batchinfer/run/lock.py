"""Only one plan, finish or retry at a time in a run folder; the lock goes with the process, however that ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir, cannot_write


@contextmanager
def locked(run: RunDir, *, doing: str) -> Iterator[None]:
    """Hold the run's lock.

    Args:
        doing: what must not happen twice at once, for a file system without locks: "finish this run".

    Raises:
        ConfigError: another process holds it, or its file cannot be written.
    """
    try:
        file = open(run.lock, "a", encoding="utf-8")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise cannot_write(run.lock, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process plans or finishes {run.root}; wait for it or stop it") from None
        except OSError as error:
            note(f"no file locks in {run.root} ({error.strerror}); do not {doing} twice at once")
        yield
