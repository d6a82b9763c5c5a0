"""`peek`: the answers of a run so far."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.options import run_argument
from batchinfer.commands.reports import print_rows, read_sql

if TYPE_CHECKING:
    from batchinfer.rundir import RunDir
    from batchinfer.status.status import Status, StatusReader

NUM_ROWS = 10
FOLLOW_S = 2.0
QUIET_LOOKS = 5  # without a worker before --follow ends: a worker may be between two units
ID_WIDTH, STATUS_WIDTH, WIDTH = 20, 14, 110


@click.command()
@run_argument
@click.option("--sql", metavar="QUERY", help="One SELECT on the view results; @FILE reads it.")
@click.option("--json", "as_json", is_flag=True, help="The rows as one JSON document on stdout.")
@click.option("--follow", is_flag=True, help="Print answers as they become durable, until the run is over.")
def peek(target: Path, sql: str | None, as_json: bool, follow: bool) -> None:
    """Print the answers so far of RUN (a run folder or a .toml file), which may be running, interrupted or finished.

    Without options, print the latest answers. Nothing is changed. An answer appears within cluster.commit_seconds. Rows
    that the plan found bad, and duplicates of other rows, are in the outputs only.

    \b
    The view results has a row's id and the columns of units/*/*/part-*.parquet (`batchinfer schema --stats`):
      batchinfer peek runs/demo --sql "SELECT finish_reason, count(*) FROM results GROUP BY ALL"
    """
    from batchinfer.report.results import newest_rows, query_results
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.open import storage_of
    from batchinfer.status.status import StatusReader

    if follow and (sql is not None or as_json):
        raise click.UsageError("--follow prints lines as they come; leave --sql and --json out")
    run, config = planned_run(target, (), may_be_planning=True)
    storage = storage_of(config)
    storage.fetch("state", "tokens")
    reader = StatusReader(run, storage)
    if follow:
        _follow(run, reader)
        return
    status = reader.read()
    question = newest_rows(NUM_ROWS) if sql is None else read_sql(sql)
    print_rows(lambda: query_results(run, reader.counted, question), as_json=as_json)
    _tell_done(status)


def _follow(run: RunDir, reader: StatusReader) -> None:
    from batchinfer.report.results import ALL_ROWS, query_results

    seen: set[Path] = set()
    quiet = 0
    while True:
        status = reader.read()
        new = [path for path in reader.counted if path not in seen]
        seen.update(new)
        if new:
            for row in query_results(run, new, ALL_ROWS)[1]:
                click.echo(_line(*row))
        quiet = quiet + 1 if status.activity == "interrupted" else 0
        if status.activity in ("computed", "finished", "partial") or quiet == QUIET_LOOKS:
            _tell_done(status)
            return
        time.sleep(FOLLOW_S)


def _tell_done(status: Status) -> None:
    click.echo(f"{status.activity}: {status.requests_done:,} of {status.requests:,} requests are answered", err=True)


def _line(row_id: str, status: str, finish_reason: str, text: str) -> str:
    from batchinfer.sanitize import fit

    ending = status if status != "ok" else finish_reason
    return fit(f"{fit(row_id, ID_WIDTH):<{ID_WIDTH}} {ending:<{STATUS_WIDTH}} {text}", WIDTH)
