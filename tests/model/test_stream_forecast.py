"""The forecast of streamed weights: requests at once by KV, time by disk or products, and days only by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.model.memory_split import split_memory
from batchinfer.model.stream_forecast import (
    JobTokens,
    ProductSpeeds,
    StreamForecast,
    check_hours,
    swept_job,
)
from batchinfer.model.weight_mode import kv_bytes_per_token
from batchinfer.records import ConfigError
from support.jobs import write_job

GB = 10**9
UNITS = [
    {
        "num_requests": count,
        "prompt_tokens": 1000 * count,
        "new_tokens": 900 * count,
        "max_output_tokens": 200 * count,
        "largest_output_tokens": longest,
        "kv_tokens": 1280 * count,
    }
    for count, longest in ((300, 200), (100, 250))
]
QUICK = ProductSpeeds(100_000.0, 100_000.0)


def found_with(tmp_path, kv_requests, speeds=None, **cluster):
    job = load_job(write_job(tmp_path, cluster={"weights": "stream", **cluster}))
    model = load_model_config(Path(job.model.path))
    kv = kv_requests * 1280 * kv_bytes_per_token(job, model)
    memory = {"memory_bytes": 7 * GB + kv, "fixed_bytes": GB, "least_kv_bytes": kv, "useful_kv_bytes": kv}
    split, tokens = split_memory([GB] * 27, **memory), JobTokens.of(UNITS)
    return StreamForecast(split, tokens, swept_job(job, model, split, tokens), 1.5 * GB, speeds)


def test_kv_decides_how_many_requests_share_a_sweep(tmp_path):
    found = found_with(tmp_path, 100)
    assert found.job.num_at_once == 100
    # four waves of 200 tokens; each begins over three sweeps, the first of which has one step of prompts
    assert found.schedule.num_sweeps == 4 * 200 + 2
    assert found.split.num_resident == 2
    assert found.read_s == pytest.approx(25 / 1.5)
    assert found.seconds == pytest.approx(802 * 25 / 1.5)
    assert "25.00 GB per sweep (2 of 27 layers stay in memory), read in 16.7 s at 1.50 GB/s" in str(found)
    assert "100 requests at once, at most 802 sweeps: 3.7 h, 5.99 output and 29.9 prompt tokens/s, done at " in str(
        found
    )
    assert str(found).endswith("the longest answer (250 tokens) alone takes 69 min")
    assert "products" not in str(found)


def test_each_sweep_takes_as_long_as_its_reads_or_its_products(tmp_path):
    read_s = 25 / 1.5
    # 100 requests at once get a token in each of 802 sweeps; what their reads leave time for computes prompts
    assert found_with(tmp_path, 100, QUICK).seconds == pytest.approx(802 * read_s)
    by_prompts = found_with(tmp_path, 100, ProductSpeeds(3000.0, 100.0))
    assert (by_prompts.prompts_s, by_prompts.answers_s) == (pytest.approx(360_000 / 12 / 3000), 1)
    assert by_prompts.seconds == pytest.approx(802 * read_s, rel=1e-3)
    assert "products take 10.0 s where prompts run (3,000.0 tokens/s) and 1.0 s elsewhere (100.0 tokens/s), as " in str(
        by_prompts
    )
    assert "the disk decides" in str(by_prompts)
    # a step takes longer than reads: 88 sweeps have one; the first wave begins over 22 of them
    steps = found_with(tmp_path, 100, ProductSpeeds(100.0, 100.0))
    assert steps.schedule.num_sweeps == 4 * 200 + 21
    assert steps.schedule.product_s == pytest.approx(3600 + (80_000 - 400) / 100)
    assert steps.seconds == pytest.approx(3600 + (821 - 88) * read_s, rel=0.01)  # and of the answers in those 88
    by_answers = found_with(tmp_path, 100, ProductSpeeds(3000.0, 4.0))
    assert by_answers.answer_sweep_s == 25
    assert by_answers.seconds == pytest.approx(by_answers.schedule.product_s, rel=0.01)
    assert "the processor decides" in str(by_answers)


def test_where_all_requests_run_at_once_the_first_sweeps_take_all_prompts(tmp_path):
    found = found_with(tmp_path, 1000, ProductSpeeds(3000.0, 1e9))
    assert found.schedule.num_prompt_sweeps == 6  # of 16 steps, the last one half full
    assert found.seconds == pytest.approx(5 * 16 * 4096 / 3000 + 245 * 25 / 1.5)


def test_an_answer_takes_a_sweep_per_token_even_if_all_requests_run_at_once(tmp_path):
    found = found_with(tmp_path, 1000)
    assert (found.job.num_at_once, found.schedule.num_sweeps) == (400, 250)
    assert found_with(tmp_path, 1000, decode_requests=2).job.num_at_once == 2 * 16


def test_prompts_of_one_wave_need_as_many_sweeps_as_their_steps_fill(tmp_path):
    assert found_with(tmp_path, 1000).schedule.num_prompt_sweeps == -(-400 * 900 // (16 * 4096))
    # ten requests are more than the first sweep's step, and so is each wave after it
    assert found_with(tmp_path, 10).schedule.num_prompt_sweeps == 2 * 40


def test_more_than_a_day_has_to_be_asked_for(tmp_path):
    found = found_with(tmp_path, 10, QUICK)
    check_hours(found, is_asked=True)
    check_hours(found_with(tmp_path, 100, QUICK), is_asked=False)
    with pytest.raises(ConfigError, match=r'takes 37 hours; set cluster.weights = "stream"'):
        check_hours(found, is_asked=False)
    with pytest.raises(ConfigError, match="takes 103 hours"):  # by its products, however quick the disk
        check_hours(replace(found_with(tmp_path, 100), speeds=ProductSpeeds(1.0, 1e6)), is_asked=False)


def test_prompts_alone_share_a_sweep_as_far_as_its_steps_go(tmp_path):
    tokens = JobTokens(2000, 2_000_000, 2_000_000, 2000, 1, 2000 * 1280)
    job = load_job(write_job(tmp_path, cluster={"weights": "stream"}, sampling={"max_tokens": 1}))
    model = load_model_config(Path(job.model.path))
    memory = {"memory_bytes": 7 * GB, "fixed_bytes": GB, "least_kv_bytes": 0, "useful_kv_bytes": GB}
    split = split_memory([GB] * 27, **memory)
    found = StreamForecast(split, tokens, swept_job(job, model, split, tokens), GB, ProductSpeeds(1000.0, 1.0))
    assert found.job.num_at_once == 16 * 4096 // 1280
    assert (found.schedule.num_sweeps, found.schedule.num_prompt_sweeps) == (40, 40)
    assert found.seconds == pytest.approx(39 * 51 + 26)  # 51 prompts a sweep, and the last 11 beside its reads
    assert "alone takes" not in str(found)
    assert "elsewhere" not in str(found)
