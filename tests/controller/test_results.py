"""Results on disk: a unit is marked done with all of its rows."""

from __future__ import annotations

import errno
import math
import shutil
import tracemalloc
from unittest.mock import Mock

import numpy as np
import pytest
from msgspec.structs import replace

from batchinfer.checked_json import publish_json
from batchinfer.controller.results import Results
from batchinfer.controller.units import result_table
from batchinfer.records import Completion, ConfigError, RequestKey, StoreError, TokenLogprobs
from batchinfer.run.session import Session
from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims, done_mark
from batchinfer.run.units.damage import reopen_damaged_units
from batchinfer.run.units.result_files import result_keys
from batchinfer.rundir import RunDir
from batchinfer.stop_signals import StopSignal


def completion(row):
    return Completion(RequestKey(0, row, 0), 0, "text", [1, 2], "length", None, 3, 0, 0, 7)


def test_a_unit_is_done_when_its_last_row_is_on_disk_and_not_before(tmp_path):
    run = RunDir(tmp_path)
    keys = {RequestKey(0, row, 0) for row in range(3)}
    with UnitClaims(FolderStorage(run)) as claims:
        results = Results(run, Session("work", StopSignal()), claims)
        assert results.open_unit(claims.try_claim(0), keys) == keys
        assert not results.add([completion(0), completion(2)])
        results.commit()
        assert done_mark(run, 0) is None
        assert results.add([completion(1)])
        results.commit()
        files = list(done_mark(run, 0).files)
    found = [key for path in files for key in result_keys(path)]
    assert len(found) == 3
    assert set(found) == keys


def test_log_probabilities_are_those_of_their_rows():
    scored = logprobs_of([7, 9], [-0.5, -1.0], [[7, 2], [1, 9]], [[-0.5, -3.0], [0.0, -1.0]])
    alone = logprobs_of([8], [-math.inf], np.zeros((1, 0)), np.zeros((1, 0)))
    rows = [
        replace(completion(0), logprobs=scored),
        completion(1),  # did not ask
        replace(completion(2), logprobs=scored, error="lost"),
        replace(completion(3), logprobs=TokenLogprobs(3), prompt_logprobs=scored),
        replace(completion(4), logprobs=alone),
    ]
    table = result_table(rows)
    items = [
        {"token_id": 7, "logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.5}, {"token_id": 2, "logprob": -3.0}]},
        {"token_id": 9, "logprob": -1.0, "top": [{"token_id": 1, "logprob": 0.0}, {"token_id": 9, "logprob": -1.0}]},
    ]
    only = [{"token_id": 8, "logprob": -math.inf, "top": []}]
    assert table["logprobs"].to_pylist() == [items, None, None, [], only]
    assert table["prompt_logprobs"].to_pylist() == [None, None, None, items, None]


def logprobs_of(tokens, logprobs, top_tokens, top_logprobs):
    found = TokenLogprobs(np.shape(top_tokens)[1])
    columns = zip((tokens, logprobs, top_tokens, top_logprobs), (np.int32, float, np.int32, float), strict=True)
    found.add(*(np.array(column, dtype).tobytes() for column, dtype in columns))
    return found


def test_alternatives_take_no_object_each():
    """Ranks wait for their controller while it makes the table, and a unit may hold millions of alternatives."""
    num_tokens, num_top = 1000, 20
    alternatives = np.tile(np.arange(num_top), (num_tokens, 1))
    scored = logprobs_of(np.ones(num_tokens), -np.ones(num_tokens), alternatives, -np.ones((num_tokens, num_top)))
    rows = [replace(completion(row), logprobs=scored) for row in range(10)]
    tracemalloc.start()
    try:
        result_table(rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / (len(rows) * num_tokens * num_top) < 24  # bytes; an object would be 60 and more


def test_folders_whose_names_say_a_value_change_no_row(tmp_path):
    """A sweep names its run folders so; versions of pyarrow before 25 took the values for those of the rows."""
    run = RunDir(tmp_path / "sample=4" / "row=7")
    run.root.mkdir(parents=True)
    with UnitClaims(FolderStorage(run)) as claims:
        results = Results(run, Session("work", StopSignal()), claims)
        results.open_unit(claims.try_claim(0), {RequestKey(0, 1, 0)})
        results.add([completion(1)])
        results.commit()
        (path,) = done_mark(run, 0).files
    assert result_keys(path) == [RequestKey(0, 1, 0)]


def test_a_unit_whose_result_was_deleted_meanwhile_is_computed_again(tmp_path):
    run = RunDir(tmp_path)
    store = FolderStorage(run)
    with UnitClaims(store) as claims:
        results = Results(run, Session("work", StopSignal()), claims)
        results.open_unit(claims.try_claim(0), {RequestKey(0, row, 0) for row in range(2)})
        results.add([completion(0)])
        results.commit()
        (first,) = run.unit(0).rglob("part-*.parquet")
        first.unlink()
        results.add([completion(1)])
        results.commit()
    assert first in done_mark(run, 0).files
    assert reopen_damaged_units(store) == [0]


def test_a_unit_whose_inherited_result_was_deleted_meanwhile_is_computed_again(tmp_path):
    run = RunDir(tmp_path)
    store = FolderStorage(run)
    keys = {RequestKey(0, row, 0) for row in range(2)}
    for row in range(2):
        with UnitClaims(store) as claims:
            results = Results(run, Session("work", StopSignal()), claims)
            results.open_unit(claims.try_claim(0), keys)
            for first in run.unit(0).rglob("part-*.parquet"):
                first.unlink()
            results.add([completion(row)])
            results.commit()
            claims.end()
    assert first in done_mark(run, 0).files
    assert reopen_damaged_units(store) == [0]


@pytest.mark.parametrize("then", ["nothing", "another run", "leftovers"])
def test_a_run_folder_that_was_deleted_gets_no_results_of_the_run_before(tmp_path, then):
    run = RunDir(tmp_path / "run")
    store = FolderStorage(run)
    publish_json(run.run_json, {"id": "first", "state": "planned", "shards": []})
    run.job.write_text("")
    with Session("work", StopSignal()) as session, UnitClaims(store) as claims:
        session.attach(store)
        results = Results(run, session, claims)
        results.open_unit(claims.try_claim(0), {RequestKey(0, row, 0) for row in range(2)})
        results.add([completion(0)])
        results.commit()
        row = run.session_stats("nodes", session.name)
        content = row.read_bytes()
        shutil.rmtree(run.root)
        if then == "another run":
            publish_json(run.run_json, {"id": "second", "state": "planned", "shards": []})
        if then == "leftovers":  # of a commit during the deletion
            row.parent.mkdir(parents=True)
            row.write_bytes(content)
        left = set(run.root.rglob("*"))
        session._heart.beat()
        if then == "nothing":
            results.add_steps(0, [])
        results.add([completion(1)])
        with pytest.raises(ConfigError, match="deleted, moved or replaced"):
            results.commit()
    assert set(run.root.rglob("*")) <= left


def test_a_disk_that_does_not_answer_is_no_deleted_run_folder(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    publish_json(run.run_json, {"id": "first", "state": "planned", "shards": []})
    with Session("work", StopSignal()) as session:
        session.attach(FolderStorage(run))
        with monkeypatch.context() as patch:
            patch.setattr("pathlib.Path.exists", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            session.check_run()
        run.session_stats("nodes", session.name).unlink()
        session.check_run()


def test_what_an_earlier_claim_has_on_disk_is_not_missing(tmp_path):
    run = RunDir(tmp_path)
    keys = {RequestKey(0, row, 0) for row in range(3)}
    for open_rows, missing in (([0], keys), ([1, 2], keys - {RequestKey(0, 0, 0)})):
        with UnitClaims(FolderStorage(run)) as claims:
            results = Results(run, Session("work", StopSignal()), claims)
            claim = claims.try_claim(0)
            assert results.open_unit(claim, keys) == missing
            results.add([completion(row) for row in open_rows])
            results.commit()
    assert len(done_mark(run, 0).files) == 2


def test_a_commit_that_fails_is_made_up_for_by_the_next(tmp_path):
    """Nothing is written twice, and no unit stays without its mark."""
    run = RunDir(tmp_path)
    with UnitClaims(FolderStorage(run)) as claims:
        results = Results(run, Session("work", StopSignal()), claims)
        run.done_marks.mkdir()
        folders = []
        for unit in range(2):
            claim = claims.try_claim(unit)
            results.open_unit(claim, {RequestKey(0, unit, 0)})
            results.add([replace(completion(unit), unit=unit)])
            folders.append(claim.folder)
        for hindrance in (folders[1], run.done_marks):
            hindrance.rename(tmp_path / "away")
            hindrance.write_text("a file where a folder should be")
            with pytest.raises(ConfigError, match="cannot write"):
                results.commit()
            hindrance.unlink()
            (tmp_path / "away").rename(hindrance)
        results.commit()
    for unit in range(2):
        (part,) = done_mark(run, unit).files
        assert result_keys(part) == [RequestKey(0, unit, 0)]
    assert all(len(list(folder.glob("part-*"))) == 1 for folder in folders)


def test_rows_whose_file_the_store_did_not_take_are_in_no_second_file(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    store = FolderStorage(run)
    with UnitClaims(store) as claims:
        results = Results(run, Session("work", StopSignal()), claims)
        results.open_unit(claims.try_claim(0), {RequestKey(0, row, 0) for row in range(2)})
        results.add([completion(0)])
        with monkeypatch.context() as patch:
            patch.setattr(store, "put", Mock(side_effect=StoreError("no network")))
            with pytest.raises(StoreError):
                results.commit()
        results.add([completion(1)])
        monkeypatch.setattr(store, "put", put := Mock(wraps=store.put))
        results.commit()
    files = [*done_mark(run, 0).files]
    assert sorted(key.row for path in files for key in result_keys(path)) == [0, 1]
    assert [call.args[0] for call in put.call_args_list if call.args[0] in files] == files
