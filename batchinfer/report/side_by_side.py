"""Several runs in one table: side by side, together, or two compared. Called by `batchinfer report` and html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.report import forms
from batchinfer.report.metrics import Figure, RunDetails
from batchinfer.report.terminal import display_width, fit

LABEL_WIDTH = 30
COLUMN_WIDTH = 16
MAX_COLUMNS = 3  # number columns of a line of at most 80 characters
CHANGE_WIDTH = COLUMN_WIDTH + 1

# label with unit, key, form
LINES: tuple[tuple[str, tuple[tuple[str, str, forms.Form], ...]], ...] = (
    (
        "Rows",
        (
            ("output rows", "rows", forms.count),
            ("ok", "rows_ok", forms.count),
            ("error", "rows_error", forms.count),
        ),
    ),
    (
        "Tokens",
        (
            ("input", "input_tokens", forms.count),
            ("from a cache", "cached_tokens", forms.count),
            ("  in memory", "memory_tokens", forms.count),
            ("  on disk", "disk_tokens", forms.count),
            ("  of duplicate rows", "duplicate_tokens", forms.count),
            ("hit share, %", "cache_hit_rate", forms.percent),
            ("at best from a cache", "optimal_cached_tokens", forms.count),
            ("output", "output_tokens", forms.count),
            ("replicated on purpose", "replicated_tokens", forms.count),
            ("wasted", "wasted_tokens", forms.count),
        ),
    ),
    (
        "Speed",
        (
            ("prefill per node, tok/s", "prefill_tokens_per_s_per_node", forms.rate),
            ("decode per node, tok/s", "decode_tokens_per_s_per_node", forms.rate),
            ("output per request, tok/s", "output_tokens_per_s_per_request", forms.rate),
            ("mean KV per output token", "mean_kv_tokens_per_output_token", forms.rate),
            ("communication hidden, %", "hidden_comm_share", forms.percent),
        ),
    ),
    (
        "Time",
        (
            ("wall, s", "wall_s", forms.rate),
            ("busy, s", "busy_s", forms.rate),
            ("idle, s", "idle_s", forms.rate),
            ("start-up, s", "startup_s", forms.rate),
            ("nodes, peak", "peak_nodes", forms.count),
            ("nodes, mean", "mean_nodes", forms.rate),
            ("GPU-hours", "gpu_hours", forms.hours),
        ),
    ),
    (
        "Money",
        (
            ("cost, $", "cost_usd", forms.dollars),
            *((f"  {label}, $", f"{name}_cost_usd", forms.dollars) for name, label in forms.SECONDS_LABELS.items()),
            ("revenue at list prices, $", "revenue_usd", forms.dollars),
            ("cost profit margin, %", "cost_profit_margin", forms.percent),
            ("gross margin, %", "gross_margin", forms.percent),
            *((f"{label}, $/M", name, forms.unit_dollars) for name, (label, _) in forms.UNIT_COST_LABELS.items()),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Column:
    """One run in the table, or several together."""

    name: str
    figures: dict[str, Figure]  # from all_figures


def run_names(run_folders: Sequence[Path]) -> list[str]:
    """What tells runs apart: their folders' names, or whole paths where two names are the same."""
    folders = [Path(folder).resolve() for folder in run_folders]
    names = [folder.name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def all_figures(metrics: dict[str, Figure], details: RunDetails) -> dict[str, Figure]:
    """The figures of a run that can be compared, by name: the report's keys, then hits by source and costs by part."""
    total, cost = details.seconds.total, metrics["cost_usd"]
    part_costs = {
        f"{name}_cost_usd": None if cost is None or not total else cost * part / total
        for name, part in asdict(details.seconds).items()
    }
    return {
        **metrics,
        "memory_tokens": details.memory_tokens,
        "disk_tokens": details.disk_tokens,
        "duplicate_tokens": details.duplicate_tokens,
        **part_costs,
        **asdict(details.unit_costs),
    }


def changes(before: dict[str, Figure], after: dict[str, Figure]) -> dict[str, dict[str, Figure]]:
    """For every figure: before, after, their difference, and the difference by the first (null when that is 0)."""
    found: dict[str, dict[str, Figure]] = {}
    for key, old in before.items():
        new = after[key]
        difference = None if old is None or new is None else new - old
        relative = None if difference is None or not old else difference / abs(old)
        found[key] = {"before": old, "after": new, "difference": difference, "relative": relative}
    return found


def format_side_by_side(columns: Sequence[Column]) -> str:
    """A line per figure and a column per run, at most 80 characters wide: more runs follow in further blocks."""
    blocks = [columns[start : start + MAX_COLUMNS] for start in range(0, len(columns), MAX_COLUMNS)]
    return "\n".join(_block(list(block)) for block in blocks)


def format_changes(before: Column, after: Column) -> str:
    """Two runs and what changed from the first to the second: in percent, or in points of a figure in percent."""
    change: dict[str, str] = {}
    for _, lines in LINES:
        for _, key, form in lines:
            old, new = before.figures[key], after.figures[key]
            if old is None or new is None:
                continue
            if form is forms.percent:
                change[key] = f"{100 * (new - old):+,.1f} points"
            elif old:
                change[key] = f"{100 * (new - old) / abs(old):+,.1f} %"
            else:
                change[key] = "0" if new == old else "from 0"
    return _block([before, after], change)


def _block(columns: list[Column], change: dict[str, str] | None = None) -> str:
    names = [fit(column.name, COLUMN_WIDTH - 1, keep_end=True) for column in columns]
    lines = [_cells("", [*names, *(["change"] if change is not None else [])])]
    for section, entries in LINES:
        lines.append(section)
        for label, key, form in entries:
            cells = [form(column.figures[key]) or "-" for column in columns]
            lines.append(_cells(f"  {label}", [*cells, *([change.get(key, "-")] if change is not None else [])]))
    return "\n".join(lines) + "\n"


def _cells(label: str, cells: list[Any]) -> str:
    padded = [" " * (COLUMN_WIDTH - display_width(cell)) + cell for cell in cells]
    return (f"{label:<{LABEL_WIDTH}}" + "".join(padded)).rstrip()
