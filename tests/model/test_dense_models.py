"""Models of dense layers alone: they plan, run on any ranks, finish, report and are simulated like the others."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
import torch

from batchinfer.model.config import load_model_config
from support.checkpoints import edit_config, make_checkpoint
from support.jobs import Ended, batchinfer, outputs, write_job, write_shard
from support.paths import RANDOM_MODEL

NUM_NEW = 24
LENGTHS = (5, 64, 1, 131, 30, 12)
LAYOUTS = {
    "1": {},
    "2": {"prefill_ranks": 2, "overlap": True},
    "1+1": {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    "2+2": {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2, "overlap": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint whose three layers are all dense, prompts, and the answers of transformers."""
    folder = tmp_path_factory.mktemp("dense")
    theirs = make_checkpoint(folder / "model", "v3", first_k_dense_replace=3)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, folder / "model" / file)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in LENGTHS]
    write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    expected = []
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(NUM_NEW):
            with torch.no_grad():
                tokens.append(int(theirs(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
        expected.append(tokens)
    (folder / "expected.json").write_text(json.dumps(expected))
    return folder


def write(folder, name, *, model="model", dtype="float32", cluster=None):
    return write_job(
        folder,
        name=f"{name}.toml",
        input={"prompt": None, "token_ids": "ids"},
        output={"dir": name},
        model={"path": model, "dtype": dtype},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True},
        cluster=cluster or {},
    )


def run(folder, name, *options, **parts) -> Ended:
    ended = batchinfer("run", write(folder, name, **parts), *options)
    assert ended.code == 0, ended.err
    return ended


def tokens_of(folder, name):
    return [row["token_ids"] for row in outputs(folder / name)["a.parquet"]]


def rewritten(folder, name, **changes):
    """A copy of the model with other keys in config.json; null stays null."""
    shutil.copytree(folder / "model", folder / name)
    path = folder / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder / name


@pytest.mark.parametrize(
    "ranks",
    ["2+2", *(pytest.param(ranks, marks=pytest.mark.all) for ranks in LAYOUTS if ranks != "2+2")],  # make test: 2+2
)
def test_the_answers_are_those_of_transformers(folder, ranks):
    run(folder, f"ranks-{ranks}", "--trace", cluster=LAYOUTS[ranks])
    assert tokens_of(folder, f"ranks-{ranks}") == json.loads((folder / "expected.json").read_text())


def test_statistics_report_and_page_do_without_experts(folder):
    run(folder, "told", cluster=LAYOUTS["2"])
    report = json.loads(batchinfer("report", folder / "told", "--json").out)
    assert report["rows_ok"] == len(LENGTHS)
    for sql in ("SELECT count(*) AS n FROM experts", "SELECT sum(expert_rows) AS n FROM steps"):
        assert batchinfer("report", folder / "told", "--sql", sql).out.split() == ["n", "─", "0"]
    assert batchinfer("report", folder / "told", "--html", folder / "page.html").code == 0
    page = (folder / "page.html").read_text()
    assert "Load of each rank" in page
    assert "Load of each expert" not in page
    assert json.loads(batchinfer("status", folder / "told", "--json").out)["state"] == "finished"
    assert "no expert was used" in batchinfer("report", folder / "told").out


@pytest.mark.all  # make test: their answers, above
@pytest.mark.parametrize("changes", [{"n_routed_experts": 0}, {"n_routed_experts": None}, {"moe_layer_freq": 7}])
def test_a_config_without_experts_means_dense_layers_wherever_they_would_begin(folder, changes):
    name = "-".join(map(str, *changes.items()))
    model = rewritten(folder, f"model-{name}", first_k_dense_replace=1, **changes)
    assert load_model_config(model).num_moe_layers == load_model_config(model).n_routed_experts == 0
    run(folder, name, model=str(model), cluster=LAYOUTS["2"])
    assert tokens_of(folder, name) == json.loads((folder / "expected.json").read_text())


def test_a_number_of_experts_need_not_be_named_where_there_are_none(folder):
    model = rewritten(folder, "unnamed")
    for key in ("n_routed_experts", "num_local_experts", "moe_intermediate_size", "num_experts_per_tok", "n_group"):
        edit_config(model, **{key: None})
    assert load_model_config(model).unknown_keys == ()
    run(folder, "unnamed-run", model=str(model))
    assert tokens_of(folder, "unnamed-run") == json.loads((folder / "expected.json").read_text())


def refused(*arguments):
    ended = batchinfer(*arguments)
    assert ended.code == 2, ended.err
    (sentence,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    return sentence


def test_there_are_no_experts_to_place(folder):
    run(folder, "first", cluster=LAYOUTS["2"])
    job = write(folder, "second", cluster=LAYOUTS["2"])
    assert "no experts to place" in refused("plan", job, "--expert-loads", folder / "first")
    learned = batchinfer("run", job, "--learn-from", folder / "first")
    assert learned.code == 0, learned.err
    assert tokens_of(folder, "second") == tokens_of(folder, "first")
    more = write(folder, "third", cluster={**LAYOUTS["2"], "redundant_experts": 2})
    assert "cluster.redundant_experts is 2, but the model has no experts" in refused("plan", more)
    assert not (folder / "third").exists()


def test_a_config_that_contradicts_the_tensors_is_refused_by_their_names(folder):
    make_checkpoint(folder / "mixed", "v3")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, folder / "mixed" / file)
    edit_config(folder / "mixed", n_routed_experts=0)
    sentence = refused("run", write(folder, "contradiction", model="mixed"))
    assert "model.layers.1.mlp.gate_proj.weight" in sentence
    assert "unknown: model.layers.1.mlp.experts.0" in sentence
    assert not (folder / "contradiction").exists()


def test_simulate_takes_a_model_of_dense_layers(folder):
    spec = folder / "spec.toml"
    sizes = "requests = 500\nprompt_tokens = 200\noutput_tokens = 30\n"
    spec.write_text(
        f'[model]\npath = "{folder / "model"}"\n[workload]\n{sizes}[cluster]\nnodes = 4\n'
        "[prefill]\nep_size = 8\n[decode]\nep_size = 8\nrequests_per_gpu = 16\n"
    )
    ended = batchinfer("simulate", spec, "--json")
    assert ended.code == 0, ended.err
    figures = json.loads(ended.out)
    assert figures["output_tokens"] == 15_000
    stages = figures["decode"]["step_s_by_stage"]
    assert [name for name, seconds in stages.items() if not seconds] == [
        *("shared expert", "routed experts", "dispatch", "combine")
    ]
    assert figures["prefill"]["redundant_experts"] == 0
