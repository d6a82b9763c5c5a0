"""Files that are named by URI: in object stores and on other file systems.

pyarrow's own file systems serve s3, gs, hdfs and abfs; fsspec's serve other schemes whose libraries are installed.
Credentials come from where these libraries look for them, never from the job.

For s3, obstore (see bucket.py) could serve inputs, too. But it cannot list a folder below which one key has an empty
part, dots for a part, or a control character, it lists markers of empty folders as objects, and it reads no profiles:
profiles.py finds the keys in one, but not those of a credential_process. Its fsspec interface takes twice the requests.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pyarrow import fs

from batchinfer.config import S3Config
from batchinfer.records import BatchinferError, ConfigError, StoreError

CONNECT_S = 5.0
REQUEST_S = 15.0  # without a byte
ATTEMPTS = 3  # per request, with growing pauses
GCS_RETRY_S = 30
MOST_LETTERS = 300  # of what a library says
ARROW_SCHEMES = {"abfs", "abfss", "hdfs", "viewfs"}
WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Place:
    """The file system and the path of a URI."""

    files: fs.FileSystem
    path: str
    uri: str

    @property
    def is_whole_at_once(self) -> bool:
        """Whether a new object appears only when all of it is there."""
        return isinstance(self.files, (fs.S3FileSystem, fs.GcsFileSystem))

    def below(self, name: str) -> Place:
        """Return the location of a file in this folder."""
        path = f"{self.path.rstrip('/')}/{name}" if self.path else name
        return Place(self.files, path, _below(self.uri, name))


def locate(uri: str, s3: S3Config) -> Place:
    """Find the file system behind a URI; nothing is asked of it yet, but which region an S3 bucket is in.

    Raises:
        ConfigError: the URI has no bucket, or an empty name in its path, or nothing that is installed knows its scheme.
        StoreError: the bucket's region cannot be found out.
    """
    scheme, _, path = uri.partition("://")
    if scheme == "s3" and "::" not in uri:
        bucket = path.partition("/")[0]
        if not bucket or WILDCARDS.search(bucket):
            raise ConfigError(f"{uri} names no bucket; write s3://bucket/folder")
        if "//" in path.rstrip("/"):
            raise ConfigError(f"{uri} has two slashes in a row, which names of files cannot have; correct the URI")
        with store_errors(f"find the bucket of {uri}"):
            return Place(_s3_files(bucket, s3), path.rstrip("/"), uri.rstrip("/"))
    try:
        if scheme == "gs":
            limit = timedelta(seconds=GCS_RETRY_S)
            return Place(fs.GcsFileSystem(retry_time_limit=limit), path.rstrip("/"), uri.rstrip("/"))
        if scheme in ARROW_SCHEMES:
            files, path = fs.FileSystem.from_uri(uri)
        else:
            files, path = _fsspec_files(uri)
    # whatever a library raises that is missing, of another version, or has no such host
    except Exception as error:
        raise ConfigError(f"cannot use {uri}: {reason_of(error)}; correct the URI, or install what serves it") from None
    return Place(files, path.rstrip("/") or path, uri if "::" in uri else uri.rstrip("/"))


def matching_objects(pattern: str, s3: S3Config) -> list[str]:
    """Return the URIs of the objects and folders that a URI matches; without wildcards, the URI itself if it exists.

    `**` matches any number of folders. URIs of folders end with a slash. A pattern with brackets is first
    looked up as a literal name.

    Raises:
        StoreError: the store does not answer, or refuses to.
    """
    head, folders, tail = _cut(pattern)
    while len(folders) > 1 and not folders[-1]:
        folders.pop()
    num_plain = next((i for i, part in enumerate(folders) if WILDCARDS.search(part)), None)
    if num_plain is None or "[" in pattern:
        place = locate(pattern, s3)
        with store_errors(f"read {pattern}"):
            kind = place.files.get_file_info(place.path).type
            if kind == fs.FileType.NotFound:
                _check_bucket(place)
        if num_plain is None or kind == fs.FileType.File:
            return {fs.FileType.File: [pattern], fs.FileType.Directory: [_below(place.uri, "")]}.get(kind, [])
    wanted = folders[num_plain:]
    base = locate(f"{head}{'/'.join(folders[:num_plain])}{tail}", s3)
    is_deep = len(wanted) > 1 or "**" in wanted
    with store_errors(f"list {base.uri}"):
        found = base.files.get_file_info(fs.FileSelector(base.path, recursive=is_deep))
    ends = {fs.FileType.File: "", fs.FileType.Directory: "/"}
    names = [(_name_below(base, info).rstrip("/"), ends[info.type]) for info in found if info.type in ends]
    return sorted(base.below(name + end).uri for name, end in names if _fits(name.split("/"), wanted))


def objects_below(uri: str, s3: S3Config) -> dict[str, str]:
    """Return the URIs of all objects below a folder, by their names relative to the folder.

    Raises:
        StoreError: the store does not answer, or refuses to.
    """
    base = locate(uri, s3)
    with store_errors(f"list {base.uri}"):
        found = base.files.get_file_info(fs.FileSelector(base.path, recursive=True))
    names = [_name_below(base, info) for info in found if info.type == fs.FileType.File]
    return {name: base.below(name).uri for name in names}


class StoreFile(io.RawIOBase):
    """An object, open for reading. Arrow passes a StoreError on unchanged, so its faults never look like damage.

    Raises:
        StoreError: the store does not answer or has no such object.
    """

    def __init__(self, uri: str, s3: S3Config) -> None:
        super().__init__()
        try:
            self._place = place = locate(uri, s3)  # a file system of an archive closes it when the last reference goes
            with store_errors(f"read {uri}"):
                self._source = place.files.open_input_file(place.path)
                self.size_bytes = self._source.size()
                self.version = _version(place, self._source)
        except BatchinferError:
            super().close()  # else Python closes, aloud, what was never opened
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with store_errors(f"read {self._place.uri}"):
            return bytes(self._source.read(None if size < 0 else size))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._source.seek(offset, whence))

    def tell(self) -> int:
        return int(self._source.tell())

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Convert the errors of a store to a StoreError: "cannot <what>: <reason>; <remedy>"."""
    try:
        yield
    except BatchinferError:
        raise
    except FileNotFoundError:
        raise StoreError(f"cannot {what}: it is not there (any more)") from None
    # file systems of fsspec raise what their libraries raise
    except Exception as error:
        raise StoreError(
            f"cannot {what}: {reason_of(error)}; check the name, the credentials, s3.endpoint and the network"
        ) from None


def reason_of(error: BaseException) -> str:
    """Return the first line of an error; for Amazon's library the error's name and message."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    found = re.search(r"AWS Error (\w+) during (\w+) operation: (.*)", text)
    if found is None:
        return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"
    certificate = re.search(r"curlCode: 60\b.*verify result: (.*?)(?: \(\d+\))?$", found[3])
    if certificate is not None:
        return untrusted(certificate[1])
    return f"{found[1]}: {re.sub(r'[. ]*[(]Request ID.*', '', found[3])}"


def untrusted(why: str) -> str:
    """Return the sentence for a rejected server certificate. All S3 libraries in use read SSL_CERT_FILE."""
    return f"the server's certificate is not accepted ({why}); SSL_CERT_FILE may name the file of its authority"


# ---- file systems


def _s3_files(bucket: str, s3: S3Config) -> fs.S3FileSystem:
    environment = os.environ
    region = s3.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    endpoint = s3_endpoint(s3)
    return _s3_connection(bucket if endpoint is None and region is None else None, endpoint, region, s3.anonymous)


def s3_endpoint(s3: S3Config) -> str | None:
    """Return the URL of the S3 service, None for Amazon's."""
    return s3.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def s3_region(bucket: str, s3: S3Config) -> str:
    """Return the region of a bucket; ask Amazon if no setting names it.

    Raises:
        StoreError: Amazon does not know the bucket, or does not answer.
    """
    said = s3.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if said is not None or s3_endpoint(s3) is not None:
        return said or "us-east-1"  # other services take any
    with store_errors(f"find the bucket {bucket}"):
        return str(fs.resolve_s3_region(bucket))


@lru_cache(maxsize=64)
def _s3_connection(bucket: str | None, endpoint: str | None, region: str | None, anonymous: bool) -> fs.S3FileSystem:
    """Return the file system for these settings, with one connection pool; ask Amazon for the region of `bucket`."""
    options: dict[str, Any] = {}
    if endpoint is not None:
        scheme, _, host = endpoint.rpartition("://")
        options |= {"endpoint_override": host.rstrip("/"), "scheme": scheme or "https"}
        # else Amazon's library sends a checksum behind the body and no length before it, which Ceph's radosgw wants
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    return fs.S3FileSystem(
        region=fs.resolve_s3_region(bucket) if bucket is not None else region,
        anonymous=anonymous,
        connect_timeout=CONNECT_S,
        request_timeout=REQUEST_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,
        **options,
    )


def _check_bucket(place: Place) -> None:
    """Raise StoreError if a place is in an S3 bucket that does not exist; one that may not be asked for passes."""
    bucket = place.path.partition("/")[0]
    if not isinstance(place.files, fs.S3FileSystem):
        return
    with suppress(OSError):
        if place.files.get_file_info(bucket).type == fs.FileType.NotFound:
            raise StoreError(f"there is no bucket {bucket}, which {place.uri} names; check the name and s3.endpoint")


def _fsspec_files(uri: str) -> tuple[fs.FileSystem, str]:
    from fsspec.core import url_to_fs

    files, path = url_to_fs(uri)
    return fs.PyFileSystem(fs.FSSpecHandler(files)), path


def _version(place: Place, source: pa.NativeFile) -> str:
    """Return the ETag or time of an object, which changes when it is replaced; "" if the store reports neither."""
    tag = (source.metadata() or {}).get("ETag")
    if tag is not None:
        return tag.decode() if isinstance(tag, bytes) else str(tag)
    written = place.files.get_file_info(place.path).mtime_ns
    return "" if written is None else str(written)


# ---- URIs


def _cut(uri: str) -> tuple[str, list[str], str]:
    """Return a URI's scheme, the names in its path, and the archive behind `::`."""
    path, chain, archive = uri.partition("::")
    scheme, _, path = path.partition("://")
    return f"{scheme}://", path.split("/"), f"{chain}{archive}"


def _name_below(base: Place, info: fs.FileInfo) -> str:
    """Return a listed object's name in the folder; it begins with a slash if the key has two there."""
    return info.path[len(base.path) :].removeprefix("/")


def _below(uri: str, name: str) -> str:
    head, folders, tail = _cut(uri)
    folder = "/".join(folders).rstrip("/")
    return f"{head}{folder}/{name}{tail}" if folder else f"{head}{name}{tail}"


def _fits(names: list[str], wanted: list[str]) -> bool:
    """Return whether a path matches a glob, both split at slashes; as in a shell, wildcards match no leading dot."""
    if not wanted:
        return not names
    if wanted[0] == "**":
        deeper = bool(names) and not names[0].startswith(".") and _fits(names[1:], wanted)
        return deeper or _fits(names, wanted[1:])
    if not names or (names[0].startswith(".") and not wanted[0].startswith(".")):
        return False
    return fnmatchcase(names[0], wanted[0]) and _fits(names[1:], wanted[1:])
