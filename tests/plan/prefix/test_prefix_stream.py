"""The prefix plan over sorted runs on disk: the same plan as in memory, in bounded memory, and nothing left behind."""

import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.plan import planner
from batchinfer.plan.prefix import plan_prefixes, sorted_runs
from batchinfer.plan.prefix.prompt_parts import PROMPT_BYTES, TOKEN_BYTES
from batchinfer.plan.prefix.streamed import PrefixStream
from batchinfer.records import ConfigError
from support.jobs import batchinfer, question, write_job, write_shard

RUNS_IN_MEMORY = 4  # a run has a quarter of the memory


def flat(prompts):
    offsets = np.cumsum([0, *map(len, prompts)])
    return np.array([token for prompt in prompts for token in prompt], dtype=np.int64), offsets


def add_in_batches(stream, prompts, batch=7):
    for first in range(0, len(prompts), batch):
        stream.add(*flat(prompts[first : first + batch]))


def check_same_plan(prompts, folder, *, run_bytes, block_bytes=200):
    """The streamed plan of the prompts is the one made in memory; returns the number of runs on disk."""
    want = plan_prefixes(*flat(prompts), block_tokens=64)
    scratch = folder / "scratch"
    token_type = np.uint16 if max(map(max, filter(None, prompts)), default=0) < 1 << 16 else np.uint32
    memory_bytes = RUNS_IN_MEMORY * run_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_runs, "BLOCK_BYTES", block_bytes)
        with PrefixStream(scratch, block_tokens=64, memory_bytes=memory_bytes, token_type=token_type) as stream:
            add_in_batches(stream, prompts)
            plan = stream.plan()
            num_runs = len(list(scratch.glob("*")))
            parts = list(stream.in_order())
    assert plan.order.tolist() == want.order.tolist()
    assert plan.shared_tokens.tolist() == want.shared_tokens.tolist()
    assert plan.cached_tokens.tolist() == want.cached_tokens.tolist()
    assert plan.distinct_tokens == want.distinct_tokens
    assert [index for part in parts for index in part.index] == want.order.tolist()
    assert [part.prompt(k).tolist() for part in parts for k in range(len(part))] == [prompts[i] for i in want.order]
    assert [shared for part in parts for shared in part.shared] == want.shared_tokens[want.order].tolist()
    assert not scratch.exists()
    return num_runs


def bytes_of_prompts(num_prompts, num_tokens):
    return num_prompts * PROMPT_BYTES + num_tokens * TOKEN_BYTES // 2  # in 16 bits


def test_two_prompts_per_run_merge_to_the_same_trie_walk(tmp_path):
    #        1 2 ── 3        prompts 0 and 2       runs: 0 1 | 2 3 | 4
    #          └─── 4 5      prompt 3
    #        9               prompts 1 and 4
    prompts = [[1, 2, 3], [9], [1, 2, 3], [1, 2, 4, 5], [9]]
    assert check_same_plan(prompts, tmp_path, run_bytes=bytes_of_prompts(2, 7)) == 3


TREE_TOKENS = st.lists(st.integers(0, 2), max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(TREE_TOKENS, max_size=40),
    head=st.lists(st.integers(0, 2**32 - 1), max_size=4),
    run_bytes=st.integers(0, 1500),
    block_bytes=st.integers(1, 400),
)
def test_any_prompts_and_any_memory_give_the_plan_made_in_memory(
    tmp_path_factory, prompts, head, run_bytes, block_bytes
):
    prompts = [head + prompt for prompt in prompts]
    check_same_plan(prompts, tmp_path_factory.mktemp("runs"), run_bytes=run_bytes, block_bytes=block_bytes)


def few_shot_tree(rng):
    system = [[rng.randrange(1000) for _ in range(20)] for _ in range(3)]
    shots = [[rng.randrange(1000) for _ in range(10)] for _ in range(4)]
    return [
        rng.choice(system) + rng.choice(shots) + rng.choice(shots) + [rng.randrange(9) for _ in range(rng.randrange(5))]
        for _ in range(200)
    ]


def multi_turn_chains(rng):
    """Each prompt is the one before it and a turn more: prompts that are prefixes of others, in any order."""
    chains = []
    for _ in range(12):
        prompt = []
        for _ in range(rng.randrange(1, 16)):
            prompt = prompt + [rng.randrange(50) for _ in range(rng.randrange(1, 8))]
            chains.append(prompt)
    rng.shuffle(chains)
    return chains


def mostly_duplicates(rng):
    return [[rng.randrange(3)] * 5 for _ in range(200)]


def all_equal(rng):
    return [[5, 6, 7]] * 150


def one_long_common_start(rng):
    """Every border between runs and parts lies behind the same 300 tokens."""
    head = [rng.randrange(1000) for _ in range(300)]
    return [head + [rng.randrange(4) for _ in range(rng.randrange(6))] for _ in range(200)]


def a_giant_among_dwarfs(rng):
    return [[1] * 5000 if i == 40 else [rng.randrange(3)] * rng.randrange(3) for i in range(100)]


CORPORA = [few_shot_tree, multi_turn_chains, mostly_duplicates, all_equal, one_long_common_start, a_giant_among_dwarfs]


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("run_bytes", [500, 5000, 20_000])
def test_corpora_of_every_shape_get_the_plan_made_in_memory(corpus, run_bytes, tmp_path):
    prompts = corpus(random.Random(run_bytes))
    assert check_same_plan(prompts, tmp_path, run_bytes=run_bytes) >= bool(run_bytes < 20_000)


@pytest.mark.parametrize(("tokens", "offsets"), [([1, 2], [0, 1]), ([1, -2], [0, 2]), ([1, 2], [0, 3])])
def test_impossible_input_is_refused(tokens, offsets, tmp_path):
    with (
        PrefixStream(tmp_path / "scratch", block_tokens=64, memory_bytes=100) as stream,
        pytest.raises(ValueError, match=r"offsets|token ids"),
    ):
        stream.add(np.array(tokens), np.array(offsets))


def test_a_token_id_that_the_type_cannot_hold_is_refused(tmp_path):
    with (
        PrefixStream(tmp_path / "scratch", block_tokens=64, memory_bytes=100, token_type=np.uint16) as stream,
        pytest.raises(ValueError, match="between 0 and 65535"),
    ):
        stream.add(np.array([1 << 16]), np.array([0, 1]))


def test_a_folder_that_cannot_be_written_is_named_and_nothing_hangs(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with (
        PrefixStream(tmp_path / "file" / "scratch", block_tokens=64, memory_bytes=100) as stream,
        pytest.raises(ConfigError, match=r"cannot write .*file/scratch"),
    ):
        add_in_batches(stream, [[1, 2, 3]] * 50)


def test_the_plan_folder_is_the_same_whatever_the_memory(tmp_path, monkeypatch):
    kind = pa.struct([("temperature", pa.float64()), ("max_tokens", pa.int64()), ("n", pa.int64())])
    rng = random.Random(0)
    choices = [None, None, {"temperature": 1.0}, {"max_tokens": 3}, {"n": 3}, {"temperature": 1.0, "n": 2}]
    for shard in range(2):
        prompts = [rng.choice([question(rng.randrange(20)), None, "again " * rng.randrange(1, 60)]) for _ in range(70)]
        columns = {
            "id": pa.array([rng.choice([None, "a", f"b{i}"]) for i in range(70)], pa.string()),
            "prompt": pa.array(prompts, pa.string()),
            "how": pa.array([rng.choice(choices) for _ in range(70)], kind),
        }
        write_shard(tmp_path / "prompts" / f"{shard}.parquet", columns)
    found = set()
    # nearly all prompts in runs of their own; a few runs; all in memory
    for memory_bytes in (1000, 100_000, planner.PREFIX_MEMORY_BYTES):
        monkeypatch.setattr(planner, "PREFIX_MEMORY_BYTES", memory_bytes)
        job = write_job(tmp_path, input={"sampling": "how"}, output={"dir": f"run-{memory_bytes}"}, sampling={"n": 2})
        assert batchinfer("plan", job).code == 0
        folder = tmp_path / f"run-{memory_bytes}" / "plan"
        found.add(tuple((folder / f"{table}.parquet").read_bytes() for table in ("requests", "units", "duplicates")))
        assert sorted(path.name for path in folder.iterdir()) == [
            "duplicates.parquet", "requests.parquet", "summary.parquet", "units.parquet"
        ]  # fmt: skip
    assert len(found) == 1


def test_a_killed_plan_leaves_nothing_behind_once_it_is_made_again(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": [question(i % 5) for i in range(30)]})
    job = write_job(tmp_path)
    # killed while the second run on disk is written
    code = (
        "import os, signal; from batchinfer import cli\n"
        "from batchinfer.plan import planner; from batchinfer.plan.prefix import sorted_runs\n"
        "planner.PREFIX_MEMORY_BYTES = 20_000\n"
        "write = sorted_runs.write_run\n"
        "def write_and_die(target, *prompts):\n"
        "    if target.name.startswith('00001'): target.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(target, *prompts)\n"
        "sorted_runs.write_run = write_and_die\n"
        "cli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code, "plan", job], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    folder = tmp_path / "run" / "plan"
    assert (folder / ".sorted" / "00001.arrow").exists()
    for leftover in (folder / ".requests.parquet.x.tmp", tmp_path / "run" / "tokens" / ".00000.parquet.x.tmp"):
        leftover.write_text("half a table of the same kill")
    assert batchinfer("plan", job).code == 0
    left = [str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.name[0] == "."]
    assert left == []
    assert len(pq.read_table(folder / "requests.parquet")) == 5
