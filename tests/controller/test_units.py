"""Requests of work units as they are read from the plan."""

from __future__ import annotations

import pyarrow as pa
import pytest

from batchinfer.config import SamplingConfig
from batchinfer.controller import units
from batchinfer.controller.units import PlannedRequests
from batchinfer.data.parquet import table_writer
from batchinfer.data.schemas.internal import REQUESTS
from batchinfer.manifest import Manifest
from batchinfer.records import DamagedFileError
from batchinfer.rundir import RunDir

DEFAULT = SamplingConfig(max_tokens=4).to_sampling()
UNITS = [{"first_row_group": unit, "num_row_groups": 1} for unit in range(3)]


def write_plan(run, first_token):
    """Write a plan of a request for each unit, whose prompt is a single token."""
    manifest = Manifest(run.root)
    values = {"expected_tokens": None, "sampling": None, "last_units": [], "max_tokens": 4}
    with table_writer(run.requests, REQUESTS.schema, manifest=manifest) as writer:
        for unit in range(len(UNITS)):
            known = {**values, "unit": unit, "row": unit, "token_ids": [first_token + unit]}
            row = {name: known.get(name, 0) for name in REQUESTS.schema.names}
            writer.write_table(pa.Table.from_pylist([row], schema=REQUESTS.schema))
    return manifest


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "run")


def test_the_plan_is_opened_once_for_all_units(run, monkeypatch):
    opened = []
    monkeypatch.setattr(
        units, "open_parquet", lambda *args, open=units.open_parquet: opened.append(args) or open(*args)
    )
    planned = PlannedRequests(run, write_plan(run, 10), DEFAULT)
    for unit in (2, 0, 1):
        (request,) = planned.of_unit(UNITS[unit])
        assert (request.unit, request.token_ids, request.sampling) == (unit, [10 + unit], DEFAULT)
    assert len(opened) == 1


def test_another_plan_in_its_place_is_refused(run):
    planned = PlannedRequests(run, write_plan(run, 10), DEFAULT)
    planned.of_unit(UNITS[0])
    write_plan(run, 20)
    with pytest.raises(DamagedFileError, match=r"plan/requests\.parquet"):
        planned.of_unit(UNITS[1])
    run.requests.unlink()
    with pytest.raises(DamagedFileError, match=r"plan/requests\.parquet"):
        planned.of_unit(UNITS[1])
