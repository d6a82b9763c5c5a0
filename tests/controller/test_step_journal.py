"""Steps that a killed controller had not committed, as its journal has them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.statistics import STATS_STEPS
from batchinfer.protocol.messages import StepRecord
from batchinfer.run.units import step_journal
from batchinfer.run.units.step_journal import StepJournal, keep_lost_steps
from batchinfer.rundir import RunDir

NUM_STEPS = 5


@pytest.fixture
def journal(tmp_path):
    """The journal of a session that ended without a commit."""
    run = RunDir(tmp_path)
    steps = StepJournal(run, "killed")
    for step in range(NUM_STEPS):
        words = {"kind": "decode", "graph": "replayed", "no_graph": None}
        steps.add([(0, step, StepRecord(**dict.fromkeys(StepRecord.__struct_fields__, 1) | words))])
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
    assert f"{path} is damaged: 1 of {NUM_STEPS} steps is in no statistics" in capsys.readouterr().err


# ---- finish beside workers


def commit(run, steps):
    """Write what a commit of the session writes."""
    rows = [{"session": "killed", "rank": 0, "step": step} for step in steps]
    with table_writer(run.session_stats("steps", "killed", 0), STATS_STEPS.schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=STATS_STEPS.schema))


def all_steps(run):
    return sorted(
        step for path in (run.stats / "steps").glob("*.parquet") for step in pq.read_table(path)["step"].to_pylist()
    )


def test_a_journal_that_a_commit_takes_away_meanwhile_is_empty(journal):
    run, path = journal
    path.unlink()
    path.symlink_to("gone")  # listed, and not there when it is read
    keep_lost_steps(run)
    assert all_steps(run) == []


@pytest.mark.parametrize("num_committed", [3, NUM_STEPS])
def test_steps_that_were_committed_after_a_finish_took_them_for_lost_count_once(journal, num_committed):
    run, path = journal
    keep_lost_steps(run)
    commit(run, range(num_committed))
    path.unlink()
    keep_lost_steps(run)
    assert all_steps(run) == list(range(NUM_STEPS))


def test_a_commit_while_a_finish_writes_them_has_them_count_once(journal, monkeypatch):
    run, path = journal

    def commit_before(target, schema):
        monkeypatch.undo()
        commit(run, range(NUM_STEPS))
        path.unlink()
        return table_writer(target, schema)

    monkeypatch.setattr(step_journal, "table_writer", commit_before)
    keep_lost_steps(run)
    assert all_steps(run) == list(range(NUM_STEPS))
