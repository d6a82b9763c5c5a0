"""Drafting is chosen by what was measured: tried when nothing speaks against it, and left where it does not pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from batchinfer.rank.draft_rule import MOST_GUESSES, DraftRule, StepTimes


def run_steps(
    rule: DraftRule,
    num_steps: int,
    num_requests: int,
    seconds: Callable[[int], float],
    chances: list[float],
    draft_s: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Guesses per request of each step, on a rank whose steps take so long by rows, and with so good guesses."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(num_steps):
        guesses = rule.choose(num_requests)
        chosen.append(guesses)
        if not guesses:
            if rule.may_pay(num_requests):
                rule.note_step(num_requests, seconds(num_requests))
            continue
        num_rows = num_requests * (1 + guesses)
        rule.note_drafts(num_requests, guesses, guesses * draft_s)
        rule.note_drafted_step(num_rows, seconds(num_rows))
        still = num_requests
        for guess in range(guesses):
            right = int((rng.random(still) < chances[guess]).sum())
            rule.note_right([0] * guess + [still], [0] * guess + [right])
            still = right
    return chosen


def reads_weights(rows: int) -> float:
    return 1.0 + 0.001 * rows


def computes(rows: int) -> float:
    return 0.001 + 1.0 * rows


def test_the_plain_step_is_measured_first():
    assert run_steps(DraftRule(), 3, 4, reads_weights, [0.9] * 4)[:2] == [0, 0]


@pytest.mark.parametrize("num_requests", [1, 3, 17, 64])
def test_where_steps_wait_for_weights_guesses_that_are_mostly_right_pay(num_requests):
    chosen = run_steps(DraftRule(), 1000, num_requests, reads_weights, [0.9] * 4, draft_s=0.05)
    assert sum(guesses >= 3 for guesses in chosen[500:]) > 0.9 * 500


def test_with_many_requests_more_rows_are_tried_now_and_then_alone():
    chosen = run_steps(DraftRule(), 60, 64, computes, [1.0] * 4)
    assert not any(chosen)
    chosen = run_steps(DraftRule(), 200, 64, computes, [1.0] * 4)
    assert 1 <= sum(chosen) <= 3


@pytest.mark.parametrize("num_requests", [1, 3, 17, 64])
def test_where_rows_cost_what_they_give_next_to_nothing_is_drafted(num_requests):
    chosen = run_steps(DraftRule(), 2000, num_requests, computes, [0.95] * 4, draft_s=0.1)
    assert sum(guesses > 0 for guesses in chosen) < 0.04 * len(chosen)


@pytest.mark.parametrize("chance", [0.0, 0.02])
def test_guesses_that_are_wrong_are_given_up_and_seldom_tried_again(chance):
    chosen = run_steps(DraftRule(), 4000, 2, reads_weights, [chance] * 4, draft_s=0.2)
    assert sum(guesses > 0 for guesses in chosen) < 0.05 * len(chosen)


def test_as_many_guesses_as_are_right_are_made():
    chosen = run_steps(DraftRule(), 600, 1, lambda rows: 1.0 + 0.1 * rows, [0.98, 0.97, 0.05, 0.05], draft_s=0.05)
    assert np.bincount(chosen[100:]).argmax() == 2


def test_guesses_that_become_right_are_found_again():
    rule = DraftRule()
    run_steps(rule, 500, 2, reads_weights, [0.0] * 4, draft_s=0.1)
    chosen = run_steps(rule, 4000, 2, reads_weights, [1.0] * 4, draft_s=0.1)
    assert sum(guesses > 0 for guesses in chosen[-500:]) > 480  # now and then the plain step is measured


def test_another_number_of_requests_is_decided_by_itself():
    rule = DraftRule()

    def seconds(rows: int) -> float:
        return 1.0 if rows <= 16 else rows / 8

    assert sum(guesses > 0 for guesses in run_steps(rule, 200, 2, seconds, [0.9] * 4)[50:]) > 140
    assert sum(run_steps(rule, 500, 64, seconds, [0.9] * 4)) < 0.05 * 500 * MOST_GUESSES


def test_expected_tokens_are_a_product_of_chances():
    rule = DraftRule()
    # the first guess always right, the second in half of the cases
    for _ in range(2000):
        rule.note_right([1, 1], [1, 1])
        rule.note_right([1, 1], [1, 0])
    assert rule.tokens_per_request(0) == 1
    assert rule.tokens_per_request(1) == pytest.approx(2)
    assert rule.tokens_per_request(2) == pytest.approx(2.5, abs=0.05)


def test_of_a_first_number_of_requests_twice_its_rows_are_tried_and_no_more():
    rule, most_rows = DraftRule(), 0
    for _ in range(200):
        guesses = rule.choose(64)
        most_rows = max(most_rows, 64 * (1 + guesses))
        if guesses:
            rule.note_drafted_step(64 * (1 + guesses), computes(64 * (1 + guesses)))
        elif rule.may_pay(64):
            rule.note_step(64, computes(64))
    assert most_rows == 128


def test_times_between_two_sizes_lie_between_and_old_ones_are_forgotten():
    times = StepTimes(most_age=500)
    for _ in range(3):
        times.note(2, 1.0, step=0)
    assert [times.hoped(size, 1) for size in (1, 2, 4, 5)] == [None, 1.0, 1.0, None]
    for _ in range(3):
        times.note(6, 3.0, step=0)
    assert [times.of(size, 1) for size in (1, 2, 4, 6, 7)] == [None, 1.0, 2.0, 3.0, None]
    assert [times.hoped(size, 1) for size in (1, 4, 8, 16)] == [None, 2.0, 4.0, None]
    assert times.of(4, 600) is None


def test_of_a_size_the_least_of_the_latest_times_counts():
    times = StepTimes()
    for seconds in (1.0, 90.0, 3.0, 4.0, 2.0, 5.0, 6.0, 7.0, 8.0, 90.0):
        times.note(4, seconds, step=0)
    assert times.of(4, 0) == 2.0


def test_the_plain_step_is_measured_again_and_again():
    chosen = run_steps(DraftRule(), 1000, 2, reads_weights, [0.9] * 4)
    plain = [step for step, guesses in enumerate(chosen) if guesses == 0]
    assert 10 < len(plain) < 40
    assert max(np.diff(plain)) <= 64 + 10


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_where_guesses_do_not_pay_next_to_nothing_is_measured(num_requests):
    rule, num_awake = DraftRule(), 0
    for step in range(6000):
        num_running = num_requests + (step % 100 < 3)
        num_awake += step >= 3000 and rule.may_pay(num_running)
        run_steps(rule, 1, num_running, computes, [0.0] * 4, draft_s=0.2)
    assert 0 < num_awake < 0.03 * 3000


def test_what_does_not_pay_with_few_requests_rests_with_more():
    rule = DraftRule()
    run_steps(rule, 300, 4, computes, [0.0] * 4, draft_s=0.2)
    assert not rule.may_pay(4)
    assert not rule.may_pay(40)
    assert rule.may_pay(2)
