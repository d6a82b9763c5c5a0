"""Files with checksums: a read returns the written bytes, or an error names the file."""

from __future__ import annotations

import io
import random
import subprocess
import sys

import pytest

from batchinfer import manifest
from batchinfer.manifest import ChecksummedWriter, Manifest, file_checksums
from batchinfer.records import DamagedFileError


@pytest.fixture
def vouched(tmp_path, monkeypatch):
    """A file of some blocks, and the manifest that vouches for it."""
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 16)
    content = random.Random(1).randbytes(50)
    path = tmp_path / "plan" / "file"
    path.parent.mkdir()
    with open(path, "wb") as file:
        writer = ChecksummedWriter(file)
        for start in range(0, 50, 7):
            writer.write(content[start : start + 7])
    assert writer.checksums == file_checksums(path)
    known = Manifest(tmp_path)
    known.add(path, writer.checksums)
    return Manifest(tmp_path, known.as_json()), path, content


def test_any_part_of_a_sound_file_is_read(vouched):
    known, path, content = vouched
    known.check(path)
    with known.open(path) as file:
        for start, size in ((0, 50), (20, 9), (15, 2), (48, 9), (0, 0)):
            file.seek(start)
            assert file.read(size) == content[start : start + size]
        assert file.seek(-3, io.SEEK_END) == 47


@pytest.mark.parametrize("place", range(0, 50, 7))
def test_a_changed_byte_is_found_by_whoever_reads_its_block(vouched, place):
    known, path, content = vouched
    damaged = bytearray(content)
    damaged[place] ^= 4
    path.write_bytes(damaged)
    first = place // 16 * 16
    words = f"bytes {first} to {min(first + 16, 50)} are not those that were written"
    with pytest.raises(DamagedFileError, match=words):
        known.check(path)
    with known.open(path) as file:
        file.seek(place)
        with pytest.raises(DamagedFileError, match=words):
            file.read(1)


@pytest.mark.parametrize(
    "change", [lambda content: content[:-1], lambda content: content + b"!"], ids=["cut", "longer"]
)
def test_a_file_of_another_length_is_refused_when_it_is_opened(vouched, change):
    known, path, content = vouched
    path.write_bytes(change(content))
    with pytest.raises(DamagedFileError, match=r"it has (49|51) bytes instead of 50"):
        known.open(path)


def test_what_nobody_vouches_for_is_refused(vouched):
    known, path, _ = vouched
    with pytest.raises(DamagedFileError, match=r"run\.json does not vouch for it"):
        known.check(path.with_name("other"))


@pytest.mark.parametrize(
    "call",
    [
        "manifest.VerifiedFile(Path('/nowhere'), manifest.Checksums(0, ()), remedy='')",
        "stores.StoreFile('file:///nowhere', S3Config())",
    ],
)
def test_a_file_that_cannot_be_opened_is_deallocated_without_messages(call):
    """Python 3.13 prints errors of deallocation; earlier versions do in development mode."""
    lines = (
        "from pathlib import Path",
        "from batchinfer import manifest",
        "from batchinfer.config import S3Config",
        "from batchinfer.data import stores",
        "from batchinfer.records import BatchinferError",
        "try:",
        f"    {call}",
        "except BatchinferError as error:",
        "    print(error)",
    )
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", "\n".join(lines)], check=True, capture_output=True, text=True
    )
    assert "/nowhere" in ended.stdout
    assert "Exception ignored" not in ended.stderr
