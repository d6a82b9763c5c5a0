"""A submitted run: status, cancel, retry."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from batchinfer.commands.options import json_option, run_argument
from batchinfer.sanitize import count_text


@click.command()
@run_argument
@click.option("--watch", is_flag=True, help="Repeat every few seconds until the run is finished.")
@json_option
def status(target: Path, watch: bool, as_json: bool) -> None:
    """Show the state and progress of RUN.

    RUN is a run folder or a .toml file. The state is planning, planned (no worker yet), running, interrupted (no worker
    is left), computed (finish is next), finished or partial. Then come tokens, units, rows, speed, time left, the
    progress of each command, and problems.
    """
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.open import storage_of
    from batchinfer.status.status import StatusReader
    from batchinfer.status.text import format_status, watch_status

    if watch and as_json:
        raise click.UsageError("--json is one document; leave --watch out")
    run, config = planned_run(target, (), may_be_planning=True, any_version=True)
    reader = StatusReader(run, storage_of(config))
    if watch:
        watch_status(reader, click.echo)
    else:
        found = reader.read()
        click.echo(json.dumps(asdict(found), indent=1) if as_json else format_status(found))


@click.command()
@run_argument
def cancel(target: Path) -> None:
    """End all tasks of RUN (a run folder or a .toml file). Finished work is kept; `submit` continues later."""
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of
    from batchinfer.submit.launcher import launchers_of

    run, config = planned_run(target, (), "sent", any_version=True)
    storage = storage_of(config)
    ended = [name for launcher in launchers_of(run) for name in launcher.cancel(storage)]
    put_sent(storage)
    click.echo(
        f"cancelled: {' '.join(ended)}" if ended else f"no tasks of {run.shown} are pending or running in a cluster"
    )


@click.command()
@run_argument
@click.option("--array", metavar="N[%M]", help="Submit N tasks, like those of the last submission.")
def retry(target: Path, array: str | None) -> None:
    """Retry the failed rows of RUN; good rows keep their answers.

    RUN is a run folder or a .toml file. Rows that the plan found to be bad stay error rows.
    """
    from batchinfer.run.planned import planned_run
    from batchinfer.run.store.interface import put_sent
    from batchinfer.run.store.open import storage_of
    from batchinfer.run.units.retry import retry_failed
    from batchinfer.submit.launcher import DEFAULT_LAUNCHER, last_launcher, launcher_named

    run, config = planned_run(target, (), "sent")
    storage = storage_of(config)
    launcher = last_launcher(run) or launcher_named(DEFAULT_LAUNCHER)
    size = None if array is None else launcher.parse_size(array)
    if size is not None and not size.tasks:
        raise click.UsageError("--array 0 would submit nothing; leave it out to start `batchinfer work` yourself")
    found = retry_failed(storage)
    failed, units = count_text(found.num_requests, "failed request"), count_text(found.num_units, "unit")
    click.echo(f"{failed} in {units} {'is' if found.num_requests == 1 else 'are'} to be computed again")
    if found.num_held:
        held = f"{count_text(found.num_held, 'more unit')} with failed requests"
        click.echo(f"{held} {'is' if found.num_held == 1 else 'are'} being worked on; retry again afterwards")
    if found.num_bad_rows:
        is_bad = f"{count_text(found.num_bad_rows, 'row')} {'is' if found.num_bad_rows == 1 else 'are'} bad"
        click.echo(f"{is_bad} in the input; a retry cannot help")
    if not found.num_open_units:
        click.echo("all units are done")
    elif size is None:
        is_open = f"{count_text(found.num_open_units, 'unit')} {'is' if found.num_open_units == 1 else 'are'} open"
        click.echo(f"{is_open}: `batchinfer work {run.shown}`, then `batchinfer finish`")
    else:
        text = launcher.submit_again(storage, size)
        put_sent(storage)
        click.echo(text)
