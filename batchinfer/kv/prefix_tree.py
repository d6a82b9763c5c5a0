"""A tree of the prompt prefixes that are in pages now, matched token by token, shared page by page.

A node is one page of prompt tokens after its parent's. Full pages are shared; where a prompt leaves a known path inside
a page, the tokens up to the branch are copied into a new page:

    [system prompt: pages 7, 3] ─┬─ [page 9: "Q: how far is"]     a full or partly filled page of the first prompt
                                 └─ [page 4: "Q: how" + ...]      copied from page 9 up to the branch, then its own
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass, field

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import PagePool


@dataclass(slots=True, eq=False)
class Node:
    """One page of prompt tokens; the tree holds its page once."""

    tokens: tuple[int, ...]  # at most PAGE_TOKENS
    page: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    sorted_tokens: list[tuple[int, ...]] = field(default_factory=list)  # of the children

    def nearest(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the child with the longest common start, and its number of tokens; (None, 0) if no child has any."""
        at = bisect_left(self.sorted_tokens, tokens)
        best, most = None, 0
        for neighbour in self.sorted_tokens[max(0, at - 1) : at + 1]:  # a common start is longest in sorted order
            common = _common_length(neighbour, tokens)
            if common > most:
                best, most = self.children[neighbour], common
        return best, most


@dataclass(frozen=True, slots=True)
class Match:
    """The parts of a prompt that are in memory.

    full:     nodes whose whole page can be shared
    branch:   node from whose page the first `num_branch_tokens` tokens can be copied, or None
    """

    full: tuple[Node, ...]
    branch: Node | None
    num_branch_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.full) * PAGE_TOKENS + self.num_branch_tokens

    @property
    def num_shared_pages(self) -> int:
        return len(self.full)


class PrefixTree:
    """Prompt prefixes in pages; the least recently used ones are freed when pages run short."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = Node((), -1, None)
        self._node_of_page: dict[int, Node] = {}
        # leaves that no sequence holds, least recently used first: these can be freed
        self._idle: OrderedDict[Node, None] = OrderedDict()

    def match(self, tokens: list[int], limit: int) -> Match:
        """Return the longest prefix of the first `limit` tokens that is in memory."""
        node = self._root
        full: list[Node] = []
        while (len(full) + 1) * PAGE_TOKENS <= limit:
            start = len(full) * PAGE_TOKENS
            child = node.children.get(tuple(tokens[start : start + PAGE_TOKENS]))
            if child is None:
                break
            full.append(child)
            node = child
        rest = tokens[len(full) * PAGE_TOKENS : min(limit, (len(full) + 1) * PAGE_TOKENS)]
        return Match(tuple(full), *node.nearest(tuple(rest)))

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        """Add a prompt's pages; a page whose tokens are known already stays with its sequence alone."""
        node = self._root
        for index, page in enumerate(pages):
            part = tuple(tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
            child = node.children.get(part)
            if child is None:
                self._pool.share(page)
                child = Node(part, page, node)
                node.children[part] = child
                insort(node.sorted_tokens, part)
                self._node_of_page[page] = child
                self._idle.pop(node, None)
            node = child
            if len(part) < PAGE_TOKENS:
                break

    def hold(self, match: Match) -> list[int]:
        """Hold the full pages of a match for a sequence, so that they stay; return them."""
        for node in match.full:
            self._pool.share(node.page)
            self._idle.pop(node, None)
        return [node.page for node in match.full]

    def release(self, pages: list[int]) -> None:
        """Release a sequence's pages; pages in the tree stay until room is needed."""
        for page in reversed(pages):
            self._pool.release(page)
            node = self._node_of_page.get(page)
            if node is not None and self._can_go(node):
                self._idle[node] = None

    def make_room(self, count: int, *, keep: tuple[Node, ...] = ()) -> bool:
        """Free pages of the tree, least recently used first, until `count` are free; return False if that fails.

        Pages that sequences hold stay, and so do the nodes to `keep` (about to be shared or copied from).
        """
        while self._pool.num_free < count:
            oldest = next((node for node in self._idle if node not in keep), None)
            if oldest is None:
                return False
            self._remove(oldest)
        return True

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens], self._node_of_page[node.page], self._idle[node]
        del parent.sorted_tokens[bisect_left(parent.sorted_tokens, node.tokens)]
        self._pool.release(node.page)
        if parent is not self._root and self._can_go(parent):
            # the parent's last use was this child's or an earlier one: it is freed next
            self._idle[parent] = None
            self._idle.move_to_end(parent, last=False)

    def _can_go(self, node: Node) -> bool:
        return not node.children and self._pool.has_one_holder(node.page)


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
