"""The number of tasks that ends a job by its deadline: placed work, changes of the number, the end of whole jobs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from batchinfer.balance.pace import MARGIN, Stretch, Terms, after, preview, spread, tasks_now

H = 3600.0


def cost(tasks, stretches):
    return sum(number * stretch.length_s * stretch.price for number, stretch in zip(tasks, stretches, strict=True))


def test_worked_example():
    #  $2        $1         $2        20 task-hours, at most 4 tasks
    #  |--- 4 h ---|--- 4 h ---|--- 2 h ---|
    #     4/6         4          4/6       the cheap hours hold 16, the other 4 are spread evenly over 6 dearer hours
    stretches = [Stretch(0, 4 * H, 2.0), Stretch(4 * H, 8 * H, 1.0), Stretch(8 * H, 10 * H, 2.0)]
    assert spread(20 * H, stretches, Terms(4)) == pytest.approx((2 / 3, 4, 2 / 3))
    # what fits into the cheap hours needs no others
    assert spread(12 * H, stretches, Terms(4)) == pytest.approx((0, 3, 0))
    # 4 x 10 hours are all there is
    assert spread(50 * H, stretches, Terms(4)) == (4, 4, 4)


def test_a_task_that_runs_already_starts_no_more():
    hour = [Stretch(0, H, 1.0)]
    assert spread(2 * H, hour, Terms(9, H / 2)) == pytest.approx((4.0,))
    assert spread(2 * H, hour, Terms(9, H / 2), running=2) == pytest.approx((2.0,))
    assert spread(2 * H, hour, Terms(9, H / 2), running=1) == pytest.approx((3.0,))
    assert spread(2 * H, hour, Terms(9, 2 * H)) == (9,)  # too late for new ones, but nothing else helps


def task_hours(ahead):
    return sum((end - start) * tasks for start, end, tasks in ahead.stretches) / H


def random_case(seed):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, 6, size=rng.integers(1, 5))) * H
    starts = [0.0, *ends[:-1]]
    stretches = [
        Stretch(float(start), float(end), float(price))
        for start, end, price in zip(starts, ends, rng.integers(1, 4, size=len(ends)), strict=True)
    ]
    most = int(rng.integers(1, 6))
    return rng, stretches, most, float(rng.uniform(0.05, 0.95)) * most * float(ends[-1])


@pytest.mark.parametrize("seed", range(40))
def test_no_whole_numbers_of_tasks_that_do_the_work_cost_less(seed):
    _, stretches, most, work_s = random_case(seed)
    placed = spread(work_s, stretches, Terms(most))
    assert cost(placed, [stretch._replace(price=1.0) for stretch in stretches]) == pytest.approx(work_s)
    costs = [
        cost(tasks, stretches)
        for tasks in itertools.product(range(most + 1), repeat=len(stretches))
        if cost(tasks, [stretch._replace(price=1.0) for stretch in stretches]) >= work_s
    ]
    assert cost(placed, stretches) <= min(costs) + 1e-6
    for price in {stretch.price for stretch in stretches}:
        numbers = [number for number, stretch in zip(placed, stretches, strict=True) if stretch.price == price]
        assert max(numbers) == min(numbers)  # as even as it can be


@pytest.mark.parametrize("seed", range(40))
def test_more_work_or_less_time_never_means_fewer_tasks(seed):
    rng, stretches, most, work_s = random_case(seed)
    has, startup_s = int(rng.integers(0, most + 1)), float(rng.uniform(0, 900))
    terms = Terms(most, startup_s)
    numbers = [tasks_now(work_s * share, stretches, terms, has) for share in np.linspace(0.05, 3, 40)]
    assert numbers == sorted(numbers)
    one_price = [Stretch(0.0, stretches[-1].end_s, 1.0)]
    numbers = [
        tasks_now(work_s, [one_price[0]._replace(end_s=one_price[0].end_s * share)], terms, has)
        for share in np.linspace(2, 0.05, 40)
    ]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("seed", range(40))
def test_what_can_be_in_time_is_in_time_and_in_the_cheapest_hours(seed):
    _, stretches, most, work_s = random_case(seed)
    work_s *= 1 - 2 * MARGIN
    ahead = preview(work_s, stretches, Terms(most))
    assert ahead.end_s <= stretches[-1].end_s
    assert task_hours(ahead) == pytest.approx(work_s / H)
    if len({stretch.price for stretch in stretches}) == 1:
        # less than one task would take ends early
        assert ahead.end_s >= min(0.9 * stretches[-1].end_s, 0.999 * work_s)
    # MARGIN of what could be placed at the very end in cheap hours is at most moved to the dearest ones
    dearest = max(stretch.price for stretch in stretches)
    least = cost(spread(work_s, stretches, Terms(most)), stretches) / H
    lost_s = MARGIN * stretches[-1].end_s * most
    assert ahead.cost <= least + lost_s / H * dearest + dearest


def test_a_speed_that_wavers_sends_no_tasks_to_and_fro():
    rng, has, changes = np.random.default_rng(0), 0, 0
    for minute in range(600):
        left_s = (600 - minute) * 60.0
        work_s = 7.5 * left_s * rng.uniform(1 - MARGIN / 2, 1 + MARGIN / 2)
        wanted = tasks_now(work_s, [Stretch(0, left_s, 1.0)], Terms(50), has)
        changes += wanted != has
        has = wanted
    assert has == 8
    assert changes <= 3


def test_nothing_left_is_nothing_to_send_and_a_deadline_that_is_over_takes_all():
    assert tasks_now(0.0, [Stretch(0, H, 1.0)], Terms(5), has=3) == 0
    assert tasks_now(H, [], Terms(5), has=3) == 5
    late = preview(10 * H, [Stretch(0, H, 2.0)], Terms(2))
    assert late.end_s == pytest.approx(5 * H)
    assert late.cost == pytest.approx(20)


@pytest.mark.parametrize("seed", range(40))
def test_a_preview_ends_at_unix_times_too(seed):
    """There a float's last digit is a quarter of a microsecond, so that rounding leaves a little work."""
    rng = np.random.default_rng(seed)
    stretch = Stretch(1.7954e9, 1.7954e9 + rng.uniform(0.001, 200), 1.0)
    terms = Terms(int(rng.integers(1, 9)), rng.uniform(0, 20), rng.uniform(0, 50))
    work_s = rng.uniform(0.1, 2000)
    ahead = preview(work_s, [stretch], terms, int(rng.integers(0, 7)))
    assert task_hours(ahead) * H >= work_s - 1e-3
    assert ahead.end_s == ahead.stretches[-1][1]


# ---- whole jobs on a clock of their own: units that are claimed, tasks that start, die and wait for the last unit


STEP_S = 5.0
LOST_S = 60.0  # of a task's work when it dies: requests that ran, and what was not committed


class Array:
    """Tasks that claim units one after the other.

    As in a run, a task that finds no unit waits until the last unit is done. A task that leaves or dies gives back its
    unit with the finished part.
    """

    def __init__(self, num_units, unit_s, startup_s):
        self.unit_s, self.startup_s = unit_s, startup_s
        self.waiting = [0.0] * num_units  # finished work of units that no task holds
        self.num_done, self.num_units = 0, num_units
        self.tasks = []  # [seconds of life, what is done of the unit it holds or None]
        self.task_s = 0.0

    def set_tasks(self, number):
        self.tasks.sort(key=lambda task: task[1] is None)  # idle ones leave first
        while len(self.tasks) > number:
            self.end_task()
        self.tasks += [[0.0, None] for _ in range(number - len(self.tasks))]

    def end_task(self):
        if self.tasks and (done_s := self.tasks.pop()[1]) is not None:
            self.waiting.append(max(0.0, done_s - LOST_S))

    def step(self, seconds):
        for task in self.tasks:
            task[0] += seconds
            self.task_s += seconds
            if task[1] is None and task[0] > self.startup_s and self.waiting:
                task[1] = self.waiting.pop()
            if task[1] is not None:
                task[1] += seconds
                if task[1] >= self.unit_s:
                    task[1] = None
                    self.num_done += 1

    @property
    def num_open(self):
        return self.num_units - self.num_done

    @property
    def work_s(self):
        return self.num_open * self.unit_s - sum(self.waiting) - sum(task[1] or 0.0 for task in self.tasks)


def paced(job, deadline_s, kills, most=100):
    """(end, task-seconds) under the rule, looked at every 15 seconds."""
    array, now = Array(*job), 0.0
    while array.num_open:
        if now % 15 == 0:
            terms = Terms(min(most, array.num_open), array.startup_s, array.unit_s)
            ahead = after([Stretch(0, deadline_s, 1.0)], now)
            wanted = tasks_now(array.work_s, ahead, terms, len(array.tasks))
            array.set_tasks(wanted)
        if now in kills:
            array.end_task()
        array.step(STEP_S)
        now += STEP_S
    return now, array.task_s


def fixed(job, number, kills):
    """Return (end, task-seconds) of an array whose number of tasks never grows."""
    array, now = Array(*job), 0.0
    array.set_tasks(number)
    while array.num_open and array.tasks:
        if now in kills:
            array.end_task()
        array.step(STEP_S)
        now += STEP_S
    return (now if array.tasks else float("inf")), array.task_s


def test_jobs_end_close_to_their_deadline_with_fewer_task_hours_than_fixed_arrays():
    shares = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        deadline_s = float(rng.integers(3, 9)) * H
        wide = rng.uniform(8, 32)  # tasks that it would take all the time
        job = 256, wide * deadline_s / 256, float(rng.integers(20, 120))
        kills = {STEP_S * at for at in rng.integers(0, int(0.8 * deadline_s / STEP_S), size=rng.integers(1, 6))}
        end_s, task_s = paced(job, deadline_s, kills)
        assert 0.9 * deadline_s <= end_s <= 1.02 * deadline_s
        # the smallest array that is in time although the same tasks die
        arrays = (fixed(job, size, kills) for size in range(int(wide) - 1, 100))
        _, fixed_task_s = next(ended for ended in arrays if ended[0] <= max(end_s, deadline_s))
        shares.append(task_s / fixed_task_s)
    print(
        f"\ntask-hours by those of the smallest fixed array that is in time: {np.mean(shares):.3f} ({max(shares):.3f})"
    )
    assert max(shares) < 1


def test_killed_tasks_are_made_up_for():
    job = 200, 300.0, 60.0  # 16.7 task-hours
    kills = {float(at) for at in range(600, 4800, 60)}  # 70 of them
    end_s, _ = paced(job, 2 * H, kills, most=30)
    assert 0.9 * 2 * H <= end_s <= 1.05 * 2 * H
    assert fixed(job, 12, kills)[0] == float("inf")  # these would all be dead
