"""Checks before a row is tokenised: tensors, keys of config.json, backend, exchange and dtype."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.checked_json import publish_json
from batchinfer.config import load_job
from batchinfer.launch import local_ranks
from batchinfer.launch.can_run_here import refuse_if_job_cannot_run
from batchinfer.launch.rank_loader import join_message, open_ranks
from batchinfer.model.config import load_model_config
from batchinfer.plan.preflight import check_job
from batchinfer.records import ModelError
from batchinfer.rundir import RunDir, read_state
from batchinfer.stop_signals import StopSignal
from support.checkpoints import edit_config
from support.hollow_weights import write_hollow_weights
from support.jobs import batchinfer, start, write_job, write_questions
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

EXPERT = "model.layers.1.mlp.experts.15.up_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"
no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine may be able to run it")


@pytest.fixture
def model(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    return tmp_path / "model"


def job_of(folder, **parts):
    return write_job(folder, **{"model": {"path": "model"}, **parts})


def refused(*arguments):
    """The one sentence of a command that ends with exit code 2."""
    ended = batchinfer(*arguments)
    assert ended.code == 2, ended.err
    (sentence,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    return sentence


def change(model, edit):
    path = model / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


TENSORS = {
    "missing": (lambda tensors: tensors.pop(EXPERT), f"1 missing: {EXPERT}"),
    "unread": (
        lambda tensors: tensors.update({"model.layers.1.self_attn.indexer.wk.weight": torch.zeros(4)}),
        "1 unknown: model.layers.1.self_attn.indexer.wk.weight",
    ),
    "shape": (lambda tensors: tensors.update({NORM: torch.ones(64)}), f"{NORM} is [64] instead of [128]"),
    "format": (lambda tensors: tensors.update({NORM: torch.ones(128, dtype=torch.int32)}), f"{NORM} is I32"),
    "quantised": (
        lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}),
        f"{EXPERT} is FP8, but config.json has no quantization_config",
    ),
}


@pytest.mark.parametrize("command", first_in_make_test(["plan", "run"]))
@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(tmp_path, model, what, command):
    edit, words = TENSORS[what]
    change(model, edit)
    assert words in refused(command, job_of(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_file_cut_short_or_of_another_kind_is_refused(tmp_path, model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"{path} is damaged" in refused("plan", job_of(tmp_path))
    path.rename(model / "pytorch_model.bin")
    assert "convert the model first" in refused("plan", job_of(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_any_size_is_checked_by_its_headers(tmp_path, model):
    # 35 GB in a hole: reading it would take minutes
    edit_config(model, hidden_size=32_768, vocab_size=250_000)
    write_hollow_weights(model)
    check_job(load_job(job_of(tmp_path)), load_model_config(model))
    write_hollow_weights(model, "I32")
    with pytest.raises(ModelError, match="is I32; supported are"):
        check_job(load_job(job_of(tmp_path)), load_model_config(model))


def test_keys_that_change_the_model_are_refused_by_name_and_value(tmp_path, model):
    edit_config(model, swiglu_limit=7.0, index_topk=2048)
    sentence = refused("plan", job_of(tmp_path))
    assert f"{model / 'config.json'}: swiglu_limit is 7.0, index_topk is 2048, which change" in sentence
    assert "remove the keys" in sentence
    assert not (tmp_path / "run").exists()


def test_unknown_keys_are_told_once_when_a_job_is_planned(tmp_path, model):
    edit_config(model, colour="blue", brightness=0.5)
    job = job_of(tmp_path)
    planned, again = batchinfer("plan", job), batchinfer("plan", job)
    assert planned.code == again.code == 0
    (line,) = (line for line in planned.err.splitlines() if line.startswith("warning: ") and "config.json" in line)
    assert f"{model / 'config.json'} has keys that are not known here and not used: colour, brightness;" in line
    assert "not known here" not in again.err


@pytest.mark.parametrize(
    ("sampling", "is_said"), [({"n": 3}, True), ({"n": 3, "temperature": 0.5}, False), ({"n": 1}, False)]
)
def test_greedy_samples_of_a_row_are_said_to_be_equal(tmp_path, sampling, is_said):
    write_questions(tmp_path / "prompts", (1,))
    planned = batchinfer("plan", write_job(tmp_path, sampling=sampling))
    assert planned.code == 0, planned.err
    words = "warning: the 3 samples of a row are equal at temperature 0; set sampling.temperature, or n = 1"
    assert (words in planned.err) == is_said


def test_a_plan_of_the_sample_model_warns_of_nothing(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    ended = batchinfer("plan", write_job(tmp_path, input={"prompt": None, "user": "prompt"}))
    assert ended.code == 0
    assert "warning" not in ended.err


ALWAYS_REFUSED = [
    ({"backend": "cpu", "exchange": "nccl", "decode_ranks": 2}, "bfloat16", ["'nccl'", "needs GPUs", "use 'auto'"]),
    ({"backend": "reference", "exchange": "deepep", "decode_ranks": 2}, "bfloat16", ["'deepep'", "needs GPUs"]),
    ({"exchange": "deepep", "decode_ranks": 2}, "float32", ["'deepep'", "not float32", "model.dtype = 'bfloat16'"]),
    ({"exchange": "deepep", "decode_ranks": 2}, "bfloat16", ["'deepep'", "hidden size 128", "multiple of 256"]),
    (
        {"exchange": "deepep-low-latency", "decode_ranks": 2},
        "fp8",
        ["hidden size 128 is none of 2048, 2560", "or 8192"],
    ),
    ({"exchange": "deepep-v1", "decode_ranks": 16}, "fp8", ["hidden size 128", "multiple of 256", "more than 8 ranks"]),
    ({"decode_ranks": 3}, "float32", ["16 experts", "redundant_experts = 2"]),
]


@pytest.mark.parametrize(("cluster", "dtype", "words"), ALWAYS_REFUSED)
@pytest.mark.parametrize("command", first_in_make_test(["plan", "run"]))
def test_what_runs_on_no_machine_is_refused_by_the_plan(tmp_path, model, cluster, dtype, words, command):
    sentence = refused(command, job_of(tmp_path, cluster=cluster, model={"path": "model", "dtype": dtype}))
    for word in words:
        assert word in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "cluster",
    [
        {"backend": "hopper"},
        {"backend": "triton", "exchange": "nccl", "decode_ranks": 2},
        {"exchange": "deepep-v1", "decode_ranks": 2},
        {"exchange": "nccl"},  # one rank exchanges nothing
    ],
)
def test_a_plan_for_another_machine_asks_nothing_of_this_one(tmp_path, model, cluster):
    ended = batchinfer("plan", job_of(tmp_path, cluster=cluster, model={"path": "model", "dtype": "bfloat16"}))
    assert ended.code == 0, ended.err


CANNOT_RUN_HERE = [
    ({"backend": "hopper"}, ["'hopper'", "cannot run here"]),
    ({"backend": "sdpa"}, ["'sdpa'", "cannot run here"]),
    ({"exchange": "nccl", "decode_ranks": 2}, ["'nccl'", "needs GPUs"]),
    (
        {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 1, "exchange": "deepep-v1"},
        ["'deepep-v1'", "needs GPUs"],
    ),
]


@no_gpu
@pytest.mark.parametrize(("cluster", "words"), CANNOT_RUN_HERE)
def test_what_cannot_run_here_ends_a_run_before_a_row_is_tokenised(tmp_path, model, cluster, words):
    sentence = refused("run", job_of(tmp_path, cluster=cluster, model={"path": "model", "dtype": "bfloat16"}))
    for word in words:
        assert word in sentence
    assert not (tmp_path / "run").exists()


@no_gpu
def test_a_run_that_learns_from_another_is_refused_as_early(tmp_path, model):
    first = batchinfer("run", job_of(tmp_path))
    assert first.code == 0, first.err
    job = job_of(tmp_path, output={"dir": "second"}, cluster={"exchange": "nccl", "decode_ranks": 2})
    assert "needs GPUs" in refused("run", job, "--learn-from", tmp_path / "run")
    assert not (tmp_path / "second").exists()


@no_gpu
def test_an_interrupted_plan_does_not_go_on_with_what_cannot_run_here(tmp_path, model):
    job = job_of(tmp_path)
    assert batchinfer("plan", job).code == 0
    run = RunDir(tmp_path / "run")
    publish_json(run.run_json, {**read_state(run), "state": "planning"})
    shutil.rmtree(tmp_path / "run" / "tokens")
    assert "cannot run here" in refused("run", job, "--set", "cluster.backend=hopper")
    assert not (tmp_path / "run" / "tokens").exists()
    # with a backend that runs the same folder goes on
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err


def test_cpp_by_name_without_a_compiler_is_refused_before_a_row_is_tokenised(tmp_path, model, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = job_of(tmp_path, cluster={"backend": "cpu"}, model={"path": "model", "dtype": "bfloat16"})
    process = start("run", job)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert re.search(r"^error: backend 'cpu': \w+: cpu cannot run here: ", err, re.M)
    assert not (tmp_path / "run").exists()


def test_what_a_job_names_and_this_machine_has_runs(tmp_path, model):
    cluster = {"backend": "reference", "exchange": "gloo", "decode_ranks": 2}
    ended = batchinfer("run", job_of(tmp_path, cluster=cluster))
    assert ended.code == 0, ended.err


def test_a_rank_that_dies_while_it_is_asked_is_no_refusal(tmp_path, model, monkeypatch):
    def ended_at_once(starts):
        return {start.rank: subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) for start in starts}

    monkeypatch.setattr(local_ranks, "start_ranks", ended_at_once)
    job, stop = load_job(job_of(tmp_path, cluster={"backend": "cpu"})), StopSignal()
    ranks = open_ranks(job, range(1), stop)
    try:
        ranks.load_ahead(join_message(job, {}))
        refuse_if_job_cannot_run(job, ranks, stop)
        with pytest.raises(Exception, match="rank 0 ended with exit code 7"):
            ranks.load(join_message(job, {}))
    finally:
        ranks.close()


def test_a_plan_never_imports_torch(tmp_path, model):
    code = "import sys; from batchinfer import cli\ntry: cli.main()\nfinally: print('torch' in sys.modules)"
    program = [sys.executable, "-c", code, "plan", str(job_of(tmp_path, cluster={"backend": "hopper"}))]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    assert ended.stdout.split()[-1] == "False"


def test_shared_memory_does_not_reach_another_node(tmp_path, model):
    job = job_of(tmp_path, cluster={"exchange": "shared", "decode_ranks": 4})
    options = ["--array", "2", "--dry-run", "--nodes-per-group"]
    assert "ranks 0 and 2 share experts and are on different nodes" in refused("submit", job, *options, "2")
    assert batchinfer("submit", job, *options, "1").code == 0
    apart = {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2, "exchange": "shared"}
    # two ranks on each of two nodes: prefill on one, decode on the other
    assert batchinfer("submit", job_of(tmp_path, cluster=apart), *options, "2").code == 0
