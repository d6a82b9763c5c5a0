"""The KV store's second tier in a bucket: nodes with disks of their own share blocks, whatever the bucket does."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from batchinfer.config import S3Config
from batchinfer.data import bucket as bucket_module
from batchinfer.data.bucket import Bucket
from batchinfer.kv_store.disk import DiskStore
from batchinfer.kv_store.reader import Reader
from batchinfer.kv_store.second_tier import ATTEMPTS
from support.faulty_store import Faults, faulty_store
from support.jobs import answers, batchinfer, write_job, write_questions
from support.kv_stores import FILE_BYTES, IDENTITY, block_files, chain_of, open_store, read_intact, write_chain
from support.s3_servers import server_with
from support.tiers import first_in_make_test

pytest.importorskip("obstore")

CHAINS = [chain_of("start", name) for name in "abcd"]  # of which all share the first block


server = server_with("blocks")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket_module, "REQUEST_S", 1.0)


class Nodes:
    """Stores of nodes by name, with one bucket behind them."""

    def __init__(self, folder: Path, url: str, stack: ExitStack) -> None:
        self.uri, self._folder, self._stack = f"s3://blocks/{folder.name}", folder, stack
        self._s3 = S3Config(endpoint=url)

    def open(self, name, **options):
        tier = Bucket(self.uri, self._s3, attempts=ATTEMPTS)
        return self._stack.enter_context(closing(open_store(self._folder / name, bucket=tier, **options)))

    def folder(self, name):
        return self._folder / name


@pytest.fixture
def nodes(server, tmp_path):
    with ExitStack() as stack:
        yield Nodes(tmp_path, server.endpoint, stack)


def test_what_one_node_has_written_another_reads_and_then_has_on_its_disk(nodes):
    first = nodes.open("a")
    assert [write_chain(first, chain) for chain in CHAINS] == [2, 1, 1, 1]
    assert first.counters.sent_files == 4  # a run of two blocks, and three of one
    second = nodes.open("b")
    assert [second.find(chain) for chain in CHAINS] == [2] * 4
    assert write_chain(second, CHAINS[0]) == 0  # equal runs are written once
    assert block_files(nodes.folder("b")) == []
    assert [read_intact(second, chain) for chain in CHAINS] == [2] * 4
    assert second.counters.fetched_files == 4
    assert [read_intact(second, chain) for chain in CHAINS] == [2] * 4
    assert second.counters.fetched_files == 4  # from disk now
    assert [path.name for path in block_files(nodes.folder("b"))] == [
        path.name for path in block_files(nodes.folder("a"))
    ]
    alone = open_store(nodes.folder("b"))  # with checksums by its own key
    assert read_intact(alone, CHAINS[0]) == 2
    alone.close()


def test_a_node_learns_what_others_put_while_it_runs(nodes):
    first, second = nodes.open("a"), nodes.open("b")
    write_chain(first, CHAINS[0])
    assert second.find(CHAINS[0]) == 0
    second._tier.refresh()
    assert read_intact(second, CHAINS[0]) == 2


def test_what_the_disks_bound_evicts_is_fetched_again(nodes):
    store = nodes.open("a", max_bytes=3 * FILE_BYTES)
    chains = [chain_of(str(number)) for number in range(9)]
    assert [write_chain(store, chain) for chain in chains] == [1] * 9
    assert store.counters.evicted_files >= 6
    for _ in range(2):
        assert [read_intact(store, chain) for chain in chains] == [1] * 9
    assert len(block_files(nodes.folder("a"))) <= 3


def test_threads_that_want_one_file_fetch_it_once(nodes):
    chain = chain_of(*"abcdefgh")
    write_chain(nodes.open("a"), chain)
    second = nodes.open("b")
    with closing(Reader(second, num_threads=4)) as reader:
        reads = [reader.ask(chain[start:]) for start in range(8)]
        assert [len(read.wait()) for read in reads] == list(range(8, 0, -1))
    assert second.counters.fetched_files == 1


@pytest.mark.parametrize("damage", first_in_make_test(["flip", "cut", "empty", "another file's"]))
def test_a_damaged_object_is_set_aside_and_put_anew(nodes, server, damage):
    write_chain(nodes.open("a"), CHAINS[0])
    write_chain(nodes.open("a2"), chain_of("other"))
    prefix = nodes.uri.removeprefix("s3://blocks/")
    files = {name: data for name, data in server.objects("blocks", prefix).items() if name.endswith(".kv")}
    (name,) = [name for name, data in files.items() if len(data) > FILE_BYTES]
    (others,) = [data for one, data in files.items() if one != name]
    data = files[name]
    bad = {
        "flip": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        "cut": data[:-1],
        "empty": b"",
        "another file's": others,
    }[damage]
    server.put("blocks", f"{prefix}/{name}", bad)
    second = nodes.open("b")
    assert read_intact(second, CHAINS[0]) == 0
    assert (second.counters.damaged_files, second.find(CHAINS[0])) == (1, 0)
    assert server.objects("blocks", f"{prefix}/quarantine") == {name.rpartition("/")[2]: bad}
    assert write_chain(second, CHAINS[0]) == 2
    assert read_intact(nodes.open("c"), CHAINS[0]) == 2
    assert second.take_problem() is None


def test_a_bucket_that_fails_is_said_once_and_the_disk_goes_on(nodes, tmp_path, server):
    write_chain(nodes.open("a"), CHAINS[0])
    faults = Faults()
    with faulty_store(server, faults) as url, ExitStack() as stack:
        store = Nodes(tmp_path, url, stack).open("b")
        assert store.find(CHAINS[0]) == 2
        faults.share, faults.kinds = 1.0, ("503",)
        assert read_intact(store, CHAINS[0]) == 0
        problem = store.take_problem()
        assert "second tier" in problem
        assert "goes on with what is on this disk" in problem
        assert store.find(CHAINS[0]) == 0
        assert write_chain(store, CHAINS[1]) == 2
        assert read_intact(store, CHAINS[1]) == 2
        assert store.take_problem() is None


@pytest.mark.all  # make test: a damaged object, above
def test_faults_now_and_then_serve_no_wrong_byte(nodes, tmp_path, server):
    faults = Faults(share=0.15, kinds=("500", "503", "lost", "late", "stale"), seed=7)
    chains = [chain_of("start", str(number)) for number in range(20)]
    with faulty_store(server, faults) as url, ExitStack() as stack:
        for name in "abc":
            tier = Bucket(nodes.uri, S3Config(endpoint=url), attempts=ATTEMPTS)  # it may go off
            store = stack.enter_context(closing(DiskStore(tmp_path / name, IDENTITY, bucket=tier)))
            for chain in chains:
                write_chain(store, chain)
                assert read_intact(store, chain) == 2
    assert faults.injected.total() >= 5
    kept = [path for path in faults.written if path.endswith(".kv")]
    assert kept
    assert sorted(kept) == sorted(set(kept))  # no file was written twice


def test_a_key_that_is_none_is_refused_with_a_sentence(nodes, server):
    server.put("blocks", f"{nodes.uri.removeprefix('s3://blocks/')}/key", b"zz")
    tier = Bucket(nodes.uri, nodes._s3, attempts=ATTEMPTS)
    with closing(DiskStore(nodes.folder("a"), IDENTITY, bucket=tier)) as store:
        assert "its key is damaged" in store.take_problem()
        assert write_chain(store, CHAINS[0]) == 2


@pytest.mark.all  # make test: what another node reads, above
def test_jobs_on_nodes_that_share_a_bucket_give_the_rows_of_a_job_without(server, tmp_path):
    write_questions(tmp_path / "prompts", (9, 4))
    expected = None
    for node, kv in [
        ("none", {}),
        ("cold", {"dir": "cold-kv"}),
        ("warm", {"dir": "cold-kv"}),
        ("other", {"dir": "other-kv"}),
    ]:
        tier = {"second_tier": "s3://blocks/jobs", "persist": "all", "reuse": "always"} if kv else {}
        parts = {"kv": kv | tier, "s3": {"endpoint": server.endpoint}, "output": {"dir": node}}
        done = batchinfer("run", write_job(tmp_path, name=f"{node}.toml", **parts))
        assert done.code == 0, done.err
        rows = answers(tmp_path / node)
        expected = expected or rows
        assert rows == expected
    report = batchinfer("report", tmp_path / "other", "--sql", "SELECT fetched_files, hit_blocks FROM kv", "--json")
    assert '"fetched_files": 0' not in report.out
    assert '"hit_blocks": 0' not in report.out
