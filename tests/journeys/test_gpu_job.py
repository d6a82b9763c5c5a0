"""A whole job on a GPU, rehearsed on the CPU: all of it but the times and the card."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import duckdb
import pytest
import torch
from safetensors import safe_open

from batchinfer.model.config import load_model_config
from batchinfer.model.tensor_names import expected_tensors
from batchinfer.model.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import job
import job_figures
from accelerator import Limits
from job_figures import differing_rows, least_seconds
from step_profile import StepProfile
from summary import summary

from bench.large_checkpoint import write_checkpoint
from support.jobs import write_shard
from support.published_shapes import GLM_FLASH

TINY = job._sizes(is_rehearsal=True)


# ---- checkpoints


def test_a_checkpoint_has_the_tensors_of_its_shape(tmp_path):
    for name, fp8 in (("bfloat16", False), ("fp8", True)):
        num_bytes = write_checkpoint(tmp_path / name, TINY.shape, fp8=fp8)
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert sum(file.stat().st_size for file in files) == num_bytes
        shapes = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        expected = dict(expected_tensors(load_model_config(tmp_path / name)))
        assert {key: shape for key, shape in shapes.items() if not key.endswith("scale_inv")} == expected
        assert (len(shapes) > len(expected)) is fp8
        Transformer.load(tmp_path / name, dtype=torch.bfloat16, backend="reference", eight_bit=fp8)


def test_no_two_weights_or_rows_of_one_are_the_same(tmp_path):
    write_checkpoint(tmp_path / "model", TINY.shape | {"vocab_size": 200_000}, fp8=False)
    with safe_open(tmp_path / "model" / "ends.safetensors", "pt") as tensors:  # larger than the block of random values
        rows = tensors.get_tensor("lm_head.weight")
        assert len(torch.unique(rows[:, :8], dim=0)) == len(rows)
        assert rows.float().std() == pytest.approx(128**-0.5, rel=0.01)
    with safe_open(tmp_path / "model" / "layer-00001.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if "experts." in name and "gate_proj" in name]  # noqa: SIM118
        firsts = {tuple(tensors.get_tensor(name)[0, :4].tolist()) for name in names}
    assert len(firsts) == len(names) == 9


def test_glm_flash_has_the_published_number_of_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_FLASH))
    weights = sum(torch.Size(shape).numel() for _, shape in expected_tensors(load_model_config(tmp_path)))
    assert weights == pytest.approx(29.9e9, rel=0.01)


# ---- prompts


def test_prompts_are_as_long_as_they_should_be_and_share_beginnings(tmp_path):
    sizes = job.Sizes(GLM_FLASH)
    job.write_inputs(tmp_path, sizes, 1000)
    rows = duckdb.sql(f"SELECT id, ids, sampling.max_tokens FROM '{tmp_path}/all/*.parquet' ORDER BY id").fetchall()
    lengths, answers = [len(ids) for _, ids, _ in rows], [most for *_, most in rows]
    assert (len(rows), min(lengths), max(lengths)) == (2000, 200, 2000)
    assert (min(answers), max(answers)) == (50, 400)
    assert len({tuple(ids[:64]) for _, ids, _ in rows}) == 8
    other = duckdb.sql(f"SELECT id, ids FROM '{tmp_path}/reversed/*.parquet'").fetchall()
    assert [key for key, _ in other] == list(range(1999, 0, -2))
    assert dict(other).items() <= {key: ids for key, ids, _ in rows}.items()


# ---- the rehearsal


def test_the_rehearsal_runs_compares_and_goes_on(tmp_path, capsys, monkeypatch):
    out, scratch = tmp_path / "job.jsonl", tmp_path / "scratch"
    arguments = ["--rehearse", "--out", str(out), "--scratch", str(scratch)]
    real, parts = job.Runs.run, []

    def run(self, name, prompts, **options):
        parts.append(name)
        if len(parts) == 1:
            raise job.NotDoneError("batchinfer run ended with code 1: no memory")
        return real(self, name, prompts, **options)

    monkeypatch.setattr(job.Runs, "run", run)
    monkeypatch.setattr(job, "PARTS", ("limits", job.JOB))
    assert job.main(arguments) == job.FAILED
    assert "job: FAILED NotDoneError: batchinfer run ended with code 1: no memory" in capsys.readouterr().out
    assert "FAILED job: NotDoneError" in summary(tmp_path)
    monkeypatch.setattr("supervised.sources", lambda: "others")
    monkeypatch.setattr(job, "PARTS", ("limits", job.JOB, job.ORDER))
    assert job.main(arguments) == job.OK
    assert not scratch.exists()
    said = capsys.readouterr().out
    assert parts == ["job-run", "job-run", "order-run"]
    assert "12 of 12 answers are those of the job, to the byte" in said
    assert "profile of 2 decode steps" in said
    summed_up = summary(tmp_path)
    assert "job: 24 rows" in summed_up
    assert "% of" not in summed_up, "a CPU's times say nothing of a card"


def test_it_stops_when_time_is_up_and_begins_the_part_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "_LEAST_S", 0.0)
    out, scratch = tmp_path / "job.jsonl", tmp_path / "scratch"
    arguments = ["--rehearse", "--out", str(out), "--scratch", str(scratch), "--minutes"]
    assert job.main([*arguments, "0.05"]) == job.UNFINISHED
    assert "first start: time was up; it begins again from its start" in capsys.readouterr().err
    assert (scratch / "model-bfloat16" / "config.json").exists()
    monkeypatch.setattr(job, "_LEAST_S", 40.0)
    assert job.main([*arguments, "0.5"]) == job.UNFINISHED
    assert "first start: not begun, time is up" in capsys.readouterr().err


def test_without_room_for_the_weights_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=40 * 10**9))
    options = SimpleNamespace(scratch=None, rehearse=False)
    with pytest.raises(job.NotDoneError, match=r"no room for 60 GB of weights \(.*40 GB.*--dtype fp8"):
        job._scratch(options, tmp_path, 60 * 10**9)
    assert job._scratch(options, tmp_path, 31 * 10**9).name == "batchinfer-job"


# ---- figures


def test_answers_that_differ_are_named(tmp_path):
    for name, last in (("one", "c"), ("two", "d")):
        columns = {
            "id": [1, 2, 3],
            "token_ids": [[1], [2], [3]],
            "text": ["a", "b", last],
            "finish_reason": ["stop"] * 3,
        }
        write_shard(tmp_path / name / "outputs" / "a.parquet", columns)
    assert differing_rows(tmp_path / "one", tmp_path / "two") == (3, [3])


def step(**values):
    zeros = dict.fromkeys(("new_tokens", "num_requests", "cached_tokens", "kv_tokens", "attention_work"), 0)
    return zeros | values


def test_the_least_time_of_steps_follows_from_the_shape(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_FLASH))
    config, limits = load_model_config(tmp_path), Limits(bf16_tflops=800, fp8_tflops=1500, copy_gb_s=4000)
    # one request alone reads the weights of 4 of 64 experts: 3.6 billion with the head
    alone = least_seconds(config, step(kind="decode", new_tokens=1, num_requests=1, kv_tokens=1), limits, fp8=False)
    assert alone == pytest.approx(2 * 3.6e9 / 4e12, rel=0.05)
    # 256 requests read them all (without the embedding), and 47 rows of 576 values for each token
    many = step(kind="decode", new_tokens=256, num_requests=256, kv_tokens=256 * 1000)
    num_bytes = 2 * (29.9e9 - 154880 * 2048) + 256_000 * 47 * 576 * 2
    assert least_seconds(config, many, limits, fp8=False) == pytest.approx(num_bytes / 4e12, rel=0.02)
    assert least_seconds(config, many, limits, fp8=True) < 0.6 * least_seconds(config, many, limits, fp8=False)
    # prompts of 64,000 tokens compute for longer than they read: 3.3 billion weights each, and 20 heads of 256 + 256
    prompts = step(kind="prefill", new_tokens=64_000, num_requests=64, attention_work=64 * 1000 * 1001 / 2)
    flops = 2 * (64_000 * 3.3e9 + 46 * prompts["attention_work"] * 20 * 512)
    assert least_seconds(config, prompts, limits, fp8=False) == pytest.approx(flops / 800e12, rel=0.05)


def test_the_share_of_the_limit_is_that_of_all_work():
    kinds = {"prefill": job_figures.Kind(1, 2.0, 0.0, 10, 1.0), "decode": job_figures.Kind(1, 2.0, 0.0, 10, 1.5)}
    figures = job_figures.RunFigures(9.0, 3.0, 5.0, 1, 10, 10, 5, kinds, {"replayed": 1}, 2, True)
    assert figures.share_of_limit == 0.5
    said = job_figures.describe("job", figures)
    assert "50.0% of the card's measured limits" in said
    assert "decode: 1 steps of 2000.00 ms, 75.0% of the limits" in said
    assert "2 operations ran on another kernel" in said


# ---- profile of steps


def test_neighbouring_steps_of_a_kind_are_profiled_once(tmp_path):
    profile = StepProfile(tmp_path / "a", {"decode": (2, 3), "prefill": (0, 2)}, on_gpu=False)
    done = []
    kinds = ["prefill", "decode", "prefill", "prefill", *["decode"] * 2, "wait", *["decode"] * 6, "prefill"]
    for kind in kinds:
        profile.run(kind, lambda kind=kind: done.append(kind) or torch.ones(3).add_(1))
    assert done == kinds
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert [(line["kind"], line["steps"]) for line in lines] == [("prefill", 2), ("decode", 3)]
    assert all(line["kernels"] > 0 for line in lines)
