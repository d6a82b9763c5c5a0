"""Other people's text in sentences."""

import pyarrow as pa
import pytest

from batchinfer.sanitize import MAX_CHARS, count_text, first_line, size_text


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (3_420_000, "3.4 MB"), (24 * 10**9, "24.0 GB")],
)
def test_sizes_have_the_unit_that_fits(num_bytes, text):
    assert size_text(num_bytes) == text


def test_one_of_a_thing_has_a_noun_in_the_singular():
    counts = [count_text(count, "bad row") for count in (0, 1, 2, 12_345)]
    assert counts == ["0 bad rows", "1 bad row", "2 bad rows", "12,345 bad rows"]
