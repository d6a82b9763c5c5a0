"""A process at its limit of open files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_more_open_files() -> Iterator[None]:
    """Let this process open no more files inside the block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.open("/dev/null", os.O_RDONLY)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
