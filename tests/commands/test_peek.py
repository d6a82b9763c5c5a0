"""The answers so far: of a run that is planned, interrupted, worked on and finished."""

import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.commands.peek import NUM_FILES, newest_files
from batchinfer.config.loading import load_job
from batchinfer.finish.early import EarlyRows
from batchinfer.records import DamagedFileError
from batchinfer.rundir import RunDir
from support.faults import MIXED, SLOW, plan_units
from support.jobs import answers, batchinfer, start, write_job, write_questions, write_shard


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """A run of 16 rows in several units, all of them done."""
    folder = tmp_path_factory.mktemp("peek")
    write_questions(folder / "prompts", (10, 6))
    job = write_job(folder, sampling={"max_tokens": 4})
    run = plan_units(job, folder / "run")
    assert batchinfer("work", run).code == 0
    return job


def counted(run):
    found = batchinfer("peek", run, "--json", "--sql", "SELECT id, text FROM results ORDER BY id")
    assert found.code == 0, found.err
    return {row["id"]: row["text"] for row in json.loads(found.out)}


def test_it_shows_what_counts_and_changes_nothing(worked, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(worked.parent / "run", run)
    before = counted(run)
    assert len(before) == 16
    units = sorted((run / "units").iterdir())
    assert len(units) > 1
    shutil.rmtree(units[-1])
    (run / "done" / units[-1].name).unlink()
    files = sorted(run.rglob("*"))
    left = counted(run)
    assert 0 < len(left) < 16
    assert left.items() < before.items()
    shown = batchinfer("peek", run)
    assert shown.code == 0
    assert len(shown.out.splitlines()) == 2 + min(10, len(left))
    assert f"interrupted: {len(left)} of 16 requests are answered" in shown.err
    assert sorted(run.rglob("*")) == files
    assert batchinfer("run", run).code == 0  # and a run folder is enough to go on
    assert counted(run) == {row["id"]: row["text"] for row in answers(run)} == before


def test_a_run_that_is_only_planned_has_no_rows(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    shown = batchinfer("peek", job)
    assert shown.code == 0
    assert "(no rows)" in shown.out
    assert "planned: 0 of 2 requests are answered" in shown.err


def test_follow_prints_every_answer_once_while_others_work(tmp_path):
    write_questions(tmp_path / "prompts", (6, 4))
    job = write_job(tmp_path, cluster=SLOW, sampling=MIXED)
    assert batchinfer("plan", job).code == 0
    follower = start("peek", tmp_path / "run", "--follow")
    assert batchinfer("run", job).code == 0
    out, err = follower.communicate(timeout=120)
    assert follower.returncode == 0, err
    assert sorted(line.split()[0] for line in out.splitlines()) == sorted(f"q{number}" for number in range(10))
    assert "10 of 10 requests are answered" in err


def test_ids_that_would_move_the_cursor_are_shown_as_escapes(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": ["\x1b[2Jx"], "prompt": ["Hello"]})
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    assert batchinfer("work", job).code == 0
    for options in ((), ("--follow",)):
        shown = batchinfer("peek", job, *options)
        assert "\\x1b[2Jx" in shown.out
        assert "\x1b" not in shown.out


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("DROP VIEW results", "takes one SELECT"),
        ("SELECT * FROM read_csv('/etc/passwd')", "--sql may read the view results and no other file"),
        ("COPY results TO '/tmp/x.csv'", "takes one SELECT"),
        ("SELECT * FROM outputs", "the SQL does not run"),
        ("SELECT 1; SELECT 2", "got 2 statements"),
    ],
)
def test_sql_may_only_read_the_answers(worked, sql, told):
    ended = batchinfer("peek", worked.parent / "run", "--sql", sql)
    assert ended.code == 2
    assert told in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.fixture
def copied(worked, tmp_path):
    shutil.copytree(worked.parent / "run", tmp_path / "run")
    return tmp_path / "run"


def change_text(path, column, text):
    """Write a Parquet file again with another text in each row of a column."""
    table = pq.read_table(path)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, table.field(place), pa.array([text] * len(table), pa.string())), path)


def test_ids_of_a_damaged_token_file_are_not_shown(worked, copied):
    path = copied / "tokens" / "00001.parquet"
    change_text(path, "id", "another")
    for options in ((), ("--sql", "SELECT 1"), ("--follow",), ("--prompts",)):
        shown = batchinfer("peek", copied, *options)
        assert (shown.code, "another" in shown.out) == (2, False)
        assert f"{path} is damaged" in shown.err
        assert "plan --again" in shown.err
    early = EarlyRows(RunDir(copied), load_job(worked))
    with pytest.raises(DamagedFileError, match=r"00001\.parquet is damaged"):
        list(early.new())


def test_answers_of_a_damaged_result_file_are_left_out_with_a_warning(copied):
    path = min((copied / "units").glob("*/*/part-*.parquet"))
    num_rows = len(pq.read_table(path))
    change_text(path, "text", "another")
    shown = batchinfer("peek", copied, "--json", "--sql", "SELECT text FROM results")
    assert shown.code == 0
    assert len(json.loads(shown.out)) == 16 - num_rows
    assert "another" not in shown.out
    assert f"warning: {path} is damaged" in shown.err


def test_the_latest_answers_are_looked_for_in_the_files_written_last(tmp_path):
    files = [tmp_path / f"part-{number}.parquet" for number in range(NUM_FILES + 3)]
    for number, path in enumerate(files):
        path.touch()
        os.utime(path, (0, 7919 * number % 1000))
    assert {path.stat().st_mtime for path in set(files) - set(newest_files(files))} == {0, 3, 6}
    assert newest_files([tmp_path / "gone", *files[:2]])[0] == tmp_path / "gone"
