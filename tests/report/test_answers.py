"""The report's figures of answers: structured outputs, thinking, log-probabilities and lengths."""

from __future__ import annotations

import json
import random

import pyarrow.parquet as pq
import pytest

from batchinfer.report.foreign_sql import run_query
from batchinfer.report.read import as_document, read_report, read_together
from batchinfer.report.views import LATER_COLUMNS
from support.jobs import batchinfer
from support.runs import error_request, request, write_run

CUT = {"finish_reason": "length"}


@pytest.fixture
def run(tmp_path):
    """Ten rows: four structured outputs and an error row of one, four that think, three with log-probabilities."""
    rows = [
        request(0, 9, 10, structured_valid=True),
        request(1, 9, 10, structured_valid=True, reasoning_tokens=4),
        request(2, 9, 10, structured_valid=False, **CUT),
        request(3, 9, 10, structured_valid=False),  # a stop string
        error_request(4) | {"structured_valid": False},
        request(5, 9, 40, reasoning_tokens=30, mean_logprob=-0.5, **CUT),
        request(6, 9, 40, reasoning_tokens=40, mean_logprob=-1.0, **CUT),
        request(7, 9, 20, reasoning_tokens=20, mean_logprob=-2.0),
        request(8, 9, 20),
        error_request(9),
    ]
    return write_run(tmp_path / "run", requests=rows)


def lines_of(*arguments):
    return [" ".join(line.split()) for line in batchinfer("report", *arguments).out.splitlines()]


def test_a_worked_example_gives_every_figure_of_answers(run):
    found = as_document(read_report(run))
    assert found["structured_outputs"] == {"rows": 5, "valid": 2, "cut": 1, "valid_share": 0.4}
    known = {"cut": 1, "cut_share": 0.25, "ended": 1, "ended_share": 0.25}
    assert found["reasoning"] == {"rows": 4, "mean_tokens": 94 / 4, **known}
    assert found["mean_logprob"] == pytest.approx(-(40 * 0.5 + 40 * 1.0 + 20 * 2.0) / 100)  # by tokens, not by rows


def test_the_panel_shows_what_there_is_to_say_of_answers(run, tmp_path):
    lines = lines_of(run)
    at = lines.index("Answers")
    assert lines[at + 1 : at + 6] == [
        "valid structured outputs 40.0 % 2 of 5; 1 cut at max_tokens",
        "thinking per row 23.50 tokens in 4 rows",
        "cut in their thinking 25.0 % 1 without an answer",
        "ended in their thinking 25.0 % 1 without an answer",
        "mean log-probability -1 nats per output token",
    ]
    at = lines.index("Output tokens of a row rows share by thinking")
    assert [line.rstrip(" █▏") for line in lines[at + 1 : at + 8]] == [
        "4 to 5 0 0.0% 1",
        "6 to 7 0 0.0% 0",
        "8 to 11 4 50.0% 0",
        "12 to 15 0 0.0% 0",
        "16 to 23 2 25.0% 1",
        "24 to 31 0 0.0% 1",
        "32 to 47 2 25.0% 1",
    ]
    assert lines[at + 3].count("█") == 2 * lines[at + 5].count("█") == 2 * lines[at + 7].count("█") > 0
    plain = lines_of(write_run(tmp_path / "plain", requests=[request(0, 9, 4), request(1, 9, 5)]))
    assert not any(line.startswith(("Answers", "Output tokens of a row")) for line in plain)


def test_thinking_has_a_column_only_where_there_is_some(tmp_path):
    lines = lines_of(write_run(tmp_path / "run", requests=[request(0, 9, 4), request(1, 9, 9)]))
    at = lines.index("Output tokens of a row rows share")
    assert lines[at + 1] == f"4 to 5 1 50.0% {'█' * 14}"


@pytest.mark.parametrize("seed", range(10))
def test_every_row_is_in_the_bin_of_its_length(tmp_path, seed):
    draw = random.Random(seed)
    lengths = [round(2 ** draw.uniform(0, draw.choice([3, 12, 20]))) for _ in range(50)]
    thinking = [draw.randint(0, length) for length in lengths]
    rows = [request(row, 9, length, reasoning_tokens=thinking[row]) for row, length in enumerate(lengths)]
    bins = read_report(write_run(tmp_path / "run", requests=[*rows, error_request(50)])).lengths
    for one in bins:
        numbers = range(one["from_tokens"], one["to_tokens"] + 1)
        assert one["rows"] == sum(length in numbers for length in lengths)
        assert one["reasoning_rows"] == sum(tokens in numbers for tokens in thinking)
        assert len(numbers) == 1 or len(numbers) * 2 <= one["from_tokens"] + 1
    assert [one["from_tokens"] for one in bins[1:]] == [one["to_tokens"] + 1 for one in bins[:-1]]
    assert sum(one["rows"] for one in bins) == 50
    assert bins[-1]["rows"] > 0
    assert bins[0]["rows"] + bins[0]["reasoning_rows"] > 0


def test_a_run_without_answers_has_no_lengths(tmp_path):
    found = as_document(read_report(write_run(tmp_path / "run", requests=[error_request(0)])))
    assert found["output_lengths"] == []
    assert found["structured_outputs"] == {"rows": 0, "valid": 0, "cut": 0, "valid_share": None}
    assert found["mean_logprob"] is None


def test_several_runs_together_are_weighted_by_their_rows_and_tokens(run, tmp_path):
    other = write_run(
        tmp_path / "other",
        requests=[request(row, 9, 100, structured_valid=True, mean_logprob=-3.0) for row in range(5)],
    )
    values = read_together([run, other], [read_report(run), read_report(other)]).values
    assert values["structured_outputs.valid_share"] == pytest.approx(7 / 10)
    assert values["reasoning.mean_tokens"] == pytest.approx(94 / 4)
    assert values["mean_logprob"] == pytest.approx(-(100 + 1500) / 600)
    assert "valid structured outputs % 40.0 100.0 +60.0 points" in lines_of(run, other, "--compare")
    assert "mean log-probability nats -1 -3 -2 nats" in lines_of(run, other, "--compare")
    changed = json.loads(batchinfer("report", run, other, "--compare", "--json").out)
    assert changed["mean_logprob"] == {"before": -1.0, "after": -3.0, "difference": -2.0, "relative": -2.0}


def test_a_run_of_an_earlier_version_is_read_and_what_it_does_not_say_is_not_known(run, tmp_path):
    earlier = write_run(tmp_path / "earlier", requests=[request(row, 9, 10) for row in range(3)])
    path = earlier / "stats" / "requests.parquet"
    pq.write_table(pq.read_table(path).drop_columns([*LATER_COLUMNS["requests"]]), path)
    found = as_document(read_report(earlier))
    assert found["structured_outputs"] == dict.fromkeys(("rows", "valid", "cut", "valid_share"))
    assert {found["reasoning"][name] for name in ("cut", "cut_share", "ended", "ended_share")} == {None}
    assert found["mean_logprob"] is None
    assert [one["rows"] for one in found["output_lengths"]] == [3]
    together = read_together([run, earlier], [read_report(run), read_report(earlier)])
    assert together.values["structured_outputs.rows"] is None
    _, rows = run_query([earlier, run], "SELECT run, count(structured_valid) FROM requests GROUP BY run ORDER BY run")
    assert list(rows) == [("earlier", 0), ("run", 5)]


def test_rows_with_choices_count_once_each_and_are_bad_if_one_choice_is(tmp_path):
    def of_row(row, *statuses):
        return [
            request(row, 5, 0, choice=choice, status=status, finish_reason="length" if status == "ok" else "error")
            for choice, status in enumerate(statuses)
        ]

    requests = [*of_row(0, "ok", "error", "error"), *of_row(1, "ok", "ok"), *of_row(2, "error", "ok")]
    requests.append(request(3, 0, 0, status="error", finish_reason="error"))  # bad before it had choices
    runs = [write_run(tmp_path / name, requests=requests) for name in ("one", "two")]
    found = [read_report(run) for run in runs]
    for report, times in ((found[0], 1), (read_together(runs, found), 2)):
        values = report.values
        assert [values[name] for name in ("rows", "rows_ok", "rows_error")] == [4 * times, times, 3 * times]
