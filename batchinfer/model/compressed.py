"""Attention to a window and to compressed entries (DeepSeek-V4 report section 2.3), operation by operation.

`project` writes a step's rows, and the entries that its tokens complete, to the memory of the layer; `attend` reads the
rows and entries that `project` has found for it. A token's result does not depend on where its prompt was cut: every
sum over tokens or keys goes in the order of their positions.
"""

# T tokens of a step, S rows that are wanted, D hidden, H heads, C width of a row, R rotary width, W rows of the window
# K keys, L parts of a key, B requests, I width of an index key, G groups of heads, V width of a token's part in entries

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from batchinfer.model.attention_kind import LayerReader
from batchinfer.model.compressed_config import INDEXED, CompressedConfig
from batchinfer.model.compressed_memory import LayerMemory, copy_entries, copy_state, put_state, take_state
from batchinfer.model.compressed_rows import Group, StepRows, rows_of_step, visible_entries
from batchinfer.model.ops import Ops
from batchinfer.model.rotary_angles import Angles, RotaryAngles
from batchinfer.model.step import AttentionStep, StateMoves
from batchinfer.model.weights import CompressedWeights, CompressorWeights, IndexWeights
from batchinfer_kernels.reference.compressed import EntryKeys, KeyRows, NewEntries
from batchinfer_kernels.row_check import RowComputation

_MOST_IDS = 1 << 22  # numbers of rows of keys held at once


class Queries(NamedTuple):
    """Queries [S, H, C] of the rows that attend, with their positions, pages and window rows.

    requests_S: the row of the table of each query.
    of_index: queries of the indexer [S, heads, I] and the weights of its heads [S, heads].
    """

    q_SHC: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions_S: torch.Tensor
    requests_S: torch.Tensor
    page_table_BP: torch.Tensor
    window: KeyRows
    of_index: tuple[torch.Tensor, torch.Tensor] | None


class Parts(NamedTuple):
    """The tokens' parts of a layer's entries of one kind, [T, V] float32, and the angles of these entries."""

    values: torch.Tensor
    gates: torch.Tensor
    angles: Angles


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
        """Return all or some queries; keep the step's rows and entries."""
        ops, config, weights, eps = self.ops, self.config, self.weights, self.eps
        x_TD = ops.rms_norm(hidden_TD, self.norm_D, eps)
        cos, sin, _ = self._angles(step, 1)
        rows_TC = ops.rotate_heads(ops.linear(x_TD, *weights.kv), 1, weights.kv_norm, eps, cos, sin).squeeze(1)
        pools = zip(self.config.compressors(self.layer), self._pools, strict=True)
        parts = [
            Parts(ops.router(x_TD, each.values), ops.router(x_TD, each.gates), self._angles(step, one.ratio))
            for one, each in pools
        ]
        rows = rows_of_step(step, config.window)
        window = self._keep(rows, rows_TC, parts, step, memory)
        positions, requests = step.positions, rows.requests_T
        if rows_S is not None:
            x_TD, cos, sin, positions, requests = (one[rows_S] for one in (x_TD, cos, sin, positions, requests))
            window = window._replace(ids_TKL=window.ids_TKL[rows_S])
        q_latent = ops.rms_norm(ops.linear(x_TD, *weights.q_down), weights.q_norm, eps)
        q_SW, no_weight = ops.linear(q_latent, *weights.q), torch.ones_like(weights.kv_norm)
        q_SHC = ops.rotate_heads(q_SW, config.num_attention_heads, no_weight, eps, cos, sin)
        index = None
        if weights.index is not None:
            q_SI = ops.linear(q_latent, *weights.index.q)
            index = (
                ops.rotate_heads(q_SI, config.index_heads, None, eps, cos, sin),
                ops.router(x_TD, weights.index.heads),
            )
        return Queries(q_SHC, cos, sin, positions, requests, step.page_table, window, index)

    def attend(
        self, hidden_TD: torch.Tensor, queries: Queries, step: AttentionStep, memory: LayerMemory
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [S, D]."""
        ops, config = self.ops, self.config
        if len(queries.q_SHC) == 0:
            return hidden_TD
        out_SHC = self._core(queries, memory)
        out_GSC = out_SHC.flatten(1).unflatten(-1, (config.num_output_groups, -1)).transpose(0, 1)
        out_SGR = ops.batched_linear(out_GSC, self.weights.out_down).transpose(0, 1)
        added: torch.Tensor = ops.linear(out_SGR.flatten(1), *self.weights.out, residual=hidden_TD)
        return added

    @property
    def _pools(self) -> list[CompressorWeights]:
        weights = self.weights
        pools = [weights.entries, None if weights.index is None else weights.index.keys]
        return [pool for pool in pools if pool is not None]

    def _angles(self, step: AttentionStep, ratio: int) -> Angles:
        """Return the angles of the first token of each token's entry of `ratio` tokens.

        All layers with entries use those of the first one, so that one table of angles grows.
        """
        if self.angles is None:
            return Angles(step.cos, step.sin, None)
        kept = f"angles of entries of {ratio}"
        if kept not in step.schedule:
            step.schedule[kept] = self.angles.at(step.positions // ratio * ratio)
        found: Angles = step.schedule[kept]
        return found

    def _keep(
        self, rows: StepRows, rows_TC: torch.Tensor, parts: list[Parts], step: AttentionStep, memory: LayerMemory
    ) -> KeyRows:
        """Write the step's rows and entries to the memory; return the windows of its tokens."""
        before = []
        for group in rows.groups:
            moves = group.moves or StateMoves()
            if moves.begin_from is not None:
                copy_state(memory, moves.begin_from, int(rows.slots_B[group.chunks.start]))
            if moves.begin_with is not None:
                put_state(memory, int(rows.slots_B[group.chunks.start]), moves.begin_with[self.layer])
            if moves.share_in is not None:
                copy_state(memory, int(rows.slots_B[group.chunks.start]), moves.share_in)
            for pair in moves.page_copies:
                copy_entries(memory, *pair)
            held = memory.window.view(-1, memory.window.shape[-1])
            if len(rows.before_N):
                before.append(self.ops.gather_rows(held, rows.before_N[group.before]))
            held[rows.kept_to_M[group.kept]] = rows_TC[rows.kept_from_M[group.kept]]
            for number, each in enumerate(parts):
                self._pool(number, each, rows, group, step, memory)
            if moves.keep_in is not None:
                copy_state(memory, int(rows.slots_B[group.chunks.start]), moves.keep_in)
            if moves.keep_as is not None:
                take_state(memory, int(rows.slots_B[group.chunks.start]), moves.keep_as[self.layer])
        if rows.in_ring:
            return KeyRows(memory.window, rows.ids_TWL)
        return KeyRows(torch.cat([*before, rows_TC]), rows.ids_TWL)

    def _pool(
        self, number: int, parts: Parts, rows: StepRows, group: Group, step: AttentionStep, memory: LayerMemory
    ) -> None:
        """Write the entries that some chunks complete, and keep the parts of their tokens."""
        weights, own, chunks = self._pools[number], group.rows, group.chunks
        self.ops.pool_entries(
            NewEntries(
                values_TV=parts.values[own],
                gates_TV=parts.gates[own],
                bias_MV=weights.bias,
                norm_C=weights.norm,
                eps=self.eps,
                cos=parts.angles.cos[own],
                sin=parts.angles.sin[own],
                positions_T=step.positions[own],
                requests_T=rows.requests_T[own] - chunks.start,
                starts_B=rows.starts_B[chunks.start : chunks.stop + 1] - own.start,
                slots_B=rows.slots_B[chunks],
                waiting=memory.waiting[number],
                pages=memory.entries[number],
                page_table_BP=step.page_table[chunks],
            )
        )

    def _core(self, queries: Queries, memory: LayerMemory) -> torch.Tensor:
        """Return core attention, [S, H, C], rotated back."""
        config, num_rows = self.config, len(queries.q_SHC)
        ratio = config.ratios[self.layer]
        if ratio == 0:
            return self._attended(queries, slice(num_rows), None)
        visible_S, table = (queries.positions_S + 1) // ratio, queries.page_table_BP
        if queries.of_index is not None:
            keys = EntryKeys(memory.entries[1], table, queries.requests_S, visible_S)
            scale = (config.index_dim * config.index_heads) ** -0.5
            ids_SK = self.ops.choose_entries(*queries.of_index, keys, topk=config.index_topk, scale=scale)
            entries = KeyRows(memory.entries[0].view(-1, config.head_dim), ids_SK[..., None])
            return self._attended(queries, slice(num_rows), entries)
        out_SHC = torch.empty_like(queries.q_SHC)
        pages, piece = memory.entries[0], max(1, _MOST_IDS // max(1, table.shape[1]))
        for start in range(0, num_rows, piece):
            some = slice(start, min(start + piece, num_rows))
            entries = visible_entries(pages, config.head_dim, table[queries.requests_S[some]], visible_S[some])
            out_SHC[some] = self._attended(queries, some, entries)
        return out_SHC

    def _attended(self, queries: Queries, rows: slice, entries: KeyRows | None) -> torch.Tensor:
        window = queries.window._replace(ids_TKL=queries.window.ids_TKL[rows])
        angles, scale = (queries.cos[rows], queries.sin[rows]), self.config.head_dim**-0.5
        out: torch.Tensor = self.ops.attend_entries(
            queries.q_SHC[rows], window, entries, self.weights.sinks_H, scale, *angles
        )
        return out


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
