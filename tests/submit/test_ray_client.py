"""Messages to users when Ray fails: a fake client raises the errors of the real one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from batchinfer.records import ConfigError
from batchinfer.submit.ray.client import _state, connect
from batchinfer.submit.ray.shape import Shape


class RayError(Exception):
    """ray.exceptions.RayError, which is neither a RuntimeError nor an OSError."""


class RpcError(RayError):
    """The error for an address without http://: Ray then uses the cluster's own protocol, not a dashboard's."""


class RequestError(OSError):
    """The base error of the library requests, which is no ConnectionError."""


ERRORS = [RpcError("Timed out while waiting for GCS"), RequestError("reset by peer"), ValueError("no address")]


@pytest.fixture(params=ERRORS, ids=lambda error: type(error).__name__)
def failing_client(request, monkeypatch):
    """The class JobSubmissionClient of a Ray all of whose answers are an error."""

    class Client:
        def __init__(self, address: str | None) -> None:
            if address is not None:
                raise request.param

        def get_job_status(self, job: str) -> None:
            raise request.param

    ray, exceptions, jobs = (ModuleType(name) for name in ("ray", "ray.exceptions", "ray.job_submission"))
    vars(exceptions)["RayError"], vars(jobs)["JobSubmissionClient"] = RayError, Client
    for module in (ray, exceptions, jobs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Client


def test_whatever_ray_raises_is_one_sentence_that_says_what_to_do(failing_client):
    with pytest.raises(
        ConfigError, match=r"Ray says: .*; name the cluster's dashboard with --address http://HEAD:8265"
    ):
        connect(Shape(address="127.0.0.1:8265"))
    with pytest.raises(ConfigError, match="Ray says: "):
        _state(connect(Shape()), "first-0")
