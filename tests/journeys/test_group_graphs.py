"""Decode steps of groups as graphs, with real rank processes and stand-ins for CUDA graphs and DeepEP.

What is shown: the ranks agree on a size in the vote that a step has anyway, record and replay the same graphs in the
same steps, and answer to the byte as without graphs. That a GPU's graph holds what the stand-in's does is not shown.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from batchinfer.model.fused.graphs import SWITCHED_OFF
from batchinfer.plan import preflight
from batchinfer.rank.step_vote import NO_MEMORY, TOO_LARGE
from support.checkpoints import make_checkpoint
from support.graph_ranks import write_site
from support.jobs import Ended, batchinfer, output_bytes, question, write_job, write_shard
from support.paths import SAMPLE_MODEL

pytestmark = pytest.mark.all  # make test: tests/rank/test_decode_graphs.py

MOST = 5  # requests that a rank decodes at once
CLUSTER = {"backend": "reference", "exchange": "deepep-low-latency", "prefill_tokens": 64, "decode_requests": MOST}
NEVER = {"refuses": (0, 1, 2, 3)}
SIZES = {1, 2, 4, MOST}
ATTEMPTS = 6  # which sizes a run meets depends on how many requests have come by then


class Jobs:
    """One job, run in different ways."""

    def __init__(self, folder):
        self.folder = folder
        sizes = {"hidden_size": 2048, "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 2048}
        make_checkpoint(folder / "model", "v3", **sizes)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(SAMPLE_MODEL / name, folder / "model")
        # answers end at different lengths, so that batches shrink; the longest one runs alone at last, and the other
        # rank has no request then, in any order of events
        lengths = [3 + 7 * number % 19 for number in range(12)] + [60]
        columns = {"prompt": [question(number) for number in range(13)]}
        columns["sampling"] = [{"max_tokens": length} for length in lengths]
        write_shard(folder / "prompts" / "part-0.parquet", columns)
        self.job = write_job(
            folder,
            input={"sampling": "sampling"},
            model={"path": str(folder / "model"), "dtype": "bfloat16"},
            sampling={"max_tokens": 14, "seed": 4, "temperature": 1.0},
            cluster=CLUSTER,
        )

    def run(
        self, name: str, *, ranks: int = 2, overlap: bool = False, graphs: str = "auto", **site: Any
    ) -> tuple[dict[str, bytes], Ended]:
        """The outputs, and how the command ended."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preflight, "check_device", lambda *_: None)
            patch.setenv("PYTHONPATH", write_site(self.folder / f"site-{name}", **site))
            settings = {"output.dir": name, "cluster.prefill_ranks": ranks, "cluster.overlap": overlap}
            settings["cluster.graphs"] = graphs
            options = [item for key, value in settings.items() for item in ("--set", f"{key}={_toml(value)}")]
            ended = batchinfer("run", self.job, *options)
        assert ended.code == 0, ended.err
        return output_bytes(self.folder / name), ended

    def steps(self, name: str) -> list[list[dict[str, Any]]]:
        """The decode steps of a run, each with what its ranks say of it."""
        sql = "SELECT * FROM steps WHERE kind = 'decode' ORDER BY start_s"
        rows = json.loads(batchinfer("report", self.folder / name, "--json", "--sql", sql).out)
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            by_rank.setdefault(row["rank"], []).append(row)
        return [list(of_step) for of_step in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)]


def _toml(value: Any) -> str:
    return json.dumps(value)


def agreed(steps) -> list[tuple[str | None, int]]:
    """Return graph and size of each step, and check that they are the same on all ranks."""
    for of_step in steps:
        said = {(row["step"], row["graph"], row["graph_rows"], row["micro_batches"]) for row in of_step}
        assert len(said) == 1, of_step
    return [(of_step[0]["graph"], of_step[0]["graph_rows"]) for of_step in steps]


def rows_for(num_requests: int) -> int:
    """Return the size of the graph for `num_requests` requests, 0 if there is none."""
    return 0 if num_requests > MOST else min(MOST, next(size for size in (1, 2, 4, 8) if size >= num_requests))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def plain(jobs):
    """The outputs of a run without graphs."""
    outputs, ended = jobs.run("plain", **NEVER)
    assert "decode steps run as no CUDA graphs: the experts' operations here read on the host" in ended.err
    assert {graph for graph, _ in agreed(jobs.steps("plain"))} == {None}
    return outputs


def expert_counts(jobs, name):
    sql = "SELECT layer, expert, sum(tokens)::INT AS n FROM experts WHERE phase = 'decode' GROUP BY ALL ORDER BY ALL"
    return json.loads(batchinfer("report", jobs.folder / name, "--json", "--sql", sql).out)


def test_two_ranks_replay_the_same_graphs_and_answer_the_same(jobs, plain):
    met: set[int] = set()
    for attempt in range(ATTEMPTS):
        met |= sizes_of_run(jobs, plain, f"two-{attempt}")
        if met == SIZES:
            return
    raise AssertionError(f"only graphs of {sorted(met)} requests were met")


def sizes_of_run(jobs, plain, name):
    """The sizes of the graphs that a run has recorded; all that holds in any run is checked."""
    outputs, ended = jobs.run(name)
    assert "decode steps run as CUDA graphs" in ended.err
    assert outputs == plain
    steps = jobs.steps(name)
    seen: set[int] = set()
    for (graph, num_rows), of_step in zip(agreed(steps), steps, strict=True):
        # the largest batch decides, and a size is recorded when it is met first
        assert num_rows == rows_for(max(row["num_requests"] for row in of_step))
        if num_rows:
            assert graph == ("replayed" if num_rows in seen else "recorded")
            seen.add(num_rows)
        assert {row["no_graph"] for row in of_step} == {None if num_rows else TOO_LARGE}
    batches = [tuple(row["num_requests"] for row in of_step) for of_step in steps]
    assert any(0 in batch for batch in batches), "a rank without requests is to run filler alone"
    assert any(first != second for first, second in batches)
    # rows that fill up are not counted, and no expert gets them
    assert expert_counts(jobs, name) == expert_counts(jobs, "plain")
    for of_step in steps:
        assert sum(row["expert_rows"] for row in of_step) == sum(row["num_requests"] for row in of_step) * 2
    report = json.loads(batchinfer("report", jobs.folder / name, "--json").out)
    num_graphs = sum(rows_for(max(batch)) > 0 for batch in batches)
    assert (report["graph_share"], report["recorded_graphs"]) == (num_graphs / len(batches), 2 * len(seen))
    return seen


@pytest.mark.all  # make test: two ranks replay the same graphs, above
def test_micro_batches_in_turn_are_one_graph(jobs, plain):
    outputs, _ = jobs.run("pairs", overlap=True)
    assert outputs == plain
    steps = jobs.steps("pairs")
    in_pairs = [(graph, size) for (graph, size), step in zip(agreed(steps), steps, strict=True)
                if step[0]["micro_batches"] == 2]  # fmt: skip
    assert ("replayed", rows_for(-(-MOST // 2))) in in_pairs
    assert None not in {graph for graph, _ in in_pairs}  # halves of what is too large have room


@pytest.mark.all  # make test: two ranks replay, above
def test_graphs_that_are_switched_off_are_never_made_and_the_report_says_so(jobs, plain):
    outputs, ended = jobs.run("off", graphs="off")
    assert outputs == plain
    assert "decode steps run as no CUDA graphs: cluster.graphs is 'off'" in ended.err
    steps = jobs.steps("off")
    assert {graph for graph, _ in agreed(steps)} == {None}
    assert {row["no_graph"] for of_step in steps for row in of_step} == {SWITCHED_OFF}
    report = json.loads(batchinfer("report", jobs.folder / "off", "--json").out)
    assert (report["graph_share"], report["recorded_graphs"], report["no_graph"]) == (0, 0, SWITCHED_OFF)


def test_without_memory_on_one_rank_no_rank_records_and_all_replay_what_they_have(jobs, plain):
    outputs, _ = jobs.run("short", memory_for={1: 1})
    assert outputs == plain
    steps = jobs.steps("short")
    done = agreed(steps)
    (recorded,) = {size for graph, size in done if graph == "recorded"}
    assert [graph for graph, _ in done].count("recorded") == 1
    assert ("replayed", recorded) in done
    plain_steps = [of_step for of_step, (graph, _) in zip(steps, done, strict=True) if graph is None]
    assert {row["no_graph"] for of_step in plain_steps for row in of_step} - {TOO_LARGE} == {NO_MEMORY}
    assert all(rows_for(max(row["num_requests"] for row in of_step)) != recorded for of_step in plain_steps)


def test_a_rank_that_dies_inside_a_graph_starts_its_group_again(jobs, plain):
    mark = jobs.folder / "died"
    outputs, ended = jobs.run("died-run", dies=(1, 4, str(mark)))
    assert mark.exists()
    assert "SIGKILL" in ended.err or "killed" in ended.err
    assert outputs == plain
