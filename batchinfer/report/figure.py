"""Figures of a report: numbers of a run, each with its name, unit, printed form and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchinfer.report import forms
from batchinfer.report.forms import Form, Value

Values = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run: its name, unit and printed form, and the text that replaces an unknown value."""

    key: str  # in --json; a dot separates table and name
    label: str  # shown to people; "": the figure is in --json only
    form: Form
    unit: str = ""
    meaning: str = ""  # on the page; "": the figure is not in --json
    note: str | Callable[[Values], str] = ""  # printed after the number
    why_empty: str = "not known"  # printed if the value is None; "": the figure is left out then
    only_if_any: bool = False  # the figure is left out if its value is 0
    is_added_up: bool = False  # several runs: the sum of their values; other figures are computed from all tables

    def called(self, label: str, note: str = "") -> Figure:
        """Return this figure with another label and note."""
        return replace(self, label=label, note=note)

    def note_of(self, values: Values) -> str:
        """Return the note that is printed after the number."""
        return self.note if isinstance(self.note, str) else self.note(values)

    def is_shown(self, values: Values) -> bool:
        """Return whether the figure is shown to people."""
        value = values[self.key]
        return bool(self.label and (value if self.only_if_any else value is not None or self.why_empty))

    def change(self, before: Value, after: Value) -> str:
        """Format the change between two runs: relative in percent; the difference for percentages and logarithms."""
        if before is None or after is None:
            return forms.DASH
        if self.unit == "%":
            return f"{100 * (after - before):+,.1f} points"
        if self.unit == "nats":
            return f"{after - before:+,.3g} nats"
        if before:
            return f"{100 * (after - before) / abs(before):+,.1f} %"
        return "0" if after == before else "from 0"


@dataclass(frozen=True, slots=True)
class Group:
    """Figures under one heading."""

    title: str
    figures: tuple[Figure, ...]
    why_empty: str | None = None  # printed instead of the figures if none is known; "": the group is left out then


def groups_of(columns: Sequence[Values], groups: Sequence[Group]) -> Iterator[tuple[Group, list[Figure]]]:
    """Yield the groups to show, each with its shown figures; without figures, `why_empty` is printed."""
    for group in groups:
        shown = [figure for figure in group.figures if any(figure.is_shown(values) for values in columns)]
        if group.why_empty is None or any(values[figure.key] is not None for values in columns for figure in shown):
            yield group, shown
        elif group.why_empty:
            yield group, []
