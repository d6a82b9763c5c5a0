"""Limits of time and memory for a user's SQL."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from batchinfer.host_info import free_memory_bytes, held_bytes
from batchinfer.records import ConfigError

if TYPE_CHECKING:
    import duckdb

SQL_S = 600.0
LOOK_S = 0.2
GRACE_S = 2.0  # for DuckDB to stop: it checks between parts of a query, not inside one function call
LEAST_BYTES = 1 << 30
RESULT_BYTES = 512 << 20  # for result rows in Python, in addition to DuckDB's memory

Result = TypeVar("Result")


def query_bytes() -> int:
    """Return the memory that a query may take: half of the free memory, at least LEAST_BYTES."""
    return max(LEAST_BYTES, free_memory_bytes() // 2)


@contextmanager
def memory_limited(num_bytes: int) -> Iterator[None]:
    """Limit the process's memory to its present size plus `num_bytes`: some SQL functions evade DuckDB's own limit.

    Raises:
        ConfigError: Python itself ran out of memory.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = held_bytes()
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    if held is not None:
        limits.append(held + num_bytes + RESULT_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    except MemoryError:
        raise too_much_memory(num_bytes) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def too_much_memory(num_bytes: int) -> ConfigError:
    """Return the error of a query that needs more than `num_bytes`."""
    return ConfigError(
        f"the SQL needs more than {num_bytes / 2**30:.1f} GiB of memory, half of what was free; let it give fewer or "
        "smaller rows"
    )


class Deadline:
    """The time limit of one query, which starts now and includes reading its rows.

    Attributes:
        is_stuck: the query ignored its interrupt, so its connection cannot be closed.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds
        self._end = time.monotonic() + seconds
        self.is_stuck = False

    def call(self, step: Callable[[], Result]) -> Result:
        """Run `step` in another thread and return its result.

        Raises:
            ConfigError: the time limit is over.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        ended = threading.Event()  # Thread.join reports its thread as ended after a signal

        def run() -> None:
            try:
                results.append(step())
            except BaseException as error:
                errors.append(error)
            ended.set()

        is_late = True
        try:
            # another thread: signals still reach this one, which can go on if the query is stuck
            threading.Thread(target=run, daemon=True).start()
            # short waits: a signal that comes right before a wait is handled after it
            while is_late and (left := self._end - time.monotonic()) > 0:
                is_late = not ended.wait(min(left, LOOK_S))
        finally:  # also if a signal stops the command
            if is_late:
                self.is_stuck = not self._stop(ended)
        if is_late:
            raise ConfigError(f"the SQL takes more than {self._seconds:g} s; give it more with --sql-seconds")
        if errors:
            raise errors[0]
        return results[0]

    def _stop(self, ended: threading.Event) -> bool:
        """Interrupt the query repeatedly (DuckDB drops an early interrupt); return whether the query stopped."""
        end = time.monotonic() + GRACE_S
        while not ended.is_set() and time.monotonic() < end:
            self._connection.interrupt()
            ended.wait(LOOK_S)
        return ended.is_set()
