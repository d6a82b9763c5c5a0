"""Deadline and budget of a run: refusals, the required number of tasks, and measurements from the run folder."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.checked_json import publish_json, read_json
from batchinfer.config import load_job
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.pace.follow_goal import follow_goal, is_finished
from batchinfer.pace.follow_schedule import follow_schedule
from batchinfer.pace.goal import Goal, clock, look_ahead, parse_deadline, read_goal, sentences, write_goal
from batchinfer.pace.meter import Measurement, RunMeter
from batchinfer.plan import packing
from batchinfer.records import ConfigError, IncompleteRunError, InterruptedRunError
from batchinfer.report.price.price_list import CheapHours, PriceList
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims
from batchinfer.run.units.result_files import write_results
from batchinfer.rundir import RunDir
from batchinfer.submit.size import ArraySize
from batchinfer.submit.slurm import client
from batchinfer.submit.slurm.client import SlurmUnavailableError
from batchinfer.submit.slurm.follower import dismiss, take_over
from batchinfer.submit.slurm.tasks import Shape, record_shape
from support.jobs import batchinfer, write_job, write_questions

H = 3600.0
NOON = 1_795_435_200.0  # 2026-11-23 12:00 UTC
IN_AN_HOUR = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + H))
IN_A_MONTH = time.strftime("%Y-%m-%d", time.localtime(time.time() + 30 * 24 * H))
TWO_DOLLARS = PriceList(gpu_hour=2.0)
# of the day in UTC: a quarter of the price from 22:00 to 06:00
CHEAP_NIGHT = PriceList(gpu_hour=2.0, cheap_hours=(CheapHours(22 * 60, 6 * 60, 0.5),))


def goal_of(**changes):
    return Goal(
        **{
            "finish_by_s": NOON + 8 * H,
            "max_cost": None,
            "most_tasks": None,
            "prices": TWO_DOLLARS,
            "set_s": NOON,
            **changes,
        }
    )


def seen(**changes):
    return Measurement(
        **{
            "work_s": 20 * H,
            "unit_s": 0.0,
            "flight_s": 0.0,
            "startup_s": 0.0,
            "spent": 0.0,
            "units_open": 256,
            "num_ranks": 8,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("goal")
    write_questions(folder / "prompts", (12,))
    return write_job(folder, pricing={"gpu_hour": 36.0}, cluster={"commit_seconds": 0.05})


@pytest.fixture
def planned(job, tmp_path, monkeypatch):
    """A plan of several units that was forecast to take ten hours on one task."""
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    run = RunDir(tmp_path / "run")
    assert batchinfer("plan", job, "--set", f"output.dir={run.root}").code == 0
    state = read_json(run.run_json)
    publish_json(run.run_json, {**state, "counts": {**state["counts"], "work_s": 10 * H}})
    return run


# ---- what is asked for


def test_deadlines_are_local_unless_they_name_a_zone(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        assert parse_deadline("2026-11-23 21:00", NOON) == NOON + 1 * H
        assert parse_deadline("2026-11-23T21:00:30+00:00", NOON) == NOON + 9 * H + 30
        assert clock(NOON) == "2026-11-23 20:00:00"
        with pytest.raises(ConfigError, match="which is in the past: now it is 2026-11-23 20:00:00"):
            parse_deadline("2026-11-23 20:00", NOON)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--finish-by", "soon"), "--finish-by is 'soon'; write date and time"),
        (("--finish-by", "2020-01-01 06:00"), "which is in the past"),
        (("--finish-by", ""), "--finish-by is ''"),
        (("--finish-by", "0001-01-01T00:00+14:00"), "--finish-by is '0001-01-01T00:00+14:00'"),
        (("--finish-by", "9999-01-01"), "more than 366 days away"),
        (("--finish-by", IN_AN_HOUR, "--set", 'slurm.schedule=["08:00 4"]'), "slurm.schedule; leave one of them out"),
        (("--finish-by", IN_AN_HOUR, "--array", "8%2"), "--array N%M"),
        (("--finish-by", IN_AN_HOUR, "--array", "0"), "would submit nothing"),
        (("--finish-by", IN_AN_HOUR, "--prices", "nowhere.toml"), "no price list at nowhere.toml"),
        (("--max-cost", "5"), "--max-cost alone does not say how many tasks"),
        (("--max-cost", "-5"), "--max-cost"),
        (("--array", "3", "--prices", "prices.toml"), "--prices is for"),
        (("--finish-by", IN_AN_HOUR, "--dry-run"), "has no complete plan yet"),
    ],
)
def test_wrong_goals_are_refused_before_anything_is_planned(job, options, sentence):
    refused = batchinfer("submit", job, *options)
    assert refused.code == 2
    assert sentence in refused.err
    assert not (job.parent / "run").exists()


def test_a_budget_needs_a_price(tmp_path):
    write_questions(tmp_path / "prompts", (1,))
    refused = batchinfer("submit", write_job(tmp_path), "--finish-by", IN_AN_HOUR, "--max-cost", "5")
    assert refused.code == 2
    assert "--max-cost needs the price of accelerators; set pricing.gpu_hour or give --prices FILE" in refused.err


def test_goals_go_with_follow_and_not_with_resize(planned):
    assert "take no other options" in batchinfer("submit", "--resize", planned.root, "3", "--finish-by", IN_AN_HOUR).err
    assert "need --finish-by" in batchinfer("submit", "--follow", planned.root, "--array", "3").err


def test_a_goal_is_recorded(tmp_path):
    run = RunDir(tmp_path)
    assert read_goal(run) is None
    goal = goal_of(max_cost=5.0, most_tasks=7, prices=CHEAP_NIGHT)
    write_goal(run, goal)
    assert read_goal(run) == goal


# ---- what it means now


def test_as_many_tasks_as_end_in_time():
    outlook = look_ahead(goal_of(), seen(), 0, NOON)
    assert outlook.tasks == 3  # 2.5, and a little that stays free
    assert 0.9 * 8 * H < outlook.ahead.end_s - NOON <= 8 * H
    assert outlook.ahead.cost == pytest.approx(20 * 8 * 2.0)
    assert not outlook.late_s
    assert look_ahead(goal_of(), seen(work_s=40 * H), 3, NOON).tasks == 6
    # tasks that were killed are not there any more
    assert look_ahead(goal_of(), seen(), 1, NOON).tasks == 3
    # no more than there is work for, and none when it is done
    assert look_ahead(goal_of(), seen(units_open=2), 3, NOON).tasks == 2
    assert look_ahead(goal_of(), seen(units_open=0, work_s=0.0), 3, NOON).tasks == 0


def test_cheap_hours_come_first():
    #  12:00 ──────────── 22:00 ─── 06:00        10 task-hours fit into the cheap eight with two tasks
    goal = goal_of(finish_by_s=NOON + 20 * H, prices=CHEAP_NIGHT)
    by_day = look_ahead(goal, seen(work_s=10 * H), 0, NOON)
    assert by_day.tasks == 0
    assert by_day.ahead.stretches[1][:1] == (NOON + 10 * H,)
    assert by_day.ahead.cost == pytest.approx(10 * 8 * 0.5)
    assert "0 tasks from now on" in sentences(goal, seen(work_s=10 * H), by_day)[0]
    assert look_ahead(goal, seen(work_s=10 * H), 0, NOON + 10 * H).tasks == 2
    # with one task at most some of it has to run by day
    assert look_ahead(replace(goal, most_tasks=1), seen(work_s=10 * H), 0, NOON).tasks == 1
    # and without another price there is nothing to wait for
    assert look_ahead(replace(goal, prices=TWO_DOLLARS), seen(work_s=10 * H), 0, NOON).tasks == 1


def test_what_cannot_be_met_is_said():
    goal = goal_of(most_tasks=2, max_cost=300.0)
    outlook = look_ahead(goal, seen(), 2, NOON)
    assert outlook.tasks == 2  # late, so all that there may be
    assert outlook.late_s == pytest.approx(2 * H)
    said = "\n".join(sentences(goal, seen(), outlook))
    assert f"cannot end by {clock(NOON + 8 * H)} with at most 2 tasks; at this speed it is 2.0 h late" in said
    assert "at this speed it costs 320.00 $ in all, more than --max-cost 300.00; it pauses before that" in said
    over = look_ahead(goal, seen(), 2, NOON + 9 * H)  # the deadline is over
    assert over.tasks == 2
    assert over.late_s == pytest.approx(11 * H)


def test_a_budget_alone_takes_the_tasks_it_is_told():
    goal = goal_of(finish_by_s=None, max_cost=1000.0, most_tasks=5)
    outlook = look_ahead(goal, seen(), 0, NOON)
    assert (outlook.tasks, outlook.late_s, outlook.is_too_dear) == (5, 0.0, False)
    assert outlook.ahead.end_s == pytest.approx(NOON + 4 * H)
    assert outlook.ahead.cost == pytest.approx(320)
    assert look_ahead(goal, seen(spent=700.0), 0, NOON).is_too_dear


def test_without_a_known_speed_one_task_measures_it():
    assert look_ahead(goal_of(), seen(work_s=None), 0, NOON).tasks == 1
    outlook = look_ahead(goal_of(), seen(work_s=None), 3, NOON)
    assert outlook.tasks == 3
    assert "not known yet" in sentences(goal_of(), seen(work_s=None), outlook)[0]


# ---- what is measured


def test_a_plan_and_then_results_say_what_is_left(planned):
    job = load_job(planned.job)
    meter = RunMeter(FolderStorage(planned), job, PriceList(gpu_hour=36.0), measure_s=1e-3)
    before = meter.measure(time.time())
    assert before.work_s == pytest.approx(10 * H)  # the plan's forecast
    assert (before.units_open, before.spent, before.num_ranks) == (12, 0.0, 1)
    assert before.unit_s == pytest.approx(10 * H / 12)
    assert batchinfer("work", planned.root).code == 0
    after = meter.measure(time.time())
    assert (after.work_s, after.units_open) == (0.0, 0)
    assert after.unit_s < 60  # measured: not an hour as forecast
    assert after.startup_s > 0
    assert batchinfer("finish", planned.root).code == 0
    cost = json.loads(batchinfer("report", planned.root, "--json").out)["cost_usd"]
    assert after.spent == pytest.approx(cost, rel=0.02)  # as the report says


def test_a_forecast_counts_until_enough_is_measured(planned):
    """Half of the units are done at a speed of which the forecast knew nothing."""
    assert batchinfer("work", planned.root).code == 0
    for unit in range(6):
        planned.done(unit).unlink()
        for part in planned.unit(unit).glob("*/part-*.parquet"):
            part.unlink()
    work = [row["new_tokens"] + row["max_output_tokens"] for row in pq.read_table(planned.units).to_pylist()]
    job = load_job(planned.job)
    lefts = [
        RunMeter(FolderStorage(planned), job, PriceList(), measure_s).measure(time.time()).work_s
        for measure_s in (1e-3, 30.0, 1e9)
    ]
    assert lefts == sorted(lefts)
    assert lefts[0] < 60
    assert lefts[2] == pytest.approx(10 * H * sum(work[:6]) / sum(work), rel=0.01)


def test_without_a_forecast_a_speed_is_not_known_before_it_is_measured(planned):
    state = read_json(planned.run_json)
    publish_json(planned.run_json, {**state, "counts": {**state["counts"], "work_s": None}})
    job = load_job(planned.job)
    assert RunMeter(FolderStorage(planned), job, PriceList(), 1e-3).measure(time.time()).work_s is None
    assert batchinfer("work", planned.root).code == 0
    assert RunMeter(FolderStorage(planned), job, PriceList(), 1e-3).measure(time.time()).work_s == 0.0
    assert RunMeter(FolderStorage(planned), job, PriceList(), 1e9).measure(time.time()).work_s is None


def test_a_speed_is_not_forgotten_while_a_run_pauses(planned):
    state = read_json(planned.run_json)
    publish_json(planned.run_json, {**state, "counts": {**state["counts"], "work_s": None}})
    assert batchinfer("work", planned.root).code == 0
    planned.done(3).unlink()
    for part in planned.unit(3).glob("*/part-*.parquet"):
        part.unlink()
    meter, now = RunMeter(FolderStorage(planned), load_job(planned.job), PriceList(), 1e-3), time.time()
    lefts = [meter.measure(now + hours * H).work_s for hours in (0, 1, 2, 10, 11)]
    assert lefts[0] > 0
    assert set(lefts) == {lefts[0]}


def test_empty_and_missing_result_files_give_no_time_of_a_request(planned):
    """A retry rewrites a file with its good rows only, perhaps none; damaged files are moved to quarantine."""
    meter = RunMeter(FolderStorage(planned), load_job(planned.job), PriceList(), 1e-3)
    times = {"admitted_s": 10.0, "finished_s": 12.5, "computed_tokens": 5, "completion_tokens": 5}
    row = {"unit": 0, "shard": 0, "row": 0, "sample": 0, "status": "ok", **times}
    with UnitClaims(FolderStorage(planned)) as claims:
        folder = claims.try_claim(0).folder
        write_results(folder, 0, pa.Table.from_pylist([row], schema=RESULTS.schema))
        empty = write_results(folder, 1, RESULTS.schema.empty_table())
        os.utime(empty, (time.time() + 60, time.time() + 60))
        assert meter.measure(time.time()).flight_s == 2.5
        for path in folder.glob("part-*"):
            path.unlink()
        assert meter.measure(time.time()).flight_s == 0.0


def test_outputs_of_a_part_do_not_end_what_is_pursued(planned):
    storage = FolderStorage(planned)
    assert batchinfer("finish", planned.root, "--allow-partial").code == 3
    assert read_json(planned.run_json)["state"] == "partial"
    assert not is_finished(storage)
    assert batchinfer("work", planned.root).code == 0
    assert not is_finished(storage)  # the outputs are still those of a part
    assert batchinfer("finish", planned.root).code == 0
    assert is_finished(storage)


def follow_by(way, planned, look_s=0.0):
    storage = FolderStorage(planned)
    if way == "goal":
        follow_goal(storage, load_job(planned.job), goal_of(finish_by_s=time.time() + H), look_s=look_s)
    else:
        follow_schedule(storage, ["08:00 4"], lambda: 0, look_s=look_s)


@pytest.mark.parametrize("way", ["goal", "schedule"])
def test_tasks_are_followed_on_when_slurm_answers_again(planned, monkeypatch, capsys, way):
    looks = iter([SlurmUnavailableError("squeue got no answer"), SlurmUnavailableError("squeue got no answer"), None])

    def slurm(*_):
        error = next(looks)
        if error is not None:
            raise error
        publish_json(planned.run_json, {**read_json(planned.run_json), "state": "finished"})
        return 1 if way == "goal" else (None, [])

    monkeypatch.setattr("batchinfer.pace.follow_goal.num_tasks", slurm)
    monkeypatch.setattr("batchinfer.pace.follow_goal.resize", slurm if way == "schedule" else lambda *_: (None, []))
    follow_by(way, planned)
    assert capsys.readouterr().err.count("warning: squeue got no answer; tasks stay as they are") == 2


@pytest.mark.parametrize("way", ["goal", "schedule"])
@pytest.mark.parametrize(("change", "sentence"), [(dismiss, "was cancelled"), (take_over, "another command follows")])
def test_a_follower_ends_with_a_cancel_or_when_another_takes_over(planned, monkeypatch, way, change, sentence):
    """The follower must not use a number of tasks that it counted before: it would replace ended tasks."""
    record_shape(planned, Shape())
    monkeypatch.setattr(client, "live_tasks", lambda _: [])

    def refuse(*_):
        raise AssertionError("it has sent tasks")

    def change_it(*_):
        change(planned)
        return 0

    monkeypatch.setattr(client, "send", refuse)
    monkeypatch.setattr("batchinfer.pace.follow_goal.num_tasks", change_it)
    monkeypatch.setattr("batchinfer.pace.follow_schedule.size_at", lambda *_: ArraySize(change_it() + 4))
    with pytest.raises(InterruptedRunError, match=sentence):
        follow_by(way, planned)


def test_a_schedule_sends_tasks_anew_for_those_that_died_but_not_for_ever(planned, monkeypatch, capsys):
    """One of four lives on; three more are wanted at each look, and no result comes."""
    sizes = []

    def resize(_, size, *__):
        sizes.append(size)
        return None, []

    monkeypatch.setattr("batchinfer.pace.follow_goal.resize", resize)
    monkeypatch.setattr("batchinfer.pace.follow_schedule.num_tasks", lambda _: 1)
    with pytest.raises(IncompleteRunError, match=r"12 tasks of \S+ were submitted since its last result"):
        follow_schedule(FolderStorage(planned), ["08:00 4%2"], lambda: 0, look_s=0.0)
    assert sizes == [ArraySize(4, 2)] * 5
    assert capsys.readouterr().err.count("3 of 4%2 tasks have ended early: replaced") == 4


def test_a_schedule_sends_no_tasks_for_units_that_others_hold(planned, monkeypatch):
    sizes = []

    def resize(_, size, *__):
        sizes.append(size.tasks)
        if len(sizes) == 2:
            dismiss(planned)
        return None, []

    monkeypatch.setattr("batchinfer.pace.follow_goal.resize", resize)
    monkeypatch.setattr("batchinfer.pace.follow_schedule.num_tasks", lambda _: 1)
    with UnitClaims(FolderStorage(planned)) as claims:
        for unit in range(1, pq.read_metadata(planned.units).num_rows):
            assert claims.try_claim(unit) is not None
        with pytest.raises(InterruptedRunError, match="was cancelled"):
            follow_schedule(FolderStorage(planned), ["08:00 4"], lambda: 0, look_s=0.0)
    assert sizes == [4, 2]  # for the unit that waits


def test_a_schedule_waits_for_the_units_of_tasks_that_have_just_died(planned, monkeypatch):
    """No task is left in Slurm, but the dead tasks hold their units until their leases expire."""
    sizes, looks = [], itertools.count()

    def resize(_, size, *__):
        sizes.append(size.tasks)
        if len(sizes) == 2:
            dismiss(planned)
        return None, []

    def minute_now():
        if next(looks) == 3:
            claims.end()
        return 0

    monkeypatch.setattr("batchinfer.pace.follow_goal.resize", resize)
    monkeypatch.setattr(client, "live_tasks", lambda _: [])
    with UnitClaims(FolderStorage(planned)) as claims:
        held = [claims.try_claim(unit) for unit in range(pq.read_metadata(planned.units).num_rows)]
        with pytest.raises(InterruptedRunError, match="was cancelled"):
            follow_schedule(FolderStorage(planned), ["08:00 4"], minute_now, look_s=0.0)
    assert sizes == [4, min(4, len(held))]


def test_a_dry_run_shows_tasks_hours_and_cost_of_the_plan(planned):
    ended = batchinfer("submit", planned.root, "--finish-by", IN_A_MONTH, "--dry-run")
    assert ended.code == 0, ended.err
    assert "1 task from now on: 10.00 task-hours are left, it ends at " in ended.out
    assert "and costs 360.00 $ in all" in ended.out
    assert "--array=0-0" in ended.out
    assert not planned.goal.exists()
    soon = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 6 * H))
    two = batchinfer("submit", planned.root, "--finish-by", soon, "--dry-run").out
    assert "2 tasks from now on" in two
    assert "--array=0-1" in two
    late = batchinfer("submit", planned.root, "--finish-by", soon, "--array", "1", "--max-cost", "100", "--dry-run").out
    assert "cannot end by" in late
    assert "4.0 h late" in late
    assert "more than --max-cost 100.00" in late
