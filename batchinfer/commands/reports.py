"""Commands that print figures: of runs (report), of given numbers (price), of a simulated cluster (simulate)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from batchinfer.commands.options import json_option
from batchinfer.report.query_limits import SQL_S

if TYPE_CHECKING:
    from batchinfer.rundir import RunDir


def _number_option(name: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(name, type=float, metavar="NUMBER", help=text)


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--together", is_flag=True, help="Several runs as one: sums, and rates over all of them.")
@click.option(
    "--compare",
    is_flag=True,
    help="Two runs side by side, with what changed from the first to the second; with --html, too. More runs: what "
    "each plan predicted, and what happened.",
)
@json_option
@click.option(
    "--sql", metavar="QUERY", help="Run one SELECT on the views (see `batchinfer schema --stats`); @FILE reads it."
)
@click.option(
    "--sql-seconds",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=SQL_S,
    show_default=True,
    help="Stop the query after this time.",
)
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write a page with pictures, one file.")
@click.option("--parquet", metavar="DIR", type=click.Path(path_type=Path), help="Write every view as a Parquet file.")
def report(
    runs: tuple[Path, ...],
    together: bool,
    compare: bool,
    as_json: bool,
    sql: str | None,
    sql_seconds: float,
    html: Path | None,
    parquet: Path | None,
) -> None:
    """Print the figures of RUNs: tokens, speed, time, cost.

    RUNs are run folders or .toml files. Several runs are shown side by side, with a column for all together. For an
    unfinished run, the figures are those so far, with the progress; --sql and --parquet need a finished run, `peek`
    shows answers so far.

    \b
    The views for --sql: outputs, requests, units, steps, experts, expert_rows, placements, nodes, kv, run,
    decode_steps. For example:
      batchinfer report runs/demo --sql "SELECT status, count(*) FROM outputs GROUP BY status"
    """
    modes = {"--together": together, "--compare": compare, "--sql": sql is not None}
    modes |= {"--html": html is not None, "--parquet": parquet is not None}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1 and chosen != ["--compare", "--html"]:
        raise click.UsageError(f"{' and '.join(chosen)} are different reports; ask for one at a time")
    if as_json and (html is not None or parquet is not None):
        raise click.UsageError(f"--json prints figures and {chosen[-1]} writes files; ask for one at a time")
    if compare and len(runs) < 2:
        raise click.UsageError(f"--compare takes two runs, but got {len(runs)}; name the earlier one first")
    if compare and len(runs) > 2 and html is not None:
        raise click.UsageError(f"a page compares two runs, but got {len(runs)}; name two, or leave --html out")
    folders = _run_folders(runs)
    if sql is not None:
        _print_query(folders, sql, sql_seconds, as_json=as_json)
    elif html is not None:
        _write_page(folders, html, compare=compare)
    elif parquet is not None:
        _export(folders, parquet)
    else:
        print_report(folders, as_json=as_json, together=together, compare=compare)


@click.command()
@click.option(
    "--run",
    "run_folder",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Start from this run (a run folder or a .toml file).",
)
@click.option("--prices", "price_file", metavar="FILE", type=click.Path(path_type=Path), help="A price list (.toml).")
@_number_option("--hit-tokens", "Input tokens served from a cache.")
@_number_option("--miss-tokens", "Input tokens computed.")
@_number_option("--output-tokens", "Output tokens.")
@_number_option("--nodes", "Mean nodes held.")
@_number_option("--gpus-per-node", "Accelerators of a node.")
@_number_option("--hours", "How long they are held.")
@_number_option("--gpu-hour", "$ per accelerator-hour.")
@_number_option("--price-hit", "$ per million hit tokens.")
@_number_option("--price-miss", "$ per million miss tokens.")
@_number_option("--price-output", "$ per million output tokens.")
@click.option("--batch", is_flag=True, help="With the list's batch discount.")
@click.option("--start", metavar="HH:MM", help="Begin at this time (UTC): the list's off-peak and cheap hours count.")
@json_option
def price(
    run_folder: Path | None,
    price_file: Path | None,
    gpu_hour: float | None,
    price_hit: float | None,
    price_miss: float | None,
    price_output: float | None,
    batch: bool,
    start: str | None,
    as_json: bool,
    **changes: float | None,
) -> None:
    """Print cost, revenue and margins of numbers or of a run.

    Options replace single numbers of a run.

    \b
    The published day of DeepSeek-V3/R1 at R1's list prices:
      batchinfer price --prices jobs/prices/deepseek-r1.toml --hit-tokens 342e9 --miss-tokens 266e9 \\
          --output-tokens 168e9 --nodes 226.75 --gpus-per-node 8 --hours 24
    """
    from batchinfer.report.price import what_if
    from batchinfer.report.price.price_list import PriceList, minute_of_day, read_prices
    from batchinfer.report.terminal import show

    start_minute = None if start is None else minute_of_day(start, "--start")
    if price_file is None and (batch or start is not None):
        raise click.UsageError(f"{'--batch' if batch else '--start'} counts with a price list only; give --prices FILE")
    amounts, prices = what_if.Amounts(), PriceList()
    if run_folder is not None:
        (folder,) = _run_folders([run_folder])
        amounts, prices = what_if.amounts_of_run(folder)
    if price_file is not None:
        prices = read_prices(price_file)
    prices = prices.with_prices(gpu_hour=gpu_hour, input_hit=price_hit, input_miss=price_miss, output=price_output)
    figures = what_if.price(what_if.with_changes(amounts, **changes), prices, is_batch=batch, start_minute=start_minute)
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        show(*what_if.price_table(figures, prices))


@click.command()
@click.argument("spec", type=click.Path(path_type=Path), required=False)
@click.option(
    "--against", type=click.Path(path_type=Path), help="Predict the measurements of this silicon_sample.csv instead."
)
@click.option("--model", type=click.Path(path_type=Path), help="With --against: folder with the config.json.")
@click.option(
    "--rows", type=click.Choice(["all", "even", "odd"]), default="all", show_default=True, help="With --against: of it."
)
@click.option(
    "--suggest", is_flag=True, help="Search the cheapest layout without a latency target; explain its factors."
)
@json_option
def simulate(
    spec: Path | None,
    against: Path | None,
    model: Path | None,
    rows: Literal["all", "even", "odd"],
    suggest: bool,
    as_json: bool,
) -> None:
    """Simulate the job of SPEC on a cluster of GPUs, without one.

    SPEC is a .toml file. Printed are tokens/s per node, the bottleneck of each stage, nodes over time, cost and margin,
    the cheapest EP sizes and batch, and nodes to finish by a time. An example with comments: jobs/simulate_day.toml.
    """
    from batchinfer.report.terminal import show
    from batchinfer.sim.table import against_table, answer_table, streamed_table, suggestion_table

    if (spec is None) == (against is None) or (against is None) != (model is None) or (suggest and spec is None):
        raise click.UsageError("give a SPEC, or --against silicon_sample.csv with --model")
    if against is not None and model is not None:
        from batchinfer.model.config import load_model_config
        from batchinfer.sim.against import compared

        figures, table = compared(against, load_model_config(model), rows), against_table
    else:
        from batchinfer.sim.answer import answer, suggestion
        from batchinfer.sim.spec import load_spec
        from batchinfer.sim.streaming import load_streamed, streamed_answer

        assert spec is not None
        if (streamed := load_streamed(spec)) is not None:
            if suggest:
                raise click.UsageError("--suggest looks for layouts of GPUs, and SPEC has a table [stream]")
            figures, table = streamed_answer(streamed), streamed_table
        else:
            loaded = load_spec(spec)
            figures, table = (suggestion(loaded), suggestion_table) if suggest else (answer(loaded), answer_table)
    if as_json:
        click.echo(json.dumps(figures, indent=1))
    else:
        show(*table(figures))


def print_report(runs: list[Path], *, as_json: bool, together: bool = False, compare: bool = False) -> None:
    """Print the report of one or several runs on stdout: one run, side by side, together, or two compared."""
    from batchinfer.commands.so_far import is_unfinished, readable
    from batchinfer.report.compare import Column, changed, planned_and_happened, run_names, side_by_side
    from batchinfer.report.panel import panel
    from batchinfer.report.read import as_document, changes_between, read_report, read_together
    from batchinfer.report.terminal import WARNING, show, text

    with readable(runs) as folders:
        found = [read_report(folder) for folder in folders]
        is_summed = together or (len(found) > 1 and not (compare or as_json))
        summed = [read_together(folders, found)] if is_summed else []
    if together:
        found = summed
    columns = [Column(name, one.values) for name, one in zip(run_names(runs), found, strict=False)]
    if as_json:
        documents = [as_document(one) for one in found]
        is_pair = compare and len(found) == 2
        shown = changes_between(*found) if is_pair else documents if len(found) > 1 else documents[0]
        click.echo(json.dumps(shown, indent=1))
    elif len(found) == 1:
        show(*panel(found[0]))
    else:
        for column, one in zip(columns, found, strict=True):
            if one.unfinished is not None:
                show(text(f"{column.name} is {one.unfinished.sentence()}", WARNING))
        if compare:
            named = [(column.name, one.predictions) for column, one in zip(columns, found, strict=True)]
            show(*([changed(*columns)] if len(found) == 2 else []), planned_and_happened(named))
        else:
            show(*side_by_side([*columns, Column("together", summed[0].values)]))
    for folder in filter(is_unfinished, () if as_json else runs):
        click.echo(
            f"not finished: `batchinfer status {folder}` shows its workers, `batchinfer run {folder}` continues it, "
            f"`batchinfer peek {folder}` shows the answers so far"
        )


def print_end(run: RunDir, *, has_dataset: bool) -> None:
    """Print the summary of a run that has just finished on stdout."""
    from batchinfer.report.read import read_report
    from batchinfer.report.summary import summary
    from batchinfer.report.terminal import show, stdout_width

    lines = summary(read_report(run.root), run.shown, stdout_width(), has_dataset=has_dataset)
    show(*lines, uncut=True)


def _run_folders(targets: Sequence[Path]) -> list[Path]:
    from batchinfer.run.planned import run_folder
    from batchinfer.run.store.interface import ALL_PARTS

    return [run_folder(target, *ALL_PARTS) for target in targets]


def _write_page(runs: list[Path], file: Path, *, compare: bool) -> None:
    from batchinfer.commands.so_far import readable
    from batchinfer.report.export import refuse_inside_runs
    from batchinfer.report.page.page import write_page

    refuse_inside_runs(runs, file)
    with readable(runs) as folders:
        write_page(folders, file, compare=compare)
    click.echo(file)


def _export(runs: list[Path], folder: Path) -> None:
    from batchinfer.report.export import export_views

    for file in export_views(runs, folder):
        click.echo(file)


def read_sql(sql: str) -> str:
    """Return the SQL text, or for @FILE the content of the file."""
    if not sql.startswith("@"):
        return sql
    try:
        return Path(sql[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot read the SQL file {sql[1:]}: {error}") from None


def print_rows(ask: Callable[[], tuple[list[str], Iterator[tuple[Any, ...]]]], *, as_json: bool) -> None:
    """Print the rows of a user's SQL query on stdout, in bounded memory."""
    from batchinfer.report.query_limits import memory_limited, query_bytes
    from batchinfer.report.rows import json_records, table_of_rows
    from batchinfer.report.terminal import show

    with memory_limited(query_bytes()):
        columns, rows = ask()
        if as_json:
            click.echo(json.dumps(list(json_records(columns, rows)), indent=1, ensure_ascii=False))
        else:
            show(*table_of_rows(columns, rows), uncut=True)


def _print_query(runs: list[Path], sql: str, seconds: float, *, as_json: bool) -> None:
    from batchinfer.report.foreign_sql import run_query

    query = read_sql(sql)
    print_rows(lambda: run_query(runs, query, seconds=seconds), as_json=as_json)
