"""Other people's text in sentences."""

import pyarrow as pa
import pytest

from batchinfer.sanitize import MAX_CHARS, first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("this is wrong.\nLINE 1: SELECT"), "this is wrong"),
        (FileNotFoundError(2, "No such file or directory", "job.toml"), "No such file or directory"),
        (pa.ArrowMemoryError(), "ArrowMemoryError"),
        (ValueError(" \n"), "ValueError"),
    ],
)
def test_an_error_gives_one_line_for_a_sentence_also_one_that_says_nothing(error, line):
    assert first_line(error) == line


def test_of_a_long_error_both_ends_are_told():
    line = first_line(ValueError("begin" + "x" * 10_000 + "end"))
    assert line.startswith("begin")
    assert line.endswith("end")
    assert len(line) < MAX_CHARS + 50
