"""What a figure is: a number of a run with its name, its unit and how people are told of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from batchinfer.report import forms
from batchinfer.report.forms import Form, Value

Values = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run: its name, its unit, how it is printed, and what is said when there is none."""

    key: str  # of --json; with a dot: of the table there
    label: str  # for people; "": in --json only
    form: Form
    unit: str = ""
    meaning: str = ""  # on the page; "": for people only, not in --json
    note: str | Callable[[Values], str] = ""  # after it
    why_empty: str = "not known"  # "": nothing is said of it then
    only_if_any: bool = False  # nothing is said of it when it is 0
    is_added_up: bool = False  # over several runs, from each run's own; others are computed from all tables together

    def called(self, label: str, note: str = "") -> Figure:
        """The same one by another name."""
        return replace(self, label=label, note=note)

    def note_of(self, values: Values) -> str:
        """What is said after the number."""
        return self.note if isinstance(self.note, str) else self.note(values)

    def is_shown(self, values: Values) -> bool:
        """Whether people are told of it."""
        value = values[self.key]
        return bool(self.label and (value if self.only_if_any else value is not None or self.why_empty))

    def change(self, before: Value, after: Value) -> str:
        """What became of it in the second of two runs: in percent; of percents and logarithms the difference."""
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
    why_empty: str | None = None  # said instead of the figures when none of them is known; "": nothing is said then


def groups_of(columns: Sequence[Values], groups: Sequence[Group]) -> Iterator[tuple[Group, list[Figure]]]:
    """The groups that people are told of, each with its figures; with none where the group's `why_empty` is said."""
    for group in groups:
        shown = [figure for figure in group.figures if any(figure.is_shown(values) for values in columns)]
        if group.why_empty is None or any(values[figure.key] is not None for values in columns for figure in shown):
            yield group, shown
        elif group.why_empty:
            yield group, []
