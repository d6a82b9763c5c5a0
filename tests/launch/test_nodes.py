"""Ranks over several processes, as srun and torchrun start them; hosts of other names stand for other nodes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import batchinfer as batchinfer_package
from batchinfer.checked_json import publish_json
from batchinfer.launch import nodes
from batchinfer.launch.nodes import this_node
from batchinfer.launch.rank_connections import RankConnections
from batchinfer.records import ConfigError, DamagedFileError
from batchinfer.run.liveness import this_host
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from support.faults import LONG, SLOW
from support.faulty_store import Faults, faulty_store
from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.s3_servers import SERVERS, running
from support.tiers import first_in_make_test

CAN_RENAME = subprocess.run(["unshare", "--uts", "true"], check=False, capture_output=True).returncode == 0
NEEDS_ROOT = pytest.mark.skipif(not CAN_RENAME, reason="needs root (unshare)")
V4, V6 = socket.AF_INET, socket.AF_INET6
APART = {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    write_questions(folder / "prompts", (12, 9, 6))
    assert batchinfer("run", write_job(folder, sampling=LONG)).code == 0
    return folder, output_bytes(folder / "run")


def planned(reference, name, cluster):
    folder, _ = reference
    job = write_job(folder, name=f"{name}.toml", output={"dir": name}, cluster=SLOW | cluster, sampling=LONG)
    assert batchinfer("plan", job).code == 0
    return folder / name


def test_a_share_by_a_launchers_variables(monkeypatch):
    for name, value in {"": "first-0-1", "_INDEX": "1", "_SIZE": "2"}.items():
        monkeypatch.setenv(f"BATCHINFER_GROUP{name}", value)
    node = this_node(4)
    assert (node.index, node.count, node.name, list(node.ranks)) == (1, 2, "first-0-1", [2, 3])
    with pytest.raises(ConfigError, match="5 ranks do not spread evenly over 2"):
        this_node(5)


@pytest.mark.all  # make test: variables of launchers, above
def test_groups_of_torchrun_that_name_no_rendezvous_do_not_share_a_meeting(monkeypatch, tmp_path):
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**ranks, "MASTER_ADDR": "fd00::7"}.items():
        monkeypatch.setenv(name, value)
    names = []
    for port in ("29400", "29401"):
        monkeypatch.setenv("MASTER_PORT", port)
        names.append(this_node(2).name)
    assert names == ["torchrun-none-fd00__7-29400", "torchrun-none-fd00__7-29401"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "../../a job")
    run = RunDir(tmp_path)
    assert run.meeting(this_node(2).name).parent == run.work


def start_nodes(
    run, num_nodes, *, other_hosts=False, own_processes=False, options=lambda index: (), variables=lambda index: {}
):
    """Start the same command once per node, with the node's number, as srun does."""
    processes = []
    for index in range(num_nodes):
        slurm = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(num_nodes)}
        command = [sys.executable, "-m", "batchinfer", "work", str(run), *options(index)]
        if other_hosts:
            rename = f'hostname node{index}; exec "$@"'
            command = ["unshare", "--uts", "sh", "-c", rename, "sh", *command]
        if own_processes:
            command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command]
        environment = {**os.environ, **slurm, "SLURM_PROCID": str(index), **variables(index)}
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return processes


def ended(processes):
    texts = [process.communicate(timeout=180)[1] for process in processes]
    return [process.returncode for process in processes], "\n".join(texts)


@pytest.mark.parametrize(
    ("cluster", "other_hosts"),
    [
        pytest.param({"prefill_ranks": 2}, False, marks=pytest.mark.slow),  # as where a rank dies
        pytest.param({"prefill_ranks": 2}, True, marks=[NEEDS_ROOT, pytest.mark.slow]),
        pytest.param(APART, True, marks=NEEDS_ROOT),
    ],
    ids=["same host", "two hosts", "two hosts, prefill apart from decode"],
)
def test_two_nodes_give_the_outputs_of_one_rank(reference, cluster, other_hosts):
    name = f"nodes-{len(cluster)}-{other_hosts}"
    run = planned(reference, name, cluster)
    codes, err = ended(start_nodes(run, 2, other_hosts=other_hosts))
    assert codes == [0, 0], err
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]
    assert not list((run / "work").glob("*"))
    rows = json.loads(batchinfer("report", run, "--json", "--sql", "SELECT * FROM nodes WHERE command = 'work'").out)
    assert [row["num_ranks"] for row in rows] == [sum(cluster[k] for k in cluster if k != "mode") // 2] * 2
    assert {row["node"] for row in rows} == ({"node0", "node1"} if other_hosts else {rows[0]["node"]})
    assert all(row["first_prefill_s"] is not None for row in rows)


@pytest.mark.all  # make test: two hosts, above
@NEEDS_ROOT
@pytest.mark.parametrize("namespaces", [["--net"], ["--pid", "--fork", "--mount-proc", "--kill-child"], ["--uts"]])
def test_a_host_is_the_processes_that_reach_each_others_memory(namespaces):
    say = [sys.executable, "-c", "from batchinfer.run.liveness import this_host; print(this_host())"]
    rename = ["sh", "-c", 'hostname other; exec "$@"', "sh"] if namespaces == ["--uts"] else []
    here, there = (
        subprocess.run([*words, *say], check=True, capture_output=True, text=True).stdout
        for words in ([], ["unshare", *namespaces, *rename])
    )
    assert here.strip() == this_host() != there.strip()


def wait_for_parts(run, processes):
    deadline = time.monotonic() + 90
    while not list(run.glob("units/*/[0-9]*/part-*.parquet")):
        assert all(process.poll() is None for process in processes), ended(processes)
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(pid):
    listed = subprocess.run(["pgrep", "-P", str(pid)], check=False, capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


def test_a_rank_of_the_other_node_dies(reference):
    run = planned(reference, "other-dies", {"prefill_ranks": 2})
    processes = start_nodes(run, 2, other_hosts=False)
    wait_for_parts(run, processes)
    os.kill(children(processes[1].pid)[0], signal.SIGKILL)
    codes, err = ended(processes)
    assert codes == [0, 0], err
    assert "starting this node's ranks again" in err
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]


def test_all_processes_of_a_group_that_is_refused_say_why(reference, tmp_path):
    run = planned(reference, "refused", {"prefill_ranks": 2})
    package = shutil.copytree(Path(batchinfer_package.__file__).parent, tmp_path / "batchinfer")
    messages = package / "protocol" / "messages.py"
    messages.write_text(messages.read_text().replace("(messages ", "(other messages "))
    own = os.environ.get("PYTHONPATH", "")
    processes = start_nodes(run, 2, variables=lambda index: {"PYTHONPATH": f"{tmp_path}:{own}" if index else own})
    texts = [process.communicate(timeout=180)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], texts
    for text, begin in zip(texts, ("error: rank", "error: the first process of this group ended: rank"), strict=True):
        (line,) = [line for line in text.splitlines() if "error: " in line]
        assert line.startswith(begin)
        assert "install the same batchinfer and msgspec for both" in line


def torchrun(job, *options):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "batchinfer", "work"]
    command = [sys.executable, *command, job, *options]
    with tempfile.TemporaryDirectory() as folder:  # torchrun leaves its own there
        variables = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


@pytest.mark.all  # make test: variables of launchers, above
def test_torchrun_starts_the_ranks(reference):
    run = planned(reference, "torchrun", {"prefill_ranks": 2})
    torchrun(run)
    assert batchinfer("finish", run).code == 0
    assert output_bytes(run) == reference[1]


@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    pytest.importorskip("obstore")
    with running(request.param, tmp_path_factory) as server:
        server.make_bucket("runs")
        yield server


class InBucket:
    """A job whose run folder is in a bucket, and a copy of it for each node."""

    def __init__(self, reference, server, url, scratch, name, cluster):
        planned(reference, name, cluster)  # on disk: for its job file
        self.job, self.prefix, self._server, self._url, self._scratch = (
            reference[0] / f"{name}.toml",
            f"{name}-{scratch.name}",
            server,
            url,
            scratch,
        )
        assert batchinfer("plan", self.job, *self.options("planner")).code == 0

    def options(self, node):
        settings = {
            "output.dir": f"s3://runs/{self.prefix}",
            "output.work_dir": self._scratch / str(node),
            "s3.endpoint": self._url,
        }
        return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]

    def outputs(self):
        done = batchinfer("finish", self.job, *self.options("finisher"))
        assert done.code == 0, done.err
        found = self._server.objects("runs", self.prefix)
        assert not [name for name in found if name.startswith("work/")]
        return {name: data for name, data in found.items() if name.startswith("outputs/")}


@pytest.mark.all  # make test: two nodes, and test_second_tier's bucket
@pytest.mark.parametrize(
    ("cluster", "other_hosts"),
    [
        pytest.param({"prefill_ranks": 2}, False, marks=pytest.mark.slow),
        pytest.param({"prefill_ranks": 2}, True, marks=[NEEDS_ROOT, pytest.mark.slow]),
        pytest.param(APART, True, marks=NEEDS_ROOT),
    ],
    ids=["same host", "two hosts", "two hosts, prefill apart from decode"],
)
def test_two_nodes_meet_in_a_bucket_and_their_kv_goes_through_it(reference, server, tmp_path, cluster, other_hosts):
    faults = Faults(share=0.03, kinds=("500", "503", "lost"), seed=3)
    with faulty_store(server, faults) as url:
        run = InBucket(reference, server, url, tmp_path, f"in-bucket-{len(cluster)}", cluster)
        nodes_ = start_nodes(run.job, 2, other_hosts=other_hosts, options=run.options)
        codes, err = ended(nodes_)
        assert codes == [0, 0], err
        assert run.outputs() == reference[1]
    assert any("/work/meeting-slurm-77-0-0.json" in path for path in faults.written)
    if cluster == APART:
        sent = {path.rpartition("/")[2] for path in faults.written if "/work/transfers-" in path}
        assert len(sent) == 27  # each request, some twice: an answer was lost


def says(monkeypatch, name_means, leaves_from):
    """Sets what the host's name means and where packets to elsewhere leave from, by family."""

    class Probe(socket.socket):
        def connect(self, address):
            if self.family not in leaves_from:
                raise OSError("Network is unreachable")

        def getsockname(self):
            return (leaves_from[self.family], 1)

    def lookup(name, port, family):
        if family not in name_means:
            raise socket.gaierror("no address of this family")
        return [(family, socket.SOCK_STREAM, 6, "", (name_means[family], 0))]

    monkeypatch.setattr(nodes.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(nodes.socket, "socket", Probe)


@pytest.mark.parametrize(
    ("name_means", "leaves_from", "expected"),
    first_in_make_test(
        [
            ({V4: "192.0.2.7", V6: "2001:db8::7"}, {V4: "192.0.2.8"}, "192.0.2.7"),
            ({V4: "127.0.1.1"}, {V4: "192.0.2.8", V6: "2001:db8::8"}, "192.0.2.8"),
            ({V4: "127.0.1.1", V6: "2001:db8::7"}, {}, "2001:db8::7"),
            ({V4: "127.0.1.1", V6: "::1"}, {V6: "2001:db8::8"}, "2001:db8::8"),
            ({V6: "fe80::1%eth0"}, {V6: "2001:db8::8"}, "2001:db8::8"),
        ],
        2,
    ),
)
def test_the_address_that_other_hosts_call_is_one_they_can_reach(monkeypatch, name_means, leaves_from, expected):
    says(monkeypatch, name_means, leaves_from)
    assert nodes.own_address() == expected


@pytest.mark.all  # make test: addresses, above
def test_a_host_that_others_cannot_reach_says_so(monkeypatch, capsys):
    """All tasks may be on it."""
    says(monkeypatch, {V4: "127.0.0.1", V6: "::1"}, {})
    assert nodes.own_address() == "127.0.0.1"
    assert "has only loopback addresses: tasks of this group on other hosts cannot reach it" in capsys.readouterr().err


@pytest.fixture
def listening():
    """A controller that waits for ranks, as its meeting point says."""
    connections = RankConnections([], "127.0.0.1")
    point = nodes.MeetingPoint("127.0.0.1", connections.listener.port, connections.credentials, session="one")
    yield point
    connections.close()


class Stop:
    requested = False


@pytest.mark.all  # make test: two hosts, above
def test_a_meeting_of_an_earlier_life_of_the_group_is_waited_out(tmp_path, listening, monkeypatch, capsys):
    """The controller was killed: no process listens at its address, or another one does."""
    node = nodes.NodeShare(1, 2, "group", range(1, 2), is_one_host=True)
    storage = FolderStorage(RunDir(tmp_path))
    gone = RankConnections([], "127.0.0.1")
    gone.close()
    monkeypatch.setattr(nodes, "MEET_S", 0.3)
    for port in (gone.listener.port, listening.port):
        nodes.announce(storage, node, nodes.MeetingPoint("127.0.0.1", port, gone.credentials, session="killed"))
        with pytest.raises(ConfigError, match=f"or cannot be reached at 127.0.0.1, port {port}"):
            nodes.find_meeting_point(storage, node, Stop, lambda: False)
        told = f"warning: the first process of this group does not answer at 127.0.0.1, port {port}; waiting 0.3 s"
        assert capsys.readouterr().err.count(told) == 1
    monkeypatch.setattr(nodes, "MEET_S", 60.0)
    threading.Timer(0.5, nodes.announce, (storage, node, listening)).start()
    assert nodes.find_meeting_point(storage, node, Stop, lambda: False) == listening


def test_nobody_else_ever_reads_the_key_of_a_meeting(tmp_path, monkeypatch):
    modes, publish = [], Path.rename

    def rename(path, target):
        modes.append(path.stat().st_mode & 0o777)
        return publish(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    point = nodes.MeetingPoint(host="127.0.0.1", port=1, credentials="secret", session="one")
    told = nodes.announce(
        FolderStorage(RunDir(tmp_path)), nodes.NodeShare(0, 2, "group", range(1), is_one_host=True), point
    )
    assert modes == [0o600]
    assert told.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("mode", "owner"), [(0o640, None), (0o602, None), pytest.param(0o600, 65534, marks=NEEDS_ROOT)]
)
def test_a_meeting_that_somebody_else_may_have_written_is_refused(tmp_path, listening, mode, owner):
    node = nodes.NodeShare(1, 2, "group", range(1, 2), is_one_host=True)
    storage = FolderStorage(RunDir(tmp_path))
    path = nodes.announce(storage, node, listening)
    assert nodes.find_meeting_point(storage, node, None, lambda: False) == listening
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    with pytest.raises(ConfigError, match="belongs to or is open to other users; remove it"):
        nodes.find_meeting_point(storage, node, None, lambda: False)


@pytest.mark.parametrize(
    "wrong", [{"exit_code": "2"}, {"exit_code": 2.5}, {"exit_code": None}, {"reason": 5}, {"reason": None}]
)
def test_the_end_of_a_group_is_damaged_if_a_value_has_the_wrong_type(tmp_path, wrong):
    storage = FolderStorage(RunDir(tmp_path))
    nodes.tell_end(storage, "one", ConfigError("no room"))
    end = nodes.told_end(storage, "one")
    assert (str(end), end.exit_code) == ("the first process of this group ended: no room", 2)
    path = storage.run.meeting("one")
    publish_json(path, {"reason": "no room", "exit_code": 2} | wrong)
    with pytest.raises(DamagedFileError, match=f"{path.name} is damaged: it is another document"):
        nodes.told_end(storage, "one")


@pytest.mark.parametrize("wrong", [{"port": "1"}, {"host": None}])
def test_a_meeting_is_damaged_if_a_value_has_the_wrong_type(tmp_path, wrong):
    node, storage = nodes.NodeShare(1, 2, "group", range(1, 2), is_one_host=True), FolderStorage(RunDir(tmp_path))
    point = {"host": "127.0.0.1", "port": 1, "credentials": "secret", "session": "one"}
    storage.run.work.mkdir()
    publish_json(storage.run.meeting("group"), point | wrong, mode=0o600)
    with pytest.raises(DamagedFileError, match="is damaged: it is another document"):
        nodes.find_meeting_point(storage, node, None, lambda: False)


def test_shares_of_nodes(monkeypatch):
    assert this_node(4).ranks == range(4)
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_JOB_ID": "5"}.items():
        monkeypatch.setenv(name, value)
    share = this_node(4)
    assert (share.index, share.count, share.ranks, share.is_one_host) == (1, 2, range(2, 4), False)
    with pytest.raises(ConfigError, match="3 ranks do not spread evenly over 2 tasks"):
        this_node(3)


@pytest.mark.parametrize("command", ["plan", "run", "finish"])
def test_commands_for_one_process_say_so_under_srun(reference, monkeypatch, command):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    refused = batchinfer(command, reference[0] / "job.toml")
    assert refused.code == 2
    assert "under srun or torchrun" in refused.err
