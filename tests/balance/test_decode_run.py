"""Decode ranks on paper: the balancer that the controller drives, with lengths that are known; its one figure."""

from __future__ import annotations

import numpy as np
import pytest

from batchinfer.balance import decode_run
from batchinfer.balance.decode_run import Answers, DealtPrompts, PaperRanks, ReadyPrompts
from batchinfer.balance.decode_series import balance_of_steps
from batchinfer.balance.request_load import RequestLoad


def answers(prompts, outputs, expected=np.nan):
    prompts, outputs = np.array(prompts), np.array(outputs)
    return Answers(prompts, outputs, outputs, np.full(len(prompts), expected))


def many(seed, num, mean_output=40):
    rng = np.random.default_rng(seed)
    prompts = np.maximum(1, 300 * np.exp(rng.standard_normal(num))).astype(np.int64)
    return answers(prompts, rng.geometric(1 / mean_output, num))


def on_paper(work, num_ranks, *, max_requests=16, request_load=0.0, move_steps=4.0):
    return PaperRanks(
        work, num_ranks, max_requests=max_requests, request_load=RequestLoad(request_load), move_steps=move_steps
    )


def dealt(num, num_ranks, work):
    """One unit, its requests dealt round robin."""
    return DealtPrompts([[list(range(rank, num, num_ranks)) for rank in range(num_ranks)]], work.output_tokens)


def test_worked_example():
    # prefill gives the first token; a step attends to prompt and tokens so far
    # rank 0   10 + 1   10 + 2   10 + 3
    # rank 1    6 + 1    -        -            mean 9, 6, 6.5
    ranks = on_paper(answers([10, 6], [4, 2]), 2, move_steps=1e9)
    series = ranks.run(ReadyPrompts(2))
    assert [kv.tolist() for kv in series.kv_tokens] == [[11, 7], [12, 0], [13, 0]]
    assert [num.tolist() for num in series.num_requests] == [[1, 1], [1, 0], [1, 0]]
    found = series.kv_balance()
    assert found.max_over_mean == pytest.approx((11 + 12 + 13) / (9 + 6 + 6.5))
    assert found.bound == found.max_over_mean, "one request is on one rank"


def test_the_figure_counts_each_step_with_its_load():
    busiest, mean, at_least = np.array([30, 10, 20]), np.array([20, 10, 10]), np.array([25, 4, 11])
    found = balance_of_steps(busiest, mean, at_least)
    assert (found.max_over_mean, found.bound) == (60 / 40, (25 + 10 + 11) / 40)
    twice = balance_of_steps(busiest, mean, at_least, np.array([1, 2, 1]))
    assert twice.max_over_mean == (30 + 10 + 10 + 20) / (20 + 10 + 10 + 10)
    assert balance_of_steps(*np.zeros((3, 4))) is None


@pytest.mark.parametrize("source", ["ready", "dealt"])
@pytest.mark.parametrize("mean_output", [40, 400])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_is_decoded_once_and_slots_are_kept(seed, mean_output, source):
    work = many(seed, 300, mean_output)
    ranks = on_paper(work, 4)
    series = ranks.run(ReadyPrompts(300) if source == "ready" else dealt(300, 4, work))
    num_SR, kv_SR = np.array(series.num_requests), np.array(series.kv_tokens)
    assert num_SR.max() <= 16
    steps_S = np.array(series.num_steps)
    assert (max(steps_S) > 1) == (mean_output == 400)
    assert steps_S @ num_SR.sum(axis=1) == pytest.approx((work.output_tokens - 1).sum())
    attended = (work.output_tokens - 1) * (work.prompt_tokens + work.output_tokens / 2)
    assert steps_S @ kv_SR.sum(axis=1) == pytest.approx(attended.sum())
    found = series.kv_balance()
    assert 1.0 <= found.bound <= found.max_over_mean


@pytest.mark.parametrize("seed", range(6))
def test_ready_prompts_are_spread_so_that_kv_and_requests_are_even(seed):
    work = many(seed, 2000)
    series = on_paper(work, 8, max_requests=32).run(ReadyPrompts(2000))
    full = series.kv_balance(only_full=True)
    in_turn = on_paper(work, 8, max_requests=32, move_steps=1e9).run(dealt(2000, 8, work)).kv_balance(only_full=True)
    assert full.max_over_mean - 1 <= 0.75 * (in_turn.max_over_mean - 1)
    assert full.max_over_mean <= 1.2
    num_SR = np.array(series.num_requests)[np.array(series.is_full)]
    assert num_SR.max(axis=1).sum() / num_SR.mean(axis=1).sum() <= 1.1


def test_moves_even_out_what_ends_at_different_times():
    # rank 0 has the long answers: once the short ones of rank 1 have ended, it would be alone
    work = answers([100] * 16, [200, 20] * 8)
    still, moving = (
        on_paper(work, 2, max_requests=8, move_steps=steps).run(dealt(16, 2, work)).kv_balance() for steps in (1e9, 1.0)
    )
    assert still.max_over_mean > 1.7
    assert moving.max_over_mean < 1.2


def test_moves_take_as_long_as_in_a_job():
    # rank 1's answers end after step 3; then the look, a step until rank 0 gives away, and one under way
    work = answers([100] * 8, [40, 4] * 4)
    series = on_paper(work, 2, max_requests=8, move_steps=0.1).run(dealt(8, 2, work))
    assert [num.tolist() for num in series.num_requests[:7]] == [
        [4, 4], [4, 4], [4, 4], [4, 0], [2, 0], [2, 2], [2, 2],
    ]  # fmt: skip
    assert len(series.num_requests) == 39 + 1, "those that have moved run one step later"


LENGTHS = {
    "geometric": lambda rng, means: rng.geometric(1 / means),
    "heavy": lambda rng, means: (means * 0.35 * (1 + rng.pareto(1.3, len(means)))).astype(np.int64),
    "alike": lambda rng, means: means.astype(np.int64),
}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_16_ranks_stay_level_while_each_can_have_two_requests(kind, is_known, seed):
    """There are 64 requests per rank, of 12 prompt groups with short or long answers of unknown lengths."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 12, 16 * 64)
    means = 200 * np.exp(rng.normal(0, 0.8, 12))[groups]
    outputs = np.clip(LENGTHS[kind](rng, means), 1, 3200)
    prompts = np.maximum(16, 450 * np.exp(rng.normal(0, 0.5, 16 * 64))).astype(np.int64)
    expected = means if is_known else np.full(len(means), np.nan)
    work = Answers(prompts, outputs, np.full(len(means), 3200), expected, groups)
    series = on_paper(work, 16, max_requests=128, request_load=400.0).run(ReadyPrompts(16 * 64))
    can_have_two = np.array(series.num_requests).sum(axis=1) >= 32
    kv_SR = np.array(series.kv_tokens)[can_have_two]
    assert kv_SR.max(axis=1).sum() / kv_SR.mean(axis=1).sum() <= 1.08


def test_a_rank_that_has_run_out_takes_over_half_of_what_another_has_left():
    work = answers([100] * 40, [30] * 40)
    source = DealtPrompts([[list(range(4)), list(range(4, 40))]], work.output_tokens)
    series = on_paper(work, 2, max_requests=4, move_steps=1e9).run(source)
    num_SR = np.array(series.num_requests)
    assert (num_SR[:-30].min(axis=1) > 0).all(), "both work, but for the last answers"


@pytest.mark.parametrize("source", ["ready", "dealt"])
def test_answers_of_one_token_and_no_answers_are_not_decoded(source):
    for num in (0, 5):
        work = Answers(*np.ones((3, num), dtype=np.int64), np.full(num, np.nan))
        ranks = on_paper(work, 2)
        assert ranks.run(ReadyPrompts(num) if source == "ready" else dealt(num, 2, work)).kv_balance() is None


def test_long_answers_are_run_in_turns_that_change_the_figure_little(monkeypatch):
    works = [many(seed, 400, mean_output=400) for seed in range(5)]

    def figures():
        return [on_paper(work, 4).run(ReadyPrompts(400)).kv_balance().max_over_mean for work in works]

    in_turns = figures()
    monkeypatch.setattr(decode_run, "TURNS_PER_ANSWER", 10**6)
    assert np.mean(in_turns) == pytest.approx(np.mean(figures()), abs=0.03)
