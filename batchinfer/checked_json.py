"""JSON documents that hold their own checksum, so that damage is found when they are read."""

import json
from pathlib import Path
from typing import Any

import xxhash

from batchinfer.records import DamagedFileError
from batchinfer.sanitize import error_text
from batchinfer.whole_files import publish_text

CHECKSUM = "checksum"  # key of a document's own checksum


def publish_json(target: Path, value: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write a JSON document with its own checksum atomically; `mode` as in `published`."""
    publish_text(target, json_text(value), mode=mode)


def json_text(value: dict[str, Any]) -> str:
    """Return a JSON document with its own checksum, as `read_json` expects it."""
    return json.dumps({**value, CHECKSUM: _checksum(value)}, indent=1, ensure_ascii=False) + "\n"


def read_json(path: Path, *needs: str, **remedy: str) -> dict[str, Any]:
    """Read a JSON document that `publish_json` wrote; accept one without a checksum, as earlier versions wrote it.

    Args:
        needs: required keys; a document without them is another one.
        remedy: of DamagedFileError.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error), **remedy) from None
    return parse_json(data, path, *needs, **remedy)


def parse_json(data: bytes, path: Path | str, *needs: str, **remedy: str) -> dict[str, Any]:
    """Parse and check the bytes of such a document, called `path` in messages.

    Args:
        needs, remedy: as for `read_json`.

    Raises:
        DamagedFileError: the document is damaged.
    """
    path = Path(path)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, error_text(error), **remedy) from None
    if not isinstance(value, dict):
        raise DamagedFileError(path, "it is not a JSON object", **remedy)
    checksum = value.pop(CHECKSUM, None)
    if checksum not in (None, _checksum(value)) or (checksum is None and _has_renamed_checksum(value)):
        raise DamagedFileError(path, "its checksum does not match its content", **remedy)
    if not value.keys() >= set(needs):
        raise DamagedFileError(path, "it is another document", **remedy)
    return value


def _has_renamed_checksum(value: dict[str, Any]) -> bool:
    """Return whether a document without a checksum key has a checksum under a damaged key: `json_text` puts it last."""
    if not value:
        return False
    *keys, last = value
    return bool(value[last] == _checksum({key: value[key] for key in keys}))


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
