"""The panel of a finished run for a terminal. Called by `batchinfer report` and `run`."""

from __future__ import annotations

from dataclasses import asdict
from textwrap import wrap
from typing import Any

from batchinfer.report import forms
from batchinfer.report.metrics import Figure, RankDetails, RunDetails, StoreDetails, is_worth_showing
from batchinfer.report.side_by_side import all_figures
from batchinfer.report.terminal import fit
from batchinfer.run.equal_rows import UNEQUAL
from batchinfer.sanitize import sanitize

PANEL_WIDTH = 80
LABEL_WIDTH = 26
VALUE_WIDTH = 18
COLUMN_WIDTH = 17  # of the second and third number in a line about a rank


def format_report(metrics: dict[str, Figure], details: RunDetails | None = None) -> str:
    """The report as grouped lines with units, at most 80 columns wide; '-' with the reason for what is not known.

    Args:
        metrics: from report_metrics.
        details: from report_details; adds the run's name, the prediction, the ranks when there were several, unreadable
            shards and the commonest errors.
    """
    sections = [
        ("Rows", _row_lines(metrics)),
        ("Tokens", _token_lines(metrics, details)),
        ("Speed", _speed_lines(metrics, details)),
        ("Time", _time_lines(metrics)),
        ("Money", _money_lines(metrics, details)),
    ]
    lines = []
    if details is not None:
        lines.append(fit(f"{details.run}   ({details.model}, {details.dtype})", PANEL_WIDTH))
        lines += _equality_lines(details)
    for title, body in sections:
        lines += [title, *body]
    if details is not None:
        lines += _seconds_lines(metrics, details) + _prediction_lines(details) + _rank_lines(details)
        lines += _store_lines(details.store) + _shard_lines(details) + _error_lines(details)
    return "\n".join(lines) + "\n"


def report_document(metrics: dict[str, Figure], details: RunDetails) -> dict[str, Any]:
    """The report as a JSON document: the keys of METRICS, hits by source, costs by part, equal rows, the plan."""
    predictions = {found.name: {"planned": found.planned, "happened": found.happened, "at_best": found.at_best}
                   for found in details.predictions}  # fmt: skip
    equality = {key: getattr(details, key) for key in ("bit_equal", "bit_equal_reason", "processor")}
    return {**all_figures(metrics, details), **equality, "predictions": predictions}


def _equality_lines(details: RunDetails) -> list[str]:
    """Nothing unless answers may depend on what rows were batched with."""
    if details.bit_equal is not False:
        return []
    return wrap(sanitize(f"warning: {UNEQUAL}: {details.bit_equal_reason}"), PANEL_WIDTH)


def _row_lines(m: dict[str, Figure]) -> list[str]:
    return [
        _line("output rows", forms.count(m["rows"])),
        _line("ok", forms.count(m["rows_ok"])),
        _line("error", forms.count(m["rows_error"])),
    ]


def _token_lines(m: dict[str, Figure], details: RunDetails | None) -> list[str]:
    hit_rate = m["cache_hit_rate"]
    hit_note = None if hit_rate is None else f"{hit_rate:.1%} of input"
    lines = [
        _line("input", forms.count(m["input_tokens"]), "tokens"),
        _line("from a cache", forms.count(m["cached_tokens"]), "tokens", hit_note),
    ]
    if details is not None:
        lines += [
            _line("  in memory", forms.count(details.memory_tokens), "tokens"),
            _line("  on disk", forms.count(details.disk_tokens), "tokens"),
            _line("  of duplicate rows", forms.count(details.duplicate_tokens), "tokens"),
        ]
    lines.append(_line("at best from a cache", forms.count(m["optimal_cached_tokens"]), "tokens"))
    if details is not None:
        lines.append(_line("computed", forms.count(details.computed_tokens), "tokens"))
    return [
        *lines,
        _line("output", forms.count(m["output_tokens"]), "tokens"),
        _line("replicated on purpose", forms.count(m["replicated_tokens"]), "tokens"),
        _line("wasted", forms.count(m["wasted_tokens"]), "tokens"),
    ]


def _speed_lines(m: dict[str, Figure], details: RunDetails | None) -> list[str]:
    prefill, decode = m["prefill_tokens_per_s_per_node"], m["decode_tokens_per_s_per_node"]
    per_request, kv_tokens = m["output_tokens_per_s_per_request"], m["mean_kv_tokens_per_output_token"]
    comm_note = None if details is None else f"of {forms.seconds(details.comm_s)} s"
    return [
        _line("prefill per node", forms.rate(prefill), "tok/s", "cached tokens included", "no prefill step"),
        _line("decode per node", forms.rate(decode), "tok/s", None, "no decode step"),
        _line("output per request", forms.rate(per_request), "tok/s", None, "no request of two tokens"),
        _line("mean KV per output token", forms.rate(kv_tokens), "tokens", None, "nothing was generated"),
        _line("communication hidden", forms.percent(m["hidden_comm_share"]), "%", comm_note, "there was none"),
    ]


def _time_lines(m: dict[str, Figure]) -> list[str]:
    return [
        _line("wall", forms.rate(m["wall_s"]), "s", forms.duration(m["wall_s"])),
        _line("busy", forms.rate(m["busy_s"]), "s", "mean over ranks"),
        _line("idle", forms.rate(m["idle_s"]), "s", "mean over ranks"),
        _line("start-up", forms.rate(m["startup_s"]), "s", "mean over ranks"),
        _line("nodes, peak", forms.count(m["peak_nodes"])),
        _line("nodes, mean", forms.rate(m["mean_nodes"]), "", None, "no node held ranks"),
        _line("GPU-hours", forms.hours(m["gpu_hours"]), "h"),
    ]


def _money_lines(m: dict[str, Figure], details: RunDetails | None) -> list[str]:
    no_cost = "no gpu_hour price in the job"
    no_revenue = "no token prices in the job"
    no_margin = "needs cost and token prices"
    if m["cost_usd"] is not None and m["revenue_usd"] is not None:
        no_margin = "nothing was spent or earned"
    elif details is not None:
        # the one price that is missing, when the other one is there
        no_margin = no_cost if details.has_token_prices else no_revenue if details.has_gpu_price else no_margin
    lines = [
        _line("cost", forms.dollars(m["cost_usd"]), "$", None, no_cost),
        _line("revenue at list prices", forms.dollars(m["revenue_usd"]), "$", None, no_revenue),
        _line("cost profit margin", forms.percent(m["cost_profit_margin"]), "%", "profit / cost", no_margin),
        _line("gross margin", forms.percent(m["gross_margin"]), "%", "profit / revenue", no_margin),
    ]
    if details is None or m["cost_usd"] is None:
        return lines
    costs = asdict(details.unit_costs)
    return lines + [
        _line(label, forms.unit_dollars(costs[name]), "$/M", f"{tokens} tokens", "no such tokens")
        for name, (label, tokens) in forms.UNIT_COST_LABELS.items()
    ]


def _seconds_lines(m: dict[str, Figure], details: RunDetails) -> list[str]:
    """Where each second of each rank went, and what it cost."""
    total, cost = details.seconds.total, m["cost_usd"]
    if not total:
        return []
    lines = [
        _columns(
            f"  {forms.SECONDS_LABELS[name]}",
            forms.rate(part),
            f"{part / total:.1%}",
            None if cost is None else forms.dollars(cost * part / total),
        )
        for name, part in asdict(details.seconds).items()
    ]
    return [_columns("Where the time went", "rank-seconds", "share", "cost, $"), *lines]


def _prediction_lines(details: RunDetails) -> list[str]:
    """The plan beside what happened, for what it could foresee and what applies."""
    lines = [
        _columns(f"  {label}", form(found.planned), form(found.happened), form(found.at_best))
        for found in details.predictions
        for label, form in [forms.PREDICTION_FORMS[found.name]]
        if is_worth_showing(found)
    ]
    return [_columns("Plan", "planned", "happened", "at best"), *lines] if lines else []


def _rank_lines(details: RunDetails) -> list[str]:
    """What each rank did, when there were several, and how often they were started again, when they were."""
    restarts = [_line("restarts", forms.count(details.restarts), "", "after a rank died")] if details.restarts else []
    if len(details.ranks) < 2:
        return ["Ranks", *restarts] if restarts else []
    digits = len(str(details.ranks[-1].rank))
    return [
        _columns("Ranks", "prefill tokens", "decode tokens", "busy s"),
        *(
            _columns(
                f"  rank {rank.rank:>{digits}}  {rank.role}",
                forms.count(rank.prefill_tokens),
                forms.count(rank.output_tokens),
                forms.rate(rank.busy_s),
            )
            for rank in details.ranks
        ),
        *_balance_lines(details.ranks),
        *_idle_lines(details),
        *restarts,
    ]


def _idle_lines(details: RunDetails) -> list[str]:
    """Decode ranks without work, and what was done against it; nothing unless several ranks decoded."""
    if details.decode_idle_share is None:
        return []
    return [
        _line("decode turns without work", forms.percent(details.decode_idle_share), "%"),
        _line("tail", forms.seconds(details.tail_s), "s", "with an idle decode rank"),
        _line("moved while running", forms.count(details.moves), "", "requests"),
    ]


def _balance_lines(ranks: tuple[RankDetails, ...]) -> list[str]:
    """How evenly the experts' work was spread over the ranks of one role: they hold the experts between them."""
    roles = list(dict.fromkeys(rank.role for rank in ranks))
    lines = []
    for role in roles:
        expert_rows = [rank.expert_rows for rank in ranks if rank.role == role]
        if len(expert_rows) > 1:
            ratio = max(expert_rows) * len(expert_rows) / sum(expert_rows) if any(expert_rows) else None
            note = f"{role} ranks" if len(roles) > 1 else None
            lines.append(_line("expert rows, max / mean", forms.rate(ratio), "", note, "no expert was used"))
    return lines


def _store_lines(store: StoreDetails | None) -> list[str]:
    """What the KV store on disk did; of trouble only what there was."""
    if store is None:
        return []
    lines = [
        _line("read", forms.megabytes(store.read_bytes), "MB"),
        _line("written", forms.megabytes(store.written_bytes), "MB"),
        _line("prefill waited for it", forms.seconds(store.wait_s), "s", "added up over ranks"),
    ]
    if store.evicted_bytes:
        lines.append(_line("evicted", forms.megabytes(store.evicted_bytes), "MB"))
    if store.unwritten_blocks:
        lines.append(_line("not written", forms.count(store.unwritten_blocks), "blocks", "no room, or disk too slow"))
    if store.damaged_files:
        lines.append(_line("damaged", forms.count(store.damaged_files), "files", "computed again"))
    return ["KV store", *lines]


def _shard_lines(details: RunDetails) -> list[str]:
    shards = details.unreadable_shards
    if not shards:
        return []
    lines = [f"Unreadable shards ({len(shards):,})"]
    for path, problem in shards[:10]:
        lines += [f"  {fit(path, PANEL_WIDTH - 2, keep_end=True)}", f"    {fit(problem, PANEL_WIDTH - 4)}"]
    if len(shards) > 10:
        lines.append(f"  and {len(shards) - 10:,} more")
    return lines


def _error_lines(details: RunDetails) -> list[str]:
    if not details.errors:
        return []
    lines = ["Errors"]
    for error, num_rows in details.errors:
        lines.append(f"{num_rows:>12,} x {fit(error, PANEL_WIDTH - 15)}")
    num_more = details.num_error_texts - len(details.errors)
    if num_more > 0:
        lines.append(f"{'':>12}   and {num_more:,} other texts (column error of the outputs)")
    return lines


def _line(label: str, value: str | None, unit: str = "", note: str | None = None, why_not: str = "not known") -> str:
    if value is None:
        return f"  {label:<{LABEL_WIDTH}}{'-':>{VALUE_WIDTH}} {why_not}"
    text = f"  {label:<{LABEL_WIDTH}}{value:>{VALUE_WIDTH}} {unit:<6} {note or ''}".rstrip()
    return text if len(text) <= PANEL_WIDTH else text[: PANEL_WIDTH - 1] + "…"


def _columns(label: str, first: str | None, second: str | None, third: str | None) -> str:
    """A line of three numbers, the first one where other lines have theirs."""
    cells = [value or "-" for value in (first, second, third)]
    return f"{label:<{LABEL_WIDTH + 2}}{cells[0]:>{VALUE_WIDTH}}{cells[1]:>{COLUMN_WIDTH}}{cells[2]:>{COLUMN_WIDTH}}"
