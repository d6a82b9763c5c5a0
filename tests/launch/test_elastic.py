"""Workers that come while others hold everything, results finished while a group works, units that open again."""

import os
import signal

import pyarrow.parquet as pq
import pytest

from batchinfer.run.store.folder import FolderStorage
from batchinfer.run.units.claims import UnitClaims
from batchinfer.rundir import RunDir
from support.faults import LONG, descendants, ended, plan_units, wait_until
from support.jobs import batchinfer, output_bytes, start, write_job, write_questions

SLOW = tuple(f"--set=cluster.{key}" for key in ("decode_requests=3", "commit_seconds=0.05", "backend=reference"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A job of several units, and its outputs."""
    folder = tmp_path_factory.mktemp("reference")
    write_questions(folder / "prompts", (12, 9, 6))
    job = write_job(folder, sampling=LONG)
    plan_units(job, folder / "run")
    assert batchinfer("run", job).code == 0
    return folder, output_bytes(folder / "run")


@pytest.fixture
def planned(reference, tmp_path):
    """The same job, only planned."""
    return RunDir(plan_units(reference[0] / "job.toml", tmp_path / "run"))


def unit_numbers(run):
    return pq.read_table(run.units)["unit"].to_pylist()


def waiting_controller(run):
    """A controller that has said that it waits for others."""
    controller = start("work", run.root)
    said = ""
    while "held by other controllers; waiting for them" not in said:
        line = controller.stderr.readline()
        assert line, f"the controller ended: {said}"
        said += line
    return controller


def test_a_controller_waits_without_ranks_until_it_gets_a_unit(reference, planned):
    with UnitClaims(FolderStorage(planned)) as others:
        held = [others.try_claim(unit) for unit in unit_numbers(planned)]
        assert None not in held
        controller, called_back = waiting_controller(planned), waiting_controller(planned)
        assert descendants(controller.pid) == []
        called_back.send_signal(signal.SIGTERM)
        assert ended(called_back).code == 75
    found = ended(controller)
    assert found.code == 0, found.err
    assert batchinfer("finish", planned.root).code == 0
    assert output_bytes(planned.root) == reference[1]
    prefills = batchinfer("report", planned.root, "--json", "--sql", "SELECT first_prefill_s FROM nodes").out
    assert "null" in prefills, "the one that was called back never had ranks"


@pytest.mark.all  # make test: a controller that waits, above
def test_a_controller_that_waited_for_nothing_ends_well_without_ever_loading(planned):
    with UnitClaims(FolderStorage(planned)) as others:
        held = [others.try_claim(unit) for unit in unit_numbers(planned)]
        controller = waiting_controller(planned)
        for claim in held:
            others.complete(claim)
        found = ended(controller)
    assert found.code == 0, found.err
    assert not list(planned.stats.glob("steps/*"))


@pytest.mark.all  # make test: a controller that waits, above
def test_partial_results_while_a_group_works_leave_its_files_alone(reference, planned):
    controller = start("work", planned.root, *SLOW)
    wait_until(lambda: list(planned.root.glob("units/*/[0-9]*/part-*.parquet")), controller)
    ranks = descendants(controller.pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # the group cannot end before finish looks at it
    transfer = planned.kv_transfers("of-a-living-session") / "kv"
    transfer.parent.mkdir(parents=True)
    transfer.write_bytes(b"on its way")
    assert batchinfer("finish", planned.root, "--allow-partial").code == 3
    assert transfer.read_bytes() == b"on its way"
    assert not planned.finish_scratch.exists()
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    found = ended(controller)
    assert found.code == 0, found.err
    assert batchinfer("finish", planned.root).code == 0
    assert output_bytes(planned.root) == reference[1]
    assert not planned.work.exists(), "nobody works any more: what is left there belongs to nobody"
