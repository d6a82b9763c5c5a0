"""Which prompt prefixes lie in pages right now: found token by token, shared page by page. Called by prefill.

A node is one page of prompt tokens after its parent's. Full pages are shared; where a prompt leaves a known path inside
a page, the tokens up to the branch are copied into a page of its own:

    [system prompt: pages 7, 3] ─┬─ [page 9: "Q: how far is"]     a full or partly filled page of the first prompt
                                 └─ [page 4: "Q: how" + ...]      copied from page 9 up to the branch, then its own
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import PagePool

RECENT_BRANCHES = 4  # siblings looked at for a common start; in prefix order the best one is the latest


@dataclass(slots=True, eq=False)
class Node:
    """One page of prompt tokens; the tree holds its page once."""

    tokens: tuple[int, ...]  # at most PAGE_TOKENS
    page: int
    parent: Node | None
    children: OrderedDict[tuple[int, ...], Node] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Match:
    """What of a prompt is in memory.

    full:     nodes whose whole page can be shared
    branch:   page of which the first `num_branch_tokens` tokens can be copied; None: no such page
    """

    full: tuple[Node, ...]
    branch: Node | None
    num_branch_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.full) * PAGE_TOKENS + self.num_branch_tokens


class PrefixTree:
    """Prompt prefixes in pages, least recently used ones given back when pages run short."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = Node((), -1, None)
        # oldest first; a node always stands before its parent, so leaves are given back first
        self._recency: OrderedDict[Node, None] = OrderedDict()

    def match(self, tokens: list[int]) -> Match:
        """The longest prefix of `tokens` in memory, without its last token (which must run to give logits)."""
        limit = len(tokens) - 1
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
        branch, num_branch_tokens = None, 0
        for _, child in zip(range(RECENT_BRANCHES), reversed(node.children.values()), strict=False):
            common = _common_length(child.tokens, rest)
            if common > num_branch_tokens:
                branch, num_branch_tokens = child, common
        exact = node.children.get(tuple(rest))  # a partly filled page that equals all that is left
        if exact is not None and len(rest) > num_branch_tokens:
            branch, num_branch_tokens = exact, len(rest)
        return Match(tuple(full), branch, num_branch_tokens)

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        """Make a prompt's pages known; pages of parts already known stay with their sequence alone."""
        node = self._root
        path: list[Node] = []
        for index, page in enumerate(pages):
            part = tuple(tokens[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
            child = node.children.get(part)
            if child is None:
                self._pool.share(page)
                child = Node(part, page, node)
                node.children[part] = child
            path.append(child)
            node = child
            if len(part) < PAGE_TOKENS:
                break
        self._touch(path)

    def hold(self, match: Match) -> list[int]:
        """Hold the full pages of a match for a sequence, so that they stay; returns them."""
        for node in match.full:
            self._pool.share(node.page)
        self._touch(list(match.full))
        return [node.page for node in match.full]

    def make_room(self, count: int, *, keep: Node | None = None) -> bool:
        """Give back pages until `count` are free; False when that is not possible.

        Only leaves that no sequence holds can go; `keep` (a page about to be copied from) stays.
        """
        if self._pool.num_free >= count:
            return True
        for node in list(self._recency):
            if node is not keep and not node.children and self._pool.has_one_holder(node.page):
                self._remove(node)
                if self._pool.num_free >= count:
                    return True
        return False

    def _touch(self, path: list[Node]) -> None:
        for node in reversed(path):  # leaf first: parents are always younger
            self._recency[node] = None
            self._recency.move_to_end(node)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        del self._recency[node]
        self._pool.release(node.page)


def _common_length(left: tuple[int, ...], right: list[int]) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
