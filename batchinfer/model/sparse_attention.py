"""DeepSeek Sparse Attention (DeepSeek-V3.2-Exp report section 2.1): latent attention to the keys that an indexer chose.

    row of a page   [ latent C | rotary key R | index key I ]     attention reads the first two, the indexer the last

A query that sees at most `topk` keys attends to all of them, in the forms of mla.py and to the bit. The others are
attended to in the absorbed form, in prefill too: there each query has keys of its own, and all heads of it share them.
"""

# T tokens of a step, S of these rows that are wanted, N of these that see more than `topk` keys, D hidden, H heads
# A query/key width, V value width, K keys of a query

from dataclasses import dataclass
from typing import NamedTuple

import torch

from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.mla import Attention, copy_latents
from batchinfer.model.step import AttentionStep
from batchinfer.model.weights import IndexerWeights
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys

KEY_NORM_EPS = 1e-6
_CHOSEN = "chosen keys"  # what a layer leaves in a step's schedule for those that share it
_MOST_ROWS = 256  # whose queries are in latent space at once: 150 kB each in bfloat16 for 128 heads


class ChosenKeys(NamedTuple):
    """Which rows see more keys than they attend to, [N] int64 ascending, and the slots of their keys, [N, K] int32."""

    rows_N: torch.Tensor
    slots_NK: torch.Tensor


class SparseQueries(NamedTuple):
    """Queries [T, H, A], and the keys of those that do not attend to all; None where all do."""

    q_THA: torch.Tensor
    chosen: ChosenKeys | None


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """As mla.Attention, with an indexer; `pages` are always this layer's, [num_pages, 64, C + R + I]."""

    dense: Attention
    indexer: IndexerConfig
    weights: IndexerWeights | None  # None: the layer takes what the one before it took

    def project(
        self, hidden_TD: torch.Tensor, step: AttentionStep, pages: torch.Tensor, rows_S: torch.Tensor | None = None
    ) -> SparseQueries:
        """See mla.Attention; the tokens' index keys go to the pages as well, and then keys are chosen."""
        x_TD, q_latent = self.dense.inputs(hidden_TD)
        q_THA = self.dense.queries(x_TD, q_latent, step, self._latents(pages))
        if self.weights is not None:
            self._write_keys(self.weights, x_TD, step, pages)
        copy_latents(step, pages)
        positions = step.positions if rows_S is None else step.positions[rows_S]
        rows_N = (positions >= self.indexer.topk).nonzero()[:, 0]
        return SparseQueries(
            q_THA if rows_S is None else q_THA[rows_S],
            None if len(rows_N) == 0 else self._chosen(x_TD, q_latent, step, pages, rows_N, rows_S),
        )

    def attend(
        self, hidden_TD: torch.Tensor, queries: SparseQueries, step: AttentionStep, pages: torch.Tensor
    ) -> torch.Tensor:
        """Core attention and output projection, added to the residual: [T, D]."""
        (q_THA, chosen), latents = queries, self._latents(pages)
        if chosen is None:
            return self.dense.attend(hidden_TD, q_THA, step, latents)
        out_THV = q_THA.new_empty(*q_THA.shape[:2], self.dense.config.v_head_dim)
        rows = (step.positions < self.indexer.topk).nonzero()[:, 0]
        if len(rows):
            out_THV[rows] = self.dense.core(q_THA[rows], step.of_rows_before(self.indexer.topk), latents)
        for rows, slots_NK in zip(chosen.rows_N.split(_MOST_ROWS), chosen.slots_NK.split(_MOST_ROWS), strict=True):
            config = self.dense.config
            q_NHW = self.dense.absorbed(q_THA[rows])
            options = {"latent_dim": config.kv_lora_rank, "scale": config.softmax_scale}
            out_THV[rows] = self.dense.values(self.dense.ops.mla_sparse(q_NHW, latents, slots_NK, **options))
        return self.dense.add_output(hidden_TD, out_THV)

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
        rows_N: torch.Tensor,
        rows_S: torch.Tensor | None,
    ) -> ChosenKeys:
        """The keys of these rows, which are numbers of wanted rows where `rows_S` says which ones are."""
        of_step = rows_N if rows_S is None else rows_S[rows_N]
        if self.weights is None:
            before: ChosenKeys = step.schedule[_CHOSEN]
            return ChosenKeys(rows_N, before.slots_NK[torch.searchsorted(before.rows_N, of_step)])
        ops, indexer, weights = self.dense.ops, self.indexer, self.weights
        q_NHI = ops.linear(q_latent[of_step], weights.query).unflatten(-1, (indexer.num_heads, indexer.head_dim))
        heads_NH = ops.router(x_TD[of_step], weights.heads) * indexer.num_heads**-0.5
        chosen = ChosenKeys(
            rows_N,
            ops.choose_keys(
                IndexQueries(q_NHI, heads_NH, step.cos[of_step], step.sin[of_step], indexer.rope_interleave),
                IndexedKeys(
                    self._index_keys(pages),
                    step.page_table,
                    step.request_of_row()[of_step],
                    step.positions[of_step],
                ),
                topk=indexer.topk,
                scale=indexer.head_dim**-0.5,
            ),
        )
        if rows_S is None:
            step.schedule[_CHOSEN] = chosen
        return chosen
