"""No run is finished while a row is missing, double or not what was written: results spoiled on purpose."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.run.units.result_files import write_results
from batchinfer.rundir import RunDir
from support.damage import make_computed_run
from support.jobs import batchinfer


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    return make_computed_run(tmp_path_factory.mktemp("computed"))


@pytest.fixture
def run(computed, tmp_path):
    """A copy of a run that is computed and not finished."""
    shutil.copytree(computed, tmp_path / "run")
    return RunDir(tmp_path / "run")


def first_file(run):
    """The first result file that the mark of unit 0 names."""
    return run.root / next(iter(read_json(run.done(0))["files"]))


def replace(run, tables):
    """Put result files with these rows in the place of unit 0's first one, vouched for as if they were its own."""
    mark, old = read_json(run.done(0)), first_file(run)
    files = [run.root / name for name in mark["files"] if run.root / name != old]
    for number, table in enumerate(tables):
        write_results(old.parent, 90 + number, table)
    files += sorted(old.parent.glob("part-0009*.parquet"))
    sizes = {str(path.relative_to(run.root)): path.stat().st_size for path in files}
    publish_json(run.done(0), {**mark, "files": sizes})


def finish(run):
    ended = batchinfer("finish", run.root)
    assert ended.code != 0
    assert not run.outputs.exists()
    return ended.err


def test_double_results_are_refused(run):
    table = pq.read_table(first_file(run))
    replace(run, [table, table.slice(0, 1)])
    assert "1 result in" in (err := finish(run))
    assert "is double and 0 are of another plan" in err


def test_results_that_nobody_planned_are_refused(run):
    table = pq.read_table(first_file(run))
    foreign = table.slice(0, 1).to_pylist()[0] | {"row": 10**6}
    replace(run, [table, pa.Table.from_pylist([foreign], schema=table.schema)])
    assert "0 results in" in (err := finish(run))
    assert "are double and 1 is of another plan" in err


def test_a_missing_result_is_noticed_although_its_unit_is_marked_done(run):
    table = pq.read_table(first_file(run))
    replace(run, [table.slice(1)] if len(table) > 1 else [])
    assert "1 result is not in" in finish(run)


def test_changed_results_are_set_aside_and_their_unit_is_not_done(run):
    path = first_file(run)
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["text"] += "!"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)  # sound, but not what was written
    assert "results of 1 of " in (err := finish(run))
    assert "are damaged; run `batchinfer work " in err
    assert not path.exists()
    assert not run.done(0).exists()
