"""Deadline and budget of a run in a bucket, seen from a login node that has only the run's URI."""

from __future__ import annotations

import time

import pytest

from batchinfer.config import load_job
from batchinfer.pace.follow_goal import is_finished, resize_durably
from batchinfer.pace.goal import Goal, read_goal, write_goal
from batchinfer.pace.meter import RunMeter
from batchinfer.plan import packing
from batchinfer.records import ConfigError, InterruptedRunError
from batchinfer.report.price.price_list import PriceList
from batchinfer.run.store.interface import put_sent
from batchinfer.run.store.open import bucket_storage
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm.follower import take_over
from batchinfer.submit.slurm.tasks import Shape, cancel, record_shape, submissions
from support.jobs import batchinfer, write_job, write_questions
from support.object_store import s3_server

pytestmark = pytest.mark.all  # make test: test_goal, with a folder

pytest.importorskip("obstore")

IN_A_MONTH = time.strftime("%Y-%m-%d", time.localtime(time.time() + 30 * 24 * 3600))
URI = "s3://runs/goal"


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """A run of several units, planned in a bucket on one node; a function that opens it on other nodes."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    write_questions(tmp_path / "prompts", (5,))
    job = write_job(tmp_path, pricing={"gpu_hour": 36.0}, cluster={"commit_seconds": 0.05}, output={"dir": URI})
    with s3_server() as server:
        server.make_bucket("runs")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        planned = batchinfer("plan", job, "--set", f"output.work_dir={tmp_path / 'planner'}")
        assert planned.code == 0, planned.err

        def node(name):
            config = load_job(job, (f"output.work_dir={tmp_path / name}",))
            storage = bucket_storage(URI, config)
            storage.fetch("state", "sent")
            return storage, config

        yield node


def test_what_others_compute_and_cost_is_measured_from_afar(nodes, tmp_path):
    login, job = nodes("login")
    meter = RunMeter(login, job, PriceList(gpu_hour=36.0), measure_s=1e-3)
    before = meter.measure(time.time())
    assert (before.work_s, before.units_open, before.spent) == (None, 5, 0.0)  # no forecast: no speed is known
    assert batchinfer("work", tmp_path / "job.toml", "--set", f"output.work_dir={tmp_path / 'worker'}").code == 0
    after = meter.measure(time.time())
    assert (after.work_s, after.units_open) == (0.0, 0)
    assert after.startup_s > 0
    assert 0 < after.spent < 36.0 * 300 / 3600
    assert not is_finished(login)
    assert batchinfer("finish", tmp_path / "job.toml", "--set", f"output.work_dir={tmp_path / 'worker'}").code == 0
    assert is_finished(login)


def test_a_goal_is_known_on_another_login_node(nodes):
    first, _ = nodes("first")
    goal = Goal(finish_by_s=2e9, max_cost=5.0, most_tasks=7, prices=PriceList(gpu_hour=2.0), set_s=1e9)
    write_goal(first.run, goal)
    put_sent(first)
    second, _ = nodes("second")
    assert read_goal(second.run) == goal


def test_what_was_sent_is_kept_also_where_slurm_refuses_what_comes_next(nodes, tmp_path, monkeypatch):
    first, _ = nodes("first")
    record_shape(first.run, Shape(partition="night"))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot run scontrol"):
        resize_durably(first, ArraySize(1), follower=take_over(first.run))
    second, _ = nodes("second")
    assert [sent.shape.partition for sent in submissions(second.run)] == ["night"]


def test_a_cancel_on_another_node_is_known_before_tasks_end(nodes, monkeypatch):
    first, _ = nodes("first")
    record_shape(first.run, Shape())
    name = take_over(first.run)
    put_sent(first)
    second, _ = nodes("second")
    looks = []

    def look(jobs):
        with pytest.raises(InterruptedRunError, match="was cancelled"):
            resize_durably(first, ArraySize(1), follower=name)
        looks.append(jobs)
        return []

    monkeypatch.setattr(client, "live_tasks", look)
    assert cancel(second) == []
    assert looks


def test_a_dry_run_and_follow_say_what_they_do_by_the_uri_alone(nodes):
    shown = batchinfer("submit", URI, "--finish-by", IN_A_MONTH, "--max-cost", "5", "--dry-run")
    assert shown.code == 0, shown.err
    assert "the speed of a task is not known yet" in shown.out
    assert f" {URI} " in shown.out
    assert "no slurm.schedule" in batchinfer("submit", "--follow", URI).err
