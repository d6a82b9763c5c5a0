"""The report of a run of a million rows: within the memory of a login node. How long it takes is printed only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.large_run import peak_bytes, write_large_run

NUM_ROWS = 1_000_000
MOST_BYTES = 1_000_000_000


@pytest.fixture(scope="module")
def million(tmp_path_factory) -> Path:
    return write_large_run(tmp_path_factory.mktemp("large") / "million", NUM_ROWS)


def test_a_million_rows_are_reported_in_a_gigabyte(million):
    used, out = peak_bytes("report", million, "--json")
    figures = json.loads(out)
    assert (figures["rows"], figures["rows_error"]) == (NUM_ROWS, NUM_ROWS // 1000)
    assert figures["cost_usd"] == pytest.approx(2 * 16 * 24)
    assert used < MOST_BYTES


def test_the_page_of_a_million_rows_takes_no_more_and_stays_small(million, tmp_path):
    used, _ = peak_bytes("report", million, "--html", tmp_path / "page.html")
    assert used < MOST_BYTES
    assert (tmp_path / "page.html").stat().st_size < 1_500_000


def test_a_million_rows_are_exported_in_a_gigabyte(million, tmp_path):
    used, _ = peak_bytes("report", million, "--parquet", tmp_path / "views")
    assert used < MOST_BYTES
