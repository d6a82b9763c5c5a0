"""DeepSeek Sparse Attention (DeepSeek-V3.2-Exp report section 2.1): latent attention to the keys that an indexer chose.

    row of a page   [ latent C | rotary key R | index key I ]     attention reads the first two, the indexer the last

A query that sees at most `topk` keys (it is near) attends to all of them, in the forms and by the operations of mla.py:
to the bit as in a dense model. The others (far ones) attend to chosen keys in the absorbed form, in prefill too: there
each query has keys of its own, and all heads of it share them.

No value of the device is read. In prefill the host knows the lengths of chunks, and so which rows are near. In decode
it knows the lowest and the highest position alone; where these say that there are both, each operation gets all rows,
finds those of the other kind without keys, and one result is taken per row.
"""

# T tokens of a step, S of these rows that are wanted, N of these whose keys are chosen, D hidden, H heads, I index keys
# A query/key width, V value width, C latent width, W latent and rotary width, K keys of a query

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from batchinfer.model import mla
from batchinfer.model.attention_kind import LayerReader
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.mla import Attention
from batchinfer.model.mla_config import DsaConfig
from batchinfer.model.ops import Ops
from batchinfer.model.page_memory import copy_in_pages
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import IndexerWeights, MlaWeights
from batchinfer_kernels import row_check
from batchinfer_kernels.reference.sparse import NO_SLOT, IndexedKeys, IndexQueries, NewIndexKeys
from batchinfer_kernels.row_check import RowComputation

KEY_NORM_EPS = 1e-6
_CHOSEN = "chosen keys"  # what a layer leaves in a step's schedule for those that share it
_MOST_ROWS = 256  # whose queries are in latent space at once: 150 kB each in bfloat16 for 128 heads


class ChosenKeys(NamedTuple):
    """The slots of chosen keys [N, K] int32, NO_SLOT for near rows, and the rows [N] int64; None: all of them."""

    slots_NK: torch.Tensor
    rows_N: torch.Tensor | None


class SparseQueries(NamedTuple):
    """Queries [T, H, A], and the chosen keys of queries that do not attend to all keys; None if all do."""

    q_THA: torch.Tensor
    chosen: ChosenKeys | None


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """mla.Attention with an indexer; `pages` are always this layer's, [num_pages, 64, C + R + I]."""

    dense: Attention
    indexer: IndexerConfig
    weights: IndexerWeights | None  # None: the layer uses the keys that the layer before it chose

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> SparseQueries:
        """Project as mla.Attention does, write the tokens' index keys to the pages, too, and choose keys."""
        x_TD, q_latent = self.dense.inputs(hidden_TD)
        q_THA = self.dense.queries(x_TD, q_latent, step, self._latents(pages))
        if self.weights is not None:
            self._write_keys(self.weights, x_TD, step, pages)
        copy_in_pages(self.dense.ops, step, pages)
        chosen = None
        if self._has_far(step):
            chosen = self._chosen(x_TD, q_latent, step, pages, rows_S)
        return SparseQueries(q_THA if rows_S is None else q_THA[rows_S], chosen)

    def attend(
        self, hidden_TD: torch.Tensor, queries: SparseQueries, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention and output projection, added to the residual: [T, D]."""
        (q_THA, chosen), latents = queries, self._latents(pages)
        if chosen is None or len(q_THA) == 0:
            return self.dense.attend(hidden_TD, q_THA, step, latents)
        core = self._decode if step.is_decode else self._prefill
        return self.dense.add_output(hidden_TD, core(q_THA, chosen, step, latents))

    def _decode(
        self, q_THA: torch.Tensor, chosen: ChosenKeys, step: AttentionStep, latents: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention of near and far rows, [T, H, V]."""
        q_THW = self.dense.absorbed(q_THA)
        out_THC = self._sparse(q_THW, latents, chosen.slots_NK)
        if step.position_range[0] < self.indexer.topk:
            keys = step.of_rows_before(self.indexer.topk).keys(latents)
            near_THC = self.dense.ops.mla_decode(q_THW, keys, **self._options)
            is_near_T = step.positions < self.indexer.topk
            out_THC = torch.where(is_near_T[:, None, None], near_THC, out_THC)
        return self.dense.values(out_THC)

    def _prefill(
        self, q_THA: torch.Tensor, chosen: ChosenKeys, step: AttentionStep, latents: torch.Tensor
    ) -> torch.Tensor:
        """Return core attention of near rows in the plain form, of far rows in the absorbed form, [T, H, V]."""
        assert chosen.rows_N is not None, "in prefill keys are chosen for far rows alone"
        out_THV = q_THA.new_empty(*q_THA.shape[:2], self.dense.config.v_head_dim)
        near_rows, near, _, _ = step.rows_by_reach(self.indexer.topk)
        if len(near_rows):
            out_THV[near_rows] = self.dense.core(q_THA[near_rows], near, latents)
        for rows, slots_NK in zip(chosen.rows_N.split(_MOST_ROWS), chosen.slots_NK.split(_MOST_ROWS), strict=True):
            q_NHW = self.dense.absorbed(q_THA[rows])
            out_THV[rows] = self.dense.values(self._sparse(q_NHW, latents, slots_NK))
        return out_THV

    def _sparse(self, q_NHW: torch.Tensor, latents: torch.Tensor, slots_NK: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.dense.ops.mla_sparse(q_NHW, latents, slots_NK, **self._options)
        return attended

    @property
    def _options(self) -> dict[str, float]:
        return {"latent_dim": self.dense.config.kv_lora_rank, "scale": self.dense.config.softmax_scale}

    def _has_far(self, step: AttentionStep) -> bool:
        return step.position_range[1] >= self.indexer.topk

    def _latents(self, pages: torch.Tensor) -> torch.Tensor:
        return pages[..., : self.dense.config.latent_dim]

    def _index_keys(self, pages: torch.Tensor) -> torch.Tensor:
        return pages[..., self.dense.config.latent_dim :]

    def _write_keys(
        self, weights: IndexerWeights, x_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor
    ) -> None:
        ops = self.dense.ops
        keys_TI, norm = ops.linear(x_TD, weights.key), (weights.key_norm, weights.key_bias, KEY_NORM_EPS)
        places = step.cos, step.sin, self._index_keys(pages), step.slots
        ops.index_cache(NewIndexKeys(keys_TI, *norm, *places, self.indexer.rope_interleave))

    def _chosen(
        self,
        x_TD: torch.Tensor,
        q_latent: torch.Tensor,
        step: AttentionStep,
        pages: torch.Tensor,
        rows_S: torch.Tensor | None,
    ) -> ChosenKeys:
        """Return chosen keys of the far rows of a prefill step, of the given wanted rows, or of all rows in decode."""
        rows_N: torch.Tensor | None
        requests_N: torch.Tensor | None
        if step.is_decode:
            rows_N, requests_N = None, step.request_of_row()
        elif rows_S is None:
            _, _, rows_N, requests_N = step.rows_by_reach(self.indexer.topk)
        else:
            rows_N, requests_N = rows_S, step.chunk_of_row
        if self.weights is None:
            slots_NK = self._shared(step, rows_N)
        else:
            slots_NK = self._best(self.weights, x_TD, q_latent, step, pages, rows_N, requests_N)
        chosen = ChosenKeys(slots_NK, None if rows_S is not None else rows_N)
        if rows_S is None:
            step.schedule[_CHOSEN] = chosen
        return chosen

    def _shared(self, step: AttentionStep, rows_N: torch.Tensor | None) -> torch.Tensor:
        """Return the keys that the layer before chose for these rows."""
        before: ChosenKeys = step.schedule[_CHOSEN]
        if before.rows_N is rows_N or before.rows_N is None:
            return before.slots_NK
        assert rows_N is not None
        places_N = torch.searchsorted(before.rows_N, rows_N).clamp(max=len(before.rows_N) - 1)
        is_near_N = step.positions[rows_N] < self.indexer.topk
        return before.slots_NK[places_N].masked_fill(is_near_N[:, None], NO_SLOT)

    def _best(
        self,
        weights: IndexerWeights,
        x_TD: torch.Tensor,
        q_latent: torch.Tensor,
        step: AttentionStep,
        pages: torch.Tensor,
        rows_N: torch.Tensor | None,
        requests_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the keys of these rows by the layer's own indexer, [N, K]."""
        ops, indexer = self.dense.ops, self.indexer
        places = x_TD, q_latent, step.cos, step.sin, step.positions
        x_ND, q_latent, cos, sin, positions_N = places if rows_N is None else (place[rows_N] for place in places)
        assert requests_N is not None
        q_NHI = ops.linear(q_latent, weights.query).unflatten(-1, (indexer.num_heads, indexer.head_dim))
        heads_NH = ops.router(x_ND, weights.heads) * indexer.num_heads**-0.5
        chosen_NK: torch.Tensor = ops.choose_keys(
            IndexQueries(q_NHI, heads_NH, cos, sin, indexer.rope_interleave),
            IndexedKeys(
                self._index_keys(pages),
                step.page_table,
                requests_N,
                positions_N,
                None if step.is_decode else step.kv_tokens,
                step.schedule,
            ),
            topk=indexer.topk,
            scale=indexer.head_dim**-0.5,
        )
        return chosen_NK


def build(
    ops: Ops, config: DsaConfig, weights: MlaWeights, norm_D: torch.Tensor, eps: float, layer: int
) -> SparseAttention:
    """Return a layer's attention, operation by operation: the C++ layer does not choose keys."""
    return SparseAttention(Attention(ops, config, weights, norm_D, eps), config.indexer, weights.indexer)


def load(reader: LayerReader, config: DsaConfig, prefix: str, layer: int) -> MlaWeights:
    """Read a layer's weights.

    Raises:
        ModelError: a weight of the indexer is not finite.
    """
    has_indexer = config.indexer.of_layer(layer)
    return mla.load(reader, config, prefix, layer, _load_indexer(reader, f"{prefix}.indexer") if has_indexer else None)


def products(weights: MlaWeights) -> Iterator[tuple[str, object]]:
    """Yield (kind, weight) of a layer's products; see AttentionKind."""
    yield from mla.products(weights)
    if weights.indexer is not None:
        yield "linear", weights.indexer.query
        yield "linear", weights.indexer.key
        yield "router", weights.indexer.heads


def computations(ops: Ops, config: DsaConfig, weights: MlaWeights, dtype: torch.dtype) -> Iterator[RowComputation]:
    """Yield attention to all keys in both forms, and to chosen ones, if the weights are plain."""
    dense = list(mla.computations(ops, config, weights, dtype))
    yield from dense
    if dense:
        indexer = row_check.IndexerShape(config.indexer.num_heads, config.indexer.head_dim, config.indexer.topk)
        yield row_check.sparse_attention(mla.attention_shape(config), indexer, dtype, ops.choose_keys, ops.mla_sparse)


def _load_indexer(reader: LayerReader, prefix: str) -> IndexerWeights:
    """Read an indexer's weights and check that they are finite, as answers look sound whatever an indexer chooses."""
    return IndexerWeights(
        query=reader.pack(reader.source(f"{prefix}.wq_b.weight", finite=True)),
        key=reader.pack(reader.source(f"{prefix}.wk.weight", finite=True)),
        key_norm=reader.tensor(f"{prefix}.k_norm.weight", finite=True),
        key_bias=reader.tensor(f"{prefix}.k_norm.bias", finite=True),
        heads=reader.router(f"{prefix}.weights_proj.weight", finite=True),
    )
