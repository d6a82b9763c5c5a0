"""The S3 servers that tests of object stores run against: moto's in `make test`, Ceph's too in `make chaos`.

@pytest.fixture(scope="module", params=SERVERS)
def server(request, tmp_path_factory):
    with running(request.param, tmp_path_factory) as server: ...
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
