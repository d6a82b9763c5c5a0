"""A group of eight ranks gives the outputs of one. Up to 32: tests/chaos/many_ranks.py."""

from __future__ import annotations

import pytest

from support.many_ranks import expect_outputs_of_one_rank, make_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("many"), num_rows=48, max_tokens=8)


@pytest.mark.parametrize("ranks", [pytest.param("8", marks=pytest.mark.slow), "4+4"])
def test_eight_ranks_give_the_outputs_of_one(job, ranks):
    expect_outputs_of_one_rank(job, ranks, "--set", "cluster.overlap=true")
