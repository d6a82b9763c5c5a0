"""The forecast of streamed weights: requests at once by KV, sweeps by their answers, and days only by name."""

from pathlib import Path

import pytest

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.model.memory_split import split_memory
from batchinfer.model.stream_forecast import check_hours, disk_speed, forecast
from batchinfer.model.weight_mode import kv_bytes_per_token
from batchinfer.records import ConfigError
from support.jobs import write_job

GB = 10**9
UNITS = [
    {"num_requests": 300, "max_output_tokens": 60_000, "kv_tokens": 300 * 1280},
    {"num_requests": 100, "max_output_tokens": 20_000, "kv_tokens": 100 * 1280},
]


def found_with(tmp_path, kv_requests, **cluster):
    job = load_job(write_job(tmp_path, cluster={"weights": "stream", **cluster}))
    model = load_model_config(Path(job.model.path))
    kv = kv_requests * 1280 * kv_bytes_per_token(job, model)
    memory = {"memory_bytes": 7 * GB + kv, "fixed_bytes": GB, "least_kv_bytes": kv, "useful_kv_bytes": kv}
    return forecast(job, model, split_memory([GB] * 27, **memory), UNITS, disk_bytes_per_s=1.5 * GB)


def test_kv_decides_how_many_requests_share_a_sweep(tmp_path):
    found = found_with(tmp_path, 100)
    assert found.num_requests_at_once == 100
    assert found.num_sweeps == 80_000 // 100
    assert found.split.num_resident == 2
    assert found.sweep_s == pytest.approx(25 / 1.5)
    assert found.seconds == pytest.approx(800 * 25 / 1.5)
    assert "25.00 GB per sweep (2 of 27 layers stay in memory), 16.7 s at 1.50 GB/s" in str(found)
    assert "100 requests at once, at most 800 sweeps: 3.7 h of reading" in str(found)
    assert str(found).endswith("an answer of 200 tokens alone takes 3,333 s")


def test_an_answer_takes_a_sweep_per_token_even_if_all_requests_run_at_once(tmp_path):
    found = found_with(tmp_path, 1000)
    assert (found.num_requests_at_once, found.num_sweeps) == (400, 200)
    assert found_with(tmp_path, 1000, decode_requests=2).num_requests_at_once == 2 * 16


def test_more_than_a_day_has_to_be_asked_for(tmp_path):
    found = found_with(tmp_path, 10)
    check_hours(found, is_asked=True)
    check_hours(found_with(tmp_path, 100), is_asked=False)
    with pytest.raises(ConfigError, match=r'takes 37 hours of reading at least; set cluster.weights = "stream"'):
        check_hours(found, is_asked=False)


def test_a_disk_has_a_speed(tmp_path):
    (tmp_path / "layer").write_bytes(bytes(5_000_000))
    assert disk_speed([tmp_path / "layer"]) > 0


def test_prompts_alone_share_a_sweep_as_far_as_its_steps_go(tmp_path):
    units = [{"num_requests": 2000, "max_output_tokens": 2000, "kv_tokens": 2000 * 1280}]
    job = load_job(write_job(tmp_path, cluster={"weights": "stream"}, sampling={"max_tokens": 1}))
    model = load_model_config(Path(job.model.path))
    memory = {"memory_bytes": 7 * GB, "fixed_bytes": GB, "least_kv_bytes": 0, "useful_kv_bytes": GB}
    found = forecast(job, model, split_memory([GB] * 27, **memory), units, disk_bytes_per_s=GB)
    assert found.num_requests_at_once == 16 * 4096 // 1280
    assert found.num_sweeps == 40
    assert "alone takes" not in str(found)
