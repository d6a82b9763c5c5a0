"""Groups of 16 and 32 ranks, one or two experts each, and prefill apart from decode: `make chaos`.

Up to four ranks: tests/launch/test_cluster.py. What grows with the number of ranks: tests/bench/many_ranks.py.
"""

from __future__ import annotations

import pytest

from support.many_ranks import expect_outputs_of_one_rank, make_job


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return make_job(tmp_path_factory.mktemp("many"), num_rows=96, max_tokens=8)


@pytest.mark.parametrize(
    ("ranks", "num_redundant"), [("16", 0), ("32", 0), ("8+16", 0), ("16", 16), ("8+16", 16)], ids=str
)
def test_many_ranks_give_the_outputs_of_one(job, ranks, num_redundant):
    expect_outputs_of_one_rank(job, ranks, "--set", f"cluster.redundant_experts={num_redundant}")
