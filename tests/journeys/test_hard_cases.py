"""Regressions and hard cases: odd folders, damaged run folders, signals inside libraries, changed settings."""

import json
import shutil
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.shards import find_shards
from batchinfer.finish import kept_columns
from batchinfer.finish.kept_columns import KeptRows
from batchinfer.plan.preflight import check_names
from batchinfer.records import ConfigError, InterruptedRunError, ModelError
from batchinfer.run.session import Session
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from support.jobs import batchinfer, outputs, question, start, write_job, write_questions, write_shard


@pytest.fixture(scope="module")
def neighbour(tmp_path_factory):
    """A folder with a finished run `run1` and prompts of another job."""
    folder = tmp_path_factory.mktemp("neighbour")
    write_questions(folder / "prompts", (3,))
    write_shard(folder / "others" / "a.parquet", {"id": [100, 101], "prompt": [question(7), question(8)]})
    assert batchinfer("run", write_job(folder, output={"dir": "run1"})).code == 0
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "run[1]",
        "it's a run",
        # make test: another odd character
        *(pytest.param(name, marks=pytest.mark.all) for name in ("run*", "ru?1", 'a "run"', "ру́н", "run{1}")),
    ],
)
def test_a_run_folder_with_an_odd_name_never_reads_its_neighbours(neighbour, name):
    job = write_job(neighbour, output={"dir": name}, input={"files": ["others/*.parquet"]})
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    assert [row["id"] for row in outputs(neighbour / name)["a.parquet"]] == [100, 101]
    assert json.loads(batchinfer("report", neighbour / name, "--json").out)["rows"] == 2


@pytest.mark.all  # make test: an odd folder, above
def test_a_file_with_glob_characters_in_an_odd_folder_is_found(tmp_path):
    folder = tmp_path / "x[1]"
    write_shard(folder / "a[1].parquet", {"prompt": [question(0)]})
    write_shard(folder / "a1.parquet", {"prompt": [question(1)]})
    assert batchinfer("plan", write_job(folder, input={"files": ["a[1].parquet"]})).code == 0
    assert len(json.loads((folder / "run" / "run.json").read_text())["shards"]) == 1


def test_damage_in_a_kept_column_is_found_before_anything_is_computed(tmp_path):
    first, second = write_questions(tmp_path / "prompts", (9, 4))
    place = pq.read_metadata(first).row_group(1).column(2).data_page_offset + 15
    data = bytearray(first.read_bytes())
    data[place : place + 30] = b"\xff" * 30
    first.write_bytes(bytes(data))
    job = write_job(tmp_path, output={"keep_columns": ["extra"]})
    ended = batchinfer("run", job)
    assert ended.code == 3, ended.err
    assert list(outputs(tmp_path / "run")) == [second.name]
    strict = batchinfer("plan", job, "--strict", "--set", "output.dir=strict")
    assert strict.code == 2
    assert first.name in strict.err


def test_wide_kept_columns_come_in_parts_of_bounded_size(tmp_path, monkeypatch):
    columns = {"prompt": [question(row % 3) for row in range(20)], "extra": [f"{row:02}" * 500 for row in range(20)]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    found = []
    for most_bytes in (kept_columns.KEPT_BYTES, 5000):
        monkeypatch.setattr(kept_columns, "KEPT_BYTES", most_bytes)
        parts = {"output": {"dir": f"run{most_bytes}", "keep_columns": ["extra"], "format": "jsonl"}}
        job = write_job(tmp_path, sampling={"n": 3, "max_tokens": 2, "temperature": 1.0}, **parts)
        assert batchinfer("run", job).code == 0
        files = tmp_path / f"run{most_bytes}" / "outputs"
        found.append([(files / "a.jsonl").read_text(), pq.read_table(files / "a.parquet")])
        assert pq.read_metadata(files / "a.parquet").num_row_groups == (1 if most_bytes > 60_000 else 12)
    assert found[0] == found[1]
    assert [text[:2] for text in found[0][1]["extra"].to_pylist()] == [f"{row // 3:02}" for row in range(60)]


@pytest.mark.all  # make test: parts of bounded size, above
def test_more_kept_text_than_one_array_holds_is_handed_out(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", {"extra": ["short", "x" * (1 << 20)]})
    rows = KeptRows(find_shards([str(shard)])[0], [pa.field("extra", pa.string())])
    parts = [(num_rows, values.nbytes) for num_rows, (values,) in rows.of(pa.array([0] + [1] * 2200))]
    assert sum(num_rows for num_rows, _ in parts) == 2201
    assert sum(num_bytes for _, num_bytes in parts) > 1 << 31
    assert max(num_bytes for _, num_bytes in parts) < 2 * kept_columns.KEPT_BYTES


def test_a_misspelt_column_is_a_mistake_in_the_job(tmp_path):
    write_questions(tmp_path / "prompts", (2,))
    for override in ("input.prompt=promt", "input.sampling=how"):
        ended = batchinfer("plan", write_job(tmp_path), "--set", override)
        assert ended.code == 2
        assert "extra" in ended.err  # the columns that there are


def test_a_signal_inside_the_tokenizer_or_a_template_stops_the_plan(tmp_path):
    rows = [[{"role": "user", "content": f"word{row} " * 150}] for row in range(20_000)]
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    write_shard(tmp_path / "prompts" / "a.parquet", {"m": pa.array(rows, kind)}, row_group_size=2000)
    job = write_job(tmp_path, input={"prompt": None, "messages": "m"})
    for delay in (0.0, 0.5):
        process = start("plan", job)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "run" / "tokens").glob(".*")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, (delay, err)
        assert not list((tmp_path / "run" / "tokens").iterdir())
    assert batchinfer("plan", job).code == 0
    assert pq.read_table(tmp_path / "run" / "tokens" / "00000.parquet")["error"].null_count == 20_000


@pytest.mark.parametrize(
    "damaged",
    [
        "plan/units.parquet",
        # make test: a table of the same folder
        *(pytest.param(f"plan/{name}.parquet", marks=pytest.mark.all) for name in ("requests", "duplicates")),
        "tokens/00000.parquet",
        "units/*/[0-9]*/part-*",
    ],
)
def test_damage_in_the_run_folder_is_told_in_a_sentence(tmp_path, damaged):
    write_questions(tmp_path / "prompts", (3,))
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    run = tmp_path / "run"
    commands = [("work", run), ("finish", run)] if damaged in ("plan/units.parquet", "plan/requests.parquet") else []
    if not commands:
        assert batchinfer("work", job).code == 0
        commands = [("finish", run)]
    (path,) = run.glob(damaged)
    path.write_bytes(path.read_bytes()[:50])
    for command in commands:
        ended = batchinfer(*command)
        assert ended.code in (1, 2), ended.err
        assert "Traceback" not in ended.err
        assert str(path) in ended.err or command[0] == "finish"


def test_an_error_that_a_library_raises_because_of_a_signal_counts_as_an_interrupt(tmp_path):
    # DuckDB raises a RuntimeError instead of the signal's exception if a query is interrupted
    stop = SimpleNamespace(requested=True)
    session = Session("finish", stop)
    session.attach(FolderStorage(RunDir(tmp_path)))
    with pytest.raises(InterruptedRunError, match="run the same command"), session:
        raise RuntimeError("Query interrupted")
    (row,) = pq.read_table(next((tmp_path / "stats" / "nodes").glob("*.parquet"))).to_pylist()
    assert row["state"] == "interrupted"


def end_with(ending):
    if ending is not None:
        raise ending


@pytest.mark.parametrize("ending", [InterruptedRunError("stopped"), ModelError("the first reason"), None])
def test_a_session_ends_as_its_command_did_also_where_its_row_cannot_be_written(tmp_path, capsys, ending):
    session = Session("work", SimpleNamespace(requested=False))
    session.attach(FolderStorage(RunDir(tmp_path)))
    shutil.rmtree(tmp_path / "stats" / "nodes")
    (tmp_path / "stats" / "nodes").write_text("")  # as on a full disk, nothing can be written there
    with pytest.raises(ConfigError if ending is None else type(ending)) as raised, session:
        end_with(ending)
    assert ending is None or raised.value is ending
    assert ("warning: cannot write" in capsys.readouterr().err) == (ending is not None)
    assert "session heartbeat" not in {thread.name for thread in threading.enumerate()}
    assert not list(tmp_path.glob("work/sessions/*"))


def test_a_shard_with_the_longest_name_gets_its_output(tmp_path):
    name = "l" * (255 - len(".parquet")) + ".parquet"
    write_shard(tmp_path / "prompts" / name, {"prompt": [question(0)]})
    ended = batchinfer("run", write_job(tmp_path))
    assert ended.code == 0, ended.err
    assert list(outputs(tmp_path / "run")) == [name]


@pytest.mark.all  # make test: the longest name, above
def test_names_too_long_for_the_run_folder_are_refused_before_a_row_is_read(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(0)]})
    shards = find_shards([str(tmp_path / "prompts" / "a.parquet")])
    for long in ("k" * 300 + ".parquet", "/".join(["folder" * 20] * 40) + ".parquet"):
        with pytest.raises(ConfigError, match="longer name"):
            check_names(RunDir(tmp_path), [replace(shards[0], name=long)], "parquet")
