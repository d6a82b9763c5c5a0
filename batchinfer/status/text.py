"""A run's status as JSON and as lines for a terminal, once or repeatedly."""

import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

from batchinfer.progress import duration
from batchinfer.run.heartbeat import SessionStatus
from batchinfer.sanitize import count_text, fit
from batchinfer.status.status import Status, StatusReader

WATCH_S = 5.0
MOST_LINES = 20  # listed units, and listed commands
WIDTH = 100
PROBLEM_WIDTH = 400


def watch_status(reader: StatusReader, show: Callable[[str], None]) -> None:
    """Show the status every WATCH_S seconds until the run is finished, or a signal ends the command."""
    while True:
        status = reader.read()
        # on a terminal each status replaces the last one
        show(("\033[H\033[2J" if sys.stdout.isatty() else "") + format_status(status))
        if status.activity in ("finished", "partial"):
            return
        time.sleep(WATCH_S)


def format_status(status: Status) -> str:
    """Return the status as lines for a terminal."""
    if status.activity == "planning":
        return "\n".join([f"{status.run}: {_activity(status)}", *_session_lines(status)])
    done = status.requests_done / status.requests if status.requests else 1.0
    lines = [
        f"{status.run}: {_activity(status)}",
        _tokens_line(status),
        f"units     {status.units_done:,} done, {status.units_running:,} running, {status.units_waiting:,} waiting, "
        f"{status.units_failed:,} with failed requests; {status.units:,} in all",
        f"requests  {status.requests_done:,} of {status.requests:,} ({done:.1%}), {status.requests_failed:,} of them "
        f"failed; {count_text(status.rows, 'row')}, {status.rows_bad:,} of them found bad by the plan",
    ]
    if status.tasks_running is not None:
        launcher = (status.launcher or "").lower()
        lines.append(
            f"{launcher:<9} {count_text(status.tasks_running, 'task')} running, {status.tasks_waiting:,} waiting"
        )
    speeds = ((status.tokens_per_s, "tokens/s"), (status.requests_per_s, "requests/s"))
    known = [f"{speed:,.2f} {unit}" for speed, unit in speeds if speed is not None]
    known += [] if status.left_s is None else [f"{duration(status.left_s)} left"]
    if known:
        lines.append(f"speed     {', '.join(known)}")
    lines += _session_lines(status)
    lines += [_sweep_line(figures) for one in status.sessions for figures in one.under_way if "sweep" in figures]
    for holder in status.running[:MOST_LINES]:
        task = "" if holder.task is None else f", task {holder.task}"
        restarts = f", restart {holder.restarts}" if holder.restarts else ""
        line = (
            f"  unit {holder.unit:>6}  {holder.node}{task}{restarts}, for {duration(holder.held_s)}: "
            f"{holder.requests_done:,} of {count_text(holder.requests, 'request')}"
        )
        lines.append(fit(line, WIDTH))
    if len(status.running) > MOST_LINES:
        lines.append(f"  and {len(status.running) - MOST_LINES:,} more")
    lines += [fit(f"problem: {problem}", PROBLEM_WIDTH) for problem in status.problems]
    return "\n".join(lines)


def _tokens_line(status: Status) -> str:
    total = status.prompt_tokens + status.output_tokens
    done = status.prompt_tokens_done + status.output_tokens_done
    share = done / total if total else 1.0
    return (
        f"tokens    {done:,} of {total:,} ({share:.1%}): prompts {status.prompt_tokens_done:,} of "
        f"{status.prompt_tokens:,}, outputs {status.output_tokens_done:,} of {status.output_tokens:,}"
    )


def _session_lines(status: Status) -> list[str]:
    """Return a line per live command, with its progress."""
    lines = [_session_line(session) for session in status.sessions[:MOST_LINES]]
    more = len(status.sessions) - MOST_LINES
    return lines + ([f"  and {more:,} more commands"] if more > 0 else [])


def _session_line(session: SessionStatus) -> str:
    task = "" if session.task is None else f", task {session.task}"
    restarts = f", restart {session.restarts}" if session.restarts else ""
    doing = "; ".join(map(_doing, session.under_way)) or "at work"
    return fit(f"  {session.command} on {session.node}{task}{restarts}: {doing}", WIDTH)


def _sweep_line(figures: dict[str, Any]) -> str:
    """Format how far a rank is whose weights are streamed (controller/work_progress.py)."""
    planned, speed = figures["planned_sweeps"], figures["read_bytes_per_s"]
    about = "" if planned is None else f" of about {max(planned, figures['sweep']):,}"
    at = "" if speed is None else f", weights at {speed / 1e9:,.2f} GB/s"
    return f"  sweep {figures['sweep']:,}{about}{at}, {duration(figures['waited_s'])} waited for them"


def _doing(figures: dict[str, Any]) -> str:
    """Format the progress figures of a command (progress.py, controller/work_progress.py)."""
    phase = str(figures.get("phase"))
    if "doing" in figures:
        return f"{phase}: {figures['doing']}"
    if "own_tokens" in figures:
        speed = figures["tokens_per_s"]
        at = "" if speed is None else f", {speed:,.0f} tokens/s"
        return f"{phase}, {figures['own_tokens']:,} tokens by it{at}"
    done, total = figures.get("done", 0), figures.get("total", 0)
    return f"{phase} {done / total:.0%}" if total else phase


def _activity(status: Status) -> str:
    """Return the run's activity in words, and the next command to run if no process works on it and no task will."""
    if status.activity in ("planned", "interrupted") and (status.tasks_running or status.tasks_waiting):
        return f"{status.activity}, no worker at present; its tasks in {status.launcher} go on with it"
    is_stale = "planning was interrupted; `batchinfer plan` continues"
    run = shlex.quote(status.run)
    workers = f"running with {status.workers:,} worker{'s' if status.workers != 1 else ''}"
    return {
        "planning": "planning; there are no tokens to count yet" if status.sessions else is_stale,
        "planned": f"planned, no worker yet; `batchinfer run {run}` computes and finishes it here",
        "running": workers,
        "interrupted": f"interrupted, no worker is left; `batchinfer run {run}` continues and finishes it here",
        "computed": f"computed, not finished; `batchinfer finish {run}` writes the outputs",
    }.get(status.activity, status.activity)
