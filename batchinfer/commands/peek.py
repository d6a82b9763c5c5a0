"""`peek`: the answers of a run so far."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.options import run_argument
from batchinfer.commands.reports import print_rows, read_sql
from batchinfer.sanitize import count_text

if TYPE_CHECKING:
    from batchinfer.config import JobConfig
    from batchinfer.rundir import RunDir
    from batchinfer.status.status import Status, StatusReader

NUM_ROWS = 10
NUM_FILES = 256  # of results, written last, in which the latest answers are looked for
FOLLOW_S = 2.0
QUIET_LOOKS = 5  # without a worker before --follow ends: a worker may be between two units
SHOWN_CHARS = 1000  # of a long prompt, from each end
ID_WIDTH, STATUS_WIDTH, WIDTH = 20, 14, 110


@click.command()
@run_argument
@click.option("--sql", metavar="QUERY", help="One SELECT on the view results; @FILE reads it.")
@click.option("--json", "as_json", is_flag=True, help="The rows as one JSON document on stdout.")
@click.option("--follow", is_flag=True, help="Print answers as they become durable, until the run is over.")
@click.option("--prompts", "with_prompts", is_flag=True, help="Print each prompt as the model got it, then its answer.")
def peek(target: Path, sql: str | None, as_json: bool, follow: bool, with_prompts: bool) -> None:
    """Print the answers so far of RUN, running or not.

    RUN is a run folder or a .toml file.

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
    if with_prompts and (follow or sql is not None):
        raise click.UsageError("--prompts shows the latest answers; leave --follow and --sql out")
    run, config = planned_run(target, (), may_be_planning=True, any_version=True)
    storage = storage_of(config)
    storage.fetch("state", "tokens")
    reader = StatusReader(run, storage)
    if follow:
        _follow(run, reader)
        return
    status = reader.read()
    files = _sound(run, reader.counted if sql is not None else newest_files(reader.counted))
    if with_prompts:
        _print_prompts(run, config, files, as_json=as_json)
        _tell_done(status)
        return
    question = newest_rows(NUM_ROWS) if sql is None else read_sql(sql)
    print_rows(lambda: query_results(run, files, question), as_json=as_json)
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
            is_first = len(seen) == len(new)
            for row in query_results(run, _sound(run, new, with_ids=is_first), ALL_ROWS)[1]:
                click.echo(_line(*row))
        quiet = quiet + 1 if status.activity == "interrupted" else 0
        if status.activity in ("computed", "finished", "partial") or quiet == QUIET_LOOKS:
            _tell_done(status)
            return
        time.sleep(FOLLOW_S)


def newest_files(files: list[Path]) -> list[Path]:
    """Return the result files that were written last: rows that ended last are in these."""
    return sorted(files, key=lambda path: path.stat().st_mtime_ns if path.exists() else 0)[-NUM_FILES:]


def _sound(run: RunDir, files: list[Path], *, with_ids: bool = True) -> list[Path]:
    """Return the undamaged result files, after the others were named.

    Raises:
        DamagedFileError: the ids in a token file are damaged; only `with_ids`.
    """
    from batchinfer.data.parquet import check_columns
    from batchinfer.manifest import Manifest
    from batchinfer.progress import note
    from batchinfer.run.units.result_files import damage
    from batchinfer.rundir import read_state, shards_of_state

    if files and with_ids:
        state = read_state(run)
        manifest = Manifest(run.root, state.get("files"))
        for shard in (shard for shard in shards_of_state(state) if shard.problem is None):
            check_columns(run.tokens(shard.index), manifest, ["id", "shard", "row"])
    reasons = {path: damage(path) for path in files}
    for path, reason in reasons.items():
        if reason is not None:
            note(
                f"warning: {path} is damaged ({reason}); its rows are left out, and computed again by `batchinfer run`"
            )
    return [path for path, reason in reasons.items() if reason is None]


def _print_prompts(run: RunDir, job: JobConfig, files: list[Path], *, as_json: bool) -> None:
    from batchinfer.data.tokenizer import load_tokenizer
    from batchinfer.manifest import Manifest
    from batchinfer.report.results import newest_prompts
    from batchinfer.rundir import read_state
    from batchinfer.sanitize import sanitize

    tokenizer = load_tokenizer(Path(job.model.path))
    manifest = Manifest(run.root, read_state(run).get("files"))
    rows = newest_prompts(run, manifest, files, NUM_ROWS, lambda ids: tokenizer.decode(ids, with_special=True))
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for row in rows:
        ending = row["status"] if row["status"] != "ok" else row["finish_reason"]
        counts = f"{row['prompt_tokens']:,} + {row['completion_tokens']:,} tokens"
        prompt, answer = (_without_middle(row[name]) for name in ("prompt", "text"))
        click.echo(sanitize(f"=== {row['id']}: {ending}, {counts}\n{prompt}\n--- answer\n{answer}\n"))


def _without_middle(text: str) -> str:
    """Return a text without the middle if it is long."""
    if len(text) <= 2 * SHOWN_CHARS:
        return text
    left_out = f"{len(text) - 2 * SHOWN_CHARS:,} characters left out; `batchinfer plan JOB --show ROW` prints all"
    return f"{text[:SHOWN_CHARS]}\n[... {left_out} ...]\n{text[-SHOWN_CHARS:]}"


def _tell_done(status: Status) -> None:
    requests, are = count_text(status.requests, "request"), "is" if status.requests_done == 1 else "are"
    click.echo(f"{status.activity}: {status.requests_done:,} of {requests} {are} answered", err=True)


def _line(row_id: str, status: str, finish_reason: str, text: str) -> str:
    from batchinfer.sanitize import fit

    ending = status if status != "ok" else finish_reason
    return fit(f"{fit(row_id, ID_WIDTH):<{ID_WIDTH}} {ending:<{STATUS_WIDTH}} {text}", WIDTH)
