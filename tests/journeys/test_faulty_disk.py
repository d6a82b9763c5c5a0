"""A quick share of tests/chaos/faulty_disk.py: every deed, at some operation in plan, work or finish."""

from __future__ import annotations

import pytest

from support.faulty_disk import DEEDS, disturb, lose_unsynced, make_faulty_disk

SHARES = (0.15, 0.55, 0.85)  # of all operations of the job
CASES = [
    pytest.param(
        deed,
        SHARES[(number + turn) % 3],
        number,
        marks=pytest.mark.slow if turn else () if number < 2 else pytest.mark.all,  # make test: a kill, and lost writes
    )
    for number, deed in enumerate(DEEDS)
    for turn in range(2)
]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return make_faulty_disk(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize(("deed", "share", "number"), CASES)
def test_a_job_survives_a_disk_that_fails(disk, tmp_path, deed, share, number):
    print(disturb(disk, tmp_path, deed, int(share * disk.num_operations) + number))


def test_what_was_not_synced_is_lost(tmp_path):
    for name in ("old", "new", "kept"):
        (tmp_path / name).write_text(name)
    (tmp_path / "renamed").write_text("new")
    (tmp_path / "new").unlink()
    synced, renamed, new = str(tmp_path / "kept"), str(tmp_path / "renamed"), str(tmp_path / "new")
    lines = [
        ["create", synced, ""],
        ["write", synced, ""],
        ["sync", synced, "4"],
        ["sync folder", str(tmp_path), ""],
        ["create", new, ""],
        ["write", new, ""],
        ["sync", new, "3"],
        ["rename", new, renamed, ""],
        ["write", str(tmp_path / "old"), ""],
    ]
    lose_unsynced(lines, keep=tmp_path)
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "old").read_text() == ""  # was never synced
    assert not (tmp_path / "renamed").exists()  # nor was the folder after its name came
    assert not (tmp_path / "new").exists()
