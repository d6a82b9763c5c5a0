"""One step of the model: its input on the host, its tensors on the device, and its result."""

# T tokens of a step, S rows whose logits are wanted, N of these rows or copies, B requests, P pages, E routed experts
# R rotary width, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.scores import Scores
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.transfer import in_one_copy, refill

_OF_DECODE = ("tokens", "positions", "slots", "logit_rows", "page_table", "kv_tokens", "is_counted")


StateParts = tuple[tuple[torch.Tensor, ...], ...]  # of each layer the rows of a state, MemoryParts.stored


class StateMoves(NamedTuple):
    """Copies of states and pages around one span, in attention kinds with a state; spans run in their order.

    begin_from: slot of the state that its request begins with; None: the state in its own slot.
    page_copies: (from, to) before the span: pages in which its request leaves the prefix that it shares.
    keep_in: slot that gets the state after the span; None: nobody needs it.
    begin_with: by layer and ring, the state with which its request begins, in place of `begin_from`.
    share_in: slot that gets this state, too; None: nobody needs it.
    keep_as: by layer and ring, tensors that get the state after the span.
    """

    begin_from: int | None = None
    page_copies: tuple[tuple[int, int], ...] = ()
    keep_in: int | None = None
    begin_with: StateParts | None = None
    share_in: int | None = None
    keep_as: StateParts | None = None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One request's chunk inside a prefill step."""

    start: int  # first row of this chunk in the step
    num_tokens: int  # rows
    context_tokens: int  # tokens in the pages after this chunk: position of its last token + 1
    page_ids: torch.Tensor  # [ceil(context_tokens / 64)] int64, the request's pages in order
    moves: StateMoves | None = None  # None: none


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: prefill chunks (`prefill`), or the next tokens of many requests (`page_table` and `kv_tokens` given).

    A rank without work takes part with no tokens. All tensors are on the host.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, page id * 64 + offset: where this token's latent goes, all different
    logit_rows: torch.Tensor  # [S] int64, rows whose logits are wanted, behind them those that are scored; may be empty
    prefill: tuple[PrefillSpan, ...] = ()  # covers all rows in order
    page_table: torch.Tensor | None = None  # [B, P] int64, pages of each request in order; padding: any valid page
    kv_tokens: torch.Tensor | None = None  # [B] int64, tokens in the pages, the new ones included; T = B * q
    copy_from: torch.Tensor | None = None  # [N] int64 slots to copy latents from, this step's own among them
    copy_to: torch.Tensor | None = None  # [N] int64 slots to copy them to, before attention reads the pages
    state_slots: torch.Tensor | None = None  # [B] int64, slot of each request's state, in attention kinds with one
    scored: torch.Tensor | None = None  # [N] int64, prefill only: the next tokens of the last N of logit_rows
    num_alternatives: int = 0  # most likely tokens to report with each scored token
    num_states: int = 0  # prefill only: number of last logit_rows that return their state and nothing else
    wants_logits: bool = True  # decode only: False if the rank samples from states (fused/screened_head.py)

    @property
    def is_decode(self) -> bool:
        return self.page_table is not None

    @property
    def without_logits(self) -> StepInput:
        """The same step for a rank that samples from states."""
        return replace(self, wants_logits=False)

    def position_range(self) -> tuple[int, int]:
        """Return the lowest and the highest position of a row; 0 and -1 without rows."""
        if len(self.positions) == 0:
            return 0, -1
        lowest, highest = self.positions.aminmax()
        return int(lowest), int(highest)


@dataclass(frozen=True, slots=True)
class StepHalves:
    """A step cut into two micro-batches, in the order of their tokens."""

    first: StepInput
    second: StepInput

    @property
    def without_logits(self) -> StepHalves:
        """The same step for a rank that samples from states."""
        return StepHalves(self.first.without_logits, self.second.without_logits)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Results of a step."""

    logits: torch.Tensor  # [S, V] float32, without the rows that are scored; no rows if the step wants none
    expert_counts: torch.Tensor  # [num_moe_layers, E] int64, tokens of this step per routed expert
    scores: Scores | None = None  # of the tokens to be scored, in their order; None: there are none
    states: torch.Tensor | None = None  # [S, D] normed, of all logit_rows, where a step's schedule gives them

    @classmethod
    def joined(cls, first: StepOutput, second: StepOutput) -> StepOutput:
        """Return the output of a step from both of its halves."""
        found = [output.scores for output in (first, second) if output.scores is not None]
        return cls(
            torch.cat([first.logits, second.logits]),
            first.expert_counts + second.expert_counts,
            Scores.joined(found) if found else None,
        )


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's int64 tensors on the model's device; lengths of chunks stay on the host, which cuts the work by them."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    slots: torch.Tensor  # [T]
    logit_rows: torch.Tensor  # [S]
    page_table: torch.Tensor  # [B, P] without gaps: once for all layers
    kv_tokens: torch.Tensor  # [B]; of prefill chunks on the host
    chunk_tokens: torch.Tensor | None = None  # prefill only: [B] rows of each chunk, on the host
    shared_pages: torch.Tensor | None = (
        None  # prefill only: [B] first pages in common with the chunk before, on the host
    )
    chunk_of_row: torch.Tensor | None = None  # prefill only: [S] the chunk of each wanted row
    moves: tuple[StateMoves | None, ...] = ()  # prefill only: of each chunk
    copy_from: torch.Tensor | None = None  # [N]
    copy_to: torch.Tensor | None = None  # [N]
    state_slots: torch.Tensor | None = None  # [B]
    scored: torch.Tensor | None = None  # [N]
    num_alternatives: int = 0
    num_states: int = 0
    wants_logits: bool = True
    is_counted: torch.Tensor | None = None  # [T] 0 for rows that only fill a batch up, which no statistics count
    position_range: tuple[int, int] = (0, -1)  # see StepInput; of rows that are counted

    @classmethod
    def of(cls, step: StepInput, device: torch.device) -> StepTensors:
        """Return the tensors on a device, moved in one copy without a wait of the host; unchanged on the CPU."""
        values: dict[str, Any] = {name: getattr(step, name) for name in ("tokens", "positions", "slots", "logit_rows")}
        optional = {name: getattr(step, name) for name in ("copy_from", "copy_to", "state_slots", "scored")}
        values |= {name: value for name, value in optional.items() if value is not None}
        on_host = {}
        if step.page_table is None:
            on_host["kv_tokens"] = torch.tensor([span.context_tokens for span in step.prefill], dtype=torch.int64)
            on_host["chunk_tokens"] = torch.tensor([span.num_tokens for span in step.prefill], dtype=torch.int64)
            page_ids = [span.page_ids for span in step.prefill]
            num_pages_B = torch.tensor([ids.shape[0] for ids in page_ids], dtype=torch.int64)
            values["page_table"] = _padded(page_ids, num_pages_B)
            on_host["shared_pages"] = _in_common(values["page_table"], num_pages_B)
            ends_B = on_host["chunk_tokens"].cumsum(0)
            values["chunk_of_row"] = torch.searchsorted(ends_B, step.logit_rows, right=True)
        else:
            assert not step.prefill, "a step is either prefill or decode"
            assert step.kv_tokens is not None, "pages come with the number of tokens in them"
            values |= {"page_table": step.page_table.contiguous(), "kv_tokens": step.kv_tokens}
        if device.type != "cpu":
            values = dict(zip(values, in_one_copy(list(values.values()), device), strict=True))
        return cls(
            **values,
            **on_host,
            moves=tuple(span.moves for span in step.prefill),
            num_alternatives=step.num_alternatives,
            num_states=step.num_states,
            wants_logits=step.wants_logits,
            position_range=step.position_range(),
        )

    @classmethod
    def fixed(
        cls, step: StepInput, is_counted: torch.Tensor, device: torch.device, position_range: tuple[int, int]
    ) -> StepTensors:
        """Return a decode step in fixed memory, into which other steps of the same shapes are copied."""
        values: dict[str, Any] = dict(zip(_OF_DECODE, in_one_copy(_of_decode(step, is_counted), device), strict=True))
        return cls(**values, position_range=position_range)

    def refill(self, step: StepInput, is_counted: torch.Tensor) -> None:
        """Put another step's values into the memory of this one, which `fixed` made."""
        refill([getattr(self, name) for name in _OF_DECODE], _of_decode(step, is_counted))


class RowsByReach(NamedTuple):
    """Rows of a prefill step by the keys they see: at most a limit (near), or more (far); [N] int64, ascending."""

    near_rows: torch.Tensor
    near: AttentionStep  # these alone, for core attention
    far_rows: torch.Tensor
    far_requests: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep(StepTensors):
    """A step as all layers share it, with the rotary angles of its positions and the scale of its queries."""

    cos: torch.Tensor  # [T, R / 2] float32
    sin: torch.Tensor
    query_scale: torch.Tensor | None = None  # [T] float32; None: all 1
    schedule: dict[str, Any] = field(default_factory=dict)  # what attention keeps from one layer to the next

    @classmethod
    def with_angles(
        cls, step: StepTensors, cos: torch.Tensor, sin: torch.Tensor, query_scale: torch.Tensor | None
    ) -> AttentionStep:
        values = {item.name: getattr(step, item.name) for item in fields(StepTensors)}
        return cls(cos=cos, sin=sin, query_scale=query_scale, **values)

    @property
    def is_decode(self) -> bool:
        return self.chunk_tokens is None

    def keys(self, pages: torch.Tensor) -> PagedKeys:
        """Return the keys that the step's tokens attend to in the layer of these pages."""
        return PagedKeys(pages, self.page_table, self.kv_tokens, self.positions, self.schedule, self.shared_pages)

    def of_wanted_rows(self) -> AttentionStep | None:
        """Return the rows of a prefill step that return logits, as a decode step: a query per prompt, absorbed form.

        The last layer finishes these alone; of the other tokens it only makes latents, and most of a prompt never
        meets its experts. None in decode, where all rows are wanted.
        """
        if self.chunk_of_row is None:
            return None
        positions_S = self.positions[self.logit_rows]
        return replace(
            self,
            cos=self.cos[self.logit_rows],
            sin=self.sin[self.logit_rows],
            query_scale=None if self.query_scale is None else self.query_scale[self.logit_rows],
            tokens=self.tokens[self.logit_rows],
            positions=positions_S,
            slots=self.slots[self.logit_rows],
            page_table=self.page_table[self.chunk_of_row],
            kv_tokens=positions_S + 1,
            chunk_tokens=None,
            shared_pages=None,
            schedule={},
        )

    def rows_by_reach(self, num_keys: int) -> RowsByReach:
        """Return the rows of a prefill step split by whether they see more than this number of keys, for all layers."""
        kept = f"rows by reach {num_keys}"
        if kept not in self.schedule:
            self.schedule[kept] = self._cut_by_reach(num_keys)
        found: RowsByReach = self.schedule[kept]
        return found

    def _cut_by_reach(self, num_keys: int) -> RowsByReach:
        """Split rows by reach, by the lengths of chunks, which the host has."""
        assert self.chunk_tokens is not None, "in decode the host does not know the lengths"
        num_before_B = (num_keys - (self.kv_tokens - self.chunk_tokens)).clamp(min=0).minimum(self.chunk_tokens)
        ends_B = self.chunk_tokens.cumsum(0)
        requests_T = torch.repeat_interleave(self.chunk_tokens)
        rows_T = torch.arange(len(requests_T))
        is_near_T = rows_T < (ends_B - self.chunk_tokens + num_before_B)[requests_T]
        on_host = rows_T[is_near_T], rows_T[~is_near_T], requests_T[~is_near_T]
        near_rows, far_rows, far_requests = in_one_copy(on_host, self.positions.device)
        near = replace(
            self,
            positions=self.positions[near_rows],
            chunk_tokens=num_before_B,
            kv_tokens=torch.where(num_before_B > 0, self.kv_tokens.clamp(max=num_keys), 0),
            schedule={},
        )
        return RowsByReach(near_rows, near, far_rows, far_requests)

    def of_rows_before(self, position: int) -> AttentionStep:
        """Return a decode step, for core attention alone, in which rows at other positions have no keys."""
        kept = f"rows before {position}"
        if kept not in self.schedule:
            seen_T = torch.where(self.positions < position, self.positions + 1, 0)
            table = self.page_table if len(self.page_table) == len(seen_T) else self.page_table[self.request_of_row()]
            table = table[:, : -(-position // PAGE_TOKENS)].contiguous()
            self.schedule[kept] = replace(self, page_table=table, kv_tokens=seen_T, schedule={})
        found: AttentionStep = self.schedule[kept]
        return found

    def request_of_row(self) -> torch.Tensor:
        """Return [T] int64 of a decode step: the page table's row of each token."""
        num_requests, num_rows = len(self.page_table), len(self.positions)
        return torch.arange(num_rows, device=self.positions.device) // max(1, num_rows // max(1, num_requests))


def _of_decode(step: StepInput, is_counted: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a decode step, in the order of _OF_DECODE."""
    assert step.is_decode
    assert step.copy_to is None, "in decode nothing is copied between slots"
    return [*(getattr(step, name) for name in _OF_DECODE[:-1]), is_counted]


def _padded(page_ids: list[torch.Tensor], num_pages_B: torch.Tensor) -> torch.Tensor:
    """Return [B, P] int64: page ids as rows of one table, padded with zeros."""
    if not page_ids:
        return torch.zeros(0, 0, dtype=torch.int64)
    is_page_BP = torch.arange(int(num_pages_B.max())) < num_pages_B[:, None]
    table_BP = torch.zeros(is_page_BP.shape, dtype=torch.int64)
    table_BP[is_page_BP] = torch.cat(page_ids)
    return table_BP


def _in_common(page_table_BP: torch.Tensor, num_pages_B: torch.Tensor) -> torch.Tensor:
    """Return [B] int64: the number of first pages that each row has in common with the row before it."""
    shared_B = torch.zeros_like(num_pages_B)
    if len(num_pages_B) > 1:
        is_same = page_table_BP[1:] == page_table_BP[:-1]
        num_same = is_same.long().cumprod(1).sum(1)
        shared_B[1:] = num_same.minimum(num_pages_B[1:]).minimum(num_pages_B[:-1])
    return shared_B
