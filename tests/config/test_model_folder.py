"""Models by name from the Hugging Face cache, and `~` and environment variables in paths of a job file."""

from __future__ import annotations

import os

import pytest

from batchinfer.config import load_job
from batchinfer.config.model_folder import model_folder
from batchinfer.records import ConfigError
from support.jobs import batchinfer, output_bytes, write_job, write_shard
from support.paths import RANDOM_MODEL

COMMITS = ("0123abc", "4567def")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache with two snapshots of acme/tiny: main is the second, the branch old the first."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    folder = cache / "models--acme--tiny"
    for commit in COMMITS:
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in RANDOM_MODEL.iterdir():
            (snapshot / file.name).symlink_to(file)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMITS[1])
    (folder / "refs" / "old").write_text(COMMITS[0] + "\n")
    return folder


@pytest.mark.parametrize(
    ("name", "commit"),
    [("acme/tiny", 1), ("acme/tiny@main", 1), ("acme/tiny@old", 0), (f"acme/tiny@{COMMITS[0]}", 0)],
)
def test_a_name_is_found_in_the_cache(hub, tmp_path, name, commit):
    assert model_folder(tmp_path, name) == str(hub / "snapshots" / COMMITS[commit])


def test_a_folder_of_the_cache_is_its_snapshot(hub, tmp_path):
    assert model_folder(tmp_path, str(hub)) == str(hub / "snapshots" / COMMITS[1])
    (hub / "refs" / "main").unlink()
    assert model_folder(tmp_path, str(hub)) == str(hub), "which of the two is not known"


def test_a_path_that_exists_goes_before_the_cache(hub, tmp_path):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert model_folder(tmp_path, "acme/tiny") == str(tmp_path / "acme" / "tiny")


@pytest.mark.parametrize("name", ["acme/other", "acme/tiny@new", "acme/tiny@../../x", "./acme/tiny", "a/b/c", "tiny"])
def test_what_is_in_no_cache_stays_a_path(hub, tmp_path, name):
    assert model_folder(tmp_path, name) == os.path.normpath(tmp_path / name)


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"HF_HOME": "{0}/home"}, "home/hub"),
        ({"XDG_CACHE_HOME": "{0}/xdg"}, "xdg/huggingface/hub"),
        ({"HOME": "{0}"}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(tmp_path, monkeypatch, variables, cache):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    snapshot = tmp_path / cache / "models--acme--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / cache / "models--acme--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert model_folder(tmp_path, "acme/tiny") == str(snapshot)


def test_a_job_runs_a_model_by_its_name(hub, tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["Hello"]})
    jobs = [
        write_job(tmp_path, name=f"{name}.toml", model={"path": path}, output={"dir": name}, sampling={"max_tokens": 3})
        for name, path in (("by-name", "acme/tiny"), ("by-path", str(RANDOM_MODEL)))
    ]
    for job in jobs:
        assert batchinfer("run", job).code == 0
    assert output_bytes(tmp_path / "by-name") == output_bytes(tmp_path / "by-path")
    ended = batchinfer("plan", jobs[0], "--set", "model.path=acme/none", "--set", "output.dir=none")
    assert ended.code == 2
    assert "`hf download acme/none` puts it into the cache" in ended.err
    ended = batchinfer("plan", jobs[0], "--set", "model.path=acme/tinny", "--set", "output.dir=none")
    assert ended.code == 2
    assert "acme/tinny is not in the Hugging Face cache: did you mean acme/tiny?; if acme/tinny is" in ended.err


def test_home_and_variables_of_paths_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    paths = {
        "input": {"files": ["${DATA}/*.parquet", "~/more/*.parquet"]},
        "output": {"dir": "~/runs/$DATA_OF_NOBODY"},
        "model": {"path": "$DATA/model"},
        "kv": {"dir": "~/kv"},
    }
    job = load_job(write_job(tmp_path, **paths))
    assert job.input.files == [f"{tmp_path}/data/*.parquet", f"{tmp_path}/home/more/*.parquet"]
    assert job.output.dir == f"{tmp_path}/home/runs/$DATA_OF_NOBODY"
    assert (job.model.path, job.kv.dir) == (f"{tmp_path}/data/model", f"{tmp_path}/home/kv")


def test_a_file_whose_name_has_such_signs_is_meant_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", "elsewhere")
    for name in ("~", "a$DATA"):
        (tmp_path / name).mkdir()
    job = load_job(write_job(tmp_path, model={"path": "a$DATA"}, output={"dir": "~"}))
    assert (job.model.path, job.output.dir) == (f"{tmp_path}/a$DATA", f"{tmp_path}/~")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"output": {"dir": "runs/${NOT_SET}/x"}},
            "output.dir names the environment variable NOT_SET, which is not",
        ),
        ({"model": {"path": "~nobody-of-this-name/m"}}, "there is no user of this name"),
    ],
)
def test_what_stands_for_nothing_is_refused_by_name(tmp_path, parts, said):
    with pytest.raises(ConfigError, match=said):
        load_job(write_job(tmp_path, **parts))
