"""Planned beside happened over several runs."""

from rich.console import Console

from batchinfer.report.compare import planned_and_happened
from batchinfer.report.read import Prediction
from support.jobs import batchinfer


def test_planned_and_happened_over_three_runs_with_the_median_error():
    runs = [
        (f"run-{number}", [Prediction("work_s", planned, 100.0, None), Prediction("cost_usd", None, 3.0, None)])
        for number, planned in enumerate((90.0, 110.0, 150.0))
    ]
    console = Console(width=100, record=True, file=None, quiet=False)
    console.print(planned_and_happened(runs))
    lines = console.export_text().splitlines()
    shown = [" ".join(line.split()) for line in lines if line.strip()]
    assert "seconds on ranks median +10.0%" in shown
    assert "run-0 90.00 100.00 -10.0%" in shown
    assert "run-2 150.00 100.00 +50.0%" in shown
    assert not any("cost" in line for line in shown)  # not planned


def test_comparing_one_run_is_an_error():
    ended = batchinfer("report", "one", "--compare")
    assert (ended.code, "--compare takes two runs, but got 1" in ended.err) == (2, True)
