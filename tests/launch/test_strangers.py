"""Another user on the hosts of a run reads nothing of it, joins nothing and breaks nothing."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import pytest

from batchinfer.launch.nodes import own_address
from launch.test_nodes import NEEDS_ROOT, ended, start_nodes
from support.faults import SLOW, descendants
from support.jobs import batchinfer, output_bytes, start, write_job, write_questions
from support.strangers import AS_NOBODY, another_user, listening_ports
from support.tiers import first_in_make_test

pytestmark = [pytest.mark.all, AS_NOBODY]  # make test: strangers in test_listener and test_exchange


@pytest.fixture
def folder():
    """A folder that every user can read, so that private files in it need their own mode."""
    path = Path(tempfile.mkdtemp(prefix="batchinfer-strangers-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def job(folder):
    """Two ranks' job, and the outputs that one rank gives."""
    write_questions(folder / "prompts", (12, 9, 6))
    sampling = {"max_tokens": 24, "ignore_eos": True}
    assert batchinfer("run", write_job(folder, sampling=sampling)).code == 0
    path = write_job(
        folder, name="two.toml", sampling=sampling, output={"dir": "two"}, cluster=SLOW | {"prefill_ranks": 2}
    )
    return path, output_bytes(folder / "run")


@pytest.mark.all  # make test: strangers at every port, below
def test_the_ranks_of_one_host_listen_at_no_port_and_send_strangers_away(folder, job):
    path, expected = job
    ports: set[int] = set()
    with start("run", path) as process, another_user(lambda: descendants(process.pid), folder / "two"):
        while process.poll() is None:
            ports |= listening_ports([process.pid, *descendants(process.pid)])
            time.sleep(0.02)
        assert process.returncode == 0, process.stderr.read()
    assert ports == set()
    assert output_bytes(folder / "two") == expected


@pytest.mark.parametrize(
    "other_hosts", first_in_make_test([False, pytest.param(True, marks=NEEDS_ROOT)]), ids=["same host", "two hosts"]
)
def test_strangers_at_every_port_of_a_group_of_nodes_change_nothing(folder, job, other_hosts):
    path, expected = job
    assert batchinfer("plan", path).code == 0
    run = folder / "two"
    run.chmod(0o755)  # as its owner may: so that the meeting's own mode is what keeps others out
    nodes = start_nodes(run, 2, other_hosts=other_hosts)

    def pids() -> list[int]:
        return [pid for node in nodes for pid in (node.pid, *descendants(node.pid))]

    with another_user(pids, run, own_address()) as seen:
        codes, err = ended(nodes)
        found = seen()
    assert codes == [0, 0], err
    assert "again" not in err, "ranks were lost"
    assert found.ports > 0
    assert found.files > 0
    assert found.read == 0
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == expected
