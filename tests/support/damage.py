"""Damage to the files of a computed run, after which the outputs must be the same, or an error must name the remedy."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from support.faults import plan_units
from support.jobs import Ended, batchinfer, output_bytes, write_job, write_questions

TWO_SHARDS = (9, 4)


def make_computed_run(folder: Path) -> Path:
    """A run of a small job with several units and result files each, all of them done, nothing finished yet."""
    write_questions(folder / "prompts", TWO_SHARDS)
    job = write_job(folder, sampling={"max_tokens": 4}, cluster={"commit_seconds": 0.01, "decode_requests": 2})
    run = plan_units(job, folder / "run")
    assert batchinfer("work", run).code == 0
    return run


def make_computed_run_with_outputs(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """See `make_computed_run`; with the outputs that it has when nothing is damaged."""
    run = make_computed_run(folder)
    calm = folder / "calm"
    shutil.copytree(run, calm)
    assert batchinfer("finish", calm).code == 0
    return run, output_bytes(calm)


def files_of(run: Path) -> list[Path]:
    """Everything that the outputs of a run depend on; not its statistics, and not its lock."""
    folders = ("tokens", "plan", "units", "done")
    files = [path for folder in folders for path in (run / folder).rglob("*") if path.is_file()]
    return sorted([*files, run / "run.json", run / "job.toml"])


def flip_bit(path: Path, rng: random.Random, _: list[Path] | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random, _: list[Path] | None = None) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def delete(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.unlink()


def zero(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path, rng: random.Random, files: list[Path]) -> None:
    """Exchange a file with another one of its kind; alone, it stays."""
    others = [other for other in files if other != path and other.suffix == path.suffix]
    if others:
        other = rng.choice(others)
        content = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)


Kind = Callable[[Path, random.Random, list[Path]], None]  # damages a file, which is one of these
KINDS: tuple[Kind, ...] = (flip_bit, truncate, delete, zero, swap)


def damaged_copy(run: Path, target: Path, number: int, *, kind: Kind) -> str:
    """A copy of a run with damage in it; the same number does the same damage. Says which file."""
    rng = random.Random(f"{kind.__name__} {number}")
    shutil.copytree(run, target)
    files = files_of(target)
    path = rng.choice(files)
    kind(path, rng, files)
    return path.relative_to(target).as_posix()


def expect_equal_or_named(run: Path, expected: dict[str, bytes], *, repair: bool) -> str:
    """Finish a damaged run: 'equal', or 'named' and, with `repair`, equal after the commands that it named.

    Raises:
        AssertionError: outputs differ, a traceback was printed, or the commands did not repair it.
    """
    ended = batchinfer("finish", run)
    if ended.code == 0:
        assert output_bytes(run) == expected
        return "equal"
    _expect_sentence(ended)
    if repair:
        job = run.parent / "job.toml"
        if "batchinfer plan" in ended.err or str(run / "job.toml") in ended.err:
            assert plan_units(job, run, "--again") == run
        for _ in range(2):  # what else is damaged is found when the first damage is repaired
            worked = batchinfer("work", run)
            assert worked.code == 0, worked.err
            ended = batchinfer("finish", run)
            if ended.code == 0:
                break
        assert ended.code == 0, ended.err
        assert output_bytes(run) == expected
    return "named"


def _expect_sentence(ended: Ended) -> None:
    assert "Traceback" not in ended.err, ended.err
    assert ended.err.count("error: ") == 1, ended.err
    assert ended.code in (1, 2), ended
