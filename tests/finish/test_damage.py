"""Damage to a computed run does not reach its outputs: they are the same, or a message names a remedy that works."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from batchinfer.checked_json import publish_json
from batchinfer.finish import finish
from batchinfer.plan import packing
from batchinfer.records import DamagedFileError
from batchinfer.run.units.claims import done_mark
from batchinfer.rundir import RunDir, read_state, shards_of_state
from support.damage import KINDS, damaged_copy, expect_equal_or_named, flip_bit, make_computed_run_with_outputs
from support.faults import UNIT_TOKENS
from support.jobs import batchinfer, output_bytes, write_job
from support.tiers import first_in_make_test

NUM_FLIPS, NUM_QUICK = 60, 30
NUM_REPAIRED = 15  # of each other kind, with the commands that the sentence names


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A run that is computed but not finished, and its outputs."""
    return make_computed_run_with_outputs(tmp_path_factory.mktemp("computed"))


@pytest.mark.parametrize(
    "number",
    [
        *range(NUM_QUICK // 3),
        *(pytest.param(number, marks=pytest.mark.all) for number in range(NUM_QUICK // 3, NUM_QUICK)),
        *(pytest.param(number, marks=pytest.mark.slow) for number in range(NUM_QUICK, NUM_FLIPS)),
    ],
)
def test_a_flipped_bit_is_found_or_changes_nothing(computed, number):
    run, expected = computed
    target = run.parent / f"flip-{number}"
    print(damaged_copy(run, target, number, kind=flip_bit))
    expect_equal_or_named(target, expected, repair=number % 6 == 0)


@pytest.mark.parametrize("kind", first_in_make_test(KINDS, 5), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.slow] * (number > 0)) for number in range(NUM_REPAIRED // len(KINDS))],
)
def test_damage_is_repaired_by_what_the_sentence_says(computed, kind, number):
    run, expected = computed
    target = run.parent / f"{kind.__name__}-{number}"
    print(damaged_copy(run, target, 1000 + number, kind=kind))
    expect_equal_or_named(target, expected, repair=True)


def test_a_plan_made_again_tokenises_only_damaged_shards_and_keeps_all_results(computed):
    run, expected = computed
    target = run.parent / "again"
    shutil.copytree(run, target)
    sound, damaged = sorted((target / "tokens").glob("*.parquet"))
    before = sound.stat().st_mtime_ns
    flip_bit(damaged, random.Random(0))
    (target / "plan" / "requests.parquet").unlink()
    results = sorted((target / "units").rglob("part-*"))
    ended = batchinfer("finish", target)
    assert ended.code == 2
    assert f"`batchinfer plan --again {target}`" in ended.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_UNIT_TOKENS", UNIT_TOKENS)
        again = batchinfer("plan", "--again", target)
    assert again.code == 0, again.err
    assert f"{damaged} is set aside" in again.err
    assert "2 of 2 units that were begun have the same rows as before" in again.err
    assert sound.stat().st_mtime_ns == before
    assert not list((target / "tokens").glob("*.json"))
    assert sorted((target / "units").rglob("part-*")) == results
    assert batchinfer("finish", target).code == 0
    assert output_bytes(target) == expected


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_json_that_is_gone_is_named_by_every_command_with_what_makes_it_anew(computed, tmp_path, begun):
    run, _ = computed
    target = tmp_path / "run"
    ignored = None if begun else shutil.ignore_patterns("units", "done", "work", "stats")
    shutil.copytree(run, target, ignore=ignored)
    (target / "run.json").unlink()
    job = write_job(tmp_path, input={"files": ["none"]})  # with this folder as its output.dir
    for command in ("status", "peek", "work", "finish", "retry", "plan"):
        for named in (target, job) if command != "plan" else (target,):
            ended = batchinfer(command, named)
            assert ended.code == 2
            assert f"{target / 'run.json'} is damaged: No such file or directory" in ended.err
            assert f"`batchinfer plan --again {target}`" in ended.err
    assert f"`batchinfer plan --again {target}`" in batchinfer("verify", target).said
    ended = batchinfer("report", target)
    assert (ended.code, f"`batchinfer plan --again {target}`" in ended.err) == (2, True)
    again = batchinfer("plan", "--again", target)
    assert again.code == 0, again.err


@pytest.mark.parametrize("is_gone", [True, False])
def test_work_itself_finds_a_result_that_is_gone_or_cut_off(computed, tmp_path, is_gone):
    run, expected = computed
    target = tmp_path / "run"
    shutil.copytree(run, target)
    part = min((target / "units").rglob("part-*"))
    part.unlink() if is_gone else part.write_bytes(part.read_bytes()[:-9])
    worked = batchinfer("work", target)
    assert worked.code == 0, worked.err
    assert "which it vouches for" in worked.err
    finished = batchinfer("finish", target)
    assert finished.code == 0, finished.err
    assert output_bytes(target) == expected


@pytest.mark.parametrize("last_unit", ["done", "only claimed"])
def test_units_with_other_rows_are_computed_anew(computed, last_unit):
    run, expected = computed
    target = run.parent / f"other-units-{last_unit}"
    shutil.copytree(run, target)
    (target / "run.json").write_text("{")
    if last_unit == "only claimed":
        for result in (target / "done" / "000001", *(target / "units" / "000001").rglob("part-*")):
            result.unlink()
    again = batchinfer("plan", "--again", target)  # with units of the usual size: one instead of two
    assert again.code == 0, again.err
    assert "1 of 2 units that were begun has the same rows as before and keeps its results" in again.err
    assert not (target / "units" / "000001").exists()
    assert batchinfer("finish", target).code == 1
    assert batchinfer("work", target).code == 0
    assert batchinfer("finish", target).code == 0
    assert output_bytes(target) == expected


@pytest.fixture
def planned(computed):
    """(a copy of the run, what plans it with its job's own file, and more settings)."""
    run, _ = computed
    with tempfile.TemporaryDirectory(dir=run.parent) as folder:
        target = shutil.copytree(run, Path(folder) / "run")
        job = run.parent / "job.toml"
        yield target, lambda *more: batchinfer("plan", job, "--set", f"output.dir={target}", *more)


@pytest.mark.all  # make test: a plan made again, above
def test_settings_may_be_given_anew_and_an_earlier_version_vouches_for_none(planned):
    run, plan = planned
    for number in (5, 5, 7):
        assert plan("--set", f"pricing.gpu_hour={number}").code == 0
        assert f"gpu_hour = {number}" in (run / "job.toml").read_text()
        assert batchinfer("verify", run).code == 0
    state = read_state(RunDir(run))
    publish_json(run / "run.json", {key: value for key, value in state.items() if key != "job"})
    (run / "job.toml").write_text((run / "job.toml").read_text().replace("gpu_hour = 7", "gpu_hour = 8"))
    assert batchinfer("finish", run).code == 0
    assert plan("--set", "pricing.gpu_hour=7").code == 0
    assert read_state(RunDir(run))["job"] == state["job"]


def test_an_interrupted_plan_goes_on_with_its_token_files_unless_they_are_damaged(computed):
    run, _ = computed
    target = run.parent / "interrupted"
    shutil.copytree(run, target)
    state = read_state(RunDir(target))
    sound, damaged = sorted((target / "tokens").glob("*.parquet"))
    for path, shard in zip((sound, damaged), shards_of_state(state), strict=True):
        checksums = state["files"][f"tokens/{path.name}"]
        publish_json(path.with_suffix(".json"), {**checksums, "content": shard.content})
    publish_json(target / "run.json", {**state, "state": "planning"})
    flip_bit(damaged, random.Random(0))
    before = sound.stat().st_mtime_ns, damaged.stat().st_mtime_ns
    ended = batchinfer("plan", target.parent / "job.toml", "--set", f"output.dir={target}")
    assert ended.code == 0, ended.err
    assert f"{damaged} is damaged" in ended.err
    assert sound.stat().st_mtime_ns == before[0]
    assert damaged.stat().st_mtime_ns > before[1]


def test_a_mark_of_another_unit_is_damage(computed):
    run, _ = computed
    target = run.parent / "marks"
    shutil.copytree(run, target)
    shutil.copy(target / "done" / "000001", target / "done" / "000000")
    with pytest.raises(DamagedFileError, match="the mark of unit 1"):
        done_mark(RunDir(target), 0)


def test_a_damaged_note_of_what_was_published_has_all_published_again(computed, tmp_path):
    target = shutil.copytree(computed[0], tmp_path / "run")
    to = ("--set", f"output.publish=file://{tmp_path}/there")
    assert batchinfer("finish", target, *to).code == 0
    put = tmp_path / "there" / "outputs" / "part-0.parquet"
    put.write_bytes(bytes(put.stat().st_size))  # the changed file has the same size
    (target / "published.json").write_text('{"place": ')
    ended = batchinfer("finish", target, *to)
    assert ended.code == 0, ended.err
    assert f"{target}/published.json is damaged" in ended.err
    assert output_bytes(tmp_path / "there") == output_bytes(target)


@pytest.mark.all  # make test: a note of what was published, above
def test_damage_that_is_met_while_publishing_is_named(computed, tmp_path, monkeypatch):
    target = shutil.copytree(computed[0], tmp_path / "run")

    def meets_damage(*_):
        raise DamagedFileError(target / "run.json", "half of it is gone", remedy="restore it")

    monkeypatch.setattr(finish, "publish_run", meets_damage)
    ended = batchinfer("finish", target, "--set", f"output.publish=file://{tmp_path}/there")
    assert ended.code == 2, ended.err
    assert f"{target}/run.json is damaged: half of it is gone; restore it; the results are all in " in ended.err


def test_verify_names_results_of_a_unit_whose_folder_is_gone(computed):
    run = computed[0].parent / "no-folder"
    shutil.copytree(computed[0], run)
    gone = sorted(path.relative_to(run).as_posix() for path in (run / "units" / "000000").rglob("part-*"))
    shutil.rmtree(run / "units" / "000000")
    ended = batchinfer("verify", run)
    assert ended.code == 3
    assert [line.partition(":")[0] for line in ended.out.splitlines()[:-1]] == gone
    assert expect_equal_or_named(run, computed[1], repair=True) == "named"


@pytest.mark.parametrize("then", ["nothing", "another run"])
@pytest.mark.parametrize("during", ["counted_units", "join_results", "write_unit_stats"])
def test_a_run_folder_that_is_deleted_or_replaced_meanwhile_gets_no_outputs(
    computed, tmp_path, monkeypatch, during, then
):
    run = RunDir(shutil.copytree(computed[0], tmp_path / "run"))
    state = {"id": "second", "state": "planned", "shards": []}
    real = getattr(finish, during)

    def deletes(*arguments, **options):
        found = real(*arguments, **options)
        shutil.rmtree(run.root)
        if then == "another run":
            run.root.mkdir()
            publish_json(run.run_json, state)
        return found

    monkeypatch.setattr(finish, during, deletes)
    ended = batchinfer("finish", run.root)
    assert ended.code == 2
    (line,) = [line for line in ended.err.splitlines() if "error: " in line]
    assert "was deleted, moved or replaced while this command worked in it" in line
    assert not [path for path in run.root.rglob("*") if path.is_file() and path not in (run.run_json, run.lock)]
    if then == "another run":
        assert read_state(run)["id"] == "second"
