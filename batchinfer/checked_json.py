"""JSON documents with a checksum of themselves, so that damage is found when they are read."""

import json
from pathlib import Path
from typing import Any

import xxhash

from batchinfer.records import DamagedFileError
from batchinfer.sanitize import words_of
from batchinfer.whole_files import publish_text

CHECKSUM = "checksum"  # key of a document's own checksum


def publish_json(target: Path, value: dict[str, Any], *, mode: int = 0o666) -> None:
    """Write a JSON document with a checksum of itself atomically; `mode` as in `published`."""
    publish_text(target, json_text(value), mode=mode)


def json_text(value: dict[str, Any]) -> str:
    """A JSON document with a checksum of itself, as `read_json` wants it."""
    return json.dumps({**value, CHECKSUM: _checksum(value)}, indent=1, ensure_ascii=False) + "\n"


def read_json(path: Path, *needs: str, **remedy: str) -> dict[str, Any]:
    """Read a JSON document that `publish_json` wrote; one without a checksum, as earlier versions wrote, is believed.

    Args:
        needs: keys without which it is another document.
        remedy: of DamagedFileError.

    Raises:
        DamagedFileError: the file is missing or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(path, error.strerror or str(error), **remedy) from None
    return document_of(data, path, *needs, **remedy)


def document_of(data: bytes, path: Path | str, *needs: str, **remedy: str) -> dict[str, Any]:
    """The same of bytes that were read from somewhere, called `path` in messages."""
    path = Path(path)
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(path, words_of(error), **remedy) from None
    if not isinstance(value, dict):
        raise DamagedFileError(path, "it is not a JSON object", **remedy)
    checksum = value.pop(CHECKSUM, None)
    if checksum not in (None, _checksum(value)) or (checksum is None and _has_renamed_checksum(value)):
        raise DamagedFileError(path, "its checksum does not fit what it says", **remedy)
    if not value.keys() >= set(needs):
        raise DamagedFileError(path, "it is another document", **remedy)
    return value


def _has_renamed_checksum(value: dict[str, Any]) -> bool:
    """Whether a document without a checksum had one, whose key is damaged: `json_text` puts it last."""
    if not value:
        return False
    *keys, last = value
    return bool(value[last] == _checksum({key: value[key] for key in keys}))


def _checksum(value: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
