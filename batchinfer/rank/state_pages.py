"""KV pages and states of running requests, for models whose requests have a state (DeepSeek V4).

A prompt can share a prefix only up to a token after which the state was kept. The spans of a step run in the order in
which their chunks were added. So the next span can reuse a slot that one has released, and a prompt can continue from
a state that the same step keeps.
"""

from dataclasses import dataclass

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.kept_states import KeptState, KeptStates
from batchinfer.kv.pages import pages_for
from batchinfer.kv.prefix_tree import Match
from batchinfer.model.step import StateMoves
from batchinfer.rank.context import RankContext
from batchinfer.rank.prompt_pages import NO_MATCH, PromptPages
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestTimes


@dataclass(frozen=True, slots=True)
class StateMatch(Match):
    """The kept state from which a prompt continues; None if the prompt is computed from its first token."""

    state: KeptState | None
    num_fixed_pages: int = 0  # pages of the state's prefix that the rest of the prompt does not change

    @property
    def num_shared_pages(self) -> int:
        return self.num_fixed_pages

    @property
    def num_tokens(self) -> int:
        return 0 if self.state is None else len(self.state.tokens)


class StatePages(PromptPages):
    """The page pool of a rank and the states of its requests."""

    runs_in_order = True

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._states = KeptStates(self.pool, context.num_slots)
        self._unit_tokens = context.model.config.attention.unit_tokens
        self._adopts_alone = not context.place.runs_prefill

    def match(self, request: Request) -> StateMatch | None:
        """Find the kept state from which a request continues, and free pages for it; return None if it has to wait.

        The shared prefix is at most as long as planned, so that the first planned piece has a token to compute.
        """
        if not self._states.has_slot:
            return None
        limit = min(request.shared_tokens - request.replicated_tokens, request.most_cached_tokens)
        found = self._states.find(request.token_ids, limit) if self._share_prefixes else None
        num_fixed = len(self._shared_pages(found))
        if self._states.make_room(self._num_pages(request) - num_fixed, keep=found):
            return StateMatch((), None, 0, found, num_fixed)
        # without running requests no page will become free: give up the state and its pages
        may_do_without = self.num_running == 0 and found is not None
        if may_do_without and self._states.make_room(self._num_pages(request), keep=None):
            return StateMatch((), None, 0, None)
        return None

    def open(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        """Start a request after the state that `match` found, on pages that `match` freed."""
        assert isinstance(match, StateMatch), "a match of this object"
        state, held = match.state, self._shared_pages(match.state)
        copied = [] if state is None else state.pages[len(held) :]
        for page in (*held, *copied):
            self.pool.share(page)
        self._copied_pages += copied
        self._states.begin(request.token_ids, request.branch_points)
        sequence = self._sequence(request, held, match.num_tokens, times)
        sequence.state_slot, sequence.num_branched = self._states.take_slot(), match.num_tokens
        if state is not None:
            copies = tuple(zip(copied, sequence.pages[len(held) :], strict=False))
            sequence.moves[match.num_tokens] = StateMoves(state.slot, copies)
        return sequence

    def match_adopted(self, request: Request) -> Match | None:
        """Free pages for a request whose KV and state come from another rank; return None if it has to wait.

        A rank that runs no prefill shares whole pages that no later token changes.
        """
        if not self._states.has_slot:
            return None
        if self._adopts_alone:
            full = self._known(request).full
            return self._if_it_fits(request, full[: self._fixed_pages(len(full) * PAGE_TOKENS)])
        return NO_MATCH if self._states.make_room(self._num_pages(request), keep=None) else None

    def adopt(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        """Start a request whose prompt ran on another rank, before its KV and state are copied to this one."""
        sequence = self._sequence(request, self._tree.hold(match), len(request.token_ids), times)
        sequence.state_slot, sequence.num_branched = self._states.take_slot(), sequence.num_computed
        if self._adopts_alone and self._share_prefixes:
            num_pages = self._fixed_pages(sequence.num_computed)
            self._tree.insert(request.token_ids[: num_pages * PAGE_TOKENS], sequence.pages[:num_pages])
        return sequence

    def make_known(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep the states after those computed tokens of a sequence at which later prompts branch off."""
        for place in sorted(sequence.request.branch_points) if self._share_prefixes else ():
            if sequence.num_branched < place <= sequence.num_computed:
                slot = self._states.keep(sequence.request.token_ids[:place], sequence.pages[: pages_for(place)])
                if slot is not None and place in sequence.moves:  # the sequence begins there, with a state from disk
                    sequence.moves[place] = sequence.moves[place]._replace(share_in=slot)
                elif slot is not None:
                    sequence.kept_slots[place] = slot
        sequence.num_branched = sequence.num_computed

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages and slot; pages and slots of kept states are released later."""
        super().release(sequence)
        assert sequence.state_slot is not None, "a sequence of this object has a slot"
        self._states.free_slot(sequence.state_slot)

    def _shared_pages(self, state: KeptState | None) -> list[int]:
        """Return the pages of a kept prefix that the prompt behind it does not change."""
        if state is None:
            return []
        return state.pages[: self._fixed_pages(len(state.tokens))]

    def _fixed_pages(self, num_tokens: int) -> int:
        """Return the number of leading pages of a prompt's first tokens that its later tokens do not change."""
        return pages_for(num_tokens // self._unit_tokens * self._unit_tokens)
