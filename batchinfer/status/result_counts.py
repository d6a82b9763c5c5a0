"""Counts of a run's results, steps and tokens for its status, planned and done, and their recent speeds."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.data.parquet import own_file, sealed_table
from batchinfer.records import DamagedFileError
from batchinfer.run.heartbeat import SessionStatus
from batchinfer.run.units.result_files import damage, is_reused
from batchinfer.rundir import RunDir

WINDOW_S = 300.0  # speeds are measured over the last minutes
MOST_ERRORS = 100  # different errors kept per file; the status shows the three most frequent of all files


@dataclass(frozen=True, slots=True)
class ResultFile:
    """The counts of a result file, which never changes."""

    rows: int
    failed: int
    written_s: float
    prompt_tokens: int = 0  # computed for the file's rows
    output_tokens: int = 0
    errors: tuple[tuple[str, int], ...] = ()  # (error text, number of rows)
    is_reused: bool = False  # answers of an earlier run


def read_result_file(path: Path, *, is_checked: bool = False) -> ResultFile:
    """Count rows, errors and tokens of a result file, which is compared with its digest if it `is_checked`.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    reason = damage(path) if is_checked else None
    if reason is not None:
        raise DamagedFileError(path, reason)
    failed: list[str] = []
    with own_file(path):
        metadata = pq.read_metadata(path)
        if any(_may_hold_errors(metadata.row_group(group)) for group in range(metadata.num_row_groups)):
            table = pq.read_table(path, columns=["status", "error"]).to_pydict()
            failed = [error for status, error in zip(*table.values(), strict=True) if status == "error"]
        counts = pq.read_table(path, columns=["computed_tokens", "completion_tokens"])
    prompt_tokens, output_tokens = (pc.sum(column).as_py() or 0 for column in counts.columns)
    errors = tuple(Counter(failed).most_common(MOST_ERRORS))
    written_s = path.stat().st_mtime
    return ResultFile(metadata.num_rows, len(failed), written_s, prompt_tokens, output_tokens, errors, is_reused(path))


def _may_hold_errors(group: pq.RowGroupMetaData) -> bool:
    """Return whether a row group may have a status other than 'ok', by the file's footer."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema == "status":
            known = column.statistics
            return known is None or not known.has_min_max or (known.min, known.max) != ("ok", "ok")
    return True


def requests_per_s(files: list[ResultFile], now_s: float) -> float | None:
    """Return the requests per second that became durable in the last minutes; None if there were none."""
    files = [file for file in files if not file.is_reused]
    recent = [file for file in files if now_s - file.written_s <= WINDOW_S]
    if not recent:
        return None
    earlier = [file.written_s for file in files if now_s - file.written_s > WINDOW_S]
    since = WINDOW_S if earlier else now_s - min(file.written_s for file in recent)
    return sum(file.rows for file in recent) / max(since, 1.0)


def step_tokens_per_s(run: RunDir, now_s: float, damaged: dict[Path, str]) -> float | None:
    """Return the tokens per second of all sessions' steps, each by its own clock over its last recorded minutes.

    Args:
        damaged: gets damaged files with their reasons.
    """
    spans: dict[str, list[tuple[float, float, int]]] = {}
    for path in (run.stats / "steps").glob("*.parquet"):
        try:
            with own_file(path):
                if now_s - path.stat().st_mtime > WINDOW_S:
                    continue
                columns = ["session", "start_s", "duration_s", "new_tokens"]
                table = pq.read_table(sealed_table(path), columns=columns).to_pydict()
        except DamagedFileError as error:
            if path.exists():  # a missing file was replaced by a commit
                damaged[path] = error.reason
            continue
        for session, start, seconds, tokens in zip(*table.values(), strict=True):
            spans.setdefault(session, []).append((start, start + seconds, tokens))
    if not spans:
        return None
    rates = []
    for steps in spans.values():
        end = max(step[1] for step in steps)
        recent = [step for step in steps if step[1] > end - WINDOW_S]
        rates.append(sum(step[2] for step in recent) / max(end - min(step[0] for step in recent), 1e-3))
    return sum(rates)


def token_counts(
    plan_U2: np.ndarray, share_left_U: np.ndarray, durable: np.ndarray, workers: list[SessionStatus]
) -> dict[str, int]:
    """Return total and finished prompt and output tokens, by the names of Status.

    Args:
        plan_U2: planned prompt and output tokens per unit, see controller/planned_tokens.py.
        share_left_U: share of each unit's requests without a durable result.
        durable: [2] prompt and output tokens of requests with a durable result.
        workers: live sessions.
    """
    in_flight = np.zeros(2)
    for figures in work_figures(workers):
        in_flight += (figures["prompt_tokens_in_flight"], figures["output_tokens_in_flight"])
    planned = durable + (plan_U2 * np.maximum(share_left_U, 0.0)[:, None]).sum(axis=0)
    done = np.minimum(durable + in_flight, planned)  # tokens that were recomputed because pages were short count once
    (prompts, outputs), (prompts_done, outputs_done) = planned.round().astype(int), done.round().astype(int)
    return {
        "prompt_tokens": int(prompts),
        "prompt_tokens_done": int(prompts_done),
        "output_tokens": int(outputs),
        "output_tokens_done": int(outputs_done),
    }


def work_figures(workers: list[SessionStatus]) -> list[dict[str, Any]]:
    """Return the progress figures of working sessions (controller/work_progress.py); planning sessions have none."""
    return [figures for session in workers for figures in session.under_way if "own_tokens" in figures]


def tokens_per_s(workers: list[SessionStatus]) -> float | None:
    """Return the sum of all sessions' speeds; None if no session knows its speed yet."""
    known = [figures["tokens_per_s"] for figures in work_figures(workers) if figures["tokens_per_s"] is not None]
    return sum(known) if known else None


def left_s(workers: list[SessionStatus]) -> float | None:
    """Return the seconds until the run is done, from each session's own estimate for working alone.

    Return None if a session has no estimate.
    """
    alone_s = [figures["alone_s"] for figures in work_figures(workers)]
    return 1 / sum(1 / seconds for seconds in alone_s) if alone_s and all(alone_s) else None
