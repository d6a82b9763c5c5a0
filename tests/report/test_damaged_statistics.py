"""A report over damaged statistics is a sentence, never a traceback; `verify` names the files."""

from __future__ import annotations

import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json
from batchinfer.data.parquet import check_sealed, table_writer
from batchinfer.report.views import open_views
from batchinfer.rundir import RunDir, read_state
from support.damage import flip_bit, truncate
from support.jobs import batchinfer, write_job, write_questions
from support.tiers import first_in_make_test

NUM_TRIALS = 40


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    write_questions(folder / "prompts", (6, 3))
    assert batchinfer("run", write_job(folder, sampling={"max_tokens": 3})).code == 0
    assert batchinfer("verify", folder / "run").code == 0
    return folder / "run"


@pytest.mark.parametrize("number", first_in_make_test(range(NUM_TRIALS), 10))
def test_damaged_statistics_are_a_sentence(finished, tmp_path, number):
    rng = random.Random(number)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = rng.choice(sorted((run / "stats").rglob("*.parquet")))
    (truncate if number % 4 == 0 else flip_bit)(path, rng)
    for ended in (batchinfer("report", run), batchinfer("report", run, "--sql", "SELECT count(*) FROM requests")):
        assert "Traceback" not in ended.err, (path, ended.err)
        assert ended.code == 0 or (ended.code == 2 and ended.err.startswith("error: ")), (path, ended)


def renamed_column(path, rng):
    """Another file that is sound."""
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["sharp", *table.column_names[1:]]), path)


@pytest.mark.parametrize("kind", [flip_bit, truncate, renamed_column, lambda path, rng: path.unlink()])
@pytest.mark.parametrize("table", first_in_make_test(["requests", "units", "run"]))
def test_damage_of_what_finish_wrote_is_named_and_finish_repairs_it(finished, tmp_path, table, kind):
    run, path = tmp_path / "run", tmp_path / "run" / "stats" / f"{table}.parquet"
    shutil.copytree(finished, run)
    before = pq.read_table(path)
    kind(path, random.Random(table))
    verified = batchinfer("verify", run)
    assert verified.code == 3
    assert f"stats/{table}.parquet: " in verified.out
    assert f"`batchinfer finish {run}`" in verified.out
    for arguments in ((), ("--sql", "SELECT count(*) FROM requests")):
        ended = batchinfer("report", run, *arguments)
        assert ended.code == 2
        assert f"{path} is damaged: " in ended.err
        assert f"`batchinfer finish {run}` writes all outputs again" in ended.err
    again = batchinfer("finish", run)
    assert f"{path} is missing or damaged" in again.err
    assert batchinfer("verify", run).code == batchinfer("report", run).code == 0
    assert pq.read_table(path).drop_columns(["finished_s"]).equals(before.drop_columns(["finished_s"]))


def test_new_prices_leave_statistics_that_are_vouched_for(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert batchinfer("finish", run, "--set", "pricing.gpu_hour=7.5").code == 0
    assert pq.read_table(run / "stats" / "run.parquet")["gpu_hour"].to_pylist() == [7.5]
    assert batchinfer("verify", run).code == 0


def test_statistics_of_an_earlier_version_are_read(finished, tmp_path):
    """The manifest of such a run has no checksums of statistics."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(finished, run.root)
    state = read_state(run)
    files = {name: entry for name, entry in state["files"].items() if not name.startswith("stats/")}
    publish_json(run.run_json, {**state, "files": files})
    for command in ("report", "verify", "finish", "verify"):
        assert batchinfer(command, run.root).code == 0


@pytest.mark.parametrize("table", ["steps", "nodes"])
@pytest.mark.parametrize("share", first_in_make_test([0.1, 0.3, 0.5, 0.7, 0.9]))
def test_a_flipped_bit_in_statistics_of_a_session_gives_no_other_figures(finished, tmp_path, table, share):
    """The bit may be in a page, in a page header, or in the metadata with the columns' positions and values."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = next((run / "stats" / table).glob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    verified = batchinfer("verify", run)
    assert verified.code == 3
    assert f"stats/{table}/{path.name}: " in verified.out
    for arguments in (
        ("report", run),
        ("plan", finished.parent / "job.toml", "--learn-from", run, "--set", f"output.dir={tmp_path}/next"),
    ):
        ended = batchinfer(*arguments)
        assert ended.code == 2
        assert f"{path} is damaged: " in ended.err
        assert "delete it: statistics do without it" in ended.err
    path.write_bytes(content[: len(content) // 2])  # its checksum is gone with its end
    ended = batchinfer("report", run)
    assert ended.code == 2
    assert f"{path} is damaged: " in ended.err
    assert "delete it: statistics do without it" in ended.err
    path.unlink()
    assert batchinfer("verify", run).code == batchinfer("report", run).code == 0


@pytest.mark.parametrize("other", ["steps/another-00000.parquet", "experts", "requests.parquet"])
def test_a_sound_table_in_another_ones_place_gives_no_other_figures(finished, tmp_path, other):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (path,) = (run / "stats" / "steps").glob("*.parquet")
    if other.startswith("steps"):  # of another session or run
        with table_writer(tmp_path / other, pq.read_schema(path)) as writer:
            writer.write_table(pq.read_table(path))
        source = tmp_path / other
    else:
        source = next(file for file in (run / "stats").rglob("*.parquet") if other in str(file.relative_to(run)))
    shutil.copy(source, path)
    verified, reported = batchinfer("verify", run), batchinfer("report", run)
    assert (verified.code, reported.code) == (3, 2)
    assert f"stats/steps/{path.name}: " in verified.out
    assert f"{path} is damaged: " in reported.err
    path.unlink()
    assert batchinfer("verify", run).code == batchinfer("report", run).code == 0


def test_statistics_that_lie_elsewhere_and_are_linked_are_no_other_tables(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.move(run / "stats" / "steps", tmp_path / "elsewhere")
    (run / "stats" / "steps").symlink_to(tmp_path / "elsewhere")
    (nodes,) = (run / "stats" / "nodes").glob("*.parquet")
    nodes.rename(tmp_path / "0f3c")
    nodes.symlink_to(tmp_path / "0f3c")  # as tools for versions of data do
    open_views([run]).close()


def test_a_value_that_is_the_key_of_the_checksum_stays_as_it_is(tmp_path):
    table = pa.table({"session": ["batchinfer.xxh3"]})
    with table_writer(tmp_path / "a.parquet", table.schema) as writer:
        writer.write_table(table)
    check_sealed(tmp_path / "a.parquet")
    statistics = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).statistics
    assert (statistics.min, statistics.max) == ("batchinfer.xxh3", "batchinfer.xxh3")


def test_statistics_that_have_no_checksum_yet_are_read(finished, tmp_path):
    """Earlier versions wrote no checksums into session tables."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for path in (run / "stats").glob("*/*.parquet"):
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    for command in ("report", "verify", "status"):
        assert batchinfer(command, run).code == 0


def test_verify_names_truncated_statistics_and_a_flipped_output(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    rng = random.Random(1)
    steps = next((run / "stats" / "steps").glob("*.parquet"))
    truncate(steps, rng)
    flip_bit(run / "outputs" / "part-0.parquet", rng)
    ended = batchinfer("verify", run)
    assert ended.code == 3
    assert f"stats/steps/{steps.name}: " in ended.out
    assert "outputs/part-0.parquet: bytes 0 to " in ended.out
    assert "2 of them damaged" in ended.out
    # the next finish writes the outputs again
    assert batchinfer("finish", run).code == 0
    steps.unlink()
    assert batchinfer("verify", run).code == 0


def unlinked(path, rng):
    path.unlink()


def other_shard(path, rng):
    """A sound file of the run under another one's name."""
    shutil.copy(path.with_name("part-0.parquet"), path)


ALL_OUTPUTS = "SELECT count(*) FROM Outputs"


@pytest.mark.parametrize("kind", [unlinked, truncate, flip_bit, other_shard, renamed_column])
def test_report_refuses_damaged_outputs_by_name(finished, tmp_path, kind):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "outputs" / "part-1.parquet"
    kind(path, random.Random(1))
    for arguments in ((), ("--sql", ALL_OUTPUTS), ("--parquet", tmp_path / "tables"), ("--html", tmp_path / "page")):
        ended = batchinfer("report", run, *arguments)
        assert ended.code == 2
        assert f"{path} is damaged: " in ended.err
        assert f"`batchinfer finish {run}` writes all outputs again" in ended.err
    assert batchinfer("finish", run).code == batchinfer("report", run).code == 0


def test_report_reads_the_outputs_that_the_run_names_and_no_other_files(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.copy(run / "outputs" / "part-0.parquet", run / "outputs" / "stray.parquet")
    (run / "outputs" / "notes.parquet").write_text("no table")
    ended = batchinfer("report", run, "--sql", ALL_OUTPUTS, "--json")
    assert (ended.code, json.loads(ended.out)) == (0, [{"count_star()": 9}]), ended
    both = batchinfer("report", run, finished, "--sql", ALL_OUTPUTS, "--json")
    assert json.loads(both.out) == [{"count_star()": 18}]


def test_a_query_without_outputs_does_not_read_them(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    flip_bit(run / "outputs" / "part-0.parquet", random.Random(1))
    assert batchinfer("report", run, "--sql", "SELECT count(*) FROM requests").code == 0
    assert batchinfer("report", run, "--sql", "SELECT * FROM requests, outputs").code == 2


def test_verify_of_something_else_is_a_sentence(tmp_path):
    ended = batchinfer("verify", tmp_path)
    assert ended.code == 2
    assert "not a run folder" in ended.err
