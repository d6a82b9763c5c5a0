"""Detection of a file's format by its first bytes, for error messages about files read in the wrong format."""

import csv

import msgspec

from batchinfer.config.model_folder import LFS_POINTER
from batchinfer.data.formats.lines import BYTE_ORDER_MARK

HEAD_BYTES = 64 << 10
_ADVICE = {
    "pointer": "it is a pointer of Git LFS, not the file itself: run `git lfs pull` in its folder",
    "parquet": 'it looks like Parquet: set input.format = "parquet"',
    "arrow": 'it looks like Arrow IPC: set input.format = "arrow"',
    "jsonl": 'it looks like JSON lines: set input.format = "jsonl", or name it *.jsonl',
    "csv": 'it looks like CSV: set input.format = "csv", or name it *.csv',
    "objects": "its objects go over several lines: write each on a line of its own (`jq -c .`), as *.jsonl",
    "array": "it looks like one JSON array: write each of its items on a line of its own (`jq -c '.[]'`), as *.jsonl",
}


def format_advice(head: bytes, taken_for: str) -> str:
    """Return the remedy for a file read in the wrong format, after a semicolon; "" if no other format is detected.

    Args:
        head: the file's first HEAD_BYTES, or all bytes of a smaller file.
        taken_for: the format in which the file was read.
    """
    found = _looks_like(head)
    if found is None or found == taken_for or (found == "objects" and taken_for != "jsonl"):
        return ""
    return f"; {_ADVICE[found]}"


def _looks_like(head: bytes) -> str | None:
    if head.startswith(LFS_POINTER):
        return "pointer"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    first, end, _ = text.partition(b"\n")
    is_whole = bool(end) or len(head) < HEAD_BYTES
    if text.startswith(b"{"):
        if not is_whole or _is_json(first):
            return "jsonl"
        return "objects" if first.strip() == b"{" else None
    if text.startswith(b"["):
        return "array"
    return "csv" if is_whole and _is_header(first) else None


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _is_header(line: bytes) -> bool:
    """Return whether a line names several columns as in CSV: in prose, blanks usually follow commas."""
    try:
        names = next(csv.reader([line.decode()], strict=True), [])
    except (UnicodeDecodeError, csv.Error):
        return False
    return len(names) > 1 and all(name and name == name.strip() and name.isprintable() for name in names)
