"""Figures of one batch size of the slice: measured times, published exchanges, and what both come to."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedule import decode_tasks, finish_s, prefill_tasks

HIT_SHARE = 0.563  # of input tokens, open-infra-index day 6
# github.com/deepseek-ai/DeepEP docs/legacy.md, H800 with 400 Gb/s InfiniBand. Low latency, EP128, 128 tokens per rank:
_DISPATCH_US, _COMBINE_US, _TOKENS = 192, 369, 128
# Normal mode, EP32: GB/s per rank, counted as if each token went to all 4 nodes; 24 of 132 SMs are busy with it.
_DISPATCH_GB_S, _COMBINE_GB_S, _NODES = 58, 57, 4
_COMPUTE_SMS, _SMS = 108, 132


@dataclass
class Figures:
    """Times of one batch size; seconds are None in a rehearsal.

    Args:
        stages: names and how often they came in the micro-batch.
        is_finite: whether all logits are, of the micro-batch and of the whole batch.
        difference: largest difference between logits of a request in the micro-batch and in the whole batch, of the
            largest logit; None where the whole batch is not run in one piece.
        stage_s: seconds of each stage in the micro-batch: its share in a step with events, of the step without.
        floor_s: seconds that each stage must take on this card by its published limits (roofline.py).
        half_s, whole_s: one of the two micro-batches, and the batch in one piece, without events inside.
        events_s: the micro-batch with two events around each stage.
        exchange_s: published seconds of the exchanges of the whole batch.
        overlapped_s: two micro-batches under the published schedule.
        exposed_s: of these, seconds in which rows are waited for.
    """

    unit: str
    tokens: int
    stages: dict[str, int]
    is_finite: bool
    stage_s: dict[str, float] = field(default_factory=dict)
    whole_s: float | None = None
    half_s: float | None = None
    exchange_s: float | None = None
    overlapped_s: float | None = None
    exposed_s: float | None = None
    difference: float | None = None
    events_s: float | None = None
    floor_s: dict[str, float] = field(default_factory=dict)

    def take_stages(self, events_s: float, stage_s: dict[str, float]) -> None:
        """Stages of a step with events, in proportion to the one without: together with the rest they are `half_s`."""
        assert self.half_s is not None
        self.events_s = events_s
        self.stage_s = {name: seconds * self.half_s / events_s for name, seconds in stage_s.items()}


def decode_exchange_s(num_tokens: int) -> tuple[float, float]:
    """Published seconds of one layer's dispatch and combine, in proportion to the tokens of a rank."""
    return tuple(1e-6 * us * num_tokens / _TOKENS for us in (_DISPATCH_US, _COMBINE_US))  # type: ignore[return-value]


def prefill_exchange_s(num_tokens: int, hidden: int) -> tuple[float, float]:
    """Published rates applied to the bytes of a rank: FP8 with a scale per 128 values there, bfloat16 back."""
    values = num_tokens * _NODES * hidden / 1e9
    return values * (1 + 4 / 128) / _DISPATCH_GB_S, values * 2 / _COMBINE_GB_S


def overlapped(figures: Figures, num_layers: int, dispatch_s: float, combine_s: float, *, is_decode: bool) -> None:
    """Fill in what two micro-batches take under the published schedule.

    What packing and copying take here counts as computing, although part of it is in the published times too. In
    prefill computing has 108 of 132 SMs.
    """
    assert figures.half_s is not None
    stretch = 1.0 if is_decode else _SMS / _COMPUTE_SMS
    stages = {name: seconds / num_layers for name, seconds in figures.stage_s.items()}
    before = "ATTN-1" if is_decode else "ATTN"
    stages[before] += stages.pop("DISPATCH", 0.0)
    stages["MLP"] += stages.pop("COMBINE", 0.0)
    names = ("ATTN-0", "ATTN-1", "SHARED", "MLP") if is_decode else ("ATTN", "SHARED", "MLP")
    per_layer = {name: stretch * stages[name] for name in names}
    computing_s = 2 * num_layers * sum(per_layer.values())
    rest_s = max(0.0, stretch * 2 * figures.half_s - computing_s)  # dense layers, logits, sums into the stream
    tasks = (decode_tasks if is_decode else prefill_tasks)(num_layers, per_layer, dispatch_s, combine_s)
    finish = finish_s(tasks)
    figures.overlapped_s, figures.exposed_s = finish + rest_s, max(0.0, finish - computing_s)


def describe(figures: Figures) -> str:
    """Lines for a reader."""
    title = f"{figures.unit}, {figures.tokens:,} tokens per step"
    if figures.half_s is None or figures.whole_s is None:
        counted = ", ".join(f"{name} {count}" for name, count in figures.stages.items())
        return "\n".join(
            [title, f"  stages of a micro-batch and how often they ran: {counted}", *_difference_line(figures)]
        )
    assert figures.exchange_s is not None
    assert figures.overlapped_s is not None
    assert figures.exposed_s is not None
    lines = [title, f"  {'micro-batch of half':<34}{1e3 * figures.half_s:9.2f} ms"]
    if figures.events_s is not None:
        lines.append(f"    {'with events around its stages':<32}{1e3 * figures.events_s:9.2f} ms")
    lines += [_stage_line(name, seconds, figures.floor_s.get(name)) for name, seconds in figures.stage_s.items()]
    lines.append(_stage_line("the rest", figures.half_s - sum(figures.stage_s.values()), None))
    lines += _difference_line(figures)
    hidden = 1 - figures.exposed_s / figures.exchange_s
    for words, seconds in (
        ("computing and copies alone", figures.whole_s),
        ("published exchange after it", figures.whole_s + figures.exchange_s),
        (f"published schedule, {hidden:.0%} hidden", figures.overlapped_s),
    ):
        rate = figures.tokens / seconds
        hits = (
            f", {rate / (1 - HIT_SHARE):,.0f} with {HIT_SHARE:.1%} hits" if figures.unit.startswith("prefill") else ""
        )
        lines.append(f"  {words:<34}{1e3 * seconds:9.2f} ms  {rate:,.0f} tokens/s per GPU{hits}")
    return "\n".join(lines)


def _stage_line(name: str, seconds: float, floor_s: float | None) -> str:
    floor = "" if floor_s is None else f"  at the limits {1e3 * floor_s:.2f} ms ({floor_s / seconds:.0%})"
    return f"    {name:<32}{1e3 * seconds:9.2f} ms{floor}"


def _difference_line(figures: Figures) -> list[str]:
    if figures.difference is None:
        return []
    return [f"  requests of the half in the whole batch: logits differ by {figures.difference:.1e} of the largest"]
