"""Comparison tables of several runs for a terminal: side by side, or two runs with their changes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import RenderableType
from rich.text import Text

from batchinfer.report import forms
from batchinfer.report.figure import Figure, Values, groups_of
from batchinfer.report.figures import GROUPS, PREDICTIONS
from batchinfer.report.read import Prediction
from batchinfer.report.terminal import HEADING, NOTE, table, text
from batchinfer.sanitize import fit

MAX_COLUMNS = 3  # runs in one table of at most 80 columns
NAME_WIDTH = 14


@dataclass(frozen=True, slots=True)
class Column:
    """One run in the table, or several together."""

    name: str
    values: Values


def run_names(run_folders: Sequence[Path]) -> list[str]:
    """Return a distinct name per run: the folder's name, or the whole path if two folders have the same name."""
    folders = [Path(folder).resolve() for folder in run_folders]
    names = [folder.name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def side_by_side(columns: Sequence[Column]) -> Iterator[RenderableType]:
    """Yield tables with a line per figure and a column per run, at most MAX_COLUMNS runs in each table."""
    for start in range(0, len(columns), MAX_COLUMNS):
        if start:
            yield text("")
        yield _table(columns[start : start + MAX_COLUMNS])


def changed(before: Column, after: Column) -> RenderableType:
    """Return a table of two runs with the change of each figure from the first to the second."""
    return _table([before, after], lambda figure: figure.change(before.values[figure.key], after.values[figure.key]))


def planned_and_happened(runs: Sequence[tuple[str, Sequence[Prediction]]]) -> RenderableType:
    """Return a table of what each run's plan predicted and what happened, figure by figure, with the median error.

    Args:
        runs: name and predictions of each run.
    """
    rows: list[list[str | Text]] = []
    for name, (label, form) in PREDICTIONS.items():
        lines: list[list[str | Text]] = []
        errors: list[float] = []
        for run, predictions in runs:
            for found in predictions:
                if found.name == name and found.planned is not None and found.happened is not None:
                    off = found.planned / found.happened - 1 if found.happened else None
                    errors += [] if off is None else [off]
                    shown = fit(run, NAME_WIDTH, keep_end=True)
                    lines.append([f"  {shown}", form(found.planned), form(found.happened), forms.signed_percent(off)])
        if lines:
            middle = f"median {forms.signed_percent(median(errors))}" if errors else ""
            rows += [[text(label, HEADING), "", "", text(middle, NOTE)], *lines]
    return table(rows, "lrrr", ("planned, happened", "planned", "happened", "planned by happened"))


def _table(columns: Sequence[Column], change: Callable[[Figure], str] | None = None) -> RenderableType:
    names = [fit(column.name, NAME_WIDTH, keep_end=True) for column in columns]
    rows: list[list[str | Text]] = [
        ["", "", *(text(name, HEADING) for name in [*names, *(["change"] if change else [])])]
    ]
    for group, figures in groups_of([column.values for column in columns], GROUPS):
        if figures:
            rows.append([text(group.title, HEADING)])
        for figure in figures:
            numbers = [figure.form(column.values[figure.key]) for column in columns]
            rows.append([f"  {figure.label}", text(figure.unit, NOTE), *numbers, *([change(figure)] if change else [])])
    return table(rows, "ll" + "r" * (len(columns) + bool(change)))
