"""Attention to a window and to compressed entries (DeepSeek-V4 report section 2.3), operation by operation.

`project` writes a step's rows, and the entries that its tokens complete, to the memory of the layer; `attend` reads the
rows and entries that `project` has found for it. A token's result does not depend on where its prompt was cut: every
sum over tokens or keys goes in the order of their positions.
"""

# T tokens of a step, S rows that are wanted, D hidden, H heads, C width of a row, R rotary width, W rows of the window
# B requests, E entries of a request, G groups of heads, V width of a token's part in entries

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchinfer.model.attention_kind import LayerReader
from batchinfer.model.compressed_config import INDEXED, CompressedConfig, Compressor
from batchinfer.model.compressed_memory import (
    LayerMemory,
    copy_entries,
    copy_state,
    keep_rows,
    put_state,
    read_entries,
    ring_rows,
    take_state,
    write_entries,
)
from batchinfer.model.ops import Ops
from batchinfer.model.rotary_angles import RotaryAngles
from batchinfer.model.step import AttentionStep, StateMoves
from batchinfer.model.weights import CompressedWeights, CompressorWeights, IndexWeights
from batchinfer_kernels.reference.compressed import (
    ChosenEntries,
    attend_rows,
    choose_entries,
    overlapping,
    pooled,
    rotated,
)
from batchinfer_kernels.row_check import RowComputation

_ANGLES = "angles of compressed attention"


class Chunk(NamedTuple):
    """The tokens of one request in a step: rows from `start` to `end`, the first one at position `first`."""

    start: int
    end: int
    first: int
    slot: int
    page_ids: torch.Tensor
    moves: StateMoves | None = None

    @property
    def last(self) -> int:
        """The position behind the last token."""
        return self.first + self.end - self.start


class Keys(NamedTuple):
    """Rows and entries for the queries of a chunk; `end` is the position behind its last token.

    rows: [up to W - 1 + tokens, C], the window's, the chunk's own last.
    entries: [E, C]; None in a layer without entries.
    index_keys: [E, I] of these entries, if some are chosen.
    """

    end: int
    rows: torch.Tensor
    entries: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None


class Queries(NamedTuple):
    """Rows that are to attend: queries [S, H, C], their positions and chunks, their angles, and the keys by chunk.

    of_index: queries of the indexer [S, heads, I] and the weights of its heads [S, heads].
    """

    q_SHC: torch.Tensor
    positions_S: torch.Tensor
    chunks_S: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: list[Keys]
    of_index: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class CompressedAttention:
    """Attention of one layer over its LayerMemory."""

    ops: Ops
    config: CompressedConfig
    weights: CompressedWeights
    norm_D: torch.Tensor  # weight of the norm before it
    eps: float  # of all norms
    layer: int
    angles: RotaryAngles | None  # of layers with entries

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, memory: LayerMemory, rows_S: torch.Tensor | None = None
    ) -> Queries:
        """Return all or some queries with their keys; keep the step's rows and entries."""
        ops, config, weights, eps = self.ops, self.config, self.weights, self.eps
        x_TD = ops.rms_norm(hidden_TD, self.norm_D, eps)
        cos, sin, angles = self._cos_sin(step)
        rows_TC = ops.rms_norm(ops.linear(x_TD, *weights.kv), weights.kv_norm, eps)
        rows_TC = rotated(rows_TC, cos, sin)
        pools = zip(self._compressors, self._pools, strict=True)
        parts = [self._parts(x_TD, step.positions, one, weights_of) for one, weights_of in pools]
        chunks = chunks_of(step)
        keys = [self._keep(chunk, rows_TC, parts, angles, memory) for chunk in chunks]
        chunks_T = torch.repeat_interleave(
            torch.tensor([chunk.end - chunk.start for chunk in chunks], dtype=torch.int64)
        )
        positions = step.positions
        if rows_S is not None:
            x_TD, cos, sin, positions, chunks_T = (one[rows_S] for one in (x_TD, cos, sin, positions, chunks_T))
        q_latent = ops.rms_norm(ops.linear(x_TD, *weights.q_down), weights.q_norm, eps)
        q_SHC = ops.linear(q_latent, *weights.q).unflatten(-1, (config.num_attention_heads, config.head_dim))
        q_SHC = ops.rms_norm(q_SHC, torch.ones_like(weights.kv_norm), eps)
        index = None
        if weights.index is not None:
            q_SHI = ops.linear(q_latent, *weights.index.q).unflatten(-1, (config.index_heads, config.index_dim))
            head_weights = ops.router(x_TD, weights.index.heads) * (config.index_dim * config.index_heads) ** -0.5
            index = rotated(q_SHI, cos, sin), head_weights
        return Queries(rotated(q_SHC, cos, sin), positions, chunks_T, cos, sin, keys, index)

    def attend(
        self, hidden_TD: torch.Tensor, queries: Queries, step: AttentionStep, memory: LayerMemory
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [S, D]."""
        if len(queries.q_SHC) == 0:
            return hidden_TD
        ops, config = self.ops, self.config
        out_SHC = torch.empty_like(queries.q_SHC)
        for number, keys in enumerate(queries.keys):
            rows = torch.nonzero(queries.chunks_S == number).flatten()
            if len(rows):
                out_SHC[rows] = self._core(queries, keys, rows)
        out_SHC = rotated(out_SHC, queries.cos, -queries.sin)
        out_GSC = out_SHC.flatten(1).unflatten(-1, (config.num_output_groups, -1)).transpose(0, 1).contiguous()
        out_SGR = ops.batched_linear(out_GSC, self.weights.out_down).transpose(0, 1)
        added: torch.Tensor = ops.linear(out_SGR.flatten(1), *self.weights.out, residual=hidden_TD)
        return added

    @property
    def _compressors(self) -> tuple[Compressor, ...]:
        return self.config.compressors(self.layer)

    @property
    def _pools(self) -> list[CompressorWeights]:
        weights = self.weights
        pools = [weights.entries, None if weights.index is None else weights.index.keys]
        return [pool for pool in pools if pool is not None]

    def _cos_sin(self, step: AttentionStep) -> tuple[torch.Tensor, torch.Tensor, RotaryAngles | None]:
        """Return the angles of the step's tokens, and in a layer with entries the angles of all positions.

        All layers with entries use those of the first one, so that one table of angles grows.
        """
        if self.angles is None:
            return step.cos, step.sin, None
        if _ANGLES not in step.schedule:
            step.schedule[_ANGLES] = self.angles.at(step.positions), self.angles
        of_step, angles = step.schedule[_ANGLES]
        return of_step.cos, of_step.sin, angles

    def _parts(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, one: Compressor, weights: CompressorWeights
    ) -> torch.Tensor:
        """Return the tokens' values and gates for entries, [T, 2, V] float32."""
        values_TV, gates_TV = self.ops.router(x_TD, weights.values), self.ops.router(x_TD, weights.gates)
        return torch.stack([values_TV, gates_TV + weights.bias[positions_T % one.ratio]], dim=1)

    def _keep(
        self,
        chunk: Chunk,
        rows_TC: torch.Tensor,
        parts: list[torch.Tensor],
        angles: RotaryAngles | None,
        memory: LayerMemory,
    ) -> Keys:
        """Write a chunk's rows and entries to the memory; return what its tokens attend to."""
        own, window = slice(chunk.start, chunk.end), self.config.window
        moves = chunk.moves or StateMoves()
        if moves.begin_from is not None:
            copy_state(memory, moves.begin_from, chunk.slot)
        if moves.begin_with is not None:
            put_state(memory, chunk.slot, moves.begin_with[self.layer])
        if moves.share_in is not None:
            copy_state(memory, chunk.slot, moves.share_in)
        for pair in moves.page_copies:
            copy_entries(memory, *pair)
        before = ring_rows(memory.window, chunk.slot, max(0, chunk.first - window + 1), chunk.first)
        rows = torch.cat([before, rows_TC[own].to(before.dtype)])
        keep_rows(memory.window, chunk.slot, chunk.last, rows_TC[own])
        found = []
        for number, (one, weights) in enumerate(zip(self._compressors, self._pools, strict=True)):
            pages, waiting = memory.entries[number], memory.waiting[number]
            entries = self._entries(chunk, parts[number][own], waiting, one, weights)
            if len(entries):
                assert angles is not None, "layers with entries have angles"
                write_entries(pages, chunk.page_ids, chunk.first // one.ratio, _placed(chunk, entries, one, angles))
            keep_rows(waiting, chunk.slot, chunk.last, parts[number][own])
            found.append(read_entries(pages, chunk.page_ids, chunk.last // one.ratio, one.width))
        if moves.keep_in is not None:
            copy_state(memory, chunk.slot, moves.keep_in)
        if moves.keep_as is not None:
            take_state(memory, chunk.slot, moves.keep_as[self.layer])
        return Keys(chunk.last, rows, *found)

    def _entries(
        self,
        chunk: Chunk,
        parts_TV: torch.Tensor,
        waiting: torch.Tensor,
        one: Compressor,
        weights: CompressorWeights,
    ) -> torch.Tensor:
        """Return the entries that a chunk completes, [entries, width] float32, normed."""
        first, last = chunk.first // one.ratio, chunk.last // one.ratio
        if first == last:
            return parts_TV.new_zeros(0, one.width)
        begin = (first - one.overlaps) * one.ratio
        parts = torch.cat([ring_rows(waiting, chunk.slot, max(0, begin), chunk.first), parts_TV])
        if begin < 0:
            parts = torch.cat([parts.new_zeros(one.ratio, *parts.shape[1:]), parts])
        parts = parts[: last * one.ratio - begin].unflatten(0, (-1, one.ratio))
        values, gates = parts.unbind(2)
        if one.overlaps:
            values, gates = overlapping(values), overlapping(gates)
        if begin < 0:
            gates[0, : one.ratio] = -math.inf  # no tokens are before the first entry
        entries: torch.Tensor = self.ops.rms_norm(pooled(values, gates), weights.norm, self.eps)
        return entries

    def _core(self, queries: Queries, keys: Keys, rows: torch.Tensor) -> torch.Tensor:
        """Return core attention of some rows of one chunk, [rows, H, C]."""
        config, positions = self.config, queries.positions_S[rows]
        num_rows, last, window = len(keys.rows), int(positions.max()), config.window
        # the place of each token of a window among the chunk's rows, the last of which is at position end - 1
        places = positions[:, None] - keys.end + num_rows - torch.arange(window - 1, -1, -1, device=positions.device)
        q = queries.q_SHC[rows]
        if keys.entries is None:
            none = torch.zeros(len(rows), 0, dtype=torch.int64, device=q.device)
            entries, chosen = keys.rows[:0], ChosenEntries(none, none.bool())
        else:
            entries, ratio = keys.entries, config.ratios[self.layer]
            visible = (positions + 1) // ratio
            entries = entries[: (last + 1) // ratio]
            if keys.index_keys is None:
                ids = torch.arange(len(entries), device=q.device).expand(len(rows), -1)
                chosen = ChosenEntries(ids, ids < visible[:, None])
            else:
                assert queries.of_index is not None
                of_index = queries.of_index[0][rows], queries.of_index[1][rows]
                chosen = choose_entries(*of_index, keys.index_keys[: len(entries)], visible, config.index_topk)
        in_window = (positions + 1).clamp(max=window)
        return attend_rows(
            q, keys.rows[places.clamp(min=0)], in_window, entries, chosen, self.weights.sinks_H, config.head_dim**-0.5
        )


def _placed(chunk: Chunk, entries: torch.Tensor, one: Compressor, angles: RotaryAngles) -> torch.Tensor:
    """Return the entries that a chunk completes, rotated to the position of the first token of each."""
    first = chunk.first // one.ratio
    cos, sin, _ = angles.at(torch.arange(first, first + len(entries), device=entries.device) * one.ratio)
    return rotated(entries, cos, sin)


def chunks_of(step: AttentionStep) -> list[Chunk]:
    """Return the chunks of a step in the order of their rows; in decode each request has equally many."""
    if step.state_slots is None:
        assert len(step.positions) == 0, "requests have slots for their state"
        return []
    slots = step.state_slots.tolist()
    if step.chunk_tokens is not None:
        sizes = step.chunk_tokens.tolist()
    else:
        sizes = [len(step.positions) // max(1, len(slots))] * len(slots)
    chunks, start = [], 0
    of_each = sizes, step.kv_tokens.tolist(), slots, step.page_table, step.moves or [None] * len(sizes)
    for size, context, slot, page_ids, moves in zip(*of_each, strict=True):
        chunks.append(Chunk(start, start + size, context - size, slot, page_ids, moves))
        start += size
    return chunks


def build(
    ops: Ops, config: CompressedConfig, weights: CompressedWeights, norm_D: torch.Tensor, eps: float, layer: int
) -> CompressedAttention:
    """Return attention of one layer."""
    angles = None
    if config.ratios[layer]:
        angles = RotaryAngles(config.compressed_rope, config.rotated, norm_D.device, ops.cos_sin)
    return CompressedAttention(ops, config, weights, norm_D, eps, layer, angles)


def load(reader: LayerReader, config: CompressedConfig, prefix: str, layer: int) -> CompressedWeights:
    """Read a layer's weights."""
    ratio = config.ratios[layer]

    def compressor(name: str) -> CompressorWeights:
        return CompressorWeights(
            values=reader.router(f"{name}.wkv.weight"),
            gates=reader.router(f"{name}.wgate.weight"),
            bias=reader.tensor(f"{name}.ape", torch.float32),
            norm=reader.tensor(f"{name}.norm.weight", torch.float32),
        )

    index = None
    if ratio == INDEXED:
        index = IndexWeights(
            q=reader.projection(f"{prefix}.indexer.wq_b"),
            heads=reader.router(f"{prefix}.indexer.weights_proj.weight"),
            keys=compressor(f"{prefix}.indexer.compressor"),
        )
    out_down = reader.source(f"{prefix}.wo_a.weight").unflatten(0, (config.num_output_groups, -1))
    return CompressedWeights(
        q_down=reader.projection(f"{prefix}.wq_a"),
        q_norm=reader.tensor(f"{prefix}.q_norm.weight"),
        q=reader.projection(f"{prefix}.wq_b"),
        kv=reader.projection(f"{prefix}.wkv"),
        kv_norm=reader.tensor(f"{prefix}.kv_norm.weight"),
        sinks_H=reader.tensor(f"{prefix}.attn_sink", torch.float32),
        out_down=reader.pack(out_down),
        out=reader.projection(f"{prefix}.wo_b"),
        entries=compressor(f"{prefix}.compressor") if ratio else None,
        index=index,
    )


def products(weights: CompressedWeights) -> Iterator[tuple[str, object]]:
    """Yield (kind, weight) of a layer's products; see AttentionKind."""
    yield "batched", weights.out_down
    for projection in (weights.q_down, weights.q, weights.kv, weights.out):
        yield "linear", projection.weight
    index = weights.index
    if index is not None:
        yield "linear", index.q.weight
        yield "router", index.heads
    for pool in (weights.entries, None if index is None else index.keys):
        if pool is not None:
            yield "router", pool.values
            yield "router", pool.gates


def computations(ops: Ops, config: CompressedConfig, weights: Any, dtype: torch.dtype) -> Iterator[RowComputation]:
    """Yield nothing: attention to compressed entries has no batched operation whose rows need a check."""
    yield from ()
