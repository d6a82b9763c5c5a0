"""A run folder goes on only with the job that made it."""

from pathlib import Path

import pytest

from batchinfer.records import RunMismatchError
from batchinfer.run.fingerprint import check_same


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        ({"columns": {"prompt": "p", "choices": "c"}}, "columns.choices was c and is now null"),
        ({"columns": {"prompt": "p"}}, "columns.choices was not known and is now null"),
        ({"columns": {"prompt": "p", "choices": None, "old": 1}}, "columns.old was 1 and is now not known"),
        ({}, 'columns was null and is now {"prompt": "p", "choices": null}'),
    ],
)
def test_the_first_key_that_differs_is_named(recorded, told):
    with pytest.raises(RunMismatchError, match="belongs to another job") as failure:
        check_same(recorded, {"columns": {"prompt": "p", "choices": None}}, Path("run"))
    assert told in str(failure.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"sampling": 2},
            "sampling was 1 and is now 2; choose another output.dir (with --reuse it gets the answers that ",
        ),
        (
            {"sampling": 2, "model.dtype": "fp8"},
            "sampling was 1 and is now 2; choose another output.dir, restore what ",
        ),
        ({"model.dtype": "fp8"}, "model.dtype was bfloat16 and is now fp8; choose another output.dir, restore what "),
        (
            {"sampling": {"a new key": 1}, "version of batchinfer": "0.2.0"},
            "version of batchinfer was 0.1.0 and is now 0.2.0; choose another output.dir, go back to the code that it "
            "began with, or delete that folder",
        ),
        ({"model code": "b"}, "model code was a and is now b; choose another output.dir, go back to the code that it "),
    ],
)
def test_the_remedy_fits_what_differs(changed, told):
    recorded = {"sampling": 1, "model.dtype": "bfloat16", "version of batchinfer": "0.1.0", "model code": "a"}
    with pytest.raises(RunMismatchError, match="belongs to another job") as failure:
        check_same(recorded, recorded | changed, Path("run"))
    assert told in str(failure.value)


def test_the_same_job_goes_on():
    check_same({"columns": {"choices": None}, "more": 1}, {"columns": {"choices": None}}, Path("run"))


A, B, C = (["a.parquet", 10, "f0"], ["b.parquet", 20, "f1"], ["c.parquet", 30, "f2"])


@pytest.mark.parametrize(
    ("recorded", "current", "told"),
    [
        ([A, B], [A, B, C], "another job: c.parquet is new among its input shards (a job over new files alone"),
        ([C], [A, B, C], "another job: a.parquet and 1 more are new among its input shards"),
        ([A, B, C], [A, C], "another job: b.parquet is missing from its input shards; choose"),
        (
            [A, B],
            [A, ["b.parquet", 21, "f3"]],
            "another job: b.parquet among its input shards has another content than when it was planned",
        ),
        ([A, B], [B, A], "another job: input shards are in another order; choose"),
        (None, [A], "another job: a.parquet is new among its input shards"),
    ],
)
def test_the_shards_that_differ_are_named(recorded, current, told):
    with pytest.raises(RunMismatchError) as failure:
        check_same({"input shards": recorded}, {"input shards": current}, Path("run"))
    assert told in str(failure.value)
