"""A store is tried before a run folder is put there, and refused with what it lacks."""

import pytest

from batchinfer.config import S3Config
from batchinfer.data import bucket as bucket_module
from batchinfer.data.bucket import Bucket
from batchinfer.records import ConfigError, StoreError
from batchinfer.run.store.bucket_probe import check_bucket
from support.faulty_store import Faults, faulty_store
from support.s3_servers import server_with

pytest.importorskip("obstore")


server = server_with("runs", and_open=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(bucket_module, "LONGEST_PAUSE_S", 0.05)


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ("ignored", "lets two processes create one name: it ignores If-None-Match"),
        ("refused", "has no conditional writes"),
        ("unmet", "refuses to replace an object that nobody has changed: it does not know If-Match"),
    ],
)
def test_a_bucket_without_conditional_writes_is_refused_with_the_reason(server, conditions, reason):
    check_bucket(Bucket("s3://runs/fine", S3Config(endpoint=server.endpoint)))
    with faulty_store(server, Faults(conditions=conditions)) as url:
        # a signature would tell that a field was left out on the way
        is_open = conditions == "ignored"
        here = Bucket(f"s3://{'open' if is_open else 'runs'}/without", S3Config(endpoint=url, anonymous=is_open))
        with pytest.raises(ConfigError, match=reason):
            check_bucket(here)
        assert list(here.objects("work")) == []


def test_a_store_that_wants_no_quotes_in_if_match_is_taken(server):
    with faulty_store(server, Faults(conditions="unquoted")) as url:
        check_bucket(Bucket("s3://runs/unquoted", S3Config(endpoint=url)))


def test_a_bucket_that_keeps_versions_is_taken_where_conditions_hold_in_it(server):
    server.make_bucket("versions")
    server.keep_versions("versions")
    here = Bucket("s3://versions/run", S3Config(endpoint=server.endpoint))
    if server.minds_versions:
        check_bucket(here)
    else:
        with pytest.raises(ConfigError, match=r"ignores If-None-Match \(radosgw does so in a bucket with versions\)"):
            check_bucket(here)


def test_wrong_buckets_and_credentials_are_sentences(server):
    with pytest.raises(ConfigError, match="names no bucket"):
        Bucket("s3://", S3Config(endpoint=server.endpoint))
    with pytest.raises(StoreError, match=r"there is no bucket nowhere \(s3://nowhere/run\)"):
        check_bucket(Bucket("s3://nowhere/run", S3Config(endpoint=server.endpoint)))
    server.check_permissions(on=True)
    try:
        with pytest.raises(StoreError, match=r"cannot write .*InvalidAccessKeyId.*; check the bucket's name"):
            check_bucket(Bucket("s3://runs/closed", S3Config(endpoint=server.endpoint)))
    finally:
        server.check_permissions(on=False)
