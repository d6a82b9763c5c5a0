"""One rank's engine in this process: requests in, completions and step records out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.model.transformer import Transformer
from batchinfer.protocol.feed import Inbox
from batchinfer.protocol.messages import Adoption, Handover, PromptPiece, StepRecord
from batchinfer.rank.context import RankContext
from batchinfer.rank.worker import RankWorker
from batchinfer.records import Completion, Request, RequestKey


def whole_prompts(requests: list[Request]) -> list[PromptPiece]:
    """Return a piece for each prompt, which ends no step before it is full."""
    return [PromptPiece(request.key, len(request.token_ids), len(request.token_ids)) for request in requests]


class Feed:
    """Hands over all requests at once and collects what comes back."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests, self.num_requests = list(requests), len(requests)
        self.done: dict[RequestKey, Completion] = {}
        self.records: list[StepRecord] = []

    def receive(self, wait_s: float = 0.0) -> Inbox:
        handed, self.requests = self.requests, []
        return Inbox(requests=handed, pieces=whole_prompts(handed), leave=len(self.done) == self.num_requests)

    def goes_on(self) -> bool:
        return True

    def ask_for_requests(self, num_pages: int) -> None:
        pass

    def send(self, report: Any, num_running: int = 0) -> None:
        self.records.append(report.record)
        for completion in report.completions:
            assert completion.key not in self.done
            self.done[completion.key] = completion


class Taking(Feed):
    """Hands over requests that have run elsewhere, some of which wait for pages."""

    def __init__(self, adoptions: list[Adoption]) -> None:
        super().__init__([])
        self.adoptions, self.num_requests = adoptions, len(adoptions)
        self.adopted: list[RequestKey] = []

    def receive(self, wait_s: float = 0.0) -> Inbox:
        handed, self.adoptions = self.adoptions, []
        return Inbox(adoptions=handed, leave=len(self.done) == self.num_requests)

    def confirm_adopted(self, keys: list[RequestKey]) -> None:
        self.adopted += keys


class GivingAway(Feed):
    """Asks for all running requests at every 9th look; another rank goes on with them to their end."""

    every = 9

    def __init__(self, requests: list[Request], go_on: Callable[[list[Adoption]], Taking]) -> None:
        super().__init__(requests)
        self._all, self._go_on, self._looks, self.num_given = requests, go_on, 0, 0
        self._read: list[RequestKey] = []
        self.taken: list[Taking] = []  # feeds of the other rank

    def receive(self, wait_s: float = 0.0) -> Inbox:
        inbox, self._looks = super().receive(), self._looks + 1
        inbox.adopted, self._read = self._read, []
        if self._looks % self.every == 0:
            inbox.give_away = [one.key for one in self._all][self._looks % 2 :: 2]
        return inbox

    def hand_over(self, handovers: list[Handover]) -> None:
        requests = {one.key: one for one in self._all}
        if handovers:
            taking = self._go_on([Adoption(requests[one.key], one) for one in handovers])
            self.done |= taking.done
            self._read = taking.adopted
            self.num_given += len(handovers)
            self.taken.append(taking)


def run_rank(
    model: Transformer,
    tokenizer: PromptTokenizer,
    requests: list[Request],
    *,
    make_drafter: Any = None,
    feed: Any = None,
    open_prefixes: Any = None,
    **sizes: Any,
) -> Any:
    """Run all requests to their end.

    Args:
        make_drafter: of the rank's context; None: nothing is drafted.
        feed: of these requests; None: a Feed.
        open_prefixes: opens a KV store; None: there is none.
        sizes: of the context.
    """
    context = RankContext(model, tokenizer, **{"num_pages": 400, "prefill_tokens": 2048, "decode_requests": 64} | sizes)
    feed = feed or Feed(requests)
    drafter = None if make_drafter is None else make_drafter(context)
    RankWorker(context, drafter=drafter, open_prefixes=open_prefixes).run(feed)
    assert len(feed.done) == len(requests)
    return feed
