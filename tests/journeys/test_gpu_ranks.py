"""Two ranks on one GPU, rehearsed on the CPU: all of it but the times and the card."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import ranks
from summary import summary

from support.cuda_stand_ins import needs_interpreter

pytestmark = [pytest.mark.slow, needs_interpreter]  # make test-all: test_staged_ranks


def test_the_rehearsal_compares_all_parts_with_one_rank_and_goes_on(tmp_path, capsys):
    out, scratch = tmp_path / "ranks.jsonl", tmp_path / "scratch"
    for _ in range(2):
        assert ranks.main(["--rehearse", "--out", str(out), "--scratch", str(scratch)]) == ranks.OK
        said = capsys.readouterr().out
        assert said.count("12 of 12 answers are those of one rank, to the byte") == 3
    assert not scratch.exists()
    assert summary(tmp_path).count("12 of 12 answers") == 3
    assert len(out.read_text().splitlines()) == 1 + len(ranks.PARTS), "what is done is not done again"
