"""The two schedules of two micro-batches: the time of one layer.

One lane computes, one lane moves expert rows; each is in order. The orders are those of `parallel/overlap.py`.
"""

from dataclasses import dataclass

from batchinfer.sim.exchange import ExchangeTimes

SETTLED = 4  # layers before the period is constant
MEASURED = 4  # layers over which the period is measured


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of one micro-batch in one layer, by stage."""

    attn_0: float  # projections up to core attention
    attn_1: float  # core attention, output projection, gate
    shared: float
    mlp: float
    exchange: ExchangeTimes

    @property
    def compute_s(self) -> float:
        """Seconds of all computing."""
        return self.attn_0 + self.attn_1 + self.shared + self.mlp

    @property
    def communication_s(self) -> float:
        """Seconds of dispatch and combine."""
        return self.exchange.dispatch_s + self.exchange.combine_s

    @property
    def plain_s(self) -> float:
        """Seconds without overlap, except of the shared expert, which waits for no rows."""
        hidden = min(self.shared, self.communication_s)
        return self.compute_s + self.communication_s - hidden


def prefill_layer_s(stages: Stages) -> float:
    """Return the seconds per layer of two equal micro-batches.

    Computing: ATTN(1) SHARED(0) ATTN(0) MLP(1) MLP(0) SHARED(1); on the way: COMBINE(0) DISPATCH(1) DISPATCH(0)
    COMBINE(1), as in DeepSeek's published profile.
    """
    attn_s = stages.attn_0 + stages.attn_1
    compute = communication = 0.0
    # times at which the inputs of the next stages are ready
    mlp_0 = shared_0 = combine_1 = 0.0
    ends = []
    for _ in range(SETTLED + MEASURED):
        combine_0 = communication = max(communication, mlp_0) + stages.exchange.combine_s
        attn_1 = compute = max(compute, combine_1) + attn_s
        dispatch_1 = communication = max(communication, attn_1) + stages.exchange.dispatch_s
        shared_0 = compute = compute + stages.shared
        attn_0 = compute = max(shared_0, combine_0) + attn_s
        dispatch_0 = communication = max(communication, attn_0) + stages.exchange.dispatch_s
        mlp_1 = compute = max(compute, dispatch_1) + stages.mlp
        combine_1 = communication = max(communication, mlp_1) + stages.exchange.combine_s
        mlp_0 = compute = max(compute, dispatch_0) + stages.mlp
        compute += stages.shared
        ends.append(compute)
    return (ends[-1] - ends[SETTLED - 1]) / MEASURED


def decode_layer_s(stages: Stages) -> float:
    """Return the seconds per layer of two equal micro-batches in five stages.

    SHARED(0) + ATTN-0(1) under DISPATCH(0); MLP(0); ATTN-1(1) under COMBINE(0); then the roles swap.
    """
    under_dispatch = max(stages.shared + stages.attn_0, stages.exchange.dispatch_s)
    under_combine = max(stages.attn_1, stages.exchange.combine_s)
    return 2 * (under_dispatch + stages.mlp + under_combine)
