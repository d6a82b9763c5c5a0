"""Figures of a run folder: where its time went, and how near its steps are to the limits of the card."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerator import Limits

from batchinfer.model.config import ModelConfig
from batchinfer.model.mla_config import MlaConfig

_BF16, _FP8, _FP32 = 2, 1 + 4 / 128**2, 4  # bytes of a weight, FP8 with its scales
KINDS = ("prefill", "decode")


@dataclass
class Kind:
    """All steps of one kind.

    between_s: from each one's end to the next step's start; least_s: at the card's limits, None: they are unknown.
    """

    steps: int = 0
    seconds: float = 0.0
    between_s: float = 0.0
    tokens: int = 0
    least_s: float | None = None


@dataclass
class RunFigures:
    """One run.

    Args:
        wall_s: from the start of the command to its end.
        first_step_s: from the start of the command to the first step.
        work_s: from the start of the first step to the end of the last one.
        input_tokens, computed_tokens, output_tokens: of prompts, of these computed, and generated.
        graphs: decode steps by "replayed", "recorded" or why they ran without a graph.
        fallbacks: operations that ran on another kernel than the chosen one.
    """

    wall_s: float
    first_step_s: float
    work_s: float
    rows: int
    input_tokens: int
    computed_tokens: int
    output_tokens: int
    kinds: dict[str, Kind]
    graphs: dict[str, int]
    fallbacks: int
    bit_equal: bool | None
    profile: list[dict[str, Any]] = field(default_factory=list)

    @property
    def share_of_limit(self) -> float | None:
        """Least seconds of all steps, of the seconds from the first step to the last."""
        least_s = [kind.least_s for kind in self.kinds.values()]
        return None if None in least_s else sum(filter(None, least_s)) / self.work_s


def least_seconds(config: ModelConfig, step: dict[str, Any], limits: Limits, *, fp8: bool) -> float:
    """Return the least time of one step, by its multiplications and by bytes that must be read, whichever is longer.

    Each weight that the step needs is read once, and each row of KV once per step; rows between operations take no
    time. In prefill the last layer computes prompts' last tokens alone.

    Args:
        step: kind, new_tokens, num_requests, cached_tokens, kv_tokens and attention_work, as in stats/steps.
    """
    attention = config.attention
    assert isinstance(attention, MlaConfig)
    is_decode = step["kind"] == "decode"
    tokens, logits = step["new_tokens"], step["num_requests"]
    layers, moe_layers = config.num_hidden_layers, config.num_moe_layers
    hidden, experts = config.hidden_size, config.n_routed_experts
    expert = 3 * hidden * config.moe_intermediate_size
    chosen = experts * (1 - (1 - config.num_experts_per_tok / experts) ** tokens)  # of evenly spread tokens
    weight = _FP8 if fp8 else _BF16
    num_bytes = weight * (
        layers * config.attention_weights
        + moe_layers * expert * (chosen + config.n_shared_experts)
        + (layers - moe_layers) * 3 * hidden * config.intermediate_size
    )
    num_bytes += _BF16 * config.vocab_size * hidden + _FP32 * moe_layers * hidden * experts
    kv_row = config.kv_bytes_per_token(_BF16)
    num_bytes += kv_row * (step["kv_tokens"] if is_decode else step["cached_tokens"] + tokens)
    full = layers if is_decode else layers - 1  # layers that compute all tokens
    full_moe = moe_layers if is_decode else moe_layers - 1
    per_token = full * config.attention_weights + (layers - moe_layers) * 3 * hidden * config.intermediate_size
    per_token += full_moe * (expert * (config.num_experts_per_tok + config.n_shared_experts) + hidden * experts)
    weight_rate = limits.fp8_tflops if fp8 else limits.bf16_tflops
    attended = (
        step["kv_tokens"] * attention.products_per_key
        if is_decode
        else step["attention_work"] * attention.num_attention_heads * (attention.qk_head_dim + attention.v_head_dim)
    )
    computing_s = 2 * tokens * per_token / weight_rate / 1e12
    computing_s += 2 * (full * attended + logits * config.vocab_size * hidden) / limits.bf16_tflops / 1e12
    return max(computing_s, num_bytes / limits.copy_gb_s / 1e9)


def run_figures(
    run: Path,
    report: dict[str, Any],
    config: ModelConfig,
    limits: Limits | None,
    *,
    fp8: bool,
    started_s: float,
    wall_s: float,
) -> RunFigures:
    """Read the statistics of a finished run of one rank.

    Args:
        report: `batchinfer report --json` of it.
        started_s: Unix time at which its command was started.
    """
    import duckdb

    sql = f"SELECT * FROM read_parquet('{run}/stats/steps/*.parquet') ORDER BY start_s"
    steps = duckdb.sql(sql).to_arrow_table().to_pylist()
    are_known = limits is not None and None not in asdict(limits).values()
    kinds, graphs = {name: Kind() for name in KINDS}, dict[str, int]()
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        kind = kinds[step["kind"]]
        kind.steps += 1
        kind.seconds += step["duration_s"]
        kind.tokens += step["new_tokens"]
        end_s = step["start_s"] + step["duration_s"]
        kind.between_s += 0.0 if following is None else max(0.0, following["start_s"] - end_s)
        if are_known:
            kind.least_s = (kind.least_s or 0.0) + least_seconds(config, step, limits, fp8=fp8)
        if step["kind"] == "decode":
            name = step["graph"] or step["no_graph"] or "no graph"
            graphs[name] = graphs.get(name, 0) + 1
    first_s, last = steps[0]["start_s"], steps[-1]
    return RunFigures(
        wall_s=wall_s,
        first_step_s=first_s - started_s,
        work_s=last["start_s"] + last["duration_s"] - first_s,
        rows=report["rows_ok"],
        input_tokens=report["input_tokens"],
        computed_tokens=kinds["prefill"].tokens,
        output_tokens=report["output_tokens"],
        kinds=kinds,
        graphs=graphs,
        fallbacks=sum(step["fallback_calls"] or 0 for step in steps),
        bit_equal=report["bit_equal"],
    )


def differing_rows(run: Path, other: Path) -> tuple[int, list[Any]]:
    """Return how many rows both runs have, and the ids of those whose tokens or texts differ."""
    import duckdb

    one, two = (f"read_parquet('{folder}/outputs/**/*.parquet')" for folder in (run, other))
    rows = duckdb.sql(
        "SELECT id, a.token_ids = b.token_ids AND a.text = b.text AND a.finish_reason = b.finish_reason "
        f"FROM {one} a JOIN {two} b USING (id) ORDER BY id"
    ).fetchall()
    return len(rows), [key for key, same in rows if same is not True]


def describe(name: str, figures: RunFigures) -> str:
    """Return the lines about a run."""
    lines = [
        f"{name}: {figures.rows:,} rows, {figures.input_tokens:,} prompt tokens, {figures.computed_tokens:,} of them "
        f"computed, {figures.output_tokens:,} generated",
        f"  {figures.wall_s:.1f} s from start to end; {figures.first_step_s:.1f} s to the first step; "
        f"{figures.work_s:.1f} s of work: {(figures.computed_tokens + figures.output_tokens) / figures.work_s:,.0f} "
        f"tokens/s computed or generated, {figures.output_tokens / figures.work_s:,.0f} generated",
    ]
    if figures.share_of_limit is not None:
        lines.append(f"  {figures.share_of_limit:.1%} of the card's measured limits over the work")
    for kind, one in figures.kinds.items():
        if not one.steps:
            continue
        limit = "" if one.least_s is None else f", {one.least_s / one.seconds:.1%} of the limits"
        lines.append(
            f"  {kind}: {one.steps:,} steps of {1e3 * one.seconds / one.steps:.2f} ms{limit}; "
            f"host between steps {1e3 * one.between_s / one.steps:.2f} ms each"
        )
    for trace in figures.profile:
        share = trace["idle_s"] / trace["whole_s"] if trace["whole_s"] else 0.0
        lines.append(
            f"  profile of {trace['steps']} {trace['kind']} steps: {trace['kernels']:,} kernels; none runs for "
            f"{1e3 * trace['idle_s'] / trace['steps']:.2f} of {1e3 * trace['whole_s'] / trace['steps']:.2f} ms a step "
            f"({share:.1%})"
        )
        lines += [f"    {1e3 * seconds / trace['steps']:8.3f} ms  {kernel}" for kernel, seconds in trace["longest"]]
    if figures.graphs:
        lines.append("  decode steps: " + ", ".join(f"{count} {name}" for name, count in figures.graphs.items()))
    if figures.fallbacks:
        lines.append(f"  {figures.fallbacks} operations ran on another kernel than the chosen one")
    return "\n".join(lines)
