"""Time and memory for other people's SQL."""

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
GRACE_S = 2.0  # for DuckDB to stop: it does between parts of a query, but not inside one call of a function
LEAST_BYTES = 1 << 30
BESIDE_BYTES = 512 << 20  # for rows on their way out, beyond what DuckDB may hold

Result = TypeVar("Result")


def query_bytes() -> int:
    """Memory that a query may take: half of what is free."""
    return max(LEAST_BYTES, free_memory_bytes() // 2)


@contextmanager
def memory_limited(num_bytes: int) -> Iterator[None]:
    """Inside, this process gets no more than this beyond what it holds: some functions of SQL ask DuckDB for none.

    Raises:
        ConfigError: Python itself ran out of it.
    """
    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = held_bytes()
    limits = [limit for limit in before if limit != resource.RLIM_INFINITY]
    if held is not None:
        limits.append(held + num_bytes + BESIDE_BYTES)
        resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    except MemoryError:
        raise too_much_memory(num_bytes) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def too_much_memory(num_bytes: int) -> ConfigError:
    """The sentence for a query that wants more."""
    return ConfigError(
        f"the SQL needs more than {num_bytes / 2**30:.1f} GiB of memory, half of what was free; let it give fewer or "
        "smaller rows"
    )


class Deadline:
    """Seconds that one query may take from here on, its rows included.

    Attributes:
        is_stuck: the query did not stop when it was told to; its connection cannot be closed.
    """

    def __init__(self, connection: duckdb.DuckDBPyConnection, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds
        self._end = time.monotonic() + seconds
        self.is_stuck = False

    def call(self, step: Callable[[], Result]) -> Result:
        """The step's result.

        Raises:
            ConfigError: the time is over.
        """
        results: list[Result] = []
        errors: list[BaseException] = []

        ended = threading.Event()  # after a signal, Thread.join takes its thread for ended

        def run() -> None:
            try:
                results.append(step())
            except BaseException as error:
                errors.append(error)
            ended.set()

        is_late = True
        try:
            # beside this thread, which a signal can reach, also while it starts, and which can go on without it
            threading.Thread(target=run, daemon=True).start()
            # in parts: a signal that comes right before a wait is noticed behind it
            while is_late and (left := self._end - time.monotonic()) > 0:
                is_late = not ended.wait(min(left, LOOK_S))
        finally:  # also when a signal stops the command
            if is_late:
                self.is_stuck = not self._stop(ended)
        if is_late:
            raise ConfigError(f"the SQL takes more than {self._seconds:g} s; give it more with --sql-seconds")
        if errors:
            raise errors[0]
        return results[0]

    def _stop(self, ended: threading.Event) -> bool:
        """Tell the query to stop, again and again: DuckDB forgets what comes before it begins. True: it has stopped."""
        end = time.monotonic() + GRACE_S
        while not ended.is_set() and time.monotonic() < end:
            self._connection.interrupt()
            ended.wait(LOOK_S)
        return ended.is_set()
