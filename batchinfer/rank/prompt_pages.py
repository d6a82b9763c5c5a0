"""The KV pages of running requests: which prompts share which, and what a prompt copies where it branches in a page."""

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.pages import PagePool, pages_for
from batchinfer.kv.prefix_tree import Match, PrefixTree
from batchinfer.rank.context import RankContext
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.records import Request, RequestTimes

NO_MATCH = Match((), None, 0)


class PromptPages:
    """The page pool of a rank, as its requests use it."""

    def __init__(self, context: RankContext) -> None:
        self.pool = PagePool(context.num_pages)
        self._tree = PrefixTree(self.pool)
        self._context = context
        self._share_prefixes = context.share_prefixes
        self._prompt_only = not context.place.runs_decode  # another rank decodes
        self._copied_pages: list[int] = []  # held until the step that copies from them is over
        self.num_running = 0  # sequences that hold pages

    def can_fit(self, request: Request) -> bool:
        """Whether the pool is large enough for a request when nothing else runs."""
        return self._num_pages(request) <= self.pool.num_pages

    def match(self, request: Request, *, with_branch: bool = True) -> Match | None:
        """What the request shares, with the rest of its pages made free; None when it has to wait.

        Args:
            with_branch: also look for a page of which it could copy the first tokens.
        """
        found = self._tree.match(request.token_ids, request.most_cached_tokens) if self._share_prefixes else NO_MATCH
        without_branch = Match(found.full, None, 0)
        if with_branch and self._make_room(request, found):
            return found
        # with nothing running no page will come free: do without the page that would be copied from
        may_do_without = not with_branch or (self.num_running == 0 and found.branch is not None)
        return without_branch if may_do_without and self._make_room(request, without_branch) else None

    def open(self, request: Request, match: Match, times: RequestTimes) -> Sequence:
        """Start a request on the pages that `match` found and made free."""
        held = self._tree.hold(match)
        self.num_running += 1
        thinking = self._context.thinking(request)
        return Sequence(
            request=request,
            pages=held + self.pool.reserve(self._num_pages(request) - len(held)),
            num_computed=match.num_tokens,
            times=times,
            stream=self._context.tokenizer.stream() if request.sampling.stop else None,
            rules=self._context.rules.make(request, thinking),
            thinking=thinking,
            tells_reasoning=self._context.reasoning != "none",
        )

    def make_known(self, sequence: Sequence, num_tokens: int) -> None:
        """Let later prompts share the pages of these first tokens of a prompt."""
        if self._share_prefixes:
            self._tree.insert(sequence.request.token_ids[:num_tokens], sequence.pages[: pages_for(num_tokens)])

    def copy_branch(self, match: Match, sequence: Sequence, copies: dict[int, int]) -> None:
        """Add the slots to copy (to -> from), which take the common part of a page over in the coming step."""
        assert match.branch is not None
        source, target = match.branch.page, sequence.pages[len(match.full)]
        self._tree.hold(Match((match.branch,), None, 0))
        self._copied_pages.append(source)
        for offset in range(match.num_branch_tokens):
            slot = source * PAGE_TOKENS + offset
            # the source may itself be filled by a copy in this step: then take it from where that one does
            copies[target * PAGE_TOKENS + offset] = copies.get(slot, slot)

    def end_step(self) -> None:
        """The step has run: pages that were copied from need not be held any longer."""
        self._tree.release(self._copied_pages)
        self._copied_pages.clear()

    def release(self, sequence: Sequence) -> None:
        """Give a sequence's pages back; prompt pages known to the tree stay until room is needed."""
        self._tree.release(sequence.pages)
        self.num_running -= 1

    def _num_pages(self, request: Request) -> int:
        return pages_needed(request, prompt_only=self._prompt_only)

    def _make_room(self, request: Request, match: Match) -> bool:
        keep = match.full if match.branch is None else (*match.full, match.branch)
        return self._tree.make_room(self._num_pages(request) - len(match.full), keep=keep)
