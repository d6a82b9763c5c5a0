"""No damage to a computed run reaches its outputs: they are the same, or a sentence says what to do, which helps."""

from __future__ import annotations

import shutil

import pytest

from support.damage import KINDS, damaged_copy, expect_equal_or_named, flip_bit, make_computed_run
from support.jobs import batchinfer, output_bytes

NUM_FLIPS = 60
NUM_REPAIRED = 15  # of each other kind, with the commands that the sentence names


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A run that is computed but not finished, and its outputs."""
    run = make_computed_run(tmp_path_factory.mktemp("computed"))
    calm = run.parent / "calm"
    shutil.copytree(run, calm)
    assert batchinfer("finish", calm).code == 0
    return run, output_bytes(calm)


@pytest.mark.parametrize("number", range(NUM_FLIPS))
def test_a_flipped_bit_is_found_or_changes_nothing(computed, number):
    run, expected = computed
    target = run.parent / f"flip-{number}"
    print(damaged_copy(run, target, number, kind=flip_bit))
    expect_equal_or_named(target, expected, repair=number % 6 == 0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("number", range(NUM_REPAIRED // len(KINDS)))
def test_damage_is_repaired_by_what_the_sentence_says(computed, kind, number):
    run, expected = computed
    target = run.parent / f"{kind.__name__}-{number}"
    print(damaged_copy(run, target, 1000 + number, kind=kind))
    expect_equal_or_named(target, expected, repair=True)
