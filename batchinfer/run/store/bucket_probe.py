"""Whether an object store can hold a run folder: tried before anything is put there."""

from __future__ import annotations

import os

from batchinfer.data.bucket import Bucket, RefusedError
from batchinfer.records import ConfigError, StoreError


def check_bucket(bucket: Bucket) -> None:
    """Check the conditional writes of a bucket with a small object, which is deleted afterwards.

    Raises:
        ConfigError: it has no conditional writes, or does not show what was written last.
        StoreError: it cannot be reached or written.
    """
    name = f"work/probe-{os.urandom(8).hex()}"
    try:
        missing = _missing(bucket, name)
    except StoreError as error:
        if "NotImplemented" not in str(error) and "not implemented" not in str(error):
            raise  # the object may stay: the first error says more than that of deleting it
        missing = f"has no conditional writes ({error})"
    bucket.delete(name)
    if missing is not None:
        raise ConfigError(
            f"the store of output.dir {bucket.uri} {missing}; use one that honours If-None-Match and If-Match when "
            "objects are put (Amazon S3 does), or choose a folder on a shared file system"
        )


def _missing(bucket: Bucket, name: str) -> str | None:
    """Return what the store cannot do, None if it can do all."""
    try:
        first = bucket.create(name, b"first")
    except RefusedError:
        return "refuses to create an object that is not there: it does not know If-None-Match"
    if first is None:
        return "says that a new name is taken"
    if bucket.create(name, b"second") is not None:
        return (
            "lets two processes create one name: it ignores If-None-Match (radosgw does so in a bucket with versions)"
        )
    try:
        second = bucket.replace(name, b"third", first)
    except RefusedError:
        return "refuses to replace an object that nobody has changed: it does not know If-Match"
    if second is None or bucket.replace(name, b"fourth", first) is not None:
        return "lets one process write over another's change: it ignores If-Match"
    found = bucket.read(name)
    if found is None or (found.data, found.version) != (b"third", second):
        return "does not show what was written to it last"
    return None
