"""How progress is shown: on terminals, in notebooks, in logs, by tqdm, and by a caller's function."""

import io
import logging
import sys

import pytest

import batchinfer
from batchinfer.api import display
from batchinfer.api.display import Display, check_progress, display_of
from batchinfer.progress import LINE_S


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook:
    """What IPython has in a notebook's kernel."""

    config = {"IPKernelApp": {}}  # noqa: RUF012

    @classmethod
    def get_ipython(cls):
        return cls


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("value", [None, "bar", "True", 1, 0.5, [], ("tqdm",)])
def test_other_values_are_one_sentence(value, tmp_path):
    with pytest.raises(batchinfer.ConfigError, match=r'; give True, False, "tqdm", or a function of a title'):
        check_progress(value)
    job = {"input": {"files": [str(tmp_path / "a.parquet")], "prompt": "p"}, "output": {"dir": str(tmp_path / "run")}}
    job = batchinfer.Job({**job, "model": {"path": str(tmp_path)}, "sampling": {"max_tokens": 1}})
    for use in (job.plan, job.run, job.rows):  # before anything starts, and before the first row is asked for
        with pytest.raises(batchinfer.ConfigError, match="progress is "):
            use(progress=value)


def test_a_terminal_is_left_to_the_command_unless_the_caller_says_otherwise(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    assert display_of(True).uses_terminal
    assert [display_of(value).uses_terminal for value in (False, "tqdm", print)] == [False] * 3
    monkeypatch.setattr(sys, "__stderr__", io.StringIO())  # the caller has redirected stderr
    assert not display_of(True).uses_terminal


def test_false_shows_nothing(capsys, clock):
    shown = display_of(False)
    assert type(shown) is Display
    clock[0] = 10 * LINE_S
    shown.line("decode: 50%, 1 of 2 tokens")
    shown.count("work", 1, 2)
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_a_function_gets_every_count():
    told = []
    shown = display_of(lambda *count: told.append(count))
    shown.count("work", 1, 2)
    assert told == [("work", 1, 2)]


def test_elsewhere_a_line_of_progress_comes_now_and_then(capsys, clock):
    shown = display_of(True)
    for second in range(int(2.5 * LINE_S)):
        clock[0] = float(second)
        shown.line(f"computing: {second}%")
        shown.line("something else")
        shown.count("work", second, 100)
    expected = [f"computing: {int(times * LINE_S)}%" for times in (1, 2)]
    assert capsys.readouterr().err.splitlines() == expected


def test_lines_that_the_callers_logging_shows_are_not_shown_twice(capsys, clock, caplog):
    shown = display_of(True)
    clock[0] = 2 * LINE_S
    with caplog.at_level(logging.INFO, logger="batchinfer"):
        shown.line("decode: 50%")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("progress", ["tqdm", True])
def test_bars_of_tqdm_count_requests_and_stay(progress, monkeypatch, capsys):
    if progress is True:
        monkeypatch.setitem(sys.modules, "IPython", Notebook)
    shown = display_of(progress)
    shown.count("load", 5, 10)
    for done in range(4):
        shown.count("work", done, 3)
        shown.count("tokens", 10 * done, 30)
    shown.count("load", 10, 10)
    shown.count("finish", 3, 3)
    shown.close()
    said = capsys.readouterr().err
    last = said.rstrip().rpartition("\r")[2]
    assert "work: 100%" in last
    assert "3/3" in last
    assert "30 tokens" in last
    assert "load" not in said  # an activity of less than a second


def test_a_bar_whose_total_grows_starts_again(capsys):
    shown = display_of("tqdm")
    shown.count("work", 1, 0)  # not known yet
    shown.count("work", 1, 2)
    shown.count("work", 2, 4)
    shown.close()
    assert "2/4" in capsys.readouterr().err.rstrip().rpartition("\r")[2]
