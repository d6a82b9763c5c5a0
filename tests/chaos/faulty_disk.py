"""A fault at every operation on the disk in turn: `make chaos`. A share: tests/journeys/test_faulty_disk.py."""

from __future__ import annotations

import shutil

import pytest

from support.faulty_disk import DEEDS, disturb, make_faulty_disk

STRIDE = 16  # operations between those of one test


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return make_faulty_disk(tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("first", range(1, STRIDE + 1))
def test_a_job_survives_a_disk_that_fails(disk, tmp_path, deed, first):
    for at in range(first, disk.num_operations + 1, STRIDE):
        folder = tmp_path / str(at)
        folder.mkdir()
        print(disturb(disk, folder, deed, at))
        shutil.rmtree(folder)
