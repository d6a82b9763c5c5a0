"""The digest of all weight bytes, and what is remembered of it."""

from __future__ import annotations

import os
import pwd

import pytest

from batchinfer.records import ConfigError, ModelError
from batchinfer.run.weights_digest import cache_folder, whole_weights_digest


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(os.urandom(100_000))
    return folder


def change_a_byte(path, *, keep_times=False):
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[54_321] ^= 1
    path.write_bytes(content)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("keep_times", [False, True])
def test_every_byte_counts_also_when_digests_are_remembered(model, tmp_path, keep_times):
    first = whole_weights_digest(model, tmp_path / "cache")
    assert whole_weights_digest(model, tmp_path / "cache") == first
    change_a_byte(model / "b.safetensors", keep_times=keep_times)
    second = whole_weights_digest(model, tmp_path / "cache")
    assert second != first
    assert whole_weights_digest(model, tmp_path / "other") == second


def test_the_same_weights_elsewhere_have_the_same_digest(model, tmp_path):
    first = whole_weights_digest(model, tmp_path / "cache")
    assert whole_weights_digest(model.rename(tmp_path / "moved"), tmp_path / "cache") == first


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a.safetensors": 3}', '{"a.safetensors": [null, 5]}'])
def test_a_damaged_cache_is_no_cache(model, tmp_path, content):
    first = whole_weights_digest(model, tmp_path / "cache")
    (remembered,) = (tmp_path / "cache").iterdir()
    remembered.write_text(content)
    assert whole_weights_digest(model, tmp_path / "cache") == first


def test_without_a_place_to_remember_it_works_all_the_same(model, tmp_path):
    (tmp_path / "file").write_text("")
    assert whole_weights_digest(model, tmp_path / "file") == whole_weights_digest(model, tmp_path / "cache")


def test_a_user_without_a_home_has_no_place_to_remember_it(model, tmp_path, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert whole_weights_digest(model, cache_folder()) == whole_weights_digest(model, tmp_path / "cache")


def test_what_cannot_be_read_is_named(model, tmp_path):
    (model / "b.safetensors").unlink()
    (model / "b.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"cannot read the weights .*b.safetensors: No such file"):
        whole_weights_digest(model, tmp_path / "cache")


def test_the_cache_is_private_and_one_that_others_may_write_is_refused(model, tmp_path):
    cache = tmp_path / "deep" / "cache"
    digest = whole_weights_digest(model, cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by every user.*chmod go-w"):
        whole_weights_digest(model, cache)
    cache.chmod(0o755)
    assert whole_weights_digest(model, cache) == digest
