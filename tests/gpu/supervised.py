"""Work done by a child process that may die: results are in a file, and a piece that kills the child is lost alone.

check.py and slice.py start themselves as the child. The file has one JSON document per line:

    {"machine": {…}, …}      the child's first line
    {"begun": KEY}           a piece of work, before it is done
    {"done": KEY, …}         and its result, with a digest of the sources that gave it
    {"note": TEXT}           any other message

A child that ends before its work is done is started again, without the piece in progress. An existing file is
continued: its results are kept, except failures with other sources than these.
"""

from __future__ import annotations

import functools
import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("batchinfer", "kernels", "tests/gpu")
RESTART = 17  # exit code of a child that asks to be started again: its GPU cannot be used any more
_LOOK_EVERY_S = 0.2


@dataclass
class Record:
    """The content of a file."""

    header: dict[str, Any] | None = None
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: str | None = None  # and neither done nor followed by another one
    notes: list[str] = field(default_factory=list)

    def left(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not done, or failed or were left out with other sources than these."""
        return [key for key in keys if key not in self.done or _may_be_mended(self.done[key])]


def _may_be_mended(result: dict[str, Any]) -> bool:
    has_failed = (
        "died" in result
        or "not_run" in result
        or bool(result.get("row", {}).get("failure"))
        or not result.get("figures", {}).get("is_finite", True)
    )
    return has_failed and result.get("sources") != sources()


@functools.cache
def sources() -> str:
    """A digest of all that can change what a piece of work gives."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def read_record(path: Path) -> Record:
    """A line that was cut off when its writer died is left out."""
    record = Record()
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if "machine" in line:
            record.header = record.header or line
        elif "note" in line:
            record.notes.append(line["note"])
        elif "begun" in line:
            record.begun = line["begun"]
        elif "done" in line:
            record.done[line["done"]] = line
            record.begun = None
    return record


def write_line(path: Path, **line: Any) -> None:
    """Add a line, behind the end of one that was cut off."""
    if "done" in line:
        line["sources"] = sources()
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def supervise(
    command: Sequence[str], keys: Sequence[str], path: Path, *, silent_s: float, end_s: float | None
) -> str | None:
    """Run the child again and again until the file has all of `keys`, or nothing more can be done.

    A piece of work at which the child dies gets the line {"done": KEY, "died": why}.

    Args:
        command: starts the child, which does what the file lacks.
        silent_s: a child that writes no line for so long hangs and is killed.
        end_s: time.monotonic() at which to stop; None: never.

    Returns:
        None when all is done, else why not.
    """
    while left := read_record(path).left(keys):
        num_lines = _num_lines(path)
        process = subprocess.Popen(command)
        try:
            why = _wait(process, path, silent_s, end_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if why == _TIME_IS_UP:
            return f"{why}: {len(read_record(path).left(left))} of {len(keys)} are not done"
        begun = read_record(path).begun
        if begun is not None:
            write_line(path, done=begun, died=why or _how_it_ended(process.returncode))
        elif _num_lines(path) == num_lines:
            return f"the process that does the work ends before it has begun ({_how_it_ended(process.returncode)})"
    return None


_TIME_IS_UP = "time is up"


def _wait(process: subprocess.Popen[bytes], path: Path, silent_s: float, end_s: float | None) -> str | None:
    """Until the process has ended (None), or must be ended."""
    num_lines, changed_s = _num_lines(path), time.monotonic()
    while process.poll() is None:
        time.sleep(_LOOK_EVERY_S)
        now_s = time.monotonic()
        if _num_lines(path) != num_lines:
            num_lines, changed_s = _num_lines(path), now_s
        if end_s is not None and now_s > end_s:
            return _TIME_IS_UP
        if now_s - changed_s > silent_s:
            return f"it said nothing for {silent_s:.0f} s and was killed"
    return None


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
