"""Patterns find what the standard library's glob finds."""

from __future__ import annotations

import glob
import os
import random
import shutil

import pytest

from batchinfer.data import patterns
from batchinfer.data.patterns import matching_paths

NAMES = ("a", "b", "day=5", ".dot", "x.parquet", "[y]", "it's", "ä")
PARTS = ("*", "**", "a", "day=*", "?", "[ab]", "*.parquet", ".*", "[[]y]", "nowhere", "*/..", ".", "a/")


@pytest.mark.parametrize("seed", range(20))
def test_random_patterns_in_random_folders(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    folders = [tmp_path]
    for _ in range(12):
        folders.append(rng.choice(folders) / rng.choice(NAMES))
        folders[-1].mkdir(exist_ok=True)
    for folder in folders:
        for name in rng.sample(NAMES, 2):
            if not (folder / name).exists():
                (folder / name).touch()
    rng.choice(folders).joinpath("lost.parquet").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    for _ in range(60):
        pattern = "/".join(rng.choices(PARTS, k=rng.randint(1, 4)))
        for start in ("", f"{glob.escape(str(tmp_path))}/"):
            found = matching_paths(start + pattern)
            assert _places(found) == _places(glob.glob(start + pattern, recursive=True)), start + pattern


def test_folders_that_go_while_they_are_looked_into_hold_nothing(tmp_path, monkeypatch):
    (tmp_path / "run" / "units").mkdir(parents=True)
    (tmp_path / "x.parquet").touch()
    is_there, found = patterns._is_there, []
    for place, folders, _ in patterns.walk_folders(str(tmp_path / "run"), lambda _: False):
        found.append((place, [*folders]))
        shutil.rmtree(tmp_path / "run" / "units")
    assert found == [(str(tmp_path / "run"), ["units"])]

    def see(path, folder):
        seen = is_there(path, folder)
        if path.endswith("run/"):
            shutil.rmtree(tmp_path / "run")
        return seen

    monkeypatch.setattr(patterns, "_is_there", see)
    assert matching_paths(f"{glob.escape(str(tmp_path))}/*/*") == []


def _places(paths):
    """Return the paths without files that end with a slash, which glob finds by a/**."""
    return {os.path.abspath(path) for path in paths if os.path.isdir(path) or not path.endswith("/")}
