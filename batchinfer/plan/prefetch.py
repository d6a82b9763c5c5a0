"""Work done one step ahead in another thread, so that reading and sorting overlap."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterator[Item], pool: ThreadPoolExecutor) -> Iterator[Item]:
    """Yield the items, each made in the pool while the previous item is in use; at most one item waits.

    An item must not be None. An error in making an item is raised in place of the item.
    """
    waiting = pool.submit(next, items, None)
    while (item := waiting.result()) is not None:
        waiting = pool.submit(next, items, None)
        yield item
        del item  # so that no more than one item waits while the next is made
