"""The sweeps of a streamed job, one after the other: a drawn example, bounds over many jobs, and long jobs."""

import random
from dataclasses import replace
from math import inf

import pytest

from batchinfer.model.sweep_schedule import SweepSpeed, SweptJob, schedule

# reads of 10 s, prompts of 100 tokens in 5 s, a token of one request in 1 s
SPEED = SweepSpeed(100, 10.0, 20.0, 1.0)
JOB = SweptJob(
    num_requests=6,
    new_tokens=100,
    answer_tokens=3,
    longest_answer=3,
    num_at_once=4,
    sweep_tokens=1000,
    spread_tokens=None,
)


def test_sweeps_of_a_small_job():
    # sweep          1     2     3     4     5     6
    # requests 1-4   P     t     t
    # requests 5-6                     P     t     t
    # products      20     4     4    10     2     2
    found = schedule(JOB, SPEED)
    assert (found.num_sweeps, found.num_prompt_sweeps) == (6, 2)
    assert found.product_s == 42
    assert found.seconds == 20 + 5 * 10


def test_prompts_that_are_spread_run_beside_reads():
    # sweep          1     2     3     4     5     6
    # request 1      P     t     t     P5    t     t
    # requests 2-3         P     t     t     P6    …      two prompts take as long as reads
    # request 4                  P     t     t
    found = schedule(replace(JOB, spread_tokens=100), SPEED)
    assert (found.num_sweeps, found.num_prompt_sweeps) == (7, 5)
    assert found.product_s == 42
    assert found.seconds == 10 + 11 + 10 + 10 + 10 + 10 + 10


def test_an_answer_that_is_longer_than_all_sweeps_goes_on_alone():
    found = schedule(replace(JOB, longest_answer=10), SPEED)
    assert found.num_sweeps == 10
    assert found.seconds == 20 + 9 * 10


def test_prompts_alone_leave_their_sweep_at_once():
    found = schedule(replace(JOB, answer_tokens=1, longest_answer=1), SPEED)
    assert (found.num_sweeps, found.num_prompt_sweeps) == (2, 2)
    assert found.seconds == 20 + 10


@pytest.mark.parametrize("seed", range(40))
def test_every_token_has_its_sweep_and_no_sweep_is_quicker_than_reads_or_products(seed):
    draw = random.Random(seed)
    job = SweptJob(
        num_requests=draw.randint(1, 300),
        new_tokens=draw.randint(1, 900),
        answer_tokens=(answer := draw.randint(1, 40)),
        longest_answer=answer + draw.randint(0, 90),
        num_at_once=draw.randint(1, 100),
        sweep_tokens=(step := draw.randint(50, 500)) * 16,
        spread_tokens=draw.choice([None, step]),
    )
    speed = SweepSpeed(draw.randint(1, 100), 1.0, draw.uniform(1, 1000), draw.uniform(1, 100))
    found = schedule(job, speed)
    tokens = job.num_requests * job.answer_tokens
    at_least = max(job.longest_answer, tokens / job.num_at_once, job.num_requests * job.new_tokens / job.sweep_tokens)
    assert at_least - 1e-6 <= found.num_sweeps
    assert found.num_prompt_sweeps <= found.num_sweeps
    products_s = job.num_requests * job.new_tokens / speed.prompt_tokens_per_s
    products_s += (tokens - job.num_requests) / speed.output_tokens_per_s
    assert found.product_s == pytest.approx(products_s)
    reads_s = found.num_sweeps * speed.read_s
    assert max(reads_s, products_s) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= (reads_s + products_s) * (1 + 1e-9)


def test_long_jobs_go_on_as_their_middle_does():
    job = replace(JOB, num_requests=100_000, answer_tokens=2000, longest_answer=2000, spread_tokens=100)
    found = schedule(job, SPEED)
    assert found.num_sweeps == pytest.approx(100_000 / 4 * 2000, rel=1e-3)
    assert found.seconds == pytest.approx(found.num_sweeps * 10, rel=1e-2)


def test_products_that_were_not_measured_take_no_time():
    found = schedule(replace(JOB, spread_tokens=100), SweepSpeed(100, 10.0, inf, inf))
    assert found.product_s == 0
    assert found.seconds == found.num_sweeps * 10
