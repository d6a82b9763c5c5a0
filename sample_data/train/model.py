"""The model to be trained: DeepSeek-V3 in small, in plain torch; called by train.py and accuracy.py.

Parameters carry the published names, so export.py has little to do (only the experts of a layer are kept in one tensor
here). Multi-token prediction follows the DeepSeek-V3 report section 2.2.
"""

# T tokens, D hidden, M answer tokens

from __future__ import annotations

from dataclasses import dataclass

import torch
from attention import Attention, yarn_frequencies
from batches import Batch, Segment
from moe import Mlp, Moe, Router
from shape import ModelShape, RmsNorm, linear
from torch import nn
from torch.nn import functional as F

NUM_COMMON_VALUES = 4  # of every embedding, at the start


class Layer(nn.Module):
    """Attention, then an MLP, each on normed input and added to the stream."""

    def __init__(self, shape: ModelShape, index: int):
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        dense = index < shape.first_k_dense_replace
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size) if dense else Moe(shape)

    def forward(
        self, x_TD: torch.Tensor, turn: torch.Tensor, segments: list[Segment], counted_T: torch.Tensor
    ) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), turn, segments)
        normed = self.post_attention_layernorm(x_TD)
        return x_TD + (self.mlp(normed) if isinstance(self.mlp, Mlp) else self.mlp(normed, counted_T))


class MtpLayer(Layer):
    """One more layer that sees the next token as well and predicts the one after it (V3 report section 2.2)."""

    def __init__(self, shape: ModelShape):
        super().__init__(shape, shape.num_hidden_layers)
        self.enorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = linear(2 * shape.hidden_size, shape.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RmsNorm(shape.hidden_size, shape.rms_norm_eps)})

    def join(self, next_embedding_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Combine the embedding of the next token and the main model's normed output to the layer's input."""
        return self.eh_proj(torch.cat([self.enorm(next_embedding_TD), self.hnorm(hidden_TD)], dim=-1))


class SampleModel(nn.Module):
    """The whole model: hidden states of the main layers and of the MTP layer; `logits` for the places asked for."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.shape = shape
        layers = [Layer(shape, index) for index in range(shape.num_hidden_layers)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab_size, shape.hidden_size),
                "layers": nn.ModuleList([*layers, MtpLayer(shape)]),
                "norm": RmsNorm(shape.hidden_size, shape.rms_norm_eps),
            }
        )
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        self._set_scales()
        self.register_buffer("frequencies", yarn_frequencies(shape), persistent=False)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed hidden states [T, D] of the main model and of the MTP layer, for a whole batch."""
        *layers, mtp = self.model["layers"]
        embedding = self.model["embed_tokens"]
        turn = self._turn(batch.positions)
        x_TD = embedding(batch.tokens)
        for layer in layers:
            x_TD = layer(x_TD, turn, batch.segments, batch.counted)
        main_TD = self.model["norm"](x_TD)
        y_TD = mtp.join(embedding(batch.next_tokens), main_TD)
        # all its tokens are one place later, which rotary attention cannot tell, so the same turns serve
        y_TD = mtp(y_TD, turn, batch.segments, batch.counted)
        return main_TD, mtp.shared_head["norm"](y_TD)

    def routers(self) -> list[Router]:
        """Return the routers of all mixture layers, the MTP layer's last."""
        return [layer.mlp.gate for layer in self.model["layers"] if isinstance(layer.mlp, Moe)]

    def _turn(self, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.frequencies
        return torch.polar(torch.ones_like(angles), angles)

    @torch.no_grad()
    def _set_scales(self) -> None:
        """Scale down the weights whose results are added to the stream, so that it does not grow with depth."""
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.mul_((2 * self.shape.num_hidden_layers) ** -0.5)
        self.model["embed_tokens"].weight.mul_(0.5)
        # Attention by position alone, such as to the token before, needs something that all tokens have in common.
        self.model["embed_tokens"].weight[:, :NUM_COMMON_VALUES] = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says about the M answer places of a batch, each [M, vocabulary] float32."""

    next_logits: torch.Tensor  # of the main model, for the next token
    after_next_logits: torch.Tensor  # of the MTP layer, for the token after it


def predict(model: SampleModel, batch: Batch, dtype: torch.dtype) -> Prediction:
    """Run a batch with weights rounded to bfloat16, as they are exported, and activations in `dtype`.

    Training goes through the rounding too (the weights behind it are float32), so nothing is lost by the export.
    """
    rounded = {name: weight.to(torch.bfloat16).to(dtype) for name, weight in model.named_parameters()}
    hidden_TD, mtp_TD = torch.func.functional_call(model, rounded, (batch,))
    head = rounded["lm_head.weight"]
    logits = [F.linear(x_TD.index_select(0, batch.places), head).float() for x_TD in (hidden_TD, mtp_TD)]
    return Prediction(*logits)
