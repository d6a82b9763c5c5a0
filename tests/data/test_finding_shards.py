"""The files of a job's input: patterns, folders, links, run folders, names."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pytest

from batchinfer.data.shard_schemas import shard_schema
from batchinfer.data.shards import find_shards
from batchinfer.records import ConfigError
from support.formats import as_arrow
from support.other_user import as_user, open_folder
from support.prompt_tables import (
    one_shard,
    write,
)


def test_shards_are_sorted_and_named_below_their_common_folder(tmp_path):
    for name in ("b/2.parquet", "b/1.parquet", "a/deep/x.pq", "a/notes"):
        write(tmp_path / name, {"prompt": ["x"]})
    shards = find_shards([f"{tmp_path}/b/*.parquet", f"{tmp_path}/**/*", f"{tmp_path}/b/1.parquet"])
    assert [shard.name for shard in shards] == ["a/deep/x.pq.parquet", "a/notes.parquet", "b/1.parquet", "b/2.parquet"]
    assert [shard.index for shard in shards] == [0, 1, 2, 3]
    assert [shard.num_rows for shard in shards] == [1, 1, 1, 1]
    assert one_shard(tmp_path / "b/1.parquet").name == "1.parquet"


def test_a_file_counts_once_however_it_is_reached(tmp_path):
    write(tmp_path / "data/a.parquet", {"prompt": ["x"]})
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert len(find_shards([f"{tmp_path}/data/*", f"{tmp_path}/link/*", f"{tmp_path}/data/../data/a.parquet"])) == 1


@pytest.mark.parametrize(
    "pattern",
    [
        "data",
        "data/*/*.parquet",
        "data/**/*.parquet",
        "data/**",
        "**",
        "[d]ata/*",
        "data/*/a.parquet",
        "data/day=[12]/a.parquet",
    ],
)
def test_a_folder_that_cannot_be_listed_is_not_passed_over(pattern):
    with open_folder() as folder:
        for day in ("day=1", "day=2"):
            write(folder / "data" / day / "a.parquet", {"prompt": ["x"]})

        def as_another():
            os.chdir(folder)
            with pytest.raises(ConfigError, match=r"cannot list the folder \S*data/day=2/? for its data: Permission d"):
                find_shards([pattern])
            assert len(find_shards(["data/day=1", "data/day=[13]/*"])) == 1

        (folder / "data" / "day=2").chmod(0)
        assert as_user(as_another) == 0


def test_a_folder_beside_files_that_cannot_be_listed_is_named_in_the_warning(capfd):
    with open_folder() as folder:
        write(folder / "data" / "a.parquet", {"prompt": ["x"]})
        (folder / "data" / "closed").mkdir(mode=0)
        (folder / "data" / "empty").mkdir()
        assert as_user(lambda: find_shards([f"{folder}/data/*"])) == 0
        said = capfd.readouterr().err
        assert f"and also folders, which are not read; name the folders to read them too: {folder}/data/c" in said
        assert "empty" not in said


@pytest.mark.parametrize("pattern", ["data", "data/**", "data/**/*.parquet", "data/**/a/**/x.parquet"])
def test_links_that_lead_in_a_circle_end(tmp_path, pattern):
    path = write(tmp_path / "data" / "a" / "x.parquet", {"prompt": ["x"]})
    for link, target in {"here": ".", "also": "../data", "a/up": "..", "a/also": "../also/a"}.items():
        (tmp_path / "data" / link).symlink_to(target)
    assert [shard.path for shard in find_shards([f"{tmp_path}/{pattern}"])] == [str(path)]


def test_the_run_folder_is_not_input(tmp_path):
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    write(tmp_path / "run/outputs/a.parquet", {"prompt": ["x"]})
    shards = find_shards([f"{tmp_path}/**/*.parquet"], exclude=tmp_path / "run")
    assert [shard.name for shard in shards] == ["a.parquet"]


@pytest.fixture
def beside_a_run(tmp_path):
    """A folder with one file of data, and runs below it with files of their own."""
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    for run in ("runs/one", "runs/deep/two", "runs/[1]"):
        for name in ("outputs/a", "tokens/00000", "dataset/data/train"):
            write(tmp_path / run / f"{name}.parquet", {"prompt": ["x"]})
        for name in ("run.json", "job.toml"):
            (tmp_path / run / name).touch()
    return tmp_path


@pytest.mark.parametrize("pattern", ["", "**/*.parquet", "**/*t", "[!.]*/../**/*.parquet"])
def test_a_folder_and_two_stars_pass_over_run_folders(beside_a_run, capsys, pattern):
    write(beside_a_run / "b" / "b.parquet", {"prompt": ["x"]})
    (beside_a_run / "b" / "job.toml").touch()  # alone it makes no run folder
    shards = find_shards([str(beside_a_run / pattern)])
    assert [shard.name for shard in shards] == ["a.parquet", "b/b.parquet"]
    runs = beside_a_run / "runs"
    named = f"name one to read it, as in {runs}/[[]1]/outputs/*.parquet: {runs}/[1], {runs}/deep/two, {runs}/one\n"
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "num_files"),
    [
        ("runs/one/outputs/*.parquet", 1),
        ("runs/one/outputs", 1),
        ("runs/one/**/*.parquet", 3),
        ("runs/one", 3),
        ("runs/one/dataset", 1),
        ("runs/one/dataset/**/*.parquet", 1),
        ("runs/*/outputs/*.parquet", 2),
        ("runs/o*/outputs", 1),
        ("runs/deep/../one/outputs/**", 1),
        ("runs/[[]1]", 3),
        ("runs/[[]1]/**/*.parquet", 3),
    ],
)
def test_a_run_folder_that_is_named_is_input(beside_a_run, capsys, pattern, num_files):
    assert len(find_shards([f"{beside_a_run}/{pattern}"])) == num_files
    assert "skips run folders" not in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["runs", "runs/*", "runs/**/*.parquet"])
def test_where_there_are_only_run_folders_nothing_is_found_and_the_note_says_why(beside_a_run, capsys, pattern):
    with pytest.raises(ConfigError):
        find_shards([f"{beside_a_run}/{pattern}"])
    assert f"as in {beside_a_run}/runs/" in capsys.readouterr().err


def test_a_name_with_glob_characters_is_found_as_it_stands(tmp_path):
    path = write(tmp_path / "part[1]?.parquet", {"prompt": ["x"]})
    assert one_shard(path).num_rows == 1


@pytest.mark.parametrize(
    ("files", "pattern", "told"),
    [
        (["a.parquet"], "b*.parquet", "no file matches"),
        (["a.parquet"], "missing.parquet", "no file matches"),
        (["data/a"], "data", "data/*.parquet"),
        (["data.parquet/a"], "*.parquet", "data.parquet/*.parquet"),
        (["a", "a.parquet"], "*", "would share the output file a.parquet"),
        (["a", "a.parquet/b.parquet"], "**/*", "as file and folder"),
    ],
)
def test_patterns_that_cannot_work_are_refused(tmp_path, files, pattern, told):
    for name in files:
        write(tmp_path / name, {"prompt": ["x"]})
    with pytest.raises(ConfigError) as failure:
        find_shards([f"{tmp_path}/{pattern}"])
    assert told in str(failure.value)


def test_a_path_that_is_not_utf_8_is_refused_also_where_that_is_its_folder(tmp_path):
    write(tmp_path / "in" / "a.parquet", {"prompt": ["x"]})
    (tmp_path / "in").rename(tmp_path / "caf\udce9")
    with pytest.raises(ConfigError, match=r"caf\\udce9/a.parquet' is not valid UTF-8; rename the file or its folder"):
        find_shards([f"{tmp_path}/*/*.parquet"])


def test_the_footer_digest_follows_the_file(tmp_path):
    path = write(tmp_path / "a.parquet", {"prompt": ["x", "y"]})
    first = one_shard(path)
    assert one_shard(path) == first
    write(path, {"prompt": ["x", "a longer text"]})
    assert one_shard(path).footer not in ("", first.footer)


def test_files_that_are_listed_twice_are_named(tmp_path, capsys):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    find_shards([f"{tmp_path}/*.jsonl"])
    assert "more than once" not in capsys.readouterr().err
    assert len(find_shards([f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"])) == 2
    told = capsys.readouterr().err
    assert "more than once" in told
    assert f"{tmp_path}/a.jsonl" in told
    assert "b.jsonl" not in told


def test_a_folder_stands_for_its_data_files(tmp_path):
    for name in ("data/train-0.parquet", "data/x/test.parquet", ".cache/a.parquet", "data/_tmp/b.parquet"):
        write(tmp_path / "hub" / name, {"prompt": ["x"]})
    (tmp_path / "hub" / "more.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "hub" / "README.md").write_text("Read me.")
    shards = find_shards([str(tmp_path / "hub")])
    assert [shard.name for shard in shards] == ["data/train-0.parquet", "data/x/test.parquet", "more.parquet"]


def test_extensions_match_without_regard_to_case(tmp_path):
    write(tmp_path / "UP.PARQUET", {"prompt": ["x"]})
    (tmp_path / "P2.JSONL").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "t.Tsv.GZ").write_bytes(gzip.compress(b"id\tprompt\n1\tx\n"))
    for patterns in ([str(tmp_path)], [f"{tmp_path}/*"]):
        shards = find_shards(patterns, roles={"prompt": "text"})
        assert [(shard.name, shard.num_rows, shard.problem) for shard in shards] == [
            ("P2.parquet", 2, None), ("UP.parquet", 1, None), ("t.parquet", 1, None),
        ]  # fmt: skip
        assert shard_schema(shards[2]).names == ["id", "prompt"]


def test_files_of_a_folder_that_look_like_data_are_named_when_left_out(tmp_path, capsys):
    write(tmp_path / "up" / "p1.parquet", {"prompt": ["x"]})
    usual = "README.md LICENSE _SUCCESS .part.crc _committed.json job.toml dataset_info.json a.log SHA256SUMS.txt"
    for name in (*usual.split(), "run/run.json", "run/job.toml", "run/left.json"):
        (tmp_path / "up" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "up" / name).write_text("{}")
    find_shards([str(tmp_path / "up")], exclude=tmp_path / "up" / "run")
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "up" / "p4.json").write_text("{}")
    find_shards([str(tmp_path / "up")])
    told = f"warning: 1 file in {tmp_path}/up is left out, as its name does not end as data files' do: p4.json\n"
    assert capsys.readouterr().err.endswith(told)
    for name in ("p3.jsonl.bz2", "deep/part-0004"):
        (tmp_path / "up" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "up" / name).write_text("{}")
    find_shards([str(tmp_path / "up")])
    told = "are left out, as their names do not end as data files' do: deep/part-0004, p3.jsonl.bz2, p4.json\n"
    assert capsys.readouterr().err.endswith(f"warning: 3 files in {tmp_path}/up {told}")
    find_shards([f"{tmp_path}/up/*.parquet"])
    assert capsys.readouterr().err == ""


def test_input_in_the_run_folder_is_told_as_such(tmp_path):
    write(tmp_path / "a.parquet", {"prompt": ["x"]})
    with pytest.raises(ConfigError, match=rf"is in the run folder {tmp_path}; choose another output\.dir"):
        find_shards([f"{tmp_path}/*.parquet"], exclude=tmp_path)


def test_links_to_folders_below_a_folder_are_followed_once(tmp_path):
    for name in ("data/a.parquet", "disk/b.parquet", "disk/deep/c.parquet"):
        write(tmp_path / name, {"prompt": ["x"]})
    for name, target in (("data/part", "../disk"), ("data/again", "../disk/deep"), ("disk/deep/up", "../../data")):
        (tmp_path / name).symlink_to(target)
    shards = find_shards([str(tmp_path / "data")])
    assert [shard.name for shard in shards] == ["a.parquet", "again/c.parquet", "part/b.parquet"]


def test_a_link_beside_the_folder_that_it_leads_to_hides_no_key(tmp_path):
    for day in ("day=1", "day=2"):
        write(tmp_path / day / "a.parquet", {"prompt": ["x"]})
    (tmp_path / "at_last").symlink_to("day=2")
    shards = find_shards([str(tmp_path)])
    assert [shard.name for shard in shards] == ["day=1/a.parquet", "day=2/a.parquet"]


def test_folders_beside_the_files_that_a_pattern_matches_are_named_if_they_hold_data(tmp_path, capsys):
    for name in ("a.parquet", "more.parquet/part-0.parquet", "more.parquet/part-1.parquet", "logs/x.log"):
        write(tmp_path / name, {"prompt": ["x"]})
    told = f"which are not read; name the folders to read them too: {tmp_path}/more.parquet/\n"
    for pattern in ("*", "*.parquet"):
        assert [shard.name for shard in find_shards([f"{tmp_path}/{pattern}"])] == ["a.parquet"]
        assert capsys.readouterr().err.endswith(told)
    # all of its files are read
    assert len(find_shards([f"{tmp_path}/*.parquet", f"{tmp_path}/more.parquet"])) == 3
    assert len(find_shards([f"{tmp_path}/**/*.parquet"])) == 3
    assert capsys.readouterr().err == ""


def test_a_saved_dataset_stands_for_the_files_that_it_lists(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("data-0.arrow", "cache-1.arrow"):
            as_arrow([{"prompt": "x"}] * 3, tmp_path / split / name, pa.ipc.new_stream)
        (tmp_path / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    shards = find_shards([str(tmp_path)])
    assert [(shard.name, shard.num_rows) for shard in shards] == [
        ("test/data-0.parquet", 3),
        ("train/data-0.parquet", 3),
    ]
    (tmp_path / "test" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state\.json, the list of a saved dataset's files"):
        find_shards([str(tmp_path)])
