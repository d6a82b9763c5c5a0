"""A run on a real Ray of three nodes on this host: one is lost in the middle, and the outputs stay the same.

The run folder is on a disk that all see, or in a bucket of moto's server, whose keys nodes have in their environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchinfer.plan import packing
from batchinfer.run.store.interface import Storage
from batchinfer.run.store.open import bucket_storage
from batchinfer.rundir import RunDir
from batchinfer.submit.ray.client import connect, submissions
from batchinfer.submit.ray.wanted import read_tasks
from support import sent_jobs
from support.jobs import batchinfer, output_bytes
from support.object_store import SECRET, Server, s3_server
from support.sent_jobs import SLOW, computed_here, submitted

pytest.importorskip("ray", reason="NOT TESTED ON A REAL RAY: it is not installed (pip install 'ray[default]')")

ROWS = (15, 12, 13)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of 40 rows in 40 units, and the outputs computed on one machine."""
    return computed_here(tmp_path_factory.mktemp("reference"), ROWS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as running:
        running.make_bucket("runs")
        yield running


@pytest.fixture(scope="module")
def cluster(server) -> Iterator[Any]:
    """Three nodes with room for two tasks each, and the keys of the object store; `submit` finds them."""
    from ray.cluster_utils import Cluster

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **dashboard})
    os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    try:
        for _ in range(2):
            found.add_node(num_cpus=2)
        yield found
    finally:
        found.shutdown()
        del os.environ["RAY_API_SERVER_ADDRESS"]


@pytest.fixture
def submit(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)

    def send(*options: str, **settings: Any) -> RunDir:
        return submitted(reference[0], tmp_path / "a run; of 100% $(touch x)", "--to", "ray", *options, **settings)

    return send


@pytest.fixture
def submit_to_bucket(reference, server, monkeypatch):
    """Sends the job with its run folder in the bucket; gives a storage of it like a person's on another machine."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    copies = Path(tempfile.mkdtemp())

    def send(name: str, *options: str) -> Storage:
        uri = f"s3://runs/{name}"
        keys = {"output.dir": uri, "output.work_dir": copies, "s3.endpoint": server.endpoint}
        keys |= {f"cluster.{key}": value for key, value in SLOW.items()}
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        sent = batchinfer("submit", reference[0], "--to", "ray", *sets, *options)
        assert sent.code == 0, sent.err
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        return fetched(bucket_storage(uri, None))

    yield send
    shutil.rmtree(copies)


def fetched(storage: Storage) -> Storage:
    storage.fetch("state", "sent")
    return storage


def wait_for(condition: Callable[[], Any], run: RunDir) -> Any:
    return sent_jobs.wait_for(condition, lambda: logs(run))


def logs(run: RunDir) -> str:
    sent = submissions(run)[-1]
    texts = [f"--- {path.name}\n{path.read_text()}" for path in sorted((run.root / "ray").glob("*.log"))]
    # of a run in a bucket Ray alone has what tasks say
    return "\n".join([connect(sent.shape).get_job_logs(sent.job), *texts])


def state(run: RunDir) -> str:
    sent = submissions(run)[-1]
    return str(connect(sent.shape).get_job_status(sent.job).value)


def is_in_the_middle(run: RunDir) -> bool:
    num_done = len(list(run.root.glob("done/*")))
    assert num_done < sum(ROWS) - 4, "too quick to be disturbed"
    return len(list(run.root.glob("units/*/[0-9]*/part-*.parquet"))) > 2


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(path.parent.name))
    return [found for child in children for found in (child, *below(child))]


def lose(cluster: Any) -> int:
    """A node that is not the head goes without a word, with all that it runs; returns how many of these computed."""
    for node in list(cluster.worker_nodes):
        found = below(node.all_processes["raylet"][0].process.pid)
        ranks = [pid for pid in found if b"batchinfer.rank.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if ranks:
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
            return len(ranks)
    return 0


@pytest.mark.slow
def test_four_tasks_of_which_a_node_is_lost_in_the_middle(submit, reference, cluster):
    run = submit("--array", "4")
    refused = batchinfer("submit", run.root, "--to", "ray", "--array", "2")
    assert (refused.code, "is in Ray already" in refused.err) == (2, True)
    wait_for(lambda: is_in_the_middle(run), run)
    status = json.loads(batchinfer("status", run.root, "--json").out)
    assert status["launcher"] == "Ray"
    assert status["tasks_running"] + status["tasks_waiting"] == 4
    assert wait_for(lambda: lose(cluster), run) >= 1
    wait_for(lambda: state(run) in ("SUCCEEDED", "FAILED"), run)
    assert state(run) == "SUCCEEDED", logs(run)
    assert output_bytes(run.root) == reference[1]
    assert "a lost node" in logs(run)
    assert not read_tasks(run).failed


@pytest.mark.slow
def test_a_group_of_two_nodes_is_resized_cancelled_and_goes_on(submit, reference, cluster, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 150)
    run = submit("--array", "2", "--nodes-per-group", "2", prefill_ranks=2)
    wait_for(lambda: is_in_the_middle(run), run)
    assert "1 task commits and leaves" in batchinfer("submit", "--resize", run.root, "1").out
    wait_for(lambda: len(read_tasks(run).running + read_tasks(run).waiting) <= 1, run)
    assert submissions(run)[-1].job in batchinfer("cancel", run.root).out
    assert state(run) in ("FAILED", "STOPPED")  # it says 75
    assert "no tasks of" in batchinfer("cancel", run.root).out
    assert batchinfer("submit", run.root, "--to", "ray", "--array", "1", "--nodes-per-group", "2").code == 0
    wait_for(lambda: state(run) in ("SUCCEEDED", "FAILED"), run)
    assert state(run) == "SUCCEEDED", logs(run)
    assert output_bytes(run.root) == reference[1]


def has_begun(server: Server, name: str) -> bool:
    listed = server.client().list_objects_v2(Bucket="runs", Prefix=f"{name}/")["Contents"]
    names = [item["Key"].removeprefix(f"{name}/") for item in listed]
    assert sum(key.startswith("done/") for key in names) < sum(ROWS) - 4, "too quick to be disturbed"
    return sum(key.startswith("units/") for key in names) > 2


@pytest.mark.slow
def test_in_a_bucket_four_tasks_of_which_a_node_is_lost_in_the_middle(submit_to_bucket, server, reference, cluster):
    storage = submit_to_bucket("first", "--array", "4")
    uri, run = "s3://runs/first", storage.run
    wait_for(lambda: has_begun(server, "first"), run)
    status = json.loads(batchinfer("status", uri, "--json").out)
    assert (status["run"], status["launcher"]) == (uri, "Ray")
    assert status["tasks_running"] + status["tasks_waiting"] == 4
    assert wait_for(lambda: lose(cluster), run) >= 1
    wait_for(lambda: state(run) in ("SUCCEEDED", "FAILED"), run)
    assert state(run) == "SUCCEEDED", logs(run)
    outputs = {key: data for key, data in server.objects("runs", "first").items() if key.startswith("outputs/")}
    assert outputs == reference[1]
    said = logs(run)
    assert "a lost node" in said
    assert said.count("Ray task first-") >= 3  # what tasks say is in the job's log
    assert not read_tasks(fetched(storage).run).failed
    # no credentials are in the submission or in any of Ray's files
    written = [
        path.read_bytes() for path in Path(cluster.head_node.get_session_dir_path()).rglob("*") if path.is_file()
    ]
    assert len(written) > 10
    assert not any(SECRET.encode() in text for text in (*written, *server.objects("runs", "first").values()))
