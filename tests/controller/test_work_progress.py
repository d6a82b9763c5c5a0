"""Tokens done of tokens planned, and the time left: by the plan, and corrected by what is measured."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest

from batchinfer.config import ClusterConfig
from batchinfer.controller import work_progress
from batchinfer.controller.work_progress import SweepCount, WorkProgress
from batchinfer.protocol.messages import StepRecord
from batchinfer.records import Completion, RequestKey
from batchinfer.run.units.planned_tokens import planned_tokens
from batchinfer.run.units.reused import rows_to_compute

# two units of two requests: 100 prompt tokens to compute and at most 40 output tokens each
ROWS = [{"unit": unit, "num_requests": 2, "new_tokens": 100, "max_output_tokens": 40} for unit in range(2)]
NOT_KNOWN = {"rows": 4, "expected_output_tokens": None, "max_output_tokens": 80, "work_s": None}


def progress_of(open_units=(0, 1), cluster=None, **counts):
    return WorkProgress(ROWS, list(open_units), NOT_KNOWN | counts, cluster or ClusterConfig())


def step(kind, new, output, duration_s=1.0, cached=0):
    numbers = dict.fromkeys(StepRecord.__struct_fields__, 0)
    numbers |= {"new_tokens": new, "cached_tokens": cached, "output_tokens": output, "duration_s": duration_s}
    return StepRecord(**numbers | {"kind": kind})


def completion(unit, computed, outputs):
    key = RequestKey(0, unit, 0)
    tokens = [1] * outputs
    return Completion(key, unit, "", tokens, "stop", None, computed, 0, 0, 0, computed_tokens=computed)


def test_planned_are_prompt_tokens_to_compute_and_output_tokens_expected():
    assert progress_of().planned.tolist() == [200, 80]
    assert progress_of(expected_output_tokens=20).planned.tolist() == [200, 20]
    assert planned_tokens([], NOT_KNOWN).shape == (0, 2)


def test_a_request_that_has_ended_counts_with_what_it_took_so_that_all_is_done_at_the_end():
    progress = progress_of()
    for unit in (0, 0, 1, 1):
        progress.step(step("prefill", 55, 1))
        progress.step(step("decode", 4, 4))
        progress.finished([completion(unit, 55, 5)])
    assert progress.done.tolist() == progress.planned.tolist() == [220, 20]
    assert (progress.requests.count, progress.requests.total) == (4, 4)
    assert re.fullmatch(
        r"computing: 100%, 4 of 4 rows; [\d,]+ tokens/s; 220 prompt and 20 output tokens", progress.line()
    )


def test_more_prompt_tokens_than_planned_never_go_beyond_all():
    progress = progress_of()
    progress.step(step("prefill", 230, 4))
    assert progress.planned.tolist() == [230, 80]


def test_units_of_others_count_by_the_plan_and_each_task_says_its_share():
    progress = progress_of(open_units=[1])  # unit 0 was done before
    assert progress.done.tolist() == [100, 40]
    assert (progress.requests.count, progress.requests.total) == (2, 4)
    progress.step(step("prefill", 10, 0))
    assert "by this task" not in progress.line()  # nobody else works
    progress = progress_of()
    progress.step(step("prefill", 10, 0))
    progress.done_elsewhere(1)
    assert progress.done.tolist() == [110, 40]
    assert progress.requests.count == 2
    assert progress.line().endswith("; 10 prompt and 0 output tokens by this task")
    progress.reopened([1])
    assert progress.done.tolist() == [10, 0]
    assert progress.requests.count == 0


def test_what_an_earlier_claim_has_done_is_nobodys_pace():
    progress = progress_of()
    progress.done_elsewhere(0, 1)
    progress.step(step("prefill", 100, 4))
    progress.step(step("decode", 30, 30))
    assert progress.done.tolist() == [150, 54]
    assert progress.left_s() == pytest.approx(50 / 100 + 26 / 30)


def test_reused_answers_are_no_work_unless_they_are_not_accepted():
    state = {"reused": {"requests_of_units": [1, 2]}}
    progress = WorkProgress(rows_to_compute(ROWS, state), [0, 1], NOT_KNOWN, ClusterConfig())
    assert progress.planned.tolist() == [50, 20]
    progress.opened(0, 1)
    progress.opened(1, 0)
    assert (progress.requests.count, progress.requests.total) == (0, 1)
    progress.opened(1, 2)  # these ranks round differently
    assert (progress.requests.count, progress.requests.total) == (0, 3)
    assert rows_to_compute(ROWS, {}) == ROWS


def test_time_left_is_measured_apart_for_prompts_and_outputs():
    progress = progress_of()
    assert progress.left_s() is None
    progress.step(step("prefill", 100, 2, duration_s=2.0))
    assert progress.left_s() is None  # nobody knows what an output token takes
    progress.step(step("decode", 2, 2, duration_s=1.0))
    # 100 prompt tokens at 50 per second, 76 output tokens at 2 per second
    assert progress.left_s() == pytest.approx(2 + 38)
    assert progress.line().endswith(", 40 s left")


def test_ranks_that_do_one_thing_only_do_it_at_the_same_time():
    cluster = ClusterConfig(mode="disaggregated", prefill_ranks=2, decode_ranks=1)
    progress = progress_of(cluster=cluster)
    progress.step(step("prefill", 50, 1, duration_s=2.0))
    progress.step(step("prefill", 50, 1, duration_s=2.0))
    progress.step(step("decode", 2, 2, duration_s=1.0))
    assert progress.left_s() == pytest.approx(max(2, 38))


def test_the_plans_time_counts_first_and_ever_less_as_more_is_measured():
    progress = progress_of(work_s=1000.0)
    assert progress.left_s() == 1000
    assert progress.line() == "to come: at most 4 rows, 17 min left"
    progress.step(step("prefill", 100, 0))
    progress.step(step("decode", 40, 40))
    # half is done: by the plan 500 s are left, as measured 1 + 1
    assert progress.left_s() == pytest.approx(0.5 * 500 + 0.5 * 2)


def test_answers_to_come_are_believed_to_be_as_long_as_those_that_ended():
    progress = progress_of()
    progress.step(step("prefill", 200, 4))
    progress.step(step("decode", 36, 36))
    before_s = progress.left_s()
    progress.finished([completion(0, 50, 10), completion(0, 50, 10)])
    # 80 less 20 that were not needed less 40 done; half of all have ended with half of what was expected
    assert progress.left_s() == pytest.approx(20 * 0.75 / 36)
    assert progress.left_s() < before_s


def test_what_ranks_had_not_ended_is_not_done_when_they_die():
    progress = progress_of()
    progress.step(step("prefill", 200, 4))
    progress.finished([completion(0, 50, 1)])
    progress.ranks_ended()
    assert progress.done.tolist() == [50, 1]
    assert progress.figures()["phase"] == "waiting"
    assert progress.figures()["tokens_per_s"] is None


def test_in_flight_is_what_is_not_durable_yet():
    progress = progress_of()
    progress.step(step("prefill", 200, 4))
    progress.finished([completion(0, 50, 1)])
    assert progress.figures()["prompt_tokens_in_flight"] == 200
    progress.committed()
    assert (progress.figures()["prompt_tokens_in_flight"], progress.figures()["output_tokens_in_flight"]) == (150, 3)


def test_a_terminal_gets_one_bar_of_rows_whose_total_stays_the_same():
    progress = progress_of()
    assert [bar.title for bar in progress.bars()] == ["to come: at most 4 rows"]
    shown = []
    for unit in (0, 0, 1, 1):
        progress.step(step("prefill", 70, 1))  # more than planned
        progress.step(step("decode", 4, 4))
        progress.finished([completion(unit, 70, 5)])  # fewer than planned
        shown += progress.bars()
    assert [(bar.title, bar.done, bar.total) for bar in shown] == [("computing", done, 4) for done in range(1, 5)]
    assert shown[-1].details[1] == "280 prompt and 20 output tokens"


def test_rows_that_earlier_commands_have_done_are_done_rows_of_the_whole_job():
    progress = progress_of(open_units=[1], rows=10)  # two for each request, and two bad ones
    progress.step(step("prefill", 50, 1))
    (bar,) = progress.bars()
    assert (bar.done, bar.total) == (5, 10)
    progress.done_elsewhere(1, 1)  # of the unit's two, the claim of a killed command
    progress.finished([completion(1, 50, 1)])
    assert progress.rows_done == 10
    assert (progress.requests.count, progress.requests.earlier, progress.requests.total) == (4, 2, 4)


def test_the_speed_is_of_all_tokens_over_the_whole_time_of_the_command(monkeypatch):
    progress = WorkProgress(ROWS, [0, 1], NOT_KNOWN, ClusterConfig(), started_s=1000.0)
    progress.step(step("prefill", 100, 1, cached=300))
    progress.step(step("decode", 19, 19, cached=500))
    monkeypatch.setattr(work_progress, "unix_s", lambda: 1010.0)
    assert progress._details()[0] == "42 tokens/s"  # (100 + 300 + 1 + 19) / 10


def test_a_job_without_requests_is_all_done():
    progress = WorkProgress([], [], NOT_KNOWN | {"rows": 0, "max_output_tokens": 0}, ClusterConfig())
    assert np.array_equal(progress.done, progress.planned)
    assert progress.line() == "to come: at most 0 rows"


def test_sweeps_are_counted_with_their_bytes_and_waiting():
    progress = progress_of()
    assert "sweep" not in progress.figures()
    progress.sweeps = SweepCount(planned=40)
    first = {"sweep": 1, "planned_sweeps": 40, "read_bytes_per_s": None, "waited_s": 0.0}
    assert progress.figures() | first == progress.figures()
    for num_bytes, wait_s in ((6_000, 1.5), (0, 0.0), (4_000, 0.5)):  # the first sweep has two steps
        progress.step(msgspec.structs.replace(step("decode", 1, 1), streamed_bytes=num_bytes, weights_wait_s=wait_s))
    third = {"sweep": 3, "planned_sweeps": 40, "read_bytes_per_s": 10_000 / 3, "waited_s": 2.0}
    assert progress.figures() | third == progress.figures()
    progress.sweeps.num_ranks = 2  # which sweep together
    assert progress.figures() | {"sweep": 2, "waited_s": 1.0} == progress.figures()
