"""Two ranks on one GPU: jobs of real processes that exchange rows through the host's memory, compared with one rank's.

    python tests/gpu/ranks.py [--out FILE] [--scratch FOLDER] [--minutes M]
    python tests/gpu/ranks.py --rehearse     on the CPU, a tiny model, plain PyTorch; rows are staged as a GPU's are

A checkpoint of GLM-4.7-Flash's widths and eight layers with random weights (11 GB) is made. Parts, in this order; FILE
keeps those that are done:

    one rank             200 prompts on a rank alone
    two ranks            experts spread over two ranks, two redundant ones, two micro-batches in turn
    prefill and decode   one rank each, KV goes from one to the other
    a rank dies          as two ranks; one kills itself in the middle of an exchange, and its group starts again

All answers must be those of one rank, to the byte. Exit codes as of job.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import job
import torch
from accelerator import Accelerator, rehearse, unusable, why_no_hopper
from job import FAILED, OK, ROOT, UNFINISHED, UNUSABLE, NotDoneError, Runs, Sizes
from supervised import read_record, write_line

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE, DIES = "one rank", "a rank dies"
TWO = {"exchange": "shared", "prefill_ranks": 2, "overlap": True, "redundant_experts": 2}
PARTS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "two ranks": TWO,
    "prefill and decode": {"exchange": "shared", "mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1},
    DIES: TWO,
}
_DYING = (1, 40)  # the rank, and the number of exchanges that it makes before
_FIGURES = ("wall_s", "tokens_per_s", "hidden_comm_share", "wasted_tokens", "recomputed_tokens")


def _sizes(*, is_rehearsal: bool) -> Sizes:
    if is_rehearsal:
        return replace(job._sizes(is_rehearsal=True), num_prompts=12)
    shape = job._sizes(is_rehearsal=False).shape | {"num_hidden_layers": 8}
    return Sizes(shape, 200, (100, 800), (30, 120), 4, (64, 512))


@contextmanager
def _site(folder: Path, part: str, *, is_rehearsal: bool) -> Iterator[None]:
    """Have rank processes stage rows on a CPU, or one of them die."""
    from support.staged_ranks import write_site

    if not is_rehearsal and part != DIES:
        yield
        return
    before = os.environ.get("PYTHONPATH")
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), before]))
    try:
        os.environ["PYTHONPATH"] = write_site(folder, dies=_DYING if part == DIES else None)
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _do(part: str, runs: Runs) -> dict[str, Any]:
    """Run one part and compare it with one rank; return its line of the file."""
    from job_figures import differing_rows

    said, folder, site = runs.make_model(), part.replace(" ", "-"), runs.folder / "site"
    if said:
        print(said, flush=True)
    with _site(site, part, is_rehearsal=runs.is_rehearsal):
        report = runs.run(folder, "all", **PARTS[part])["report"]
    figures = {name: report.get(name) for name in _FIGURES}
    text, failure = f"{part}: " + ", ".join(f"{name} {_short(value)}" for name, value in figures.items()), ""
    if part == DIES and not (site / "died").exists():
        failure = "no rank has died"
    if part != ALONE:
        num_rows, differing = differing_rows(runs.folder / ALONE.replace(" ", "-"), runs.folder / folder)
        text += f"\n  {num_rows - len(differing):,} of {num_rows:,} answers are those of one rank, to the byte"
        if num_rows != runs.sizes.num_prompts:
            failure = f"{num_rows} rows could be compared"
        elif differing:
            failure = f"{len(differing)} answers differ, of rows {', '.join(map(str, differing[:10]))}"
    return {"text": text, "failure": failure, "figures": figures}


def _short(value: Any) -> str:
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def do_parts(path: Path, runs: Runs, accelerator: Accelerator) -> int:
    """Do what the file lacks, and say it; return the exit code."""
    machine, record, code = accelerator.describe(), read_record(path), OK
    if record.header is None:
        write_line(path, machine=machine)
    elif record.header["machine"] != machine:
        print(f"{path} has results of another machine or of other versions; name another file.", file=sys.stderr)
        return UNUSABLE
    left = record.left(PARTS)
    if left and not (runs.folder / ALONE.replace(" ", "-")).is_dir():
        left = [part for part in PARTS if part in left or part == ALONE]  # its answers are gone
    for part in PARTS:
        if part in left:
            try:
                row = _do(part, runs)
            except TimeoutError:
                print(f"{part}: time was up; it begins again from its start", file=sys.stderr)
                return UNFINISHED if code == OK else code
            except Exception as error:  # the other parts go on
                row = {"text": part, "failure": f"{type(error).__name__}: {error}"}
            write_line(path, done=part, row=row)
        else:
            row = record.done[part]["row"]
        print(row["text"], flush=True)
        if row["failure"]:
            print(f"{part}: FAILED {row['failure']}", flush=True)
            code = FAILED
    return code


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    start_s = time.monotonic()
    parser = argparse.ArgumentParser(description="Run jobs with two ranks on one GPU.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, a tiny model, plain PyTorch")
    parser.add_argument("--scratch", help="folder for model and runs; unset: memory, then disk, where there is room")
    parser.add_argument("--out", type=Path, help="JSON lines as parts are done; what the file has is not done again")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command with --out goes on")
    options = parser.parse_args(arguments)
    if options.rehearse:
        rehearse()
    elif (reason := why_no_hopper()) is not None:
        print(unusable(reason), file=sys.stderr)
        return UNUSABLE
    accelerator = Accelerator(torch.device("cpu" if options.rehearse else "cuda"))
    end_s = start_s + (60 * options.minutes if options.minutes else float(2**20))
    with tempfile.TemporaryDirectory() as temporary:
        try:
            scratch = job._scratch(options, Path(temporary), num_bytes=12 * 10**9)
        except NotDoneError as error:
            print(f"{error}.", file=sys.stderr)
            return UNUSABLE
        scratch = scratch.with_name("batchinfer-ranks") if options.scratch is None else scratch
        scratch.mkdir(parents=True, exist_ok=True)
        sizes = _sizes(is_rehearsal=options.rehearse)
        runs = Runs(scratch, sizes, fp8=False, is_rehearsal=options.rehearse, end_s=end_s)
        code = do_parts(options.out or Path(temporary) / "ranks.jsonl", runs, accelerator)
        if code == OK:
            shutil.rmtree(scratch)
        else:
            print(f"model and runs are in {scratch}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
