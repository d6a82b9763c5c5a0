"""A run folder with the plan of another job: planned again if nothing was computed, else refused."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.data.schemas.statistics import STATS_NODES
from batchinfer.run.heartbeat import Heartbeat
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import LAUNCHERS, RunDir
from support.jobs import answers, batchinfer, write_job, write_questions, write_shard


@pytest.fixture
def planned(tmp_path):
    """A planned run and its job."""
    write_questions(tmp_path / "prompts", (3, 2))
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    return job


def test_a_changed_job_is_planned_anew_while_nothing_was_computed(planned, tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    (tmp_path / "prompts" / "part-1.parquet").unlink()
    job = write_job(tmp_path, sampling={"max_tokens": 3})
    ended = batchinfer("plan", job)
    assert ended.code == 0, ended.err
    assert "held the plan of another job without results; the folder is planned again" in ended.err
    assert batchinfer("run", job).code == 0
    rows = answers(tmp_path / "run")
    assert len(rows) == 3
    assert all(len(row["token_ids"]) <= 3 for row in rows)


def test_other_model_code_does_not_go_on_with_a_plan(planned, tmp_path):
    state = read_json(tmp_path / "run" / "run.json")
    now = state["fingerprint"].pop("model code")
    for before, told in (({}, "null"), ({"model code": "0a1b"}, "0a1b")):
        publish_json(tmp_path / "run" / "run.json", {**state, "fingerprint": {**state["fingerprint"], **before}})
        ended = batchinfer("work", tmp_path / "run")
        assert ended.code == 2
        assert f"belongs to another job: model code was {told} and is now {now}; choose" in ended.err
    ended = batchinfer("run", planned)
    assert ended.code == 0, ended.err
    assert "held the plan of another job without results; the folder is planned again" in ended.err


def test_a_plan_that_was_killed_in_between_is_made_by_whoever_comes(planned, tmp_path, monkeypatch):
    from batchinfer.plan import planner

    def dies(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr(planner, "note", dies)
    assert batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 3})).code == 1
    monkeypatch.undo()
    assert batchinfer("run", write_job(tmp_path)).code == 0
    assert len(answers(tmp_path / "run")) == 5


def test_a_run_in_which_work_was_done_is_refused_and_what_would_be_lost_is_told(planned, tmp_path):
    assert batchinfer("work", planned).code == 0
    changed = write_job(tmp_path, sampling={"max_tokens": 3})
    ended = batchinfer("plan", changed)
    assert ended.code == 2
    assert "sampling.max_tokens was 8 and is now 3" in ended.err
    assert "or delete that folder, which loses the answers of 1 work unit" in ended.err
    assert batchinfer("finish", tmp_path / "run").code == 0
    ended = batchinfer("plan", changed)
    assert ended.code == 2
    assert "or delete that folder, which loses the outputs of 5 rows" in ended.err
    assert len(answers(tmp_path / "run")) == 5


def write_three(path, answer):
    """Three prompts, of which no answer of two digits changes the file's footer."""
    return write_shard(path, {"id": ["a", "b", "c"], "prompt": ["Ask 10.", f"Ben {answer}.", "Cut 12."]})


def test_a_shard_edited_under_the_same_footer_is_planned_anew_or_refused(planned, tmp_path):
    first = write_three(tmp_path / "prompts" / "part-0.parquet", 11)
    assert batchinfer("plan", planned).code == 0
    footer = pq.read_metadata(first)
    write_three(first, 37)
    assert pq.read_metadata(first).equals(footer)
    ended = batchinfer("plan", planned)
    assert "the folder is planned again" in ended.err
    assert batchinfer("work", planned).code == 0
    write_three(first, 11)
    for command in ("plan", "run", "finish"):
        ended = batchinfer(command, planned)
        assert ended.code == 2, ended.err
        assert "part-0.parquet" in ended.err
    write_three(first, 37)
    assert batchinfer("run", planned).code == 0


def test_a_plan_that_was_interrupted_does_not_take_tokens_of_an_edited_shard(planned, tmp_path, monkeypatch):
    from batchinfer.plan import planner

    def dies(*_):
        raise OSError("the disk is gone")

    first = write_three(tmp_path / "prompts" / "part-0.parquet", 11)
    with monkeypatch.context() as patched:
        patched.setattr(planner, "load_rows", dies)
        again = batchinfer("plan", planned, "--set", f"output.dir={tmp_path / 'again'}")
        assert again.code == 1, again.err
    before = pq.read_table(tmp_path / "again" / "tokens" / "00000.parquet")["token_ids"].to_pylist()
    write_three(first, 37)
    assert batchinfer("plan", planned, "--set", f"output.dir={tmp_path / 'again'}").code == 0
    after = pq.read_table(tmp_path / "again" / "tokens" / "00000.parquet")["token_ids"].to_pylist()
    assert [row for row in range(3) if before[row] != after[row]] == [1]


def add_session(run):
    """The row of a `work` on another host that has not said that it ended; its sign of life is still to be given."""
    (session,) = (run / "stats" / "nodes").glob("*.parquet")
    row = {**pq.read_table(session).to_pylist()[0], "session": "other", "command": "work", "state": "running"}
    table = pa.Table.from_pylist([{**row, "node": "far"}], STATS_NODES.schema)
    pq.write_table(table, session.with_name("other.parquet"))
    return Heartbeat(FolderStorage(RunDir(run)), "other", "work")


def write_sign(run, **changes):
    """A sign of life whose process is on another host, unless `changes` say otherwise."""
    path = RunDir(run).heartbeat("other")
    publish_json(path, read_json(path) | {"host": "far", "node": "far"} | changes)
    return path


def test_a_run_that_somebody_may_work_in_is_left_alone(planned, tmp_path):
    run, changed = tmp_path / "run", write_job(tmp_path, sampling={"max_tokens": 3})
    heart = add_session(run)
    ended = batchinfer("plan", changed)
    assert ended.code == 2
    assert "or delete that folder once its `batchinfer work` on far is over: its end is not recorded" in ended.err
    heart.beat()
    write_sign(run)
    ended = batchinfer("plan", changed)
    assert ended.code == 2
    assert "sampling.max_tokens was 8 and is now 3" in ended.err
    assert "stop it, or if it was killed there, run this again after 60 s" in ended.err
    assert (run / "plan" / "units.parquet").exists()


def test_a_session_that_has_been_silent_on_another_host_makes_way(planned, tmp_path):
    run = tmp_path / "run"
    add_session(run).beat()
    sign = write_sign(run)
    os.utime(sign, (sign.stat().st_mtime - 61,) * 2)
    ended = batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 3}))
    assert ended.code == 0, ended.err
    assert not sign.exists()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_was_sent_to_a_cluster_is_left_alone(planned, tmp_path, launcher):
    (tmp_path / "run" / launcher).mkdir()
    (tmp_path / "run" / launcher / "0001.json").write_text("{}")
    ended = batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 3}))
    assert ended.code == 2
    assert f"or delete that folder after `batchinfer cancel {tmp_path / 'run'}`: it was sent to a cluster" in ended.err
