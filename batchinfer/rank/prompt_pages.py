"""KV pages of running requests: pages shared between prompts, and copies of a page's tokens where prompts branch."""

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import PagePool, pages_for
from batchinfer.kv.prefix_tree import Match, Node, PrefixTree
from batchinfer.rank.context import RankContext
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.records import Request, RequestTimes

NO_MATCH = Match((), None, 0)


class PromptPages:
    """The page pool of a rank and the prefix tree of the prompts in it."""

    runs_in_order = False  # whether what a step does to pages depends on the order of its chunks

    def __init__(self, context: RankContext) -> None:
        self.pool = PagePool(context.num_pages)
        self._tree = PrefixTree(self.pool)
        self._context = context
        self._share_prefixes = context.share_prefixes
        self._prompt_only = not context.place.runs_decode  # another rank decodes
        self._copied_pages: list[int] = []  # held until the step that copies from them is over
        self.num_running = 0  # sequences that hold pages

    def can_fit(self, request: Request) -> bool:
        """Return whether the pool is large enough for a request if no other one runs."""
        return self._num_pages(request) <= self.pool.num_pages

    def match(self, request: Request) -> Match | None:
        """Find the known pages that a request can share and free its other pages; return None if it has to wait."""
        found = self._known(request)
        if self._make_room(request, found):
            return found
        # without running requests no page will become free: give up the page to copy from
        may_do_without = self.num_running == 0 and found.branch is not None
        return self._if_it_fits(request, found.full) if may_do_without else None

    def match_adopted(self, request: Request) -> Match | None:
        """Find the whole pages that a request from another rank can share and free its other pages, or return None."""
        return self._if_it_fits(request, self._known(request).full)

    def open(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        """Start a request on the pages that `match` found and made free."""
        return self._sequence(request, self._tree.hold(match), match.num_tokens, times)

    def adopt(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        """Start a request whose prompt ran on another rank, before its KV is copied into its pages."""
        sequence = self.open(request, match, times)
        sequence.num_computed = sequence.num_prompt_tokens
        self.make_known(sequence, sequence.num_prompt_tokens)
        return sequence

    def make_known(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the pages of a prompt's first tokens to the prefix tree, so that later prompts share them."""
        if self._share_prefixes:
            self._tree.insert(sequence.request.token_ids[:num_tokens], sequence.pages[: pages_for(num_tokens)])

    def copy_branch(self, match: Match, sequence: Sequence, copies: dict[int, int]) -> None:
        """Add the slots to copy (to -> from) in the next step, for the tokens of a page that both prompts have."""
        assert match.branch is not None
        source, target = match.branch.page, sequence.pages[len(match.full)]
        self._tree.hold(Match((match.branch,), None, 0))
        self._copied_pages.append(source)
        for offset in range(match.num_branch_tokens):
            slot = source * PAGE_TOKENS + offset
            # a copy of this step may fill the source itself: then copy from that copy's source
            copies[target * PAGE_TOKENS + offset] = copies.get(slot, slot)

    def end_step(self) -> None:
        """Release the pages that the step has copied from."""
        self._tree.release(self._copied_pages)
        self._copied_pages.clear()

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages; pages in the prefix tree stay until their room is needed."""
        self._tree.release(sequence.pages)
        self.num_running -= 1

    def drop_known(self) -> None:
        """Free all pages of prompts that ended, so that no later prompt shares them; none may be running."""
        assert self.num_running == 0, "pages of running prompts stay"
        self._tree.make_room(self.pool.num_pages)

    def _sequence(self, request: Request, held: list[int], num_computed: int, times: RequestTimes) -> Sequence:
        """Start a request on these pages of its beginning, and free ones for the rest."""
        self.num_running += 1
        thinking, stop = self._context.thinking(request), request.sampling.stop
        rules = self._context.rules.make(request, thinking)
        is_text_alone = bool(stop) and rules is None and thinking is None
        return Sequence(
            request=request,
            pages=held + self.pool.reserve(self._num_pages(request) - len(held)),
            num_computed=num_computed,
            times=times,
            stream=self._context.tokenizer.stream() if stop else None,
            completing=self._context.stop_tokens.of(stop) if is_text_alone else None,
            rules=rules,
            thinking=thinking,
            separates_reasoning=self._context.reasoning != "none",
        )

    def _num_pages(self, request: Request) -> int:
        return pages_needed(request, prompt_only=self._prompt_only)

    def _known(self, request: Request) -> Match:
        return self._tree.match(request.token_ids, request.most_cached_tokens) if self._share_prefixes else NO_MATCH

    def _if_it_fits(self, request: Request, full: tuple[Node, ...]) -> Match | None:
        without_branch = Match(full, None, 0)
        return without_branch if self._make_room(request, without_branch) else None

    def _make_room(self, request: Request, match: Match) -> bool:
        keep = match.full if match.branch is None else (*match.full, match.branch)
        return self._tree.make_room(self._num_pages(request) - len(match.full), keep=keep)
