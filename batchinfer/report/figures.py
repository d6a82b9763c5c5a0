"""The figures of a finished run, one entry each: for the panel, the comparison, the page and `--json`.

A new figure is an entry here and a column of that name in a one-row table of queries/*.sql (read.ONE_ROW_TABLES).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from batchinfer.records import PHASES
from batchinfer.report import forms
from batchinfer.report.figure import Figure, Group, Values
from batchinfer.report.forms import Form, Value

MANY_CUT_ROWS = 0.1  # from this share of the answered rows on, the report gives advice


def _of_length(values: Values) -> str:
    cut, ok = values["finish_reasons.length"] or 0, values["rows_ok"] or 0
    answered = ok - (values["finish_reasons.no_output"] or 0)
    is_many = answered > 0 and cut / answered >= MANY_CUT_ROWS
    return f"{cut / answered:.1%} of answers: raise max_tokens?" if is_many else ""


def _of_structured(values: Values) -> str:
    rows, valid, cut = (forms.count(values[f"structured_outputs.{name}"]) for name in ("rows", "valid", "cut"))
    return f"{valid} of {rows}; {cut} cut at max_tokens"


def _without_answer(values: Values, key: str) -> str:
    return f"{forms.count(values[key])} without an answer"


def _of_written(values: Values) -> str:
    return "" if values["store_written_bytes"] else "only new, whole blocks (kv.block_tokens), by kv.persist"


def _such_ranks(values: Values, kind: str) -> str:
    """Return the ranks behind a node's rate as text, '8 x 120'; "" if the number is 1 or not known."""
    ranks, rate = values.get(f"{kind}_ranks_per_node"), values.get(f"{kind}_tokens_per_s_per_rank")
    return f"{ranks:.3g} x {forms.rate(rate)}" if ranks and ranks != 1 else ""


def _of_sweeps(values: Values) -> str:
    return f"in {forms.count(values['sweeps'])} sweeps"


def _overlap(kind: str) -> tuple[Figure, Figure]:
    """Return two figures of a phase: the share of steps in two micro-batches, and the hidden share of communication."""
    hidden = f"hidden_comm_{kind}"

    def note(values: Values) -> str:
        return "" if values[hidden] is None else f"of steps, {forms.percent(values[hidden])} % hidden"

    return (
        Figure(f"overlap_{kind}", f"two micro-batches, {kind}", forms.percent, "%",
               f"share of {kind} steps that ran as two micro-batches, one computing while the other's rows travelled; "
               "null when no rows travelled",
               note=note, why_empty=""),
        Figure(hidden, "", forms.percent, "%", f"hidden_comm_share of {kind} steps alone"),
    )  # fmt: skip


def _moving_s(values: Values) -> Value:
    comm_s, waiting = values["comm_s"], values["wait_comm_share"]
    return None if comm_s is None or waiting is None else comm_s * (1 - waiting)


ROWS = Group(
    "Rows",
    (
        Figure("rows", "output rows", forms.count, "", "output rows: input rows times samples"),
        Figure("rows_ok", "ok", forms.count, "", "output rows with status ok; all token counts below are theirs, "
               "without reused rows"),
        Figure("reused_rows", "  reused", forms.count, "", "of these, rows whose answer was taken over from an earlier "
               "run (duplicates of them, too): no token, price or rate of this run counts them", only_if_any=True),
        Figure("finish_reasons.stop", "  ended by themselves", forms.count, "", "output rows that ended by themselves"),
        Figure("finish_reasons.length", "  cut at max_tokens", forms.count, "", "output rows with all the tokens that "
               "they were allowed, most likely not at their end", note=_of_length),
        Figure("finish_reasons.no_output", "  only their prompts", forms.count, only_if_any=True),
        Figure("rows_error", "error", forms.count, "", "output rows with status error"),
        Figure("finish_reasons.error", "", forms.count, "", "output rows that did not get an answer"),
    ),
)  # fmt: skip
ANSWERS = Group(
    "Answers",
    (
        Figure("structured_outputs.valid_share", "valid structured outputs", forms.percent, "%",
               "structured_outputs.valid / structured_outputs.rows", note=_of_structured, why_empty=""),
        Figure("structured_outputs.rows", "", forms.count, "", "computed rows that asked for a structured output"),
        Figure("structured_outputs.valid", "", forms.count, "", "of these, rows whose answer is what they asked for"),
        Figure("structured_outputs.cut", "", forms.count, "",
               "of these, rows cut at max_tokens; others ended by a stop string or token, in thinking or as an error"),
        Figure("reasoning.mean_tokens", "thinking per row", forms.rate, "tokens",
               "mean tokens of thinking, over ok rows with thinking that is told from the answer",
               note=lambda values: f"in {forms.count(values['reasoning.rows'])} rows", why_empty=""),
        Figure("reasoning.rows", "", forms.count, "", "ok rows with such thinking"),
        Figure("reasoning.cut_share", "  cut in their thinking", forms.percent, "%",
               "reasoning.cut / reasoning.rows", note=partial(_without_answer, key="reasoning.cut"), why_empty=""),
        Figure("reasoning.cut", "", forms.count, "",
               "of these, rows with nothing but thinking that were cut at max_tokens"),
        Figure("reasoning.ended_share", "  ended in their thinking", forms.percent, "%",
               "reasoning.ended / reasoning.rows", note=partial(_without_answer, key="reasoning.ended"), why_empty=""),
        Figure("reasoning.ended", "", forms.count, "",
               "of these, rows with nothing but thinking that ended by themselves or by a stop token"),
        Figure("mean_logprob", "mean log-probability", forms.number, "nats",
               "natural logarithm, mean over all output tokens of rows that asked for logprobs",
               note="per output token", why_empty=""),
    ),
    why_empty="",
)  # fmt: skip
TOKENS = Group(
    "Tokens",
    (
        Figure("input_tokens", "input", forms.count, "tokens", "prompt tokens, counted once per sample"),
        Figure("cached_tokens", "from a cache", forms.count, "tokens",
               "prompt tokens not to be computed for their row: shared in memory by the plan's order, loaded from "
               "disk, or a duplicate's; what ran all the same is replicated, recomputed or wasted"),
        Figure("memory_tokens", "  in memory", forms.count, "tokens", "of these, shared in memory by the plan's order"),
        Figure("disk_tokens", "  on disk", forms.count, "tokens", "of these, read from the store on disk"),
        Figure("duplicate_tokens", "  of duplicate rows", forms.count, "tokens",
               "of these, of rows that another row's answer serves"),
        Figure("cache_hit_rate", "hit share", forms.percent, "%", "cached_tokens / input_tokens", why_empty="no input"),
        Figure("optimal_cached_tokens", "at best from a cache", forms.count, "tokens",
               "input_tokens minus tokens of distinct prefixes that were not on disk, scored ones per row: a perfect "
               "cache"),
        Figure("computed_tokens", "computed", forms.count, "tokens",
               "prompt tokens that ran through the model, counted in prefill steps: the sum of the next four"),
        Figure("needed_tokens", "  needed once", forms.count, "tokens",
               "of these, what had to run once: neither shared by rows, as the plan orders them, nor on disk"),
        Figure("replicated_tokens", "  replicated on purpose", forms.count, "tokens",
               "of these, prefix tokens computed on more than one rank on purpose"),
        Figure("recomputed_tokens", "  recomputed", forms.count, "tokens",
               "of these, computed again by a rank that had computed them and given up their pages",
               note=lambda values: "pages were short" if values["recomputed_tokens"] else ""),
        Figure("wasted_prompt_tokens", "  wasted", forms.count, "tokens",
               "of these, lost with a killed rank or session, or of failed rows"),
        Figure("output_tokens", "output", forms.count, "tokens",
               "tokens delivered, a duplicate's delivered output included"),
        Figure("reused_input_tokens", "input of reused rows", forms.count, "tokens",
               "prompt tokens of reused_rows, which are not among input_tokens", only_if_any=True),
        Figure("reused_output_tokens", "output of reused rows", forms.count, "tokens",
               "tokens delivered with reused_rows, which are not among output_tokens", only_if_any=True),
        Figure("wasted_tokens", "wasted in all", forms.count, "tokens",
               "tokens run through the model for nothing: wasted_prompt_tokens, and the same of decode steps"),
    ),
)  # fmt: skip
SPEED = Group(
    "Speed",
    (
        Figure("rows_per_s", "rows, end to end", forms.rate, "rows/s", "rows / wall_s: start-up and finish count, too",
               why_empty="no time was measured"),
        Figure("tokens_per_s", "tokens, end to end", forms.rate, "tok/s",
               "(input_tokens + output_tokens) / wall_s: cached and duplicate tokens are delivered, so they count",
               note="input and output", why_empty="no time was measured"),
        Figure("prefill_tokens_per_s_per_node", "prefill per node", forms.rate, "tok/s",
               "prompt tokens, cached ones included, per second of prefill steps on one node with "
               "prefill_ranks_per_node such ranks",
               note=lambda values: ", ".join(filter(None, [_such_ranks(values, "prefill"), "cached included"])),
               why_empty="no prefill step"),
        Figure("prefill_tokens_per_s_per_rank", "", forms.rate, "tok/s", "the same on one rank that runs prefill"),
        Figure("prefill_ranks_per_node", "", forms.rate, "",
               "ranks that run prefill, on nodes that hold such ranks: mean over the time"),
        Figure("decode_tokens_per_s_per_node", "decode per node", forms.rate, "tok/s",
               "generated tokens per second of decode steps on one node with decode_ranks_per_node such ranks",
               note=lambda values: _such_ranks(values, "decode"), why_empty="no decode step"),
        Figure("decode_tokens_per_s_per_rank", "", forms.rate, "tok/s", "the same on one rank that runs decode"),
        Figure("decode_ranks_per_node", "", forms.rate, "",
               "ranks that run decode, on nodes that hold such ranks: mean over the time"),
        Figure("output_tokens_per_s_per_request", "output per request", forms.rate, "tok/s",
               "mean over generated requests of (tokens - 1) / (time of last - of first token)",
               why_empty="no request of two tokens"),
        Figure("acceptance_rate", "drafted tokens accepted", forms.percent, "%",
               "accepted_tokens / drafted_tokens; null when nothing was drafted",
               note=lambda values: f"of {forms.count(values['drafted_tokens'])}", why_empty=""),
        Figure("drafted_tokens", "", forms.count, "tokens",
               "guesses of the model's layer for multi-token prediction, run together with the tokens that were due"),
        Figure("accepted_tokens", "", forms.count, "tokens", "of these, right ones, which needed no step of their own"),
        Figure("speculation_gain", "  decode is quicker by", forms.ratio, "",
               "seconds that decode steps with guesses would have taken at the pace of this run's steps without, as "
               "many requests running, by the seconds that they took; null when there were none to compare",
               note="in steps with drafts", why_empty=""),
        Figure("weights_streamed_bytes", "weights read again", forms.megabytes, "MB",
               "bytes of weights read from disk in all sweeps (cluster.weights), the first sweep's among them",
               note=_of_sweeps, only_if_any=True),
        Figure("weights_wait_s", "  waited for them", forms.seconds, "s", "seconds in which ranks waited for weights",
               note=lambda values: f"{forms.percent(values.get('weights_wait_share') or 0)} % of the steps' time",
               only_if_any=True),
        Figure("sweeps", "", forms.count, "", "passes of steps through all layers that read weights"),
        Figure("graph_share", "decode as CUDA graphs", forms.percent, "%",
               "decode steps that ran as CUDA graphs; null when all ranks compute on CPUs",
               note=lambda values: f"others: {reason}" if (reason := values.get("no_graph")) else "", why_empty=""),
        Figure("recorded_graphs", "", forms.count, "", "CUDA graphs that were recorded, over all ranks"),
        Figure("mean_kv_tokens_per_output_token", "mean KV per output token", forms.rate, "tokens",
               "mean KV length that a generated token attended to", why_empty="nothing was generated"),
        Figure("wait_comm_share", "communication, waiting", forms.percent, "%",
               "share of communication time in which nothing moved, as another rank had not sent its rows; null when "
               "there was none, or where that is not known (GPUs)",
               note=lambda values: f"of {forms.seconds(values['comm_s'])} s, for late ranks", why_empty=""),
        Figure("hidden_comm_share", "communication hidden", forms.percent, "%",
               "share of communication time without waiting, in which rows moved while the rank computed; null like "
               "wait_comm_share",
               note=lambda values: f"of {forms.seconds(_moving_s(values))} s of moving",
               why_empty="none, or not told from waiting"),
        *(figure for kind in PHASES for figure in _overlap(kind)),
    ),
)  # fmt: skip
TIME = Group(
    "Time",
    (
        Figure("wall_s", "wall", forms.rate, "s",
               "seconds in which a session of the run was alive (planning and finishing too); gaps do not count",
               note=lambda values: forms.duration(values["wall_s"])),
        Figure("busy_s", "busy", forms.rate, "s",
               "seconds in model steps; busy, idle, startup: means over ranks, together the time ranks were held",
               note="mean over ranks"),
        Figure("idle_s", "idle", forms.rate, "s",
               "seconds in which ranks were held but neither starting up nor in a step", note="mean over ranks"),
        Figure("startup_s", "start-up", forms.rate, "s",
               "seconds from the start of a session that holds ranks to its first prefill step; `run` makes its plan "
               "in them, too",
               note="mean over ranks, planning of `run` included"),
        Figure("peak_nodes", "nodes, peak", forms.count, "", "most hosts on which ranks were held at one time"),
        Figure("mean_nodes", "nodes, mean", forms.rate, "", "mean number of hosts held, over the time in which any was",
               why_empty="no node held ranks"),
        Figure("gpu_hours", "GPU-hours", forms.hours, "h", "ranks held x hours held"),
        Figure("steps_outside_s", "steps outside", forms.seconds, "s",
               "most seconds by which a step began before its session or ended after it; null up to one second. If not "
               "null, a host's clock is wrong or was set during the run: do not trust times, speeds and cost",
               note="of their session: wrong clocks", only_if_any=True),
    ),
)  # fmt: skip
MONEY = Group(
    "Money",
    (
        Figure("cost_usd", "cost", forms.dollars, "$",
               "gpu_hours x the price of an accelerator-hour; null without that price",
               why_empty="no gpu_hour price", is_added_up=True),
        Figure("revenue_usd", "revenue at list prices", forms.dollars, "$",
               "hit, miss and output tokens at their list prices; null unless all three are set",
               why_empty="no token prices", is_added_up=True),
        Figure("cost_profit_margin", "cost profit margin", forms.percent, "%",
               "(revenue - cost) / cost, a ratio: 5.45 means 545 %",
               note="profit / cost", why_empty="needs cost and revenue"),
        Figure("gross_margin", "gross margin", forms.percent, "%",
               "(revenue - cost) / revenue, a ratio: 0.845 means 84.5 %",
               note="profit / revenue", why_empty="needs cost and revenue"),
    ),
    why_empty="The job has no prices: set gpu_hour, input_hit, input_miss and output under [pricing], then run "
    "`batchinfer finish` again.",
)  # fmt: skip
# $ per million tokens by the three usual conventions
UNIT_COSTS = Group(
    "Cost per million tokens",
    (
        Figure("usd_per_million_output_tokens", "all cost on output", forms.unit_dollars, "$/M",
               "the whole cost by output tokens", note="output tokens", why_empty="no such tokens"),
        Figure("usd_per_million_tokens", "all cost on all tokens", forms.unit_dollars, "$/M",
               "the whole cost by input and output tokens", note="input + output tokens", why_empty="no such tokens"),
        Figure("prefill_usd_per_million_input_tokens", "by pool: prefill", forms.unit_dollars, "$/M",
               "what prefill cost by input tokens", note="input tokens", why_empty="no such tokens"),
        Figure("decode_usd_per_million_output_tokens", "by pool: decode", forms.unit_dollars, "$/M",
               "what decode cost by output tokens", note="output tokens", why_empty="no such tokens"),
    ),
    why_empty="",
)  # fmt: skip
# the parts of the ranks' time: columns of rank_seconds.sql
PARTS = {
    "startup": "start-up",
    "prefill": "prefill",
    "decode": "decode",
    "exchange": "waiting for expert rows",
    "waste": "wasted work",
    "tail": "tail",
    "idle": "idle otherwise",
}
PART_COSTS = Group(
    "Cost by part",
    tuple(
        Figure(f"{part}_cost_usd", label, forms.dollars, "$", f"{part}: its share of the ranks' seconds x cost_usd")
        for part, label in PARTS.items()
    ),
    why_empty="",
)
RANKS = Group(
    "Ranks",
    (
        Figure("prefill_tokens_max_over_mean", "prefill tokens, max / mean", forms.ratio, "",
               "new tokens of the busiest rank of each prefill step, summed over steps, by the sum of the means; "
               "null with one prefill rank", why_empty=""),
        Figure("prefill_attention_max_over_mean", "prefill attention, max / mean", forms.ratio, "",
               "the same of the attention work: (query, key) pairs of the new tokens", why_empty=""),
        Figure("decode_kv_max_over_mean", "decode KV, max / mean", forms.ratio, "",
               "KV tokens of the busiest decode rank by the mean, over all decode steps; null with one decode rank",
               note=lambda values: f"at best {forms.ratio(values['decode_kv_bound'])}", why_empty=""),
        Figure("decode_kv_bound", "", forms.ratio, "",
               "what it cannot be below with what runs in each step: the largest request is on one rank"),
        Figure("decode_requests_max_over_mean", "decode requests, max / mean", forms.ratio, "",
               "requests of the decode rank with most by the mean, over all decode steps",
               note=lambda values: f"at best {forms.ratio(values['decode_requests_bound'])}", why_empty=""),
        Figure("decode_requests_bound", "", forms.ratio, "", "what it cannot be below: requests are whole"),
        Figure("decode_idle_share", "decode turns without work", forms.percent, "%", why_empty=""),
        Figure("tail_s", "tail", forms.seconds, "s", note="with an idle decode rank", why_empty=""),
        Figure("moves", "moved while running", forms.count, "", note="requests", only_if_any=True),
        Figure("restarts", "restarts", forms.count, "", note="after a rank died", only_if_any=True),
    ),
    why_empty="",
)  # fmt: skip
EXPERTS = Group(
    "Experts",
    (
        Figure("expert_rows_max_over_mean", "expert rows, busiest / mean", forms.ratio, "",
               "(token, expert) rows that the busiest rank's experts computed, by the mean: layer by layer and phase "
               "by phase, weighted by rows; null where one rank holds all",
               note=lambda values: f"promised {forms.ratio(values['expert_rows_promised_max_over_mean'])}",
               why_empty=""),
        Figure("expert_rows_promised_max_over_mean", "", forms.ratio, "",
               "the same of the rows that the placement in force gives each rank of the tokens counted"),
        Figure("expert_rows_measured_by_promised", "  measured / promised", forms.ratio, "",
               "expert_rows_max_over_mean / expert_rows_promised_max_over_mean", why_empty=""),
        Figure("expert_rows_furthest", "  furthest from promised", forms.percent, "%",
               "of all ranks: the furthest that rows measured in a phase are from those promised, as a share of these",
               note="of a rank's rows", why_empty=""),
        Figure("expert_placements", "experts placed", forms.count, "",
               "how often experts were placed while ranks ran", note="times while ranks ran", only_if_any=True),
        Figure("calibration_tokens", "calibration", forms.count, "tokens",
               "prompt tokens run before the first step, for their experts' sake alone: in no other count of tokens, "
               "and their time is part of the start-up", note="before the first step", only_if_any=True),
    ),
    why_empty="",
)  # fmt: skip
STORE = Group(
    "KV store",
    (
        Figure("store_read_bytes", "read", forms.megabytes, "MB", why_empty=""),
        Figure("store_written_bytes", "written", forms.megabytes, "MB", note=_of_written, why_empty=""),
        Figure("store_wait_s", "prefill waited for it", forms.seconds, "s", note="added up over ranks", why_empty=""),
        Figure("store_evicted_bytes", "evicted", forms.megabytes, "MB", only_if_any=True),
        Figure("store_unwritten_blocks", "not written", forms.count, "blocks", note="no room, or disk too slow",
               only_if_any=True),
        Figure("store_damaged_files", "damaged", forms.count, "files", note="computed again", only_if_any=True),
    ),
    why_empty="",
)  # fmt: skip
GROUPS = (ROWS, ANSWERS, TOKENS, SPEED, TIME, MONEY, UNIT_COSTS, PART_COSTS, RANKS, EXPERTS, STORE)
FIGURES = {figure.key: figure for group in GROUPS for figure in group.figures}
PUBLISHED = tuple(figure for figure in FIGURES.values() if figure.meaning)

# label and form of each prediction, by its name in predictions.sql
PREDICTIONS: dict[str, tuple[str, Form]] = {
    "computed_tokens": ("prompt tokens computed", forms.count),
    "output_tokens": ("output tokens", forms.count),
    "prefill_tokens_balance": ("prefill tokens, busiest / mean", forms.ratio),
    "prefill_attention_balance": ("prefill attention, busiest / mean", forms.ratio),
    "decode_balance": ("decode KV, busiest / mean", forms.ratio),
    "expert_balance": ("experts, busiest / mean", forms.ratio),
    "work_s": ("seconds on ranks", forms.rate),
    "gpu_hours": ("GPU-hours", forms.hours),
    "cost_usd": ("cost, $", forms.dollars),
}


def known(*keys: str) -> tuple[Figure, ...]:
    """Return the figures with these keys, for another group."""
    return tuple(FIGURES[key] for key in keys)


def as_tables(by_key: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keys with a dot to nested tables: {'a.b': 1} becomes {'a': {'b': 1}}."""
    found: dict[str, Any] = {}
    for key, value in by_key.items():
        table, dot, name = key.partition(".")
        if dot:
            found.setdefault(table, {})[name] = value
        else:
            found[key] = value
    return found


def document(values: Values) -> dict[str, Any]:
    """Return the published figures as a JSON document."""
    return as_tables({figure.key: values[figure.key] for figure in PUBLISHED})


def changes(before: Values, after: Values) -> dict[str, Any]:
    """Return before, after, difference and relative change of every published figure (no relative change from 0)."""
    found = {}
    for key in (figure.key for figure in PUBLISHED):
        old, new = before[key], after[key]
        difference = None if old is None or new is None else new - old
        relative = None if difference is None or not old else difference / abs(old)
        found[key] = {"before": old, "after": new, "difference": difference, "relative": relative}
    return as_tables(found)
