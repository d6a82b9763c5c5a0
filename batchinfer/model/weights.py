"""The model's tensors of one rank, in the form in which the layers use them."""

# D hidden, F intermediate, E experts, H heads, N query/key width without position, R rotary width, V value width
# C latent width, Z = N + V

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from batchinfer.model.weight_stream import LayerStream
from batchinfer_kernels.reference.block_scaled import BLOCK, BlockScaled, stack
from batchinfer_kernels.weight_format import Weight


class Projection(NamedTuple):
    """A linear map: weight [out, in] and bias [out] or None."""

    weight: Weight
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Weights of a layer's indexer, in the run's dtype whatever the projections are held in; `heads` in float32."""

    query: Weight  # [heads * width, q_lora_rank]
    key: Weight  # [width, D]
    key_norm: torch.Tensor  # [width]
    key_bias: torch.Tensor
    heads: Any  # [heads, D], for the weight of each head by token


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """MLA of one layer. Without query compression `q_down` and `q_norm` are None and `q` takes the hidden state."""

    q_down: Projection | None
    q_norm: torch.Tensor | None
    q: Projection  # [H * (N + R), q_lora_rank or D]
    kv_down: Projection  # [C + R, D]
    kv_norm: torch.Tensor  # [C]
    kv_up_HZC: Weight  # from latent to per-head key (first N rows) and value (last V)
    key_up_HCN: Weight  # the key's part transposed, from query to latent
    value_up_HVC: Weight  # the value's part
    out: Projection  # [D, H * V]
    indexer: IndexerWeights | None = None
    down: Projection | None = None  # q_down above kv_down in one, which are views of it then

    def joined(self) -> MlaWeights:
        """Return weights with a joined `down` product, if both are plain or FP8 and no block would have rows of both.

        For GPUs: on CPUs the order of sums may depend on the number of columns.
        """
        q_down, kv_down = self.q_down, self.kv_down
        if q_down is None or (q_down.bias is None) != (kv_down.bias is None):
            return self
        bias = None if q_down.bias is None or kv_down.bias is None else torch.cat([q_down.bias, kv_down.bias])
        above, below = q_down.weight, kv_down.weight
        both: Weight
        if isinstance(above, torch.Tensor) and isinstance(below, torch.Tensor):
            both, cut = torch.cat([above, below]), len(above)
            parts: tuple[Weight, Weight] = both[:cut], both[cut:]
        elif isinstance(above, BlockScaled) and isinstance(below, BlockScaled) and len(above.values) % BLOCK == 0:
            both, cut = stack([above, below]), len(above.values)
            parts = both.rows(0, cut), both.rows(cut, len(both.values))
        else:
            return self
        q_down, kv_down = Projection(parts[0], q_down.bias), Projection(parts[1], kv_down.bias)
        return replace(self, q_down=q_down, kv_down=kv_down, down=Projection(both, bias))


@dataclass(frozen=True, slots=True)
class GqaWeights:
    """Grouped-query attention of one layer; the norms' weights are as NewHeads of the operations has them."""

    qkv: Projection  # [(H + 2 * KV) * A, D], queries above keys above values
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Projection  # [D, H * A]
    sinks_H: torch.Tensor | None  # float32


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Weights that compress tokens to entries; products, bias and norm are in float32."""

    values: Any  # [V, D]
    gates: Any  # [V, D]
    bias: torch.Tensor  # [tokens of an entry, V], of the gates
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexWeights:
    """An indexer of entries; `heads` in float32."""

    q: Projection  # [heads * width, q_lora_rank]
    heads: Any  # [heads, D], for the weight of each head by token
    keys: CompressorWeights


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """Attention to a window and to compressed entries of one layer."""

    q_down: Projection  # [q_lora_rank, D]
    q_norm: torch.Tensor
    q: Projection  # [H * C, q_lora_rank]
    kv: Projection  # [C, D]
    kv_norm: torch.Tensor
    sinks_H: torch.Tensor  # float32
    out_down: Weight  # [groups, o_lora_rank, H / groups * C]
    out: Projection  # [D, groups * o_lora_rank]
    entries: CompressorWeights | None
    index: IndexWeights | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """SwiGLU: `gate_up` [2 * F, D] has the gate projection above the up projection, `down` is [D, F]."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router in float32, the routed experts this rank holds, and the shared expert that sees every token."""

    router_ED: Any
    router_bias_E: torch.Tensor | None  # of scores for the choice, or of the products
    gate_up_EFD: Weight  # [held, 2 * F, D]
    down_EDF: Weight  # [held, D, F]
    shared: MlpWeights | None
    gate_up_bias_EF: torch.Tensor | None = None  # [held, 2 * F]
    down_bias_ED: torch.Tensor | None = None  # [held, D]
    shared_gate_1D: Any = None  # in float32, of the shared expert's factor; None: it has none
    experts_VK: torch.Tensor | None = None  # [vocabulary, experts per token] int64 of a layer that chooses by token


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """The weights of hyper-connections around one sublayer, or before the output head; all in float32."""

    mixing: Any  # from a token's N * D values to its factors
    scale: torch.Tensor
    base: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attention: Any  # of its kind
    mlp: MlpWeights | MoeWeights
    input_norm: torch.Tensor | None = None  # of the input of attention; None: there is none
    mlp_norm: torch.Tensor | None = None
    attention_streams: StreamWeights | None = None  # None: a plain residual
    mlp_streams: StreamWeights | None = None
    attention_post_norm: torch.Tensor | None = None  # of the result of attention; None: there is none
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The layer for multi-token prediction (DeepSeek-V3 report section 2.2); embedding and head are the model's."""

    token_norm: torch.Tensor  # of the next token's embedding
    hidden_norm: torch.Tensor  # of the hidden state
    joined: Projection  # [D, 2 * D], from both to the layer's input
    layer: LayerWeights
    norm: torch.Tensor


class Ends(NamedTuple):
    """The tensors before and after the layers."""

    embedding: torch.Tensor
    norm: torch.Tensor
    lm_head: Weight
    streams: StreamWeights | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a rank; `expert_ids` are the experts of each MoE layer's E dim."""

    embedding: torch.Tensor  # [vocabulary, D]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Weight  # [vocabulary, D]
    expert_ids: tuple[tuple[int, ...], ...]
    mtp: MtpWeights | None = None
    streams: StreamWeights | None = None  # before the output head
    mapped_bytes: int = 0  # of files that are its memory
    stream: LayerStream | None = None  # reads layers before they compute; None: all are in memory
