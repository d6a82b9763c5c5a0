"""A run in a bucket on Ray: the submission, and the messages of user and driver; without a Ray cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.config import S3Config
from batchinfer.records import DamagedFileError
from batchinfer.run.store.bucket import BucketStorage
from batchinfer.run.store.interface import put_sent
from batchinfer.submit.ray.wanted import Tasks, read_tasks, read_wanted, write_tasks, write_wanted
from support.jobs import batchinfer, write_job, write_questions
from support.object_store import KEY_ID, SECRET, s3_server

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        running.make_bucket("runs")
        yield running


@pytest.fixture
def job(tmp_path, server) -> tuple[Path, list[str]]:
    write_questions(tmp_path / "prompts", (3,))
    keys = {"output.dir": "s3://runs/ray", "output.work_dir": tmp_path / "me", "s3.endpoint": server.endpoint}
    return write_job(tmp_path), [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]


def test_what_is_sent_names_the_bucket_and_its_service_and_holds_no_keys(job, server):
    path, options = job
    shown = batchinfer("submit", path, "--to", "ray", "--array", "4", "--dry-run", *options)
    assert shown.code == 0, shown.err
    assert "BATCHINFER_RAY_RUN=s3://runs/ray" in shown.out
    assert f"AWS_ENDPOINT_URL_S3={server.endpoint}" in shown.out
    assert KEY_ID not in shown.out
    assert SECRET not in shown.out


def test_a_person_and_the_driver_are_on_different_machines(job, server, tmp_path):
    path, options = job
    assert batchinfer("plan", path, *options).code == 0
    person, driver = (
        BucketStorage("s3://runs/ray", S3Config(endpoint=server.endpoint), str(tmp_path / node))
        for node in ("person", "driver")
    )
    for node in (person, driver):
        node.fetch("state", "sent")
    with pytest.raises(DamagedFileError, match="it is not there"):
        read_wanted(driver)
    write_wanted(person, 3)
    assert read_wanted(driver) == 3
    write_tasks(driver, Tasks(running=["a"], waiting=["b", "c"]))
    assert read_tasks(person.run) == Tasks()
    person.fetch("sent")
    assert read_tasks(person.run).waiting == ["b", "c"]
    # what was fetched is the driver's: a person who keeps what was sent does not bring it back
    write_tasks(driver, Tasks(running=["a", "b", "c"]))
    write_wanted(person, 5)
    put_sent(person)
    tasks = json.loads(server.objects("runs", "ray")["ray/tasks.json"])
    assert tasks["running"] == ["a", "b", "c"]
    person.fetch("sent")
    assert (read_tasks(person.run).running, read_wanted(driver)) == (["a", "b", "c"], 5)
