"""A folder in an S3-compatible object store, with conditional writes in place of a disk's links and renames.

If-None-Match creates an object unless it exists. If-Match replaces an object unless another process has replaced it. A
write whose response is lost may still have succeeded: after each refusal, and after any error that leaves this open,
the object is read back and compared with the data. So the data of a conditional write must differ from all other
writes of the same name, by a token or a counter.

ETags are compared, never parsed. HTTP wants them in quotes, but Ceph's radosgw takes them in If-Match without quotes
only: if one form is refused, the other is tried.

obstore's own retries are off: after a first try that won the race, it would report the refused second try as a loss.
"""

from __future__ import annotations

import collections
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from batchinfer.config import S3Config
from batchinfer.data.profiles import profile_keys
from batchinfer.data.stores import CONNECT_S, REQUEST_S, reason_of, s3_endpoint, s3_region, untrusted
from batchinfer.records import ConfigError, StoreError

ATTEMPTS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two of them, drawn by chance up to twice the last
CHUNK_BYTES = 16 << 20
WHOLE_S = 600.0  # of a request with all its bytes
_FINAL = r"\b(400 Bad Request|501 Not Implemented|NotImplemented|InvalidCertificate)\b"  # in errors that no try mends

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Found:
    """Content of an object, and its version (ETag), which `replace` takes."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing, which may be older than the object."""

    name: str  # below the folder
    num_bytes: int
    written_s: float  # Unix time by the store's clock
    version: str


class RefusedError(StoreError):
    """Error: each try of a write was refused although its condition held."""


class Bucket:
    """The objects below a URI such as s3://bucket/folder; names count from there.

    The constructor sends a request only to find the region of a bucket at Amazon.

    Args:
        attempts: most tries of a request.

    Raises:
        ConfigError: the URI names no bucket, or obstore is not installed.
        StoreError: from every method, if the store does not answer, refuses (RefusedError), or has no such bucket.
    """

    def __init__(self, uri: str, s3: S3Config, *, attempts: int = ATTEMPTS) -> None:
        self.uri, self._attempts = uri.rstrip("/"), attempts
        self._store = _connection(self.uri, s3, s3_endpoint(s3), CONNECT_S, REQUEST_S)
        self._is_quoted = True  # the form of ETags in If-Match
        self.requests: collections.Counter[str] = collections.Counter()  # tries, by kind

    def read(self, name: str) -> Found | None:
        """Return an object, None if it does not exist."""
        return self._try("get", name, lambda: self._get(name))

    def create(self, name: str, data: bytes) -> str | None:
        """Create an object and return its version; return None if another process has created it."""
        return self._write(name, data, None)

    def replace(self, name: str, data: bytes, version: str) -> str | None:
        """Replace this version of an object and return the new version; return None if it was replaced or deleted."""
        return self._write(name, data, version)

    def put(self, name: str, source: bytes | Path) -> None:
        """Create or replace an object: for names with one writing process, or names that determine the content."""
        self._try("put", name, lambda: self._put(name, source, "overwrite"))

    def fetch(self, name: str, target: Path) -> bool:
        """Write an object's bytes to a file; return False if there is no such object."""

        def get() -> bool:
            try:
                got = _library().get(self._store, name)
                with open(target, "wb") as file:
                    for chunk in got.stream(min_chunk_size=CHUNK_BYTES):
                        file.write(chunk)
            except FileNotFoundError as error:
                self._refuse_no_bucket(error)
                return False
            return True

        return self._try("get", name, get)

    def objects(self, folder: str) -> Iterator[Listed]:
        """Yield all objects in a folder and below, by one request for each 1,000."""

        def pages() -> list[Any]:
            try:
                found = list(_library().list(self._store, f"{folder}/", chunk_size=1000))
            except FileNotFoundError as error:
                self._refuse_no_bucket(error)
                found = []
            self.requests["list"] += max(0, len(found) - 1)  # the first page is counted as a try
            return found

        for page in self._try("list", folder, pages):
            for item in page:
                yield Listed(item["path"], item["size"], item["last_modified"].timestamp(), str(item["e_tag"]))

    def names(self, folder: str = "") -> set[str]:
        """Return the names of objects and folders directly in a folder, by one request for each 1,000."""
        prefix = f"{folder}/" if folder else None
        found = self._try("list", folder, lambda: _library().list_with_delimiter(self._store, prefix))
        paths = [*found["common_prefixes"], *(item["path"] for item in found["objects"])]
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""

        def delete() -> None:
            try:
                _library().delete(self._store, name)
            except FileNotFoundError as error:
                self._refuse_no_bucket(error)

        self._try("delete", name, delete)

    def _write(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write an object if it has this version (None: if it does not exist); return its new version, else None."""
        errors = _library().exceptions

        def write() -> str | None:
            is_quoted = self._is_quoted
            try:
                return self._put(name, data, _condition(version, is_quoted=is_quoted))
            except (FileNotFoundError, errors.AlreadyExistsError, errors.PreconditionError) as error:
                self._refuse_no_bucket(error)  # 404 may also mean that the object to replace was deleted
                failure: Exception = _UnchangedError("it is refused although nobody else has written it")
                is_unmet = isinstance(error, errors.PreconditionError)
            except errors.BaseError as error:  # it may have succeeded; radosgw answers 500 to the loser of a race
                _raise_if_final(error)
                failure, is_unmet = error, False
            found = self._read_back(name)
            if found is not None and found.data == data:
                return found.version  # written by this try, or by an earlier one whose response was lost
            if (None if found is None else found.version) != version:
                return None  # written by another process
            if is_unmet:  # not S3's 409, which means that another write is under way
                self._is_quoted = not is_quoted
            raise failure

        return self._try("put", name, write)

    def _read_back(self, name: str) -> Found | None:
        self.requests["get"] += 1
        return self._get(name)  # an error here repeats the write

    def _get(self, name: str) -> Found | None:
        try:
            got = _library().get(self._store, name)
            return Found(bytes(got.bytes()), str(got.meta["e_tag"]))
        except FileNotFoundError as error:
            self._refuse_no_bucket(error)
            return None

    def _put(self, name: str, source: bytes | Path, mode: Any) -> str:
        written = _library().put(self._store, name, source, mode=mode, chunk_size=CHUNK_BYTES)
        return str(written["e_tag"])

    def _try(self, kind: str, name: str, call: Callable[[], Result]) -> Result:
        """Return the result of `call`; repeat it after an error that may be temporary.

        Args:
            kind: of the request: get, put, list or delete.
            name: of the object, for the error.

        Raises:
            StoreError: no try succeeded.
        """
        base = _library().exceptions.BaseError
        pause_s = FIRST_PAUSE_S
        for attempt in range(self._attempts):
            self.requests[kind] += 1
            try:
                return call()
            except (base, _UnchangedError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # an error of a local file
                if attempt == self._attempts - 1 or _is_final(error):
                    raise _failure(kind, f"{self.uri}/{name}", error) from None
            time.sleep(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _refuse_no_bucket(self, error: Exception) -> None:
        """Return None for a missing object; raise StoreError for a missing bucket."""
        if "NoSuchBucket" in str(error):
            bucket = self.uri.removeprefix("s3://").partition("/")[0]
            raise StoreError(
                f"there is no bucket {bucket} ({self.uri}); make it, or correct output.dir and s3.endpoint"
            )


class _UnchangedError(Exception):
    """Error: a write was refused, but no other process has written the object."""


def _condition(version: str | None, *, is_quoted: bool) -> Any:
    """Return the library's argument for `If-None-Match: *` or for `If-Match`."""
    if version is None:
        return "create"
    return {"e_tag": version if is_quoted else version.strip('"')}


# ---- the library


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise ConfigError(
            "a run folder in an object store (output.dir) needs obstore: pip install 'batchinfer[bucket]'"
        ) from None
    return obstore


@lru_cache(maxsize=64)
def _connection(uri: str, s3: S3Config, endpoint: str | None, connect_s: float, request_s: float) -> Any:
    name, _, prefix = uri.removeprefix("s3://").partition("/")
    if not name or not uri.startswith("s3://"):
        raise ConfigError(f"{uri} names no bucket; write s3://bucket/folder")
    library = _library()
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    options: dict[str, Any] = {"skip_signature": True} if s3.anonymous else profile_keys()
    if endpoint is not None:
        options["aws_endpoint_url_s3"] = endpoint.rstrip("/")  # this key overrides the environment
    return library.store.S3Store(
        name,
        prefix=prefix or None,
        region=s3_region(name, s3),
        client_options={
            "connect_timeout": f"{connect_s:g}s",
            "read_timeout": f"{request_s:g}s",
            "timeout": f"{WHOLE_S:g}s",
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 0},
        **options,
    )


def _failure(kind: str, uri: str, error: Exception) -> StoreError:
    doing = {"get": "read", "put": "write"}.get(kind, kind)
    kind_of_error = RefusedError if isinstance(error, _UnchangedError) else StoreError
    return kind_of_error(
        f"cannot {doing} {uri}: {_reason(error)}; check the bucket's name, the credentials, s3.endpoint and the network"
    )


def _is_final(error: Exception) -> bool:
    """Return whether another try would fail in the same way."""
    errors = _library().exceptions
    is_refused = isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError, errors.NotFoundError))
    return is_refused or re.search(_FINAL, str(error)) is not None


def _raise_if_final(error: Exception) -> None:
    if _is_final(error):
        raise error


def _reason(error: Exception) -> str:
    """Return the reason of an error, in the words of S3 if there are any."""
    text = str(error)
    code, words = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    if code is not None:
        return f"{code[1]}: {words[1].rstrip('. ')}" if words is not None and words[1] else code[1]
    if "169.254.169.254" in text or "security-credentials" in text:
        return "there are no credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a machine's role)"
    status = re.search(r"non-2xx status code: (\d+ [\w ]+)", text)
    return status[1].strip() if status is not None else _cause(text) or reason_of(error)


def _cause(text: str) -> str | None:
    """Return why a request could not be sent, by the debugging output in an error's text, else None."""
    certificate = re.search(r"InvalidCertificate\(\s*(\w+)", text)
    if certificate is not None:
        return untrusted(certificate[1])
    server, said = re.search(r"https?://[^/\s]+", text), re.findall(r'\b(?:message|error): "([^"]+)"', text)
    return f"{server[0]}: {said[-1]}" if server is not None and said else None
