"""The S3 servers that tests of object stores run against: moto's in `make test`, Ceph's too in `make chaos`.

server = server_with("runs")    # a fixture of this name
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support import rgw
from support.object_store import Server, s3_server

BOTH = ("moto", "radosgw")
SERVERS = ("moto", pytest.param("radosgw", marks=pytest.mark.slow))


@contextmanager
def running(name: str, folders: pytest.TempPathFactory) -> Iterator[Server]:
    """Start one of them, or skip the test with the reason."""
    if name == "moto":
        with s3_server() as server:
            yield server
        return
    reason = rgw.why_not()
    if reason is not None:
        warnings.warn(reason, stacklevel=1)
        pytest.skip(reason)
    with rgw.gateway(folders.mktemp("ceph")) as server:
        yield server


def server_with(*buckets: str, and_open: bool = False, which: Sequence[Any] = SERVERS) -> Any:
    """A fixture: a module's server, each of them in turn, in which there are these buckets.

    Args:
        and_open: and one called `open`, which needs no key.
    """

    @pytest.fixture(scope="module", params=which)
    def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        with running(request.param, tmp_path_factory) as found:
            for name in buckets:
                found.make_bucket(name)
            if and_open:
                found.make_open_bucket("open")
            yield found

    return server
