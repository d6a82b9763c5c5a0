"""Names of KV blocks, the order of eviction, and the rule of reuse: pure logic."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.kv_store.block_file import FileName
from batchinfer.kv_store.blocks import MAX_LABEL, KvIdentity
from batchinfer.kv_store.reuse import TRIAL_BYTES, ReuseRule
from batchinfer.kv_store.space_manager import rank_files
from batchinfer.kv_store.store_dir import StoredFile
from batchinfer.records import ConfigError
from support.kv_stores import IDENTITY, chain_of, tokens_of


def test_a_name_is_the_keyed_hash_of_the_name_before_and_the_blocks_tokens():
    tokens = list(range(64 + 64 + 63))  # the last block is not whole: it has no name
    key, names = IDENTITY.digest, []
    parent = key
    for start in (0, 64):
        data = parent + np.array(tokens[start : start + 64], "<u4").tobytes()
        parent = hashlib.blake2b(data, key=key, digest_size=32).digest()
        names.append(parent)
    assert IDENTITY.chain(tokens) == names
    assert IDENTITY.chain(np.array(tokens)) == names
    assert IDENTITY.chain(tokens[:63]) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_two_prompts_share_the_names_of_their_common_whole_blocks_and_no_others(left, right):
    names = [chain_of(*map(str, parts)) for parts in (left, right)]
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    assert names[0][:common] == names[1][:common]
    assert not set(names[0][common:]) & set(names[1][common:])


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "x"},
        {"config": "x"},
        {"dtype": "fp8"},
        {"numerics": "x"},
        {"salt": "x"},
        {"block_tokens": 128},
        {"num_layers": 3},
        {"latent_dim": 24},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_content_changes_every_name(change):
    other = replace(IDENTITY, **change)
    tokens = tokens_of("a", "b", "c", "d")
    assert not set(IDENTITY.chain(tokens)) & set(other.chain(tokens))


def test_the_models_folder_does_not_count():
    assert replace(IDENTITY, model="elsewhere").chain(tokens_of("a")) == chain_of("a")


def test_a_block_has_whole_pages_of_all_layers():
    identity = KvIdentity("m", "w", "c", "float32", "cpu", "", 128, 5, 48)
    assert identity.block_shape == (2, 5, 64, 48)
    assert identity.block_bytes == 128 * 5 * 48 * 4
    assert len(identity.chain(range(300))) == 2


@pytest.mark.parametrize(("change", "word"), [({"dtype": "int3"}, "int3"), ({"block_tokens": 100}, "100")])
def test_an_identity_that_cannot_be_is_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        replace(IDENTITY, **change)


def test_the_salt_is_told_to_nobody_and_labels_are_short():
    text = str(replace(IDENTITY, salt="a secret", model="m" * 5000).describe())
    assert "a secret" not in text
    assert "m" * MAX_LABEL in text
    assert len(text) < 1000


def test_a_file_name_says_what_the_file_holds():
    chain = chain_of(*"abcdef")
    for start, stop in ((0, 1), (0, 6), (2, 5)):
        name = FileName.of(chain, start, stop)
        assert FileName.parse(str(name)) == name
        assert len(str(name)) <= 255
    for text in ("notes.txt", "", ".kv", str(name)[:-4], str(name)[:-5] + ".kv", "x" + str(name)):
        assert FileName.parse(text) is None


# Eviction: files by letters; a file's place in its chain and its parent are in its name.
def files_of(*chains):
    """A file per block: files_of("ab", "ac") gives {"a": …, "ab": …, "ac": …}."""
    files = {}
    for parts in chains:
        chain = chain_of(*parts)
        for at in range(len(parts)):
            files[parts[: at + 1]] = StoredFile(parts[: at + 1], FileName.of(chain, at, at + 1), 1)
    return files


def ranked(files, last_use_s, next_uses=()):
    next_uses = {files[path].name.blocks[0]: use for path, use in dict(next_uses).items()}
    return [file.path for _, file in rank_files(files.values(), last_use_s, next_uses.get)]


def test_unneeded_files_go_least_recently_used_first_and_needed_ones_last_farthest_next_use_first():
    files = files_of("a", "b", "c", "d")
    assert ranked(files, {"a": 30, "b": 10, "c": 20, "d": 5}, {"d": 7, "a": 9}) == ["b", "c", "a", "d"]


def test_a_file_outlives_those_that_follow_it_in_its_chain():
    #   a ─┬─ ab ── abc      abc was used last of all, and d before everything but a
    #      └─ ad
    files = files_of("abc", "ad", "e")
    assert ranked(files, {"a": 1, "ab": 2, "abc": 50, "ad": 3, "e": 40}) == ["ad", "e", "abc", "ab", "a"]
    # a later block that is needed keeps those before it, even without next uses of these
    assert ranked(files, {"a": 1, "ab": 2, "abc": 3, "ad": 50, "e": 60}, {"abc": 5}) == ["ad", "e", "abc", "ab", "a"]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_never_takes_a_file_before_its_descendants(seed):
    rng = np.random.default_rng(seed)
    files = files_of(*("".join(rng.choice(list("abc"), 6)) for _ in range(8)))
    last_use_s = {path: int(rng.integers(4)) for path in files}
    next_uses = {path: int(rng.integers(5)) for path in files if rng.random() < 0.4}
    order = ranked(files, last_use_s, next_uses)
    assert sorted(order) == sorted(files)
    for path in files:
        assert all(
            order.index(path) > order.index(other) for other in files if other.startswith(path) and other != path
        )


def test_loading_ends_only_after_a_whole_trial_that_was_slower_than_computing():
    rule = ReuseRule("auto")
    third = TRIAL_BYTES // 3
    slow = {"num_bytes": third, "read_s": 2.0, "num_tokens": 1000, "compute_s_per_token": 0.001}
    assert rule.note(**slow)
    assert rule.note(**slow)
    assert rule.note(**{**slow, "num_bytes": TRIAL_BYTES - 2 * third - 1})
    assert not rule.note(**{**slow, "num_bytes": 1})
    assert not rule.is_worthwhile
    assert not rule.note(num_bytes=TRIAL_BYTES, read_s=0.0, num_tokens=10**6, compute_s_per_token=1.0)


def test_a_trial_is_judged_by_its_sums_and_the_next_one_begins_anew():
    rule = ReuseRule("auto")
    fast = {"num_bytes": TRIAL_BYTES, "read_s": 0.5, "num_tokens": 1000, "compute_s_per_token": 0.001}
    assert rule.note(**{**fast, "num_bytes": 1, "read_s": 100.0, "compute_s_per_token": 1.0})
    assert all(rule.note(**fast) for _ in range(100))
    # a disk that has become slow is not excused by how fast it was before
    assert not rule.note(**{**fast, "read_s": 1.1})


def test_equal_time_is_worthwhile_and_always_means_always():
    even = {"num_bytes": TRIAL_BYTES, "read_s": 1.0, "num_tokens": 1000, "compute_s_per_token": 0.001}
    assert ReuseRule("auto").note(**even)
    assert not ReuseRule("auto").note(**{**even, "read_s": 1.01})
    always = ReuseRule("always")
    assert all(always.note(**{**even, "read_s": 1e6}) for _ in range(5))
