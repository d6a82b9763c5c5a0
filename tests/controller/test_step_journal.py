"""Steps that a killed controller had not committed, as its journal has them."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from batchinfer.controller.step_journal import StepJournal, keep_lost_steps
from batchinfer.protocol.messages import StepRecord
from batchinfer.rundir import RunDir

NUM_STEPS = 5


@pytest.fixture
def journal(tmp_path):
    """The journal of a session that ended without a commit."""
    run = RunDir(tmp_path)
    steps = StepJournal(run, "killed")
    for step in range(NUM_STEPS):
        words = {"kind": "decode", "graph": "replayed", "no_graph": None}
        steps.add(0, step, StepRecord(**dict.fromkeys(StepRecord.__struct_fields__, 1) | words))
    return run, run.step_journal("killed")


def lost_steps(run):
    keep_lost_steps(run)
    return pq.read_table(run.stats / "steps" / "killed-lost.parquet")["step"].to_pylist()


def test_all_lines_count_but_one_that_was_being_written(journal):
    run, path = journal
    assert lost_steps(run) == list(range(NUM_STEPS))
    path.write_bytes(path.read_bytes()[:-7])
    assert lost_steps(run) == list(range(NUM_STEPS - 1))


def test_a_damaged_line_is_told_and_does_not_count(journal, capsys):
    run, path = journal
    content = bytearray(path.read_bytes())
    lines = content.split(b"\n")
    content[len(lines[0]) + 1 + lines[1].index(b"decode")] ^= 1
    path.write_bytes(content)
    assert lost_steps(run) == [0, 2, 3, 4]
    assert f"{path} is damaged: 1 of {NUM_STEPS} steps are in no statistics" in capsys.readouterr().err
