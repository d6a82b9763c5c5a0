"""Of a run that is not finished: how much is done, and which figures nobody can know before its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchinfer.checked_json import read_json
from batchinfer.report.forms import Value, count
from batchinfer.rundir import RunDir

KEY = "unfinished"  # of run.json in a folder of statistics so far (finish/so_far.py), and of --json
# They compare rows that are done with work for rows that are not, or with what the whole plan is to share
NOT_KNOWN_YET = ("optimal_cached_tokens", "wasted_prompt_tokens", "wasted_tokens", "waste_cost_usd")
# predictions of the whole run, by their names in queries/predictions.sql
OF_THE_WHOLE = ("computed_tokens", "output_tokens", "work_s", "gpu_hours", "cost_usd")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """How much of a run is done; what is planned is None while it is being planned."""

    activity: str  # as `status` has it; of several runs all of them
    rows_done: int  # output rows whose results are durable, error rows too
    rows_planned: int | None
    tokens_done: int  # of prompts and outputs
    tokens_planned: int | None

    def sentence(self) -> str:
        """What a person is told of it."""
        if self.rows_planned is None or self.tokens_planned is None:
            done = "not planned yet"
        else:
            rows = f"{count(self.rows_done)} of {count(self.rows_planned)} rows"
            done = f"{rows}, {count(self.tokens_done)} of {count(self.tokens_planned)} tokens"
        return f"unfinished ({self.activity}): {done}; figures are of what is durable so far"


def read_unfinished(run: RunDir) -> Unfinished | None:
    """What `write_so_far` has noted; None of a run folder itself."""
    found = read_json(run.run_json).get(KEY)
    return None if found is None else Unfinished(**found)


def together(runs: Sequence[Unfinished]) -> Unfinished | None:
    """Those of several runs that are not finished; None: all are."""
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
    """The figures without those that nobody can know yet."""
    return {**values, **dict.fromkeys(NOT_KNOWN_YET)}
