"""States of requests in slots, and prefixes whose state is kept where later prompts branch off.

Where a model's requests keep a state besides their pages, a prompt goes on after a shared prefix only where the state
after exactly this prefix was kept:

    prompt       [ pages 7, 3, 9 ……………………………………… )
    kept states        ^ slot 5        ^ slot 2            each holds the pages up to its place
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from batchinfer.kv.pages import PagePool


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """A prefix with its pages and the read-only slot that holds the state after its last token."""

    tokens: list[int]
    pages: list[int]
    slot: int


class KeptStates:
    """The slots of a rank: one for each running request, the others for kept states.

    If slots or pages run short, kept states are dropped. Those go first on whose path the fewest prompts began of
    late; of one path the shortest prefix goes first, since a walk down the prefix tree comes back to it last.
    """

    def __init__(self, pool: PagePool, num_slots: int) -> None:
        self._pool = pool
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: list[KeptState] = []  # the one to be dropped first comes first

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free or can be made free."""
        return bool(self._free or self._kept)

    def find(self, tokens: list[int], limit: int) -> KeptState | None:
        """Return the state after the longest kept prefix of the first `limit` tokens."""
        on_path = (state for state in self._on_path(tokens) if len(state.tokens) <= limit)
        return max(on_path, key=lambda state: len(state.tokens), default=None)

    def keep(self, tokens: list[int], pages: list[int]) -> int | None:
        """Return a slot for the state after these tokens; None if it is kept already or all slots are in use."""
        if any(len(state.tokens) == len(tokens) for state in self._on_path(tokens)) or not self.has_slot:
            return None
        for page in pages:
            self._pool.share(page)
        self._kept.append(KeptState(tokens, pages, self.take_slot()))
        return self._kept[-1].slot

    def begin(self, tokens: list[int], wanted: Collection[int]) -> None:
        """Record the start of a prompt: drop the states on its path except those after `wanted` tokens."""
        for state in sorted(self._on_path(tokens), key=lambda state: len(state.tokens)):
            self._kept.remove(state)
            if len(state.tokens) in wanted:
                self._kept.append(state)
            else:
                self._give_back(state)

    def take_slot(self) -> int:
        """Take a slot for a request, if need be that of a kept state; ask `has_slot` first."""
        if not self._free:
            self._give_back(self._kept.pop(0))
        return self._free.pop()

    def free_slot(self, slot: int) -> None:
        """Give back a request's slot."""
        self._free.append(slot)

    def make_room(self, count: int, *, keep: KeptState | None) -> bool:
        """Drop states until `count` pages are free, but not `keep`; return False, and drop none, if that fails."""
        others = [state for state in self._kept if state is not keep]
        missing = count - self._pool.num_free
        if missing <= 0:
            return True
        holders: dict[int, int] = {}  # of each page, by states that can go
        for page in (page for state in others for page in state.pages):
            holders[page] = holders.get(page, 0) + 1
        freeable = {page for page, count in holders.items() if self._pool.num_holders(page) == count}
        if len(freeable) < missing:
            return False
        for state in others:
            if self._pool.num_free >= count:
                break
            if freeable.intersection(state.pages):
                self._kept.remove(state)
                self._give_back(state)
        return True

    def _on_path(self, tokens: list[int]) -> Iterator[KeptState]:
        """Yield the states after prefixes of these tokens."""
        for state in self._kept:
            count = len(state.tokens)
            # the last token tells most others apart
            if count <= len(tokens) and state.tokens[-1] == tokens[count - 1] and state.tokens == tokens[:count]:
                yield state

    def _give_back(self, state: KeptState) -> None:
        self._free.append(state.slot)
        for page in state.pages:
            self._pool.release(page)
