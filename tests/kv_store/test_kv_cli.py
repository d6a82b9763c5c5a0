"""`batchinfer kv`: what it prints, how it ends, and that a wrong argument gets one sentence."""

import errno
import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace

import pytest

from batchinfer.kv_store import file_reader
from batchinfer.kv_store.block_file import HEADER_BYTES, FileName
from batchinfer.kv_store.upkeep import parse_bytes
from batchinfer.records import ConfigError
from support.jobs import batchinfer, write_job
from support.kv_stores import (
    BLOCK_BYTES,
    FILE_BYTES,
    IDENTITY,
    block_files,
    chain_of,
    damage,
    open_store,
    read_intact,
    total_bytes,
    write_chain,
)


@pytest.fixture
def folder(tmp_path):
    """A store with four blocks of one model and one of another."""
    folder = tmp_path / "kv"
    with closing(open_store(folder)) as store:
        write_chain(store, chain_of(*"abc"))
        write_chain(store, chain_of("d"))
        assert read_intact(store, chain_of(*"ab")) == 2
    other = replace(IDENTITY, model="other", salt="a secret")
    with closing(open_store(folder, other)) as store:
        write_chain(store, chain_of("a", identity=other))
    return folder


def document(*arguments, code=0):
    ended = batchinfer("kv", *arguments, "--json")
    assert ended.code == code, ended.err
    return json.loads(ended.out)


def refusal(*arguments):
    """The one sentence of a command that ends with 2."""
    ended = batchinfer("kv", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    (line,) = ended.err.strip().splitlines()
    assert line.startswith("error: ")
    return line


def test_stat_tells_what_is_there_by_model_and_what_runs_did(folder):
    found = document("stat", folder)
    assert (found["blocks"], found["files"]) == (5, 3)
    assert found["bytes"] == total_bytes(folder)
    assert {model["model"]: model["blocks"] for model in found["models"]} == {"tiny": 4, "other": 1}
    (tiny,) = (model for model in found["models"] if model["model"] == "tiny")
    assert (tiny["dtype"], tiny["block_tokens"], tiny["weights"]) == ("bfloat16", 64, "w" * 32)
    assert found["hit_tokens"] == 2 * 64
    assert found["hit_bytes"] == 2 * BLOCK_BYTES
    assert found["written_tokens"] == 5 * 64
    assert [session["model"] for session in found["sessions"]] == ["tiny", "other"]
    assert "a secret" not in json.dumps(found)
    text = batchinfer("kv", "stat", folder).out
    assert "5 blocks in 3 files" in text
    assert "tiny  bfloat16, cpu, blocks of 64 tokens: 4 blocks" in text
    assert "2 sessions read 128 tokens" in text


def test_stat_tells_why_a_store_was_switched_off(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(open_store(folder)) as store, monkeypatch.context() as patch:
        patch.setattr(file_reader, "read_blocks", fails)
        assert read_intact(store, chain_of(*"ab")) == 0
        told = store.take_problem()
    assert "is switched off: cannot read" in told
    assert [session["switched_off"] for session in document("stat", folder)["sessions"]] == [None, None, told]
    assert f"0 files damaged; {told}" in batchinfer("kv", "stat", folder).out
    assert document("stat", folder)["problem"] is None


def test_stat_counts_a_damaged_file_that_could_not_be_moved(folder):
    with closing(open_store(folder)) as store:
        shutil.rmtree(folder / "quarantine")
        (folder / "quarantine").touch()
        for path in block_files(folder):
            damage(path, 0)
        assert read_intact(store, chain_of(*"ab")) == 0
        told = store.take_problem()
    assert "is switched off for writing" in told
    assert f"1 file damaged; {told}" in batchinfer("kv", "stat", folder).out


def test_stat_tells_that_the_key_is_damaged(folder):
    damage(folder / "key", 0, 7)
    problem = document("stat", folder)["problem"]
    assert "has a damaged key; delete the folder" in problem
    assert f"no run can use them: {problem}" in batchinfer("kv", "stat", folder).out


def test_stat_of_a_store_whose_labels_are_gone(folder):
    for label in folder.glob("models/*/identity.json"):
        label.unlink()
    for session in folder.glob("history/*.json"):
        session.write_text("not JSON")
    assert document("stat", folder)["blocks"] == 5
    assert batchinfer("kv", "stat", folder).code == 0


def test_verify_finds_nothing_in_a_sound_store(folder):
    found = document("verify", folder)
    assert (found["files"], found["blocks"], found["damaged"]) == (3, 5, [])
    assert "3 files checked, 0 of them damaged" in batchinfer("kv", "verify", folder).out


@pytest.mark.parametrize("as_json", [True, False])
def test_verify_moves_damaged_files_aside_and_ends_with_3(folder, as_json):
    sound, flipped, short = block_files(folder)
    content = bytearray(flipped.read_bytes())
    content[HEADER_BYTES + 5] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(b"")
    if as_json:
        found = document("verify", folder, code=3)
        assert sorted(damaged["file"] for damaged in found["damaged"]) == sorted([flipped.name, short.name])
    else:
        ended = batchinfer("kv", "verify", folder)
        assert ended.code == 3
        assert f"{flipped.name}: the checksum of block 0 does not match" in ended.out
        assert f"{short.name}: only 0 bytes long" in ended.out
    assert block_files(folder) == [sound]
    assert document("stat", folder)["quarantined_files"] == 2
    assert document("verify", folder)["damaged"] == []


def test_verify_finds_files_in_the_wrong_place(folder):
    path = block_files(folder)[0]
    (other,) = (model for model in folder.glob("models/*") if model != path.parent.parent)
    target = other / path.parent.name
    target.mkdir(exist_ok=True)
    path.rename(target / path.name)
    found = document("verify", folder, code=3)
    assert [damaged["reason"] for damaged in found["damaged"]] == [
        "it belongs to another model, dtype, backend or salt"
    ]


def test_gc_shrinks_to_a_size_and_clears_what_the_dead_left(folder):
    left = folder / "writing" / "100.killed-0.tmp"
    left.write_bytes(b"half a block")
    found = document("gc", folder, "--max-bytes", str(2 * FILE_BYTES))
    assert found["bytes_after"] == total_bytes(folder) <= 2 * FILE_BYTES
    assert found["evicted_files"] == 3 - len(block_files(folder)) > 0
    assert not left.exists()
    assert "0 files with 0 bytes evicted" in batchinfer("kv", "gc", folder, "--max-bytes", "1GiB").out
    assert document("gc", folder, "--max-bytes", "0")["bytes_after"] == 0
    assert block_files(folder) == []


def test_gc_without_a_size_evicts_nothing(folder):
    assert document("gc", folder)["evicted_files"] == 0
    assert len(block_files(folder)) == 3


def test_path_names_the_folder_or_the_file_of_a_block(folder):
    assert batchinfer("kv", "path", folder).out == f"{folder}\n"
    block = chain_of(*"abc")[2]
    for text in (block.hex(), block.hex()[:12], block.hex()[:20].upper()):
        path = batchinfer("kv", "path", folder, text).out.strip()
        assert block[:6] in FileName.parse(path.rpartition("/")[2]).blocks
    assert "holds no block" in refusal("path", folder, "ab" * 32)
    assert "holds no block" in refusal("path", folder, block.hex()[:24] + "0" * 40), "every digit counts"
    assert "12 to 64 digits" in refusal("path", folder, "xyz")


def test_a_job_file_stands_for_its_store(folder):
    job = write_job(folder.parent, kv={"dir": "kv"})
    assert document("stat", job)["blocks"] == 5
    assert "set kv.dir" in refusal("stat", write_job(folder.parent, name="without.toml"))


@pytest.mark.parametrize("command", ["stat", "verify", "gc", "path"])
def test_a_folder_that_is_no_store_ends_with_2(tmp_path, command):
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert "is no KV store" in refusal(command, target)
    (tmp_path / "store.json").write_text("{}")
    assert "damaged" in refusal(command, tmp_path)
    (tmp_path / "store.json").write_text('{"version": 99}')
    assert "version 99" in refusal(command, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "store.json"]


@pytest.mark.parametrize(
    "arguments", [["stat"], ["nonsense"], ["stat", "a", "b"], ["gc", "a", "--bogus"], ["path"], ["verify", "--json"]]
)
def test_wrong_usage_ends_with_2(arguments):
    ended = batchinfer("kv", *arguments)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_help_explains_every_command():
    text = batchinfer("kv", "--help").out
    for command in ("stat", "verify", "gc", "path"):
        assert re.search(rf"^  {command} ", text, re.M)
        assert "STORE" in batchinfer("kv", command, "--help").out


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("500", 500),
        ("10GB", 10**10),
        ("10GiB", 10 * 2**30),
        ("1.5TB", 15 * 10**11),
        ("2 kib", 2048),
        ("7B", 7),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "10XB", "1e9", "ten", "10GBB", "1.5.2GB", "inf", "nan"])
def test_what_is_no_size_gets_a_sentence(tmp_path, text):
    with pytest.raises(ConfigError, match="no number of bytes"):
        parse_bytes(text)


def test_a_wrong_size_is_refused_before_anything_is_deleted(folder):
    assert "10XB" in refusal("gc", folder, f"--max-bytes={'10XB'}")
    assert len(block_files(folder)) == 3
