"""A run's status as JSON, as lines for a terminal, and again and again."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batchinfer.sanitize import fit
from batchinfer.slurm.status import Status, StatusReader, duration

WATCH_S = 5.0
MOST_LINES = 20  # running units that are listed
WIDTH = 100
PROBLEM_WIDTH = 400


def watch_status(reader: StatusReader, show: Callable[[str], None]) -> None:
    """Show the status again and again until the run is finished, or a signal ends the command."""
    while True:
        status = reader.read()
        # on a terminal each one replaces the one before
        show(("\033[H\033[2J" if sys.stdout.isatty() else "") + format_status(status))
        if status.activity in ("finished", "partial"):
            return
        time.sleep(WATCH_S)


def as_document(status: Status) -> dict[str, Any]:
    """The status as one JSON document."""
    return asdict(status)


def format_status(status: Status) -> str:
    """The status as lines for a terminal."""
    if status.activity == "planning":
        return f"{status.run}: {_activity(status)}"
    done = status.requests_done / status.requests if status.requests else 1.0
    lines = [
        f"{status.run}: {_activity(status)}",
        f"units     {status.units_done:,} done, {status.units_running:,} running, {status.units_waiting:,} waiting, "
        f"{status.units_failed:,} with failed requests; {status.units:,} in all",
        f"requests  {status.requests_done:,} of {status.requests:,} ({done:.1%}), {status.requests_failed:,} of them "
        f"failed; {status.rows:,} rows, {status.rows_bad:,} of them bad since the plan",
    ]
    if status.tasks_running is not None:
        lines.append(f"slurm     {status.tasks_running:,} tasks running, {status.tasks_waiting:,} waiting")
    if status.tokens_per_s is not None and status.requests_per_s is not None:
        left = "" if status.left_s is None else f", {duration(status.left_s)} left"
        lines.append(f"speed     {status.tokens_per_s:,.0f} tokens/s, {status.requests_per_s:,.2f} requests/s{left}")
    for holder in status.running[:MOST_LINES]:
        task = "" if holder.task is None else f", task {holder.task}"
        restarts = f", restart {holder.restarts}" if holder.restarts else ""
        line = (
            f"  unit {holder.unit:>6}  {holder.node}{task}{restarts}, for {duration(holder.held_s)}: "
            f"{holder.requests_done:,} of {holder.requests:,} requests"
        )
        lines.append(fit(line, WIDTH))
    if len(status.running) > MOST_LINES:
        lines.append(f"  and {len(status.running) - MOST_LINES:,} more")
    lines += [fit(f"problem: {problem}", PROBLEM_WIDTH) for problem in status.problems]
    return "\n".join(lines)


def _activity(status: Status) -> str:
    """What goes on, and what to do where nobody does anything about it."""
    workers = f"running with {status.workers:,} worker{'s' if status.workers != 1 else ''}"
    return {
        "planning": "planning; there is nothing to count yet",
        "planned": "planned, nobody works on it yet: `batchinfer work` does",
        "running": workers,
        "interrupted": "interrupted, nobody works on it any more: `batchinfer work` goes on",
        "computed": "computed, not finished: `batchinfer finish` writes the outputs",
    }.get(status.activity, status.activity)
