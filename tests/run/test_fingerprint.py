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


def test_the_same_job_goes_on():
    check_same({"columns": {"choices": None}, "more": 1}, {"columns": {"choices": None}}, Path("run"))
