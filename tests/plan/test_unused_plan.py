"""A run folder with the plan of another job: planned anew while nothing was computed, refused after that."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.schemas import STATS_NODES
from support.jobs import answers, batchinfer, write_job, write_questions


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
    assert "held the plan of another job, of which nothing was computed; it is planned anew" in ended.err
    assert batchinfer("run", job).code == 0
    rows = answers(tmp_path / "run")
    assert len(rows) == 3
    assert all(len(row["token_ids"]) <= 3 for row in rows)


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
    assert "or delete that folder, which loses the answers of 1 work units" in ended.err
    assert batchinfer("finish", tmp_path / "run").code == 0
    ended = batchinfer("plan", changed)
    assert ended.code == 2
    assert "or delete that folder, which loses the outputs of 5 rows" in ended.err
    assert len(answers(tmp_path / "run")) == 5


def test_a_run_that_somebody_may_work_in_is_left_alone(planned, tmp_path):
    (session,) = (tmp_path / "run" / "stats" / "nodes").glob("*.parquet")
    row = {**pq.read_table(session).to_pylist()[0], "command": "work", "state": "running", "node": "far"}
    pq.write_table(pa.Table.from_pylist([row], STATS_NODES.schema), session.with_name("other.parquet"))
    ended = batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 3}))
    assert ended.code == 2
    assert "or delete that folder once its `batchinfer work` on far is over, which has not said so yet" in ended.err
    assert (tmp_path / "run" / "plan" / "units.parquet").exists()


def test_a_run_that_was_sent_to_slurm_is_left_alone(planned, tmp_path):
    (tmp_path / "run" / "slurm").mkdir()
    (tmp_path / "run" / "slurm" / "0001.json").write_text("{}")
    ended = batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 3}))
    assert ended.code == 2
    assert f"or delete that folder after `batchinfer cancel {tmp_path / 'run'}`: it was sent to Slurm" in ended.err
