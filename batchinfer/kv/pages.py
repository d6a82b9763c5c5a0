"""The device page pool: the number of holders of each KV page."""

from batchinfer.config import PAGE_TOKENS


def pages_for(num_tokens: int) -> int:
    """Return the number of pages that hold `num_tokens` tokens of KV."""
    return -(-num_tokens // PAGE_TOKENS)


class PagePool:
    """A pool of pages that counts the holders of each page; a page without holders is free.

    pages   0 .. num_pages - 1, each held by any number of sequences and by the prefix tree
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        # popping from the end hands out low page numbers first
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def reserve(self, count: int) -> list[int]:
        """Take `count` free pages, each with one holder; ask `num_free` first."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page in use."""
        assert self._holders[page] > 0, f"page {page} is free, nothing to share"
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Remove a holder; the last one frees the page."""
        assert self._holders[page] > 0, f"page {page} released twice"
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)

    def has_one_holder(self, page: int) -> bool:
        return self._holders[page] == 1

    def num_holders(self, page: int) -> int:
        return self._holders[page]
