"""Jobs whose ranks exchange rows as those that share a GPU do: real processes, the host's memory in a GPU's place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.staged_ranks import write_site

pytestmark = pytest.mark.all  # make test: tests/parallel/test_exchange.py


class Jobs:
    """One job, run in different ways."""

    def __init__(self, folder):
        self.folder = folder
        write_questions(folder / "prompts", (5, 4))
        self.job = write_job(folder, sampling={"max_tokens": 6, "seed": 4, "temperature": 1.0}, cluster={})

    def run(self, name: str, *, dies: tuple[int, int] | None = None, **cluster: Any):
        """Return the outputs, the marks of the ranks that exchanged rows, and what was said."""
        site = self.folder / f"site-{name}"
        settings = {"output.dir": name} | {f"cluster.{key}": value for key, value in cluster.items()}
        options = [item for key, value in settings.items() for item in ("--set", f"{key}={json.dumps(value)}")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", write_site(site, dies=dies))
            ended = batchinfer("run", self.job, *options)
        assert ended.code == 0, ended.err
        return output_bytes(self.folder / name), {mark.name for mark in site.glob("[rd]*-*")}, ended.err


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return Jobs(tmp_path_factory.mktemp("staged"))


@pytest.fixture(scope="module")
def of_one(jobs):
    outputs, marks, _ = jobs.run("one")
    assert not marks
    return outputs


@pytest.mark.parametrize(
    ("cluster", "ranks"),
    [
        ({"prefill_ranks": 2, "overlap": True, "redundant_experts": 2}, {0, 1}),
        ({"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2, "overlap": True}, {1, 2}),
    ],
    ids=["colocated", "disaggregated"],
)
def test_outputs_are_those_of_one_rank(jobs, of_one, cluster, ranks):
    outputs, marks, _ = jobs.run("-".join(map(str, cluster.values())), exchange="shared", **cluster)
    assert marks == {f"rank-{rank}" for rank in ranks}
    assert outputs == of_one


def test_a_rank_that_dies_in_an_exchange_starts_its_group_again(jobs, of_one):
    outputs, marks, said = jobs.run("dies", prefill_ranks=2, exchange="shared", dies=(1, 7))
    assert marks == {"rank-0", "rank-1"}
    assert (jobs.folder / "site-dies" / "died").exists()
    assert "SIGKILL" in said or "killed" in said
    assert outputs == of_one
