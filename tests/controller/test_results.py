"""Results on disk: a unit is marked done with all of its rows."""

from __future__ import annotations

from batchinfer.controller.claims import UnitClaims, done_mark
from batchinfer.controller.result_files import result_keys
from batchinfer.controller.results import Results
from batchinfer.records import Completion, RequestKey
from batchinfer.run.session import Session
from batchinfer.rundir import RunDir
from batchinfer.stop import StopSignal


def completion(row):
    return Completion(RequestKey(0, row, 0), 0, "text", [1, 2], "length", None, 3, 0, 0, 7)


def test_a_unit_is_done_when_its_last_row_is_on_disk_and_not_before(tmp_path):
    run = RunDir(tmp_path)
    keys = {RequestKey(0, row, 0) for row in range(3)}
    with UnitClaims(run) as claims:
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


def test_what_an_earlier_claim_has_on_disk_is_not_missing(tmp_path):
    run = RunDir(tmp_path)
    keys = {RequestKey(0, row, 0) for row in range(3)}
    with UnitClaims(run) as claims:
        for open_rows, missing in (([0], keys), ([1, 2], keys - {RequestKey(0, 0, 0)})):
            results = Results(run, Session("work", StopSignal()), claims)
            claim = claims.try_claim(0)
            assert results.open_unit(claim, keys) == missing
            results.add([completion(row) for row in open_rows])
            results.commit()
            if done_mark(run, 0) is None:
                claims.release(claim)
        assert len(done_mark(run, 0).files) == 2
