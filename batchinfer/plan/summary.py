"""Summary of a plan: counts, balance, time and cost."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from batchinfer.balance.request_load import RequestLoad
from batchinfer.config import JobConfig
from batchinfer.plan.earlier_run import Speeds
from batchinfer.plan.forecast import PlannedWork, balances, nodes_to_finish, work_seconds
from batchinfer.plan.requests import PlannedRequests
from batchinfer.plan.rows import RowTable
from batchinfer.plan.scored import tokens_scored_again
from batchinfer.plan.step_times import decode_tokens_per_s
from batchinfer.progress import note
from batchinfer.records import ExitCode, Shard
from batchinfer.rundir import RunDir, read_state
from batchinfer.sanitize import count_text


def count_plan(
    shards: list[Shard], rows: RowTable, requests: PlannedRequests, work: PlannedWork, plan_s: float
) -> dict[str, Any]:
    """Return the counts of schemas.PLAN_SUMMARY but those of requests and units.

    Args:
        requests: those to compute, in prefix order.
        plan_s: seconds of planning.
    """
    lengths = rows.num_tokens
    return {
        "input_rows": rows.num_input_rows,
        "rows": int(rows.n[rows.choice == 0].sum()) + rows.num_bad,
        "bad_rows": rows.num_bad,
        "unreadable_shards": sum(shard.problem is not None for shard in shards),
        "control_rows": rows.num_control,
        "duplicates": len(requests.duplicate_row),
        "input_tokens": int(np.multiply(lengths, rows.n, dtype=np.int64).sum()),
        "duplicate_tokens": int(lengths[requests.duplicate_row].sum()),
        "computed_tokens": int((work.prompt_tokens - work.shared_tokens).sum()),
        "distinct_tokens": requests.distinct_tokens + tokens_scored_again(requests, lengths[requests.row_index]),
        "max_output_tokens": int(work.max_tokens.sum()),
        "plan_s": plan_s,
        "rows_per_s": rows.num_input_rows / plan_s,
    }


def predict(
    job: JobConfig,
    work: PlannedWork,
    speeds: Speeds | None,
    *,
    request_load: RequestLoad,
    held_before_s: float,
    gpus_per_node: int | None,
) -> dict[str, Any]:
    """Return the values of schemas.PREDICTIONS by name.

    Args:
        speeds: of an earlier run, or simulated; if None, time and cost are not known.
        request_load: see forecast.balances.
        held_before_s: seconds for which the command holds the ranks' GPUs before the ranks start.
        gpus_per_node: for the number of nodes; None: not known.
    """
    cluster = job.cluster
    times = None if speeds is None else speeds.step_times
    prefill, decode, series = balances(work, cluster, request_load=request_load, needs_series=times is not None)
    if speeds is not None and times is not None and series is not None:
        to_decode = float(np.maximum(work.answer_tokens - 1, 0).sum())
        found = decode_tokens_per_s(times, series, to_decode, cluster.num_decode_ranks)
        speeds = replace(speeds, decode_tokens_per_s=found or speeds.decode_tokens_per_s)
    if speeds is not None and not speeds.is_simulated:
        note(_learned_sentence(speeds))
    is_known = bool(np.isfinite(work.expected_tokens).any())
    seconds = None if speeds is None else work_seconds(work, cluster, speeds)
    work_s = None if seconds is None else held_before_s + seconds
    gpu_hours = None if work_s is None else cluster.num_ranks * work_s / 3600
    gpu_hour = job.pricing.gpu_hour
    nodes = None
    if speeds is not None and work_s is not None and cluster.finish_hours is not None and gpus_per_node is not None:
        nodes = nodes_to_finish(
            work_s,
            cluster.finish_hours * 3600,
            least_s=speeds.longest_answer_s,
            num_units=len(work.unit_starts) - 1,
            num_ranks=cluster.num_ranks,
            gpus_per_node=gpus_per_node,
        )
    return {
        "expected_output_tokens": round(float(work.answer_tokens.sum())) if is_known else None,
        "prefill_tokens_max_over_mean": prefill.tokens,
        "prefill_attention_max_over_mean": prefill.attention,
        "decode_max_over_mean": decode.max_over_mean,
        "decode_bound": decode.bound,
        "work_s": work_s,
        "is_simulated": None if speeds is None else speeds.is_simulated,
        "gpu_hours": gpu_hours,
        "cost_usd": None if gpu_hours is None or gpu_hour is None else gpu_hours * gpu_hour,
        "nodes_to_finish": nodes,
    }


def _learned_sentence(speeds: Speeds) -> str:
    """Return the speeds by which a time is predicted from an earlier run."""
    decode, times = speeds.decode_tokens_per_s, speeds.step_times
    generated = "" if decode is None else f" and {decode:,.1f} generated"
    batches = "" if times is None else f"; {times.sentence()}"
    return f"time by the earlier run: {speeds.prefill_tokens_per_s:,.1f} prompt{generated} tokens/s per rank{batches}"


def read_summary(run: RunDir) -> dict[str, Any]:
    """Return the plan's counts and predictions by name (schemas.PLAN_SUMMARY)."""
    return dict(read_state(run)["counts"])


def expected_end(run: RunDir) -> str | None:
    """Return a warning if the plan shows that the run will not end with exit code 0, else None."""
    state = read_state(run)
    num_bad = state["counts"]["bad_rows"]
    num_unreadable = sum(shard["problem"] is not None for shard in state["shards"])
    counts = {"error rows": num_bad, "shards without outputs": num_unreadable}
    told = ", ".join(f"{what}: {count:,}" for what, count in counts.items() if count)
    if not told:
        return None
    return (
        f"warning: the run will end with exit code {ExitCode.ROW_ERRORS:d}: {told}; correct the input, or accept these "
        "errors"
    )


def format_summary(summary: dict[str, Any], num_ranks: int) -> str:
    """Return the summary as a few lines of text."""
    saved = summary["input_tokens"] - summary["computed_tokens"]
    share = saved / summary["input_tokens"] if summary["input_tokens"] else 0.0
    expected = summary["expected_output_tokens"]
    lines = [
        f"rows        {summary['input_rows']:>14,} in, {summary['rows']:,} out, {summary['bad_rows']:,} bad",
        f"requests    {summary['requests']:>14,} to compute in {count_text(summary['units'], 'unit')}, "
        f"{count_text(summary['duplicates'], 'duplicate')}",
        f"input       {summary['input_tokens']:>14,} tokens, {share:.1%} shared"
        + (" or reused" if summary.get("reused_requests") else ""),
        f"to compute  {summary['computed_tokens']:>14,} prompt tokens "
        f"({summary['distinct_tokens']:,} at least, whatever the order)",
        f"to generate {summary['max_output_tokens']:>14,} tokens at most"
        + ("" if expected is None else f", {expected:,} expected"),
    ]
    if summary.get("reused_requests"):
        lines.insert(
            2,
            f"reused      {summary['reused_requests']:>14,} further "
            f"{'request' if summary['reused_requests'] == 1 else 'requests'}, answered by an earlier run",
        )
    if summary["control_rows"]:
        lines.insert(1, f"control     {summary['control_rows']:>14,} rows contain control tokens in their text")
    if num_ranks > 1:
        lines += [
            f"busiest rank{summary['prefill_attention_max_over_mean']:>14.3f} times the mean in prefill's attention, "
            f"{summary['prefill_tokens_max_over_mean']:.3f} in its tokens, {summary['decode_max_over_mean']:.3f} in "
            f"decode (at best {summary['decode_bound']:.3f})"
        ]
    return "\n".join([*lines, *_time_lines(summary), _planned_line(summary)])


def _time_lines(summary: dict[str, Any]) -> list[str]:
    if summary["work_s"] is None:
        return [f"time        {'-':>14} not known (an earlier run, --learn-from RUN, or cluster.gpu tells)"]
    done = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + summary["work_s"]))
    cost = summary["cost_usd"]
    lines = [
        f"time        {summary['work_s']:>14,.1f} s on one group of ranks: done at {done} if it starts now",
        f"GPU-hours   {summary['gpu_hours']:>14,.4f}" + ("" if cost is None else f", {cost:,.4f} $"),
    ]
    if summary["nodes_to_finish"] is not None:
        lines.append(f"nodes       {summary['nodes_to_finish']:>14,} finish within cluster.finish_hours")
    if summary["is_simulated"]:
        lines.append(f"on paper    {'':>14} by tables of cluster.gpu, start-up left out")
    return lines


def _planned_line(summary: dict[str, Any]) -> str:
    return f"planned in  {summary['plan_s']:>14,.1f} s ({summary['rows_per_s']:,.0f} rows/s)"
