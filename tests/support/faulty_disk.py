"""Jobs on a disk that fails at a chosen operation: what follows must be the same outputs, or a sentence that helps."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.damage import flip_bit
from support.jobs import batchinfer, output_bytes, write_job, write_questions

SOURCE = Path(__file__).with_suffix(".c")
# kill: one process ends; cut: all end, and what was not synced is gone; flip: as kill, and a bit of the file is another
DEEDS = ("kill", "cut", "EIO", "ENOSPC", "flip")
MOST_COMMANDS = 4  # that sentences may ask for, one after the other


@dataclass(frozen=True)
class FaultyDisk:
    """The preloaded library, and a job that was run on a good disk."""

    library: Path
    job: Path
    expected: dict[str, bytes]  # its outputs
    num_operations: int  # that running it takes


@dataclass(frozen=True)
class _Fault:
    deed: str
    at: int
    folder: Path  # for the library's own files

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    def environment(self, library: Path, root: Path) -> dict[str, str]:
        (self.folder / "kept").mkdir(parents=True)
        (self.folder / "count").write_bytes(bytes(8))
        return os.environ | {
            "LD_PRELOAD": str(library),
            "FAULTY_ROOT": str(root),
            "FAULTY_COUNT": str(self.folder / "count"),
            "FAULTY_KEPT": str(self.folder / "kept"),
            "FAULTY_JOURNAL": str(self.journal),
            "FAULTY_AT": str(self.at),
            "FAULTY_DEED": "kill" if self.deed == "flip" else self.deed,
        }

    def count(self) -> int:
        return int.from_bytes((self.folder / "count").read_bytes(), sys.byteorder)


def make_faulty_disk(folder: Path) -> FaultyDisk:
    """Compile the library, run the job once and count what it does to the disk."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NOT TESTED: a failing disk needs a C compiler (cc, gcc or clang), and there is none here")
    library = folder / "faulty_disk.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", SOURCE, "-o", library, "-ldl"], check=True)
    write_questions(folder / "prompts", (5, 4))
    job = write_job(folder, sampling={"max_tokens": 3}, cluster={"commit_seconds": 0.05, "decode_requests": 3})
    calm = _Fault("kill", 0, folder / "calm")
    ended = _run(job, folder / "run", calm.environment(library, folder / "run"))
    assert ended.returncode == 0, ended.stderr
    return FaultyDisk(library, job, output_bytes(folder / "run"), calm.count())


def disturb(disk: FaultyDisk, folder: Path, deed: str, at: int) -> str:
    """Run the job with a fault at one operation, then again on a good disk, with what its sentences ask for.

    Raises:
        AssertionError: a traceback was printed, outputs differ, or nothing helped.
    """
    run = folder / "run"
    fault = _Fault(deed, at, folder)
    ended = _run(disk.job, run, fault.environment(disk.library, run))
    if ended.returncode >= 0:
        _expect_no_traceback(ended.stderr)
    lines = [line.split("\t") for line in fault.journal.read_text(errors="surrogateescape").splitlines()]
    if deed == "cut":
        lose_unsynced(lines, keep=run)
    if deed == "flip":
        touched = [Path(line[1]) for line in lines if Path(line[1]).is_file() and Path(line[1]).stat().st_size]
        if touched:
            flip_bit(touched[-1], random.Random(at))
    said = ended.stderr.strip().splitlines()[-1:] if ended.returncode > 0 else []
    story = [f"{deed} at {at}: {' '.join(lines[-1][:2]) if lines else ''}, exit {ended.returncode}", *said]
    for _ in range(MOST_COMMANDS):
        again = batchinfer("run", disk.job, "--set", f"output.dir={run}")
        _expect_no_traceback(again.err)
        if again.code == 0:
            assert output_bytes(run) == disk.expected
            return "; ".join(story)
        story.append(again.err.strip().splitlines()[-1])
        _obey(story[-1], disk.job, run)
    raise AssertionError("\n".join(story))


def lose_unsynced(lines: Sequence[Sequence[str]], *, keep: Path) -> None:
    """Simulate a power cut: lose contents that were not synced, and names in folders that were not.

    Args:
        lines: of the journal, split.
        keep: a folder whose own name is not lost.
    """
    synced: dict[str, int] = {}  # bytes of files that were written
    dirty: set[str] = set()
    names: list[tuple[str, Sequence[str]]] = []  # (folder whose sync makes it last, line)
    for line in lines:
        what, path = line[0], line[1]
        if what == "write":
            dirty.add(path)
        elif what == "sync":
            dirty.discard(path)
            synced[path] = int(line[2])
        elif what == "sync folder":
            names = [(folder, other) for folder, other in names if folder != path]
        else:
            target = line[2] if what == "rename" else path
            if what == "rename":
                for known in [name for name in {*dirty, *synced} if name == path or name.startswith(path + "/")]:
                    moved = target + known[len(path) :]
                    if known in dirty:
                        dirty.remove(known)
                        dirty.add(moved)
                    if known in synced:
                        synced[moved] = synced.pop(known)
            if target != str(keep):
                names.append((os.path.dirname(target), line))
    for path in dirty:
        if os.path.isfile(path):
            os.truncate(path, min(synced.get(path, 0), os.path.getsize(path)))
    for _, line in reversed(names):
        _undo(line)


def _undo(line: Sequence[str]) -> None:
    what, path = line[0], Path(line[1])
    if what == "create" and path.is_dir():
        shutil.rmtree(path)
    elif what == "create":
        path.unlink(missing_ok=True)
    elif not path.parent.is_dir():  # what was in a folder that is gone is gone
        return
    elif what == "remove folder":
        path.mkdir(exist_ok=True)
    elif what == "remove" and line[2]:
        os.link(line[2], path)
    elif what == "rename" and os.path.exists(line[2]):
        os.rename(line[2], path)
        if line[3]:
            os.link(line[3], line[2])


def _run(job: Path, run: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = "from batchinfer.program import program; program()"
    return subprocess.run(
        [sys.executable, "-c", command, "run", job, "--set", f"output.dir={run}"],
        env=environment,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=300,
        check=False,
    )


def _obey(sentence: str, job: Path, run: Path) -> None:
    """Do what an error asks for."""
    assert sentence.startswith("error: "), sentence
    if "plan --again" in sentence:
        batchinfer("plan", "--again", job, "--set", f"output.dir={run}")
    elif "delete it" in sentence:
        found = re.search(r"error: (\S+) is damaged", sentence)
        assert found is not None, sentence
        Path(found[1]).unlink()
    else:
        assert "batchinfer work" in sentence, sentence


def _expect_no_traceback(text: str) -> None:
    assert "Traceback" not in text, text
