"""`finish --wait`: for clusters that start nothing behind other tasks."""

from __future__ import annotations

import shutil
import threading
from unittest.mock import Mock

import pytest

from batchinfer.finish import finish
from batchinfer.plan import packing
from batchinfer.records import ConfigError
from batchinfer.run.session import Session
from batchinfer.run.store.folder import FolderStorage
from batchinfer.rundir import RunDir
from batchinfer.stop_signals import StopSignal
from support.jobs import batchinfer, start, write_job, write_questions


def test_it_returns_when_the_last_unit_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MIN_UNIT_TOKENS", 1)
    monkeypatch.setattr(finish, "LOOK_S", 0.02)
    write_questions(tmp_path / "prompts", (3,))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    run = RunDir(tmp_path / "run")
    waiting = threading.Thread(target=finish.wait_for_units, args=(FolderStorage(run), Mock()), daemon=True)
    waiting.start()
    run.done_marks.mkdir(exist_ok=True)
    for unit in range(3):
        waiting.join(0.2)
        assert waiting.is_alive()
        run.done(unit).touch()
    waiting.join(20)
    assert not waiting.is_alive()


def test_what_does_not_go_together_is_refused_and_a_signal_ends_it(tmp_path):
    write_questions(tmp_path / "prompts", (3,))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    assert batchinfer("finish", tmp_path / "run", "--wait", "--allow-partial").code == 2
    waiting = start("finish", "--wait", tmp_path / "run")
    assert waiting.stderr is not None
    assert "waiting: 1 of 1 unit is not done yet" in waiting.stderr.readline()
    waiting.terminate()
    assert waiting.wait(30) == 75


def test_it_does_not_wait_for_a_run_folder_that_is_gone(tmp_path, monkeypatch):
    write_questions(tmp_path / "prompts", (3,))
    assert batchinfer("plan", write_job(tmp_path)).code == 0
    run = RunDir(tmp_path / "run")
    with Session("finish", StopSignal()) as session:
        session.attach(FolderStorage(run))
        monkeypatch.setattr(finish, "time", Mock(sleep=lambda _: shutil.rmtree(run.root)))
        with pytest.raises(ConfigError, match="was deleted, moved or replaced"):
            finish.wait_for_units(FolderStorage(run), session)
