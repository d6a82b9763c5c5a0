"""Deadlines, budgets and schedules on a real Slurm with the run folder in a bucket, followed from other login nodes."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from batchinfer.config import JobConfig
from batchinfer.pace.follow_goal import follow_goal
from batchinfer.pace.follow_schedule import follow_schedule
from batchinfer.pace.goal import Goal, read_goal
from batchinfer.plan import packing
from batchinfer.records import InterruptedRunError
from batchinfer.report.price.price_list import PriceList
from batchinfer.run.planned import planned_run
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.open import storage_of
from batchinfer.submit.slurm.tasks import live_tasks, submissions
from support.jobs import Ended, batchinfer
from support.object_store import Server, s3_server
from support.sent_jobs import SLOW, computed_here, stumble, wait_for

pytest.importorskip("obstore")

ROWS = (9, 8, 7)

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow]


@dataclass
class InBucket:
    """A run s3://runs/<name>, and login nodes that know its URI."""

    job: Path
    uri: str
    server: Server
    scratch: Path
    patch: pytest.MonkeyPatch

    def on(self, node: str) -> None:
        """From now on commands run on this login node."""
        (self.scratch / node).mkdir(exist_ok=True)
        self.patch.setattr(tempfile, "tempdir", str(self.scratch / node))

    def submit(self, *options: str) -> Ended:
        settings = {"output.dir": self.uri, "s3.endpoint": self.server.endpoint}
        settings |= {f"cluster.{key}": value for key, value in SLOW.items()}
        sets = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        sent = batchinfer("submit", self.job, *sets, *options)
        assert sent.code == 0, sent.err
        return sent

    def here(self) -> tuple[Storage, JobConfig]:
        """The run on the login node that commands run on."""
        _, config = planned_run(Path(self.uri), ())
        storage = storage_of(config)
        storage.fetch("state", "sent")
        return storage, config

    def names(self, folder: str) -> int:
        listed = self.server.client().list_objects_v2(Bucket="runs", Prefix=f"{self.uri.rpartition('/')[2]}/{folder}/")
        return int(listed["KeyCount"])

    def outputs(self) -> dict[str, bytes]:
        found = self.server.objects("runs", self.uri.rpartition("/")[2])
        return {name: data for name, data in found.items() if name.startswith("outputs/")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    return computed_here(tmp_path_factory.mktemp("reference"), ROWS)


@pytest.fixture
def run(reference, tmp_path, monkeypatch) -> Iterator[InBucket]:
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    monkeypatch.chdir(tmp_path)  # logs come here
    stumble(monkeypatch, tmp_path / "slow", 0.5)
    (tmp_path / "nodes").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nodes"))
    with s3_server() as server:
        server.make_bucket("runs")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        found = InBucket(reference[0], "s3://runs/followed", server, tmp_path, monkeypatch)
        found.on("first")
        try:
            yield found
        finally:
            batchinfer("cancel", found.uri)


def test_the_command_stays_and_another_login_node_goes_on(run, reference):
    soon = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 60))
    sent = run.submit("--finish-by", soon, "--array", "3")
    assert f"`batchinfer submit --follow {run.uri}` adapts their number again" in sent.out
    assert run.outputs() == reference[1]
    run.on("second")
    storage, _ = run.here()
    assert [sent.size.tasks for sent in submissions(storage.run)][:2] == [0, 1]  # the shape, then what measures
    assert read_goal(storage.run).most_tasks == 3
    assert batchinfer("submit", "--follow", run.uri).code == 0  # nothing left to do


def test_a_budget_that_is_spent_pauses_the_run_and_more_of_it_goes_on_elsewhere(run, reference):
    run.patch.setattr("batchinfer.pace.follow_goal.LEAVE_S", 5.0)
    run.patch.setenv("STEP_S", "1.5")
    run.submit("--array", "1")
    wait_for(lambda: run.names("units") > 1)
    run.on("second")
    storage, config = run.here()
    now = time.time()
    prices = PriceList(gpu_hour=36.0)  # a cent per second of a task
    goal = Goal(finish_by_s=None, max_cost=0.25, most_tasks=2, prices=prices, set_s=now)
    with pytest.raises(
        InterruptedRunError, match=r"before more than --max-cost 0\.25 is spent; .* --follow s3://runs/"
    ):
        follow_goal(storage, config, goal, look_s=0.5)
    assert not live_tasks(storage.run)
    assert 0 < run.names("done") < sum(ROWS)
    run.on("third")
    storage, config = run.here()
    follow_goal(storage, config, replace(goal, max_cost=100.0), look_s=0.5)
    assert run.outputs() == reference[1]


def test_the_number_of_tasks_follows_the_hour(run, reference):
    run.submit("--array", "2")
    wait_for(lambda: run.names("units") > 1)
    run.on("second")
    storage, _ = run.here()
    minutes = itertools.chain([8 * 60, 9 * 60 + 1], itertools.repeat(20 * 60 + 30))
    looks = itertools.count(1)

    def minute_now() -> int:
        if next(looks) == 3:
            wait_for(lambda: not live_tasks(storage.run))  # at 09:00 all go
            assert run.outputs() == {}
        return next(minutes)

    follow_schedule(storage, ["08:00 1", "09:00 0", "20:00 3"], minute_now, look_s=0.5)
    run.on("third")
    assert [sent.size.tasks for sent in submissions(run.here()[0].run)] == [2, 3]
    assert run.outputs() == reference[1]
