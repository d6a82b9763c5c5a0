"""Decode steps of an earlier run, and the speed of a job with other batches."""

import numpy as np
import pytest

from batchinfer.balance.decode_run import DecodeSeries
from batchinfer.config import ClusterConfig
from batchinfer.plan.earlier_run import Speeds
from batchinfer.plan.forecast import PlannedWork, balances
from batchinfer.plan.step_times import StepTimes, decode_tokens_per_s, fitted

TIMES = StepTimes(step_s=0.01, request_s=0.001, kv_token_s=1e-6)


def steps(seed=0, num=200, noise=0.0):
    """A small run's steps: batches that shrink to one request."""
    rng = np.random.default_rng(seed)
    requests = np.linspace(40, 1, num).round()
    kv = requests * rng.uniform(200, 2000, num)
    seconds = TIMES.step_s + TIMES.request_s * requests + TIMES.kv_token_s * kv
    return requests, kv, seconds * (1 + noise * rng.standard_normal(num))


def series_of(batches, *, kv=1000.0, full=()):
    """One step of each batch on two ranks, the first of which has all the requests but one."""
    return DecodeSeries(
        num_steps=[1] * len(batches),
        kv_tokens=[np.array([kv * batch, kv]) for batch in batches],
        num_requests=[np.array([batch, 1]) for batch in batches],
        largest_kv_tokens=[kv] * len(batches),
        is_full=[batch in full for batch in batches],
    )


def test_times_per_step_request_and_token_are_found_again():
    found = fitted(*steps())
    assert (found.step_s, found.request_s, found.kv_token_s) == pytest.approx((0.01, 0.001, 1e-6), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_noise_gives_no_negative_time_and_keeps_the_recorded_sum(seed):
    requests, kv, seconds = steps(seed, noise=0.5)
    found = fitted(requests, kv, seconds)
    assert min(found.step_s, found.request_s, found.kv_token_s) >= 0
    predicted = found.step_s * len(kv) + found.request_s * requests.sum() + found.kv_token_s * kv.sum()
    assert predicted == pytest.approx(seconds.sum())


def test_few_steps_and_steps_of_one_batch_say_nothing():
    assert fitted(*(column[:10] for column in steps())) is None
    same = np.full(100, 8.0)
    assert fitted(same, same * 100, np.full(100, 0.02)) is None


def test_a_step_takes_as_long_as_on_its_busiest_rank():
    assert TIMES.seconds(series_of([10])).tolist() == pytest.approx([0.01 + 0.01 + 0.01])


def test_full_steps_stand_for_the_tokens_that_a_sample_lacks():
    # a full step: 11 tokens in 30 ms; the last ones: 2 in 12 ms and in 12 ms again
    sample = series_of([10, 1, 1], full=(10,))
    all_of_it = decode_tokens_per_s(TIMES, sample, 15, 2)
    assert all_of_it == pytest.approx(15 / 0.054 / 2)
    more = decode_tokens_per_s(TIMES, sample, 15 + 11 * 99, 2)
    assert more == pytest.approx((15 + 11 * 99) / (0.054 + 99 * 0.03) / 2)
    assert decode_tokens_per_s(TIMES, DecodeSeries(), 100, 2) is None


def test_a_larger_job_gets_the_speed_of_its_larger_batches():
    def speed_of(num, cluster):
        work = PlannedWork(
            unit_starts=np.arange(0, num + 1, num // 4),
            prompt_tokens=np.full(num, 50),
            shared_tokens=np.zeros(num, dtype=np.int64),
            max_tokens=np.full(num, 20),
            expected_tokens=np.full(num, np.nan),
        )
        series = balances(work, cluster, needs_series=True).decode_series
        return decode_tokens_per_s(TIMES, series, 19.0 * num, cluster.num_decode_ranks)

    for ranks in (1, 2):
        cluster = ClusterConfig(prefill_ranks=ranks, decode_requests=64)
        assert speed_of(400 * ranks, cluster) > 2 * speed_of(8 * ranks, cluster)


def test_speeds_without_steps_have_no_times():
    assert Speeds(1.0, None, 1.0, 0.0).step_times is None
