"""Jobs in which tokens are drafted give the files that they give without, to the byte; the report has the gain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from support.checkpoints import edit_config, read_tensors, write_tensors
from support.jobs import Ended, batchinfer, output_bytes, toml, write_job
from support.paths import SAMPLE_MODEL, SAMPLE_PROMPTS

pytestmark = pytest.mark.all  # make test: tests/rank/test_drafting.py

ROWS = 40
FEW = {"speculate": "auto", "decode_requests": 3}  # running at once
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 40},
    "drawn": {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "n": 3, "seed": 5},
    "long": {"max_tokens": 90, "ignore_eos": True, "logprobs": 2, "stop": ["77"]},
}


def make_job(folder: Path, **parts: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(SAMPLE_PROMPTS / "part-00000.parquet", columns=["id", "messages"]).slice(0, ROWS)
    (folder / "prompts").mkdir(exist_ok=True)
    pq.write_table(rows, folder / "prompts" / "a.parquet")
    model = {"path": str(SAMPLE_MODEL), "dtype": "float32"} | parts.pop("model", {})
    return write_job(folder, input={"prompt": None, "messages": "messages"}, model=model, **parts)


def run(job: Path, name: str, **settings: Any) -> tuple[Path, Ended]:
    """Run the job with other settings in a new run folder."""
    folder = job.parent / name
    changes = {"output.dir": str(folder)} | settings
    options = [item for key, value in changes.items() for item in ("--set", f"{key}={_bare(value)}")]
    ended = batchinfer("run", job, *options)
    assert ended.code == 0, ended.err
    return folder, ended


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else toml(value)


def figures(run_folder: Path) -> dict[str, Any]:
    return json.loads(batchinfer("report", run_folder, "--json").out)


# each dtype and each way; test_drafting has more
MARKS = {("float32", "drawn"): (), ("bfloat16", "long"): pytest.mark.all, ("fp8", "greedy"): pytest.mark.all}


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        pytest.param(dtype, how, marks=MARKS.get((dtype, how), pytest.mark.slow))
        for dtype in ("float32", "bfloat16", "fp8")
        for how in HOW
    ],
)
def test_outputs_are_the_same_with_drafts_and_without(tmp_path, dtype, how):
    job = make_job(tmp_path, model={"dtype": dtype}, sampling=HOW[how], cluster=FEW)
    on, _ = run(job, "on")
    off, _ = run(job, "off", **{"cluster.speculate": "off"})
    assert output_bytes(on) == output_bytes(off)
    found = figures(on)
    assert found["drafted_tokens"] >= found["accepted_tokens"] > 0
    assert found["acceptance_rate"] == found["accepted_tokens"] / found["drafted_tokens"]
    assert found["wasted_tokens"] == 0
    nothing = {"drafted_tokens": 0, "accepted_tokens": 0, "acceptance_rate": None, "speculation_gain": None}
    without = figures(off)
    assert {key: without[key] for key in nothing} == nothing


def answers_of(run_folder: Path) -> list[dict[str, Any]]:
    """All columns but the one that says where KV came from."""
    (file,) = (run_folder / "outputs").glob("*.parquet")
    return pq.read_table(file).drop_columns(["cached_tokens"]).to_pylist()


def test_several_ranks_draft_nothing_and_say_so(tmp_path):
    job = make_job(tmp_path, sampling=HOW["greedy"], cluster=FEW)
    one, ended = run(job, "one")
    assert "drafted" not in ended.err
    two, ended = run(job, "two", **{"cluster.prefill_ranks": 2})
    assert "no tokens are drafted with the model's MTP layer: experts are spread over 2 ranks" in ended.err
    assert answers_of(one) == answers_of(two)
    assert figures(two)["drafted_tokens"] == 0


def test_a_checkpoint_without_the_layer_runs_and_says_so(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(SAMPLE_MODEL, model)
    write_tensors(model, {name: one for name, one in read_tensors(model).items() if "layers.4.mlp" not in name})
    job = make_job(tmp_path, model={"path": str(model)}, sampling=HOW["greedy"], cluster=FEW)
    folder, ended = run(job, "run")
    assert "MTP layer: the checkpoint has no model.layers.4.mlp.gate.weight" in ended.err
    assert figures(folder)["drafted_tokens"] == 0
    edit_config(model, num_nextn_predict_layers=0)
    write_tensors(model, {name: one for name, one in read_tensors(model).items() if "layers.4." not in name})
    _, ended = run(job, "again")
    assert "drafted" not in ended.err
