"""The progress of an unfinished run, and the figures that are unknown before its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchinfer.checked_json import read_json
from batchinfer.report.forms import Value, count
from batchinfer.rundir import RunDir

KEY = "unfinished"  # of run.json in a folder of statistics so far (finish/so_far.py), and of --json
# These figures compare finished rows with work for unfinished rows, or with the sharing of the whole plan
NOT_KNOWN_YET = ("optimal_cached_tokens", "wasted_prompt_tokens", "wasted_tokens", "waste_cost_usd")
# predictions of the whole run, by their names in queries/predictions.sql
OF_THE_WHOLE = ("computed_tokens", "output_tokens", "work_s", "gpu_hours", "cost_usd")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The finished part of a run; planned numbers are None while the run is being planned."""

    activity: str  # as in `status`; several runs: their activities joined by +
    rows_done: int  # output rows whose results are durable, error rows too
    rows_planned: int | None
    tokens_done: int  # of prompts and outputs
    tokens_planned: int | None

    def sentence(self) -> str:
        """Return the progress as a sentence."""
        if self.rows_planned is None or self.tokens_planned is None:
            done = "not planned yet"
        else:
            rows = f"{count(self.rows_done)} of {count(self.rows_planned)} rows"
            done = f"{rows}, {count(self.tokens_done)} of {count(self.tokens_planned)} tokens"
        return f"unfinished ({self.activity}): {done}; figures are of what is durable so far"


def read_unfinished(run: RunDir) -> Unfinished | None:
    """Read the progress from a folder of statistics so far; return None for a run folder itself."""
    found = read_json(run.run_json).get(KEY)
    return None if found is None else Unfinished(**found)


def together(runs: Sequence[Unfinished]) -> Unfinished | None:
    """Add up the progress of unfinished runs; return None if there are none."""
    if not runs:
        return None
    rows, tokens = ([getattr(one, f"{what}_planned") for one in runs] for what in ("rows", "tokens"))
    return Unfinished(
        activity=" + ".join(dict.fromkeys(one.activity for one in runs)),
        rows_done=sum(one.rows_done for one in runs),
        rows_planned=None if None in rows else sum(rows),
        tokens_done=sum(one.tokens_done for one in runs),
        tokens_planned=None if None in tokens else sum(tokens),
    )


def known_so_far(values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the figures, with None for those that are unknown before the run's end."""
    return {**values, **dict.fromkeys(NOT_KNOWN_YET)}
