"""Streamed weights on paper: the same figures as the plan's forecast, tables, and a spec that cannot be used."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.model.packed_folder import ENDS
from batchinfer.model.stream_forecast import JobTokens, StreamForecast, swept_job
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_mode import split_for
from batchinfer.sim.streaming import forecast_of, load_streamed, packed_on_paper
from support.jobs import batchinfer, write_job

V3 = Path(__file__).parents[2] / "jobs" / "models" / "deepseek-v3"
SPEC = f"""
[model]
path = "{V3}"

[workload]
requests = 10_000
prompt_tokens = 1000
output_tokens = 200

[stream]
dtype = "int4"
memory_bytes = 60_000_000_000
disk_bytes_per_s = 6.3e9
prompt_tokens_per_s = 95
output_tokens_per_s = 40
"""


def spec_with(tmp_path, old="", new=""):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.replace(old, new, 1))
    return path


def test_hosts_that_spread_the_experts_read_less_each_and_run_more_at_once(tmp_path):
    one = forecast_of(load_streamed(spec_with(tmp_path)))
    four = forecast_of(
        load_streamed(spec_with(tmp_path, "output_tokens_per_s = 40", "output_tokens_per_s = 40\nranks = 4"))
    )
    model = load_model_config(V3)
    of_experts = weight_bytes(model, "int4") - weight_bytes(model, "int4", num_experts=0)
    # attention and the shared expert are read by all
    assert one.split.sweep_bytes - four.split.sweep_bytes == pytest.approx(of_experts * 3 / 4, rel=0.02)
    assert (four.num_ranks, four.tokens) == (4, one.tokens)
    assert four.job.num_requests == one.job.num_requests / 4
    assert four.seconds < one.seconds / 4
    assert f"{four.split.sweep_bytes / 1e9:,.2f} GB per sweep on each of 4 ranks" in str(four)
    assert f"{4 * four.job.num_at_once:,} requests at once" in str(four)


def test_figures_are_those_of_the_plan_for_the_same_requests_and_host(tmp_path):
    found = forecast_of(load_streamed(spec_with(tmp_path)))
    cluster = {"weights": "stream", "memory_bytes": 60_000_000_000}
    parts = {"model": {"path": str(V3), "dtype": "int4"}, "sampling": {"max_tokens": 200}, "cluster": cluster}
    job, model = load_job(write_job(tmp_path, **parts)), load_model_config(V3)
    unit = {
        "num_requests": 10_000,
        "prompt_tokens": 10_000_000,
        "new_tokens": 10_000_000,
        "max_output_tokens": 2_000_000,
        "largest_output_tokens": 200,
        "kv_tokens": 10_000 * 1216,  # 1,199 tokens in whole pages
    }
    tokens, paper = JobTokens.of([unit]), packed_on_paper(model, "int4")
    sizes = {"free_bytes": 60_000_000_000, "most_tokens": tokens.kv, "largest_tokens": 1200}
    split = split_for(job, model, paper, **sizes)
    assert found == StreamForecast(split, tokens, swept_job(job, model, split, tokens), 6.3e9, found.speeds)
    assert found.split.sweep_bytes > 300e9
    assert found.decides == "disk"


def test_layers_on_paper_take_what_all_weights_take():
    model = load_model_config(V3)
    sizes = packed_on_paper(model, "fp8").sizes
    assert len(sizes) == 1 + model.num_hidden_layers
    assert sum(sizes.values()) == weight_bytes(model, "fp8")
    assert sizes[ENDS] == weight_bytes(replace(model, num_hidden_layers=0), "fp8")


def test_prompts_alone_keep_one_layer_of_kv_and_are_decided_by_products(tmp_path):
    found = forecast_of(load_streamed(spec_with(tmp_path, "output_tokens = 200", "output_tokens = 1")))
    assert found.decides == "processor"
    assert found.seconds == pytest.approx(10_000 * 1000 / 95, rel=0.02)


def test_the_command_prints_figures_as_a_table_and_as_json(tmp_path):
    path = spec_with(tmp_path)
    figures = json.loads(batchinfer("simulate", path, "--json").out)
    assert figures["requests_at_once"] < figures["requests"] == 10_000
    assert figures["output_tokens_per_s"] == pytest.approx(2_000_000 / figures["hours"] / 3600)
    ended = batchinfer("simulate", path)
    assert ended.code == 0
    assert "10,000 requests, weights streamed; the disk decides" in ended.out
    assert f"{figures['sweeps']:,}" in ended.out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_bytes = 60_000_000_000", "memory_bytes = 6_000_000_000", "cannot be streamed in 6.00 GB of memory"),
        ("disk_bytes_per_s = 6.3e9", "", "stream.disk_bytes_per_s"),
        ("[stream]", "[cluster]\nnodes = 2\n[stream]", "cluster"),
        ("requests = 10_000", 'requests = 10_000\narrival = "day"', "workload.arrival does not count"),
        ("requests = 10_000", "requests = 10_000\npeak_over_mean = 1.5", "workload.peak_over_mean does not count"),
    ],
)
def test_a_spec_that_cannot_be_used_is_one_sentence(tmp_path, old, new, words):
    ended = batchinfer("simulate", spec_with(tmp_path, old, new))
    assert ended.code == 2
    (sentence,) = ended.err.strip().splitlines()
    assert words in sentence


def test_layouts_of_gpus_are_not_looked_for(tmp_path):
    ended = batchinfer("simulate", spec_with(tmp_path), "--suggest")
    assert ended.code == 2
    assert "[stream]" in ended.err
