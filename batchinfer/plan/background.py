"""Work done one step ahead in another thread, so that reading and sorting overlap."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def made_ahead(items: Iterator[Item], pool: ThreadPoolExecutor) -> Iterator[Item]:
    """The same items, each made in the pool while the one before it is in use; at most one waits.

    An item is never None. What making an item raises is raised where it would have been handed out.
    """
    waiting = pool.submit(next, items, None)
    while (item := waiting.result()) is not None:
        waiting = pool.submit(next, items, None)
        yield item
        del item  # so that no more than one item waits while the next is made
