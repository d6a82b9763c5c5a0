"""Answers of a model with FP8 weights against float64, and the distance that its roundings explain.

The reference computes in float64 with the same quantised weights and rounds nothing. It takes the experts that the
tested model took: where two are nearly as good as each other rounding chooses, and a logit then jumps by more than all
roundings move it. How good the choice was, by the reference's scores, is compared apart.

The distance of logits is the mean over tokens of the KL divergence from the reference's distribution of the next token.
How far roundings move it follows from a model of them:

    Every value that the engine rounds is moved by an error of its own, evenly spread over half a step to both sides. A
    step of bfloat16 is 2^-7 of the value's power of two. A step of E4M3 is 2^-3 of it, at least 2^-9, times the scale
    of the 128 values of which it is one, their largest ÷ 448.

The reference is computed with such errors at each place where the engine rounds, several times; a rounding engine is
one more such draw. The bound is their mean and six times their spread, or a quarter more than the mean if this is more:
roundings inside operations (parts of a sum, softmax weights) are not in the model.
"""

# T tokens, K experts per token, E experts, D hidden, F intermediate, H heads, V vocabulary

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from batchinfer.model.moe import MoeMlp, gate_rule
from batchinfer.model.transformer import Transformer
from batchinfer.model.weights import MlpWeights, MoeWeights
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp8 import BLOCK
from batchinfer_kernels.reference.gating import gate
from support.paged_steps import PagedRequests

_LATENT_NORM_EPS = 1e-6
_DRAWS = 6
_MOST_OVER_MEAN = 1.25


class Rounding:
    """Errors as of rounded values.

    Args:
        seed: of the errors; None: values stay as they are.
    """

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else torch.Generator().manual_seed(seed)

    def bfloat16(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as it may be after rounding to bfloat16."""
        return self._moved(x, _power_of_two(x, least=-126) * 2.0**-7)

    def fp8(self, x_TM: torch.Tensor) -> torch.Tensor:
        """Return rows as they may be after rounding to E4M3 with a scale per 128 values."""
        width = x_TM.shape[-1]
        tiles = F.pad(x_TM, (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
        scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        step = _power_of_two(tiles / scale, least=-6) * 2.0**-3 * scale
        return self._moved(x_TM, step.flatten(-2)[..., :width])

    def _moved(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if self._random is None:
            return x
        return x + (torch.rand(x.shape, generator=self._random, dtype=torch.float64) - 0.5) * step


def _power_of_two(x: torch.Tensor, *, least: int) -> torch.Tensor:
    """Return the largest power of two that is not above |x|, at least 2^least."""
    _, exponent = torch.frexp(x.abs())
    return torch.ldexp(torch.ones_like(x), (exponent - 1).clamp_min(least))


def wide(weight: Any) -> torch.Tensor:
    """Return a weight in float64, of FP8 its values times their block's scale."""
    if not isinstance(weight, BlockScaled):
        return weight.double()
    num_rows, num_columns = weight.values.shape
    scales = weight.scales.double().repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)
    return weight.values.double() * scales[:, :num_columns]


class Plain(NamedTuple):
    """What the reference gives for one prompt.

    logits: [T, V].
    own_choice: of each MoE layer the experts that it would take, [T, K].
    scores: of each MoE layer what experts are chosen by, [T, E].
    """

    logits: torch.Tensor
    own_choice: list[torch.Tensor]
    scores: list[torch.Tensor]


class Float64Model:
    """A model with latent attention, one prompt at a time, without pages.

    Args:
        model: on the CPU in plain PyTorch, whose weights are used.
    """

    def __init__(self, model: Transformer) -> None:
        self._model, self._config = model, model.config
        self._wide: dict[tuple[int, int | None], torch.Tensor] = {}

    def run(self, tokens: Sequence[int], chosen: Sequence[torch.Tensor], rounding: Rounding) -> Plain:
        """Compute all tokens of a prompt.

        Args:
            chosen: of each MoE layer the experts to take, [T, K].
        """
        weights, left = self._model.weights, iter(chosen)
        own, scores = list[torch.Tensor](), list[torch.Tensor]()
        hidden_TD = weights.embedding[torch.tensor(tokens)].double()
        for layer in weights.layers:
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            x_TD = self._norm(hidden_TD, layer.input_norm, self._config.rms_norm_eps, rounding)
            hidden_TD = rounding.bfloat16(hidden_TD + self._attend(x_TD, layer.attention, rounding))
            x_TD = self._norm(hidden_TD, layer.mlp_norm, self._config.rms_norm_eps, rounding)
            if isinstance(layer.mlp, MoeWeights):
                logits_TE = x_TD @ self._weight(layer.mlp.router_ED).T
                own.append(gate(logits_TE, layer.mlp.router_bias_E, gate_rule(self._config))[0])
                assert layer.mlp.router_bias_E is not None
                scores.append(torch.sigmoid(logits_TE) + layer.mlp.router_bias_E)
                part_TD = self._experts(x_TD, logits_TE, layer.mlp, next(left), rounding)
            else:
                part_TD = self._swiglu(rounding.fp8(x_TD), layer.mlp, rounding)
            hidden_TD = rounding.bfloat16(hidden_TD + part_TD)
        x_TD = self._norm(hidden_TD, weights.norm, self._config.rms_norm_eps, rounding)
        return Plain(rounding.bfloat16(x_TD @ self._weight(weights.lm_head).T), own, scores)

    def _weight(self, weight: Any, part: int | None = None) -> torch.Tensor:
        """Return a weight, or one of several experts', in float64; widened once."""
        key = id(weight), part
        if key not in self._wide:
            self._wide[key] = wide(weight if part is None else weight[part])
        return self._wide[key]

    @staticmethod
    def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding) -> torch.Tensor:
        normed = rounding.bfloat16(x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())
        return rounding.bfloat16(normed * weight.double())

    def _attend(self, x_TD: torch.Tensor, weights: Any, rounding: Rounding) -> torch.Tensor:
        config: Any = self._config.attention
        heads, nope, rotary = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        rounded_TD = rounding.fp8(x_TD)
        latents_TW = rounding.bfloat16(rounded_TD @ self._weight(weights.kv_down.weight).T)
        if weights.q_down is not None:
            q_TL = rounding.bfloat16(rounded_TD @ self._weight(weights.q_down.weight).T)
            rounded_TD = rounding.fp8(self._norm(q_TL, weights.q_norm, _LATENT_NORM_EPS, rounding))
        q_THA = rounding.bfloat16(rounded_TD @ self._weight(weights.q.weight).T).unflatten(-1, (heads, -1))
        cos, sin, _ = self._model.angles.at(torch.arange(len(x_TD)))
        latent_TC, key_TR = latents_TW.split([config.kv_lora_rank, rotary], dim=-1)
        latent_TC = self._norm(latent_TC, weights.kv_norm, _LATENT_NORM_EPS, rounding)
        key_TR = rounding.bfloat16(_turned(key_TR[:, None], cos, sin))
        plain_THN, turned_THR = q_THA.split([nope, rotary], dim=-1)
        q_THA = torch.cat([plain_THN, rounding.bfloat16(_turned(turned_THR, cos, sin))], dim=-1)
        kv_THZ = rounding.bfloat16(torch.einsum("tc,hzc->thz", latent_TC, wide(weights.kv_up_HZC)))
        k_THA = torch.cat([kv_THZ[..., :nope], key_TR.expand(-1, heads, -1)], dim=-1)
        scores_HTX = torch.einsum("tha,xha->htx", q_THA, k_THA) * config.softmax_scale
        unseen = torch.ones(len(x_TD), len(x_TD), dtype=torch.bool).triu(1)
        shares_HTX = torch.softmax(scores_HTX.masked_fill(unseen, -torch.inf), dim=-1)
        out_THV = rounding.bfloat16(torch.einsum("htx,xhv->thv", rounding.bfloat16(shares_HTX), kv_THZ[..., nope:]))
        return rounding.fp8(out_THV.flatten(1)) @ self._weight(weights.out.weight).T

    def _swiglu(
        self, rounded_TD: torch.Tensor, weights: MlpWeights | tuple[torch.Tensor, torch.Tensor], rounding: Rounding
    ) -> torch.Tensor:
        if isinstance(weights, MlpWeights):
            weights = self._weight(weights.gate_up.weight), self._weight(weights.down.weight)
        gate_TF, up_TF = rounding.bfloat16(rounded_TD @ weights[0].T).chunk(2, dim=-1)
        active_TF = rounding.bfloat16(rounding.bfloat16(F.silu(gate_TF)) * up_TF)
        return rounding.bfloat16(rounding.fp8(active_TF) @ weights[1].T)

    def _experts(
        self,
        x_TD: torch.Tensor,
        logits_TE: torch.Tensor,
        weights: MoeWeights,
        chosen_TK: torch.Tensor,
        rounding: Rounding,
    ) -> torch.Tensor:
        """Return the sum of the shared and the chosen experts."""
        scores_TK = torch.sigmoid(logits_TE).gather(1, chosen_TK)
        shares_TK = scores_TK / scores_TK.sum(-1, keepdim=True) * gate_rule(self._config).scale
        rounded_TD = rounding.fp8(x_TD)
        assert weights.shared is not None
        total_TD = self._swiglu(rounded_TD, weights.shared, rounding)
        for expert in chosen_TK.unique().tolist():
            tokens, place = torch.where(chosen_TK == expert)
            own = self._weight(weights.gate_up_EFD, expert), self._weight(weights.down_EDF, expert)
            y_MD = self._swiglu(rounded_TD[tokens], own, rounding)
            total_TD = total_TD.index_add(0, tokens, y_MD * shares_TK[tokens, place, None])
        return total_TD


def _turned(x_THR: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs turned."""
    pairs = torch.view_as_complex(x_THR.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(-2)


@dataclass
class Given:
    """What an engine gave for some prompts: of each the logits [T, V], and the experts of each MoE layer [T, K]."""

    prompts: list[list[int]]
    logits: list[torch.Tensor]
    chosen: list[list[torch.Tensor]] = field(default_factory=list)


def spread_prompts(vocabulary: int, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return prompts of these lengths, without a common start."""
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=random) for length in lengths]


def given_by(model: Transformer, prompts: Sequence[torch.Tensor], *, decoded: int) -> Given:
    """Run prompts through a model's pages on its device, the last `decoded` tokens one by one, the others at once."""
    requests = PagedRequests(model, [prompt[:-decoded] for prompt in prompts], max_new_tokens=decoded)
    order = list(range(len(prompts)))
    rows: list[list[list[torch.Tensor]]] = [[[] for _ in range(model.num_moe_layers)] for _ in prompts]
    with _noted_choices() as noted:
        _step(requests.prefill_step, noted, rows, order, {i: len(requests.tokens[i]) for i in order})
        for place in range(-decoded, 0):
            for i in order:
                requests.tokens[i].append(int(prompts[i][place]))
            _step(requests.decode_step, noted, rows, order, None)
    chosen = [[torch.cat(layer) for layer in request] for request in rows]
    return Given(requests.tokens, [requests.all_logits(i).cpu() for i in order], chosen)


def _step(step: Any, noted: list[torch.Tensor], rows: Any, order: list[int], sizes: dict[int, int] | None) -> None:
    """Run a step of all requests and add the experts of its rows to those of their requests."""
    noted.clear()
    step(order) if sizes is None else step(order, sizes)
    for layer, ids_TK in enumerate(noted):
        for i, part in zip(order, ids_TK.split(list(sizes.values()) if sizes else 1), strict=True):
            rows[i][layer].append(part)


@contextmanager
def _noted_choices() -> Iterator[list[torch.Tensor]]:
    """Give a list that gets the experts of each MoE layer's tokens, in the order in which layers run."""
    noted: list[torch.Tensor] = []
    route = MoeMlp.route

    def noting(*args: Any, **options: Any) -> Any:
        routing = route(*args, **options)
        noted.append(routing.ids_TK.cpu())
        return routing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoeMlp, "route", noting)
        yield noted


class Distance(NamedTuple):
    """How far answers are from the reference, each a mean over tokens.

    divergence: KL divergence of the next token's distribution.
    lost_score: by how much the experts taken score below those that the reference would take, by its own scores.
    """

    divergence: float
    lost_score: float


def distance(
    plain: Sequence[Plain], logits: Sequence[torch.Tensor], chosen: Sequence[Sequence[torch.Tensor]]
) -> Distance:
    """Return how far logits and experts are from the reference."""
    logs, others = (torch.cat(list(part)).double().log_softmax(-1) for part in ([one.logits for one in plain], logits))
    divergence = (logs.exp() * (logs - others)).sum(-1).mean()
    lost = [
        (scores.gather(1, own) - scores.gather(1, taken)).sum(-1)
        for one, request in zip(plain, chosen, strict=True)
        for scores, own, taken in zip(one.scores, one.own_choice, request, strict=True)
    ]
    return Distance(float(divergence), float(torch.cat(lost).mean()))


def distances(model: Transformer, given: Given) -> tuple[Distance, Distance]:
    """Return how far an engine's answers are from float64, and the bound that roundings explain.

    Args:
        model: the same weights on the CPU in plain PyTorch.
    """
    exact = Float64Model(model)

    def drawn(seed: int | None) -> list[Plain]:
        rounding = Rounding(seed)
        pairs = zip(given.prompts, given.chosen, strict=True)
        return [exact.run(tokens, chosen, rounding) for tokens, chosen in pairs]

    plain = drawn(None)
    draws = [drawn(seed) for seed in range(_DRAWS)]
    found = [distance(plain, [one.logits for one in draw], [one.own_choice for one in draw]) for draw in draws]
    bounds = [_bound([values[place] for values in found]) for place in range(2)]
    return distance(plain, given.logits, given.chosen), Distance(*bounds)


def _bound(values: Sequence[float]) -> float:
    mean = statistics.mean(values)
    return max(mean + 6 * statistics.stdev(values), _MOST_OVER_MEAN * mean)
