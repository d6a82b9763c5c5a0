"""Whether a run's rows are equal bit for bit: said by ranks, put together, written down and reported."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.schemas.statistics import STATS_NODES
from batchinfer.equal_rows import EqualRows, combine
from batchinfer.launch.agent import _copy_session_stats
from batchinfer.run.session import Session
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from batchinfer.stop_signals import StopSignal
from support.jobs import batchinfer, write_job, write_questions

CPP = EqualRows(True, None, "A (avx512)", "C++")
OLDER = EqualRows(True, None, "B (avx2)", "C++")
PLAIN = EqualRows(True, None, "B (AVX2)", "plain PyTorch on B")
UNEQUAL = EqualRows(False, "in plain PyTorch …", "C (AVX512)", "plain PyTorch on C")
ON_GPU = EqualRows(None, "not measured", "H100", "H100, CUDA")
# In a rank: a product of exactly 8 rows is rounded otherwise, as if it was summed in another order.
TRAP = """
import torch.nn.functional as F
linear = F.linear
F.linear = lambda x, *rest: linear(x, *rest) * (1 + 2**-20) if x.shape[-2:-1] == (8,) else linear(x, *rest)
"""


@pytest.mark.parametrize(
    ("said", "bit_equal", "reason", "processor"),
    [
        ([], None, None, None),
        ([CPP, CPP], True, None, "A (avx512)"),
        ([CPP, OLDER, CPP], True, None, "A (avx512) + B (avx2)"),
        ([CPP, UNEQUAL, ON_GPU], False, "in plain PyTorch …", "A (avx512) + C (AVX512) + H100"),
        ([ON_GPU, CPP], None, "not measured", "H100 + A (avx512)"),
        ([EqualRows(), CPP], None, None, "A (avx512)"),  # a session of a version that did not say
        # each is equal in itself, but a row depends on which of them computes it
        ([CPP, PLAIN], None, "rows were computed with C++ + plain PyTorch on B, which", "A (avx512) + B (AVX2)"),
    ],
)
def test_a_run_is_as_equal_as_the_least_of_its_ranks(said, bit_equal, reason, processor):
    found = combine(said)
    assert (found.bit_equal, found.processor) == (bit_equal, processor)
    assert found.bit_equal_reason == reason or found.bit_equal_reason.startswith(reason)


def test_it_does_not_matter_in_how_many_steps_it_is_put_together():
    for said in ([CPP, OLDER, UNEQUAL], [CPP, PLAIN, CPP], [CPP, OLDER, CPP]):
        assert combine([combine(said[:2]), said[2]]).bit_equal is combine(said).bit_equal


@pytest.fixture
def job(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    return write_job(tmp_path, cluster={"backend": "reference", "prefill_ranks": 2})


def report(run):
    return json.loads(batchinfer("report", run, "--json").out)


def test_a_run_whose_ranks_find_a_difference_says_so_once_and_everywhere(job, tmp_path, monkeypatch):
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "sitecustomize.py").write_text(TRAP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "trap"))
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    warnings = re.findall("warning: answers may depend on what rows are batched with: (.*)", ended.err)
    assert len(warnings) == 1  # of two ranks
    assert re.fullmatch(
        r"in plain PyTorch a product with a weight of \d+ x \d+ gives a row other bits among 71 rows than alone "
        r"\(1 thread\); \S.*",
        warnings[0],
    )
    expected = (False, warnings[0])
    state = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (state["bit_equal"], state["bit_equal_reason"]) == expected
    figures = report(tmp_path / "run")
    assert (figures["bit_equal"], figures["bit_equal_reason"]) == expected
    assert figures["processor"] == state["processor"]
    assert state["numerics"].startswith("plain PyTorch")
    panel = batchinfer("report", tmp_path / "run").out.splitlines()
    (first,) = [line for line in panel if line.startswith("warning: answers may depend")]
    assert max(map(len, panel)) <= 80
    assert panel.index(first) == 1
    batchinfer("report", tmp_path / "run", "--html", tmp_path / "page.html")
    assert "Warning: answers may depend on what rows are batched with" in (tmp_path / "page.html").read_text()


def test_once_a_session_has_found_a_difference_the_run_keeps_it(job, tmp_path):
    assert batchinfer("run", job, "--set", "cluster.prefill_ranks=1").code == 0
    run = RunDir(tmp_path / "run")
    before, equal = report(run.root), shutil.copytree(run.root, tmp_path / "equal")
    (path,) = (run.stats / "nodes").glob("*.parquet")
    table = pq.read_table(path)
    (session,) = table.to_pylist()
    assert session["bit_equal"] is before["bit_equal"]
    assert session["numerics"].startswith("plain PyTorch")
    assert session["processor"] == before["processor"]
    # a session on another machine, before this one
    other = {**session, **asdict(replace(UNEQUAL, bit_equal_reason="of another machine")), "session": "earlier"}
    pq.write_table(table.from_pylist([other], schema=table.schema), path.with_name("0-earlier.parquet"))
    run.stats_file("requests").unlink()
    assert batchinfer("finish", run.root).code == 0
    state = json.loads(run.run_json.read_text())
    assert (state["bit_equal"], state["bit_equal_reason"]) == (False, "of another machine")
    assert state["processor"] == f"C (AVX512) + {session['processor']}"
    assert report(run.root)["bit_equal"] is False
    both = json.loads(batchinfer("report", equal, run.root, "--together", "--json").out)
    assert (both["bit_equal"], both["bit_equal_reason"]) == (False, "of another machine")
    assert both["processor"] == " + ".join(sorted({session["processor"], "C (AVX512)"}))  # each once
    # one of a version that did not say it, and that did compute: not known any more
    older = {name: value for name, value in session.items() if name not in asdict(UNEQUAL)}
    pq.write_table(table.from_pylist([older]), path.with_name("0-earlier.parquet"))
    run.stats_file("requests").unlink()
    assert batchinfer("finish", run.root).code == 0
    assert json.loads(run.run_json.read_text())["bit_equal"] is None


def test_a_run_that_is_equal_says_nothing_of_it_on_the_panel(job, tmp_path):
    ended = batchinfer("run", job)
    assert ended.code == 0
    figures = report(tmp_path / "run")
    if figures["bit_equal"] is False:
        pytest.skip(f"on this processor: {figures['bit_equal_reason']}")
    assert (figures["bit_equal"], figures["bit_equal_reason"]) == (True, None)
    assert "answers may depend" not in ended.err + ended.out


def test_several_nodes_have_what_the_ranks_of_all_say(tmp_path):
    """The controller hears all ranks; the other nodes' sessions take it over from its row."""
    path = RunDir(tmp_path).session_stats("nodes", "first")
    row = {"session": "first", "first_prefill_s": 5.0, "device": "cpu"}
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row | asdict(UNEQUAL)], schema=STATS_NODES.schema), path)
    session = Session("work", StopSignal())
    _copy_session_stats(FolderStorage(RunDir(tmp_path)), session, "first")
    assert session.equal_rows == UNEQUAL


def test_a_run_without_the_cpp_operations_says_so_once_and_why(job, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/no/compiler")
    warning = "warning: the model runs in plain PyTorch, slower than the C++ operations, which cannot run: "
    ended = batchinfer("run", job, "--set", "cluster.backend=auto")
    assert ended.code == 0, ended.err
    (reason,) = re.findall(f"{re.escape(warning)}(.*)", ended.err)  # one of two ranks
    assert reason.startswith(("no C++ compiler on this machine (/no/compiler)", "the processor"))
    # a job that names plain PyTorch gets no warning
    assert warning not in batchinfer("run", job, "--set", f"output.dir={tmp_path / 'asked'}").err
