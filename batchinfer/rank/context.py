"""RankContext, shared by all parts of a rank: model, pages, role and step sizes."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from batchinfer.config.cluster import SWEEP_STEPS
from batchinfer.config.rank_layout import RankPlace
from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.kv.memory import KvMemory
from batchinfer.model.attention_kinds import kind_of
from batchinfer.model.fused.graph_size import num_filler_pages
from batchinfer.model.fused.graphs import DecodeGraphs, has_memory, why_not_recorded
from batchinfer.model.fused.screened_head import ScreenedHead
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.mtp import Draft
from batchinfer.model.schedules import Schedule, plain
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.mesh import Mesh
from batchinfer.rank.bucket_transfer import BucketTransfers
from batchinfer.rank.logit_rules import RuleMaker
from batchinfer.rank.stop_strings import StopTokens
from batchinfer.rank.thinking import AnyThinking, HarmonyThinking, HarmonyTokens, Mode, Thinking, ThinkingTokens
from batchinfer.records import Request

ALONE = RankPlace(rank=0, role="both", group_rank=0, group_size=1)


@dataclass(frozen=True)
class RankContext:
    """Model, tokenizer, pages, role and limits of one rank."""

    model: Transformer
    tokenizer: PromptTokenizer
    num_pages: int
    prefill_tokens: int  # most of a prefill step
    decode_requests: int  # most of a decode step
    num_slots: int = 0  # of requests' states; 0: the model's requests have none
    place: RankPlace = ALONE
    mesh: Mesh = field(default_factory=Mesh.alone)
    transfer_bytes: int = 0  # no prompt is admitted while other ranks have more KV than this still to read
    transfers: Path | BucketTransfers | None = None  # where KV goes on its way between hosts; None: anonymous memory
    graphs_off: bool = False  # decode steps never run as CUDA graphs
    # run two micro-batches in turn when there is work for both; "auto": where the ranks have measured that it pays
    overlap: bool | Literal["auto"] = False
    share_prefixes: bool = True
    traced: bool = False  # report the spans of the first steps
    reasoning: Mode = "none"  # how thinking is separated from answers
    continues: bool = False  # answers go on with the last message of their prompt
    prompts_alone: bool = False  # see weight_mode.computes_prompts_alone
    spreads_prompts: bool = False  # a sweep takes prompts only as long as its weights are read
    placement: int = 0  # number of the placement with which the experts were loaded

    def __post_init__(self) -> None:
        # before the first step, so that pages for which there is no memory are refused at the start
        _ = self.pages, self.schedule, self.graphs

    @cached_property
    def pages(self) -> Any:
        """[L, P, 64, W], the page pool, followed by the filler pages of graphs, which no request uses.

        Attention kinds with a state have their own memory instead, of as many pages and slots.
        """
        num_filler = 0 if self.no_graphs else num_filler_pages(self.decode_requests, self.mesh.size)
        return self.model.new_pages(self.num_pages + num_filler, self.num_slots, one_layer=self.prompts_alone)

    @cached_property
    def memory(self) -> KvMemory:
        """Pages and states as they travel and are stored."""
        parts_of = kind_of(self.model.config.attention).parts
        if parts_of is None:
            return KvMemory(self.pages)
        layers = list(map(parts_of, self.pages))
        return KvMemory(
            pages=tuple(pages for layer in layers for pages in layer.pages),
            slots=tuple(layer.slots for layer in layers),
            stored=tuple(layer.stored for layer in layers),
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The fastest schedule of steps that are not recorded as graphs: decode in one call if possible, else plain."""
        fused = None if self.model.stream is not None else FusedDecode.of(self.model)
        return Schedule(decode=fused or plain)

    @cached_property
    def screened_head(self) -> ScreenedHead | None:
        """The head that finds tokens of decode steps without all logits; None if there is none here."""
        return ScreenedHead.of(self.model) if self.place.runs_decode else None

    @property
    def num_sweep_steps(self) -> int:
        """Most prefill steps, and most decode steps, that pass through the model together."""
        return 1 if self.model.stream is None else SWEEP_STEPS

    @property
    def running_requests(self) -> int:
        """Most requests that decode at once."""
        return self.decode_requests * self.num_sweep_steps

    @cached_property
    def no_graphs(self) -> str | None:
        """Reason why this rank's decode steps never run as graphs; None if they do where the group agrees."""
        if not self.place.runs_decode:
            return "the rank runs no decode steps"
        return why_not_recorded(self.model, switched_off=self.graphs_off)

    @cached_property
    def graphs(self) -> DecodeGraphs | None:
        """CUDA graphs of decode steps; None for the reason in `no_graphs`."""
        if self.no_graphs:
            return None
        memory = partial(has_memory, self.model.device)
        return DecodeGraphs(self.num_pages, most_rows=self.decode_requests, has_memory=memory)

    @property
    def draft(self) -> Draft:
        """The fastest way to draft tokens with the model's layer for multi-token prediction."""
        assert self.model.mtp is not None
        decode = self.schedule.decode
        return decode.draft if isinstance(decode, FusedDecode) and decode.has_mtp else self.model.mtp

    @property
    def stack(self) -> Any:
        """The C++ stack that runs decode steps with drafted tokens in one call; None if there is none."""
        decode = self.schedule.decode
        if self.model.config.attention.rope.query_scale is not None:  # the stack's rows hold cos and sin alone
            return None
        return decode.stack if isinstance(decode, FusedDecode) and decode.has_mtp else None

    @cached_property
    def rules(self) -> RuleMaker:
        """Factory of the rules of requests that change the model's logits."""
        return RuleMaker(self.tokenizer, self.model.config.vocab_size)

    @cached_property
    def stop_tokens(self) -> StopTokens:
        """Tokens with which answers may complete their stop strings."""
        return StopTokens(self.tokenizer)

    def thinking(self, request: Request) -> AnyThinking | None:
        """Return the thinking of a request's answer; None if the job and the request do not look for it."""
        if self.reasoning == "none" and request.sampling.thinking_budget is None:
            return None
        tokens = self._thinking_tokens
        mode: Mode = "auto" if self.reasoning == "none" else self.reasoning
        if isinstance(tokens, HarmonyTokens):
            return HarmonyThinking(tokens, request.token_ids)
        return None if tokens is None else Thinking(tokens, request.token_ids, mode, continues=self.continues)

    @cached_property
    def _thinking_tokens(self) -> ThinkingTokens | HarmonyTokens | None:
        return HarmonyTokens.of(self.tokenizer) or ThinkingTokens.of(self.tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.tokenizer.eos_token_ids
