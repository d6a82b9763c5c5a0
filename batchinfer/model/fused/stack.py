"""Decode steps in one C++ call, for a lone rank on the CPU; the same bits as operation by operation."""

# S rows whose logits are wanted, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchinfer.model.fused.layers import FusedAttention, FusedMoe, all_packed, plain_weight
from batchinfer.model.moe import DenseMlp
from batchinfer.model.mtp import DraftInput, Mtp
from batchinfer.model.sampling import uniforms as uniforms_of
from batchinfer.model.step import StepInput, StepOutput
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer_kernels.cpu.packed import Packed, library

if TYPE_CHECKING:
    from batchinfer.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class FusedDecode:
    """All layers of one model as one C++ object."""

    stack: Any
    has_mtp: bool = False

    @classmethod
    def of(cls, model: Transformer) -> FusedDecode | None:
        """Return the fused decode; None if a layer is not fused, rows travel between ranks, or rows are padded."""
        weights, head, eps = model.weights, model.weights.lm_head, model.config.rms_norm_eps
        if not isinstance(head, Packed) or head.is_int8 or head.depth != model.config.hidden_size:
            return None
        stack = library().classes.Stack(weights.embedding, weights.norm, eps, head.plain)
        for layer in model.layers:
            attention, mlp = layer.attention, layer.mlp
            if not isinstance(attention, FusedAttention):
                return None
            if isinstance(mlp, FusedMoe) and mlp.kernel_of_all is not None:
                stack.add_mixture(attention.kernel, mlp.kernel_of_all)
                continue
            of_dense = (mlp.weights.gate_up, mlp.weights.down) if isinstance(mlp, DenseMlp) else ()
            held = all_packed(*map(plain_weight, of_dense))
            if not isinstance(mlp, DenseMlp) or held is None:
                return None
            stack.add_dense(attention.kernel, mlp.norm_D, eps, *(weight.plain for weight in held))
        return cls(stack, has_mtp=model.mtp is not None and _add_mtp(stack, model.mtp))

    def __call__(self, model: Transformer, step: StepInput, pages: torch.Tensor, log: SpanLog) -> StepOutput:
        """See schedules.WholeStep."""
        assert step.page_table is not None
        with MicroBatchSpans(log).compute("DECODE"):
            angles = model.angles.at(step.positions)
            logits_SV, counts, states_SD = self.stack.decode(
                *(step.tokens, *angles, step.positions, step.slots),
                *(step.page_table.contiguous(), step.kv_tokens, step.logit_rows, pages, step.wants_logits),
            )
        for mlp in model.moe_mlps:
            mlp.num_local_rows += len(step.tokens) * model.config.num_experts_per_tok
        no_counts = torch.zeros(0, model.config.n_routed_experts, dtype=torch.int64)
        return StepOutput(logits_SV, torch.stack(counts) if counts else no_counts, states=states_SD)

    def draft(self, model: Transformer, given: DraftInput, pages: torch.Tensor) -> torch.Tensor:
        """See mtp.Mtp."""
        angles = model.angles.at(given.positions)
        rows, guesses = given.sampling, np.arange(given.num_guesses)[:, None]
        are_drawn = bool(rows.temperature.any())
        uniforms = uniforms_of(rows.key, given.num_new + guesses) if are_drawn else np.zeros((len(guesses), 0))
        settings = [torch.from_numpy(values) for values in (rows.temperature, rows.top_k, rows.top_p, rows.min_p)]
        return self.stack.draft(
            *(given.states, given.tokens, given.last_rows, *angles, given.places, given.slots),
            *(given.page_table, given.places + 1, pages, settings, torch.from_numpy(uniforms)),
        )


def _add_mtp(stack: Any, mtp: Mtp) -> bool:
    """Add the layer for multi-token prediction to the stack; return whether it could be fused, too."""
    attention, mlp, joined = mtp.layer.attention, mtp.layer.mlp, all_packed(plain_weight(mtp.weights.joined))
    if not isinstance(attention, FusedAttention) or not isinstance(mlp, FusedMoe) or joined is None:
        return False
    if mlp.kernel_of_all is None:
        return False
    norms = mtp.weights.token_norm, mtp.weights.hidden_norm
    stack.set_mtp(*norms, joined[0].plain, mtp.weights.norm, attention.kernel, mlp.kernel_of_all)
    return True
