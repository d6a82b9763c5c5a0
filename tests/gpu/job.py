"""A whole job on one GPU: a checkpoint of GLM-4.7-Flash's exact shape is made, then `batchinfer run` on 2,000 prompts.

    python tests/gpu/job.py [--out FILE] [--scratch FOLDER] [--dtype bfloat16 | fp8] [--minutes M]
    python tests/gpu/job.py --rehearse     on the CPU, a tiny model of the same family, plain PyTorch, no times

Weights are random: bfloat16 on a card of 100 GiB or more (59.9 GB), else FP8 (30.6 GB). Parts, in this order; FILE
keeps those that are done, and the same command goes on with the others:

    limits       products and copies on this card
    first start  16 short prompts: what a first start compiles
    job          2,000 prompts of 200 to 2,000 tokens, 8 shared prefixes, answers of 50 to 400 tokens, as a user runs it
    other order  every second prompt in reverse order, with other batches; some steps are profiled. Its answers must be
                 those of the job, to the byte, where the engine says that rows are equal

Exit codes: 0 done, 1 a part failed or answers differ, 2 no such GPU or a wrong option, 3 time was up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerator import Accelerator, Limits, rehearse, unusable, why_no_hopper  # noqa: E402
from supervised import read_record, write_line  # noqa: E402

OK, FAILED, UNUSABLE, UNFINISHED = 0, 1, 2, 3
FIRST, JOB, ORDER = "first start", "job", "other order"
PARTS = ("limits", FIRST, JOB, ORDER)
_LARGE_CARD_BYTES = 100 * 2**30
_LEAST_S = 40.0  # a part is not begun with less time than this
_STOP_S = 8.0  # for a run to end after a signal; run.sh ends this script 10 seconds later
_SPARE_BYTES = 2 * 2**30  # of the scratch folder: runs


class NotDoneError(RuntimeError):
    """A part could not be done; the message says why."""


@dataclass(frozen=True)
class Sizes:
    """What the job is made of; ranges are in tokens."""

    shape: dict[str, Any]
    num_prompts: int = 2000
    prompt: tuple[int, int] = (200, 2000)
    answer: tuple[int, int] = (50, 400)
    num_prefixes: int = 8
    prefix: tuple[int, int] = (64, 1024)
    num_first: int = 16
    # of the other order: smaller steps of both kinds
    cluster: tuple[tuple[str, int], ...] = (("decode_requests", 160), ("prefill_tokens", 3000))
    # of each kind: how many steps go by, and how many are profiled then
    profiled: tuple[tuple[str, tuple[int, int]], ...] = (("prefill", (2, 6)), ("decode", (40, 24)))


def _sizes(*, is_rehearsal: bool) -> Sizes:
    from support.published_shapes import GLM_FLASH

    if not is_rehearsal:
        return Sizes(GLM_FLASH)
    widths = {"hidden_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "v_head_dim": 32}
    widths |= {"qk_rope_head_dim": 16, "moe_intermediate_size": 64, "intermediate_size": 128}
    counts = {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "num_hidden_layers": 3}
    tiny = GLM_FLASH | widths | counts | {"vocab_size": 2048, "max_position_embeddings": 512}
    return Sizes(
        tiny, 24, (20, 120), (4, 12), 2, (8, 64), 2, (("decode_requests", 5), ("prefill_tokens", 90)),
        (("prefill", (1, 2)), ("decode", (1, 2))),
    )  # fmt: skip


def write_inputs(folder: Path, sizes: Sizes, num_tokens: int) -> None:
    """Write the prompts of the three runs: `first`, `all`, and `reversed`, every second one in reverse order.

    Args:
        num_tokens: of the tokenizer; prompts are ids below it.
    """
    from support.jobs import write_shard

    random = np.random.default_rng(0)
    lengths = np.linspace(*sizes.prefix, sizes.num_prefixes, dtype=int)
    prefixes = [random.integers(0, num_tokens, length) for length in lengths]
    rows = []
    for number in range(sizes.num_prompts):
        prefix = prefixes[number % sizes.num_prefixes]
        length = max(int(random.integers(*sizes.prompt, endpoint=True)), len(prefix) + 1)
        own = random.integers(0, num_tokens, length - len(prefix))
        tokens = [*prefix.tolist(), *own.tolist()]
        rows.append((number, tokens, {"max_tokens": int(random.integers(*sizes.answer, endpoint=True))}))
    short = [(number, tokens[:100], {"max_tokens": 8}) for number, tokens, _ in rows[: sizes.num_first]]
    for name, chosen in (("first", short), ("all", rows), ("reversed", rows[::-2])):
        columns = dict(zip(("id", "ids", "sampling"), map(list, zip(*chosen, strict=True)), strict=True))
        write_shard(folder / name / "prompts.parquet", columns, row_group_size=1000)


class Runs:
    """The model and the runs in a scratch folder.

    Args:
        end_s: time.monotonic() at which a run is stopped.
    """

    def __init__(self, scratch: Path, sizes: Sizes, *, fp8: bool, is_rehearsal: bool, end_s: float) -> None:
        self.folder, self.sizes, self.fp8, self.is_rehearsal = scratch, sizes, fp8, is_rehearsal
        self._end_s = end_s

    @property
    def model(self) -> Path:
        """The checkpoint's folder."""
        return self.folder / ("model-fp8" if self.fp8 else "model-bfloat16")

    def make_model(self) -> str | None:
        """Write checkpoint and prompts if they are not there; return what to say about it."""
        from tokenizers import Tokenizer

        from bench.large_checkpoint import write_checkpoint

        if self.model.is_dir():
            return None
        start_s = time.monotonic()
        partial = self.model.with_name(self.model.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        num_bytes = write_checkpoint(partial, self.sizes.shape, fp8=self.fp8)
        tokenizer = Tokenizer.from_file(str(partial / "tokenizer.json"))
        write_inputs(self.folder, self.sizes, tokenizer.get_vocab_size())
        partial.rename(self.model)
        return f"{num_bytes / 1e9:.1f} GB of weights written in {time.monotonic() - start_s:.1f} s, {self.model}"

    def run(self, name: str, prompts: str, *, profile: Path | None = None, **cluster: Any) -> dict[str, Any]:
        """Run the job over these prompts from its start.

        Returns:
            started_s and wall_s of the command, and its report.

        Raises:
            NotDoneError: it ended with another code than 0, or time was up.
        """
        from support.jobs import write_job

        run = self.folder / name
        shutil.rmtree(run, ignore_errors=True)
        job = write_job(
            self.folder,
            name=f"{name}.toml",
            input={"files": [f"{prompts}/*.parquet"], "prompt": None, "token_ids": "ids", "sampling": "sampling"},
            output={"dir": name},
            model={"path": str(self.model), "dtype": "fp8" if self.fp8 else "bfloat16"},
            sampling={"max_tokens": 8, "ignore_eos": True, "temperature": 0.7, "top_p": 0.95, "seed": 1},
            cluster={"backend": "reference" if self.is_rehearsal else "auto", **cluster},
        )
        paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if profile is not None:
            settings = {"path": str(profile), "steps": dict(self.sizes.profiled), "rehearse": self.is_rehearsal}
            environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "in_ranks"), str(HERE), *paths])
            environment["BATCHINFER_STEP_PROFILE"] = json.dumps(settings)
        started_s = time.time()
        self._call(["run", str(job)], environment)
        wall_s = time.time() - started_s
        report = json.loads(self._call(["report", str(run), "--json"], environment))
        return {"started_s": started_s, "wall_s": wall_s, "report": report}

    def _call(self, arguments: list[str], environment: dict[str, str]) -> str:
        """Run a command of batchinfer; return its output."""
        left_s = self._end_s - time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "batchinfer", *arguments],
            env=environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=left_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_STOP_S)
            process.kill()
            raise TimeoutError from error
        if process.returncode:
            raise NotDoneError(f"batchinfer {arguments[0]} ended with code {process.returncode}: {err[-1500:]}")
        return out


def _do(part: str, runs: Runs, accelerator: Accelerator, limits: Limits | None) -> dict[str, Any]:
    """Do one part; return its figures."""
    from job_figures import describe, differing_rows, run_figures

    from batchinfer.model.config import load_model_config

    if part == "limits":
        return {} if accelerator.is_rehearsal else asdict(accelerator.limits())
    folder = {FIRST: "first-run", JOB: "job-run", ORDER: "order-run"}[part]
    profile = runs.folder / "profile.jsonl" if part == ORDER else None
    if profile is not None:
        profile.unlink(missing_ok=True)
    prompts = {FIRST: "first", JOB: "all", ORDER: "reversed"}[part]
    ran = runs.run(folder, prompts, profile=profile, **(dict(runs.sizes.cluster) if part == ORDER else {}))
    config = load_model_config(runs.model)
    times = {"started_s": ran["started_s"], "wall_s": ran["wall_s"]}
    figures = run_figures(runs.folder / folder, ran["report"], config, limits, fp8=runs.fp8, **times)
    if profile is not None:
        figures.profile = [json.loads(line) for line in profile.read_text().splitlines()] if profile.exists() else []
    text = describe(part, figures)
    failure = "" if profile is None or figures.profile else "no steps were profiled"
    if part == ORDER:
        num_rows, differing = differing_rows(runs.folder / "job-run", runs.folder / folder)
        text += f"\n  {num_rows - len(differing):,} of {num_rows:,} answers are those of the job, to the byte"
        if differing:
            text += f"; not those of rows {', '.join(map(str, differing[:10]))}"
        if num_rows != (runs.sizes.num_prompts + 1) // 2:
            failure = f"{num_rows} rows could be compared"
        elif differing and figures.bit_equal:
            failure = f"{len(differing)} answers differ, though rows are said to be equal"
    return {"text": text, "failure": failure, **asdict(figures)}


def do_parts(path: Path, runs: Runs, accelerator: Accelerator, end_s: float) -> int:
    """Do what the file lacks, and say it."""
    machine = accelerator.describe() | {"model": runs.model.name.replace("model-", "GLM-4.7-Flash's shape, ")}
    record = read_record(path)
    if record.header is None:
        write_line(path, machine=machine)
    elif record.header["machine"] != machine:
        print(f"{path} has results of another machine or of other versions; name another file.", file=sys.stderr)
        return UNUSABLE
    left = record.left(PARTS)
    if ORDER in left and not (runs.folder / "job-run").is_dir() and JOB not in left:
        left = [part for part in PARTS if part in left or part == JOB]  # its answers are gone
    code, limits = OK, None
    for part in PARTS:
        if part not in left:
            result = record.done[part]
        elif end_s - time.monotonic() < _LEAST_S:
            print(f"{part}: not begun, time is up", file=sys.stderr)
            return UNFINISHED if code == OK else code
        else:
            result = _result(part, runs, accelerator, limits)
            if result is None:
                print(f"{part}: time was up; it begins again from its start", file=sys.stderr)
                return UNFINISHED if code == OK else code
            write_line(path, done=part, **result)
        row = result["row"]
        if part == "limits":
            limits = Limits(**row["values"]) if row.get("values") else None
        print(f"{part}: FAILED {row['failure']}" if row["failure"] else row.get("text", part), flush=True)
        if row["failure"]:
            code = FAILED
            if row.get("text"):
                print(row["text"], flush=True)
    return code


def _result(part: str, runs: Runs, accelerator: Accelerator, limits: Limits | None) -> dict[str, Any] | None:
    """Return the line of a part in the file; None: time was up."""
    try:
        if part != "limits" and (said := runs.make_model()):
            print(said, flush=True)
        values = _do(part, runs, accelerator, limits)
    except TimeoutError:
        return None
    except Exception as error:  # the other parts go on
        return {"row": {"failure": f"{type(error).__name__}: {error}"}}
    finally:
        accelerator.release()
    if part == "limits":
        text = ", ".join(f"{name} {value:,.0f}" for name, value in values.items() if value) or "no limits are measured"
        return {"row": {"failure": "", "text": f"limits: {text}", "values": values}}
    return {"row": values}


def _scratch(options: argparse.Namespace, temporary: Path, num_bytes: int) -> Path:
    """Return the folder for model and runs: memory if it has room, else the disk.

    Raises:
        NotDoneError: neither has room.
    """
    if options.scratch is not None:
        return Path(options.scratch).absolute()
    if options.rehearse:
        return temporary / "job"
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    for place in places:
        folder = place / "batchinfer-job"
        if folder.is_dir() or (place.is_dir() and shutil.disk_usage(place).free > num_bytes + _SPARE_BYTES):
            return folder
    room = ", ".join(f"{place} {shutil.disk_usage(place).free / 1e9:.0f} GB" for place in places if place.is_dir())
    raise NotDoneError(f"there is no room for {num_bytes / 1e9:.0f} GB of weights ({room}); --dtype fp8 takes half")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run a whole job on one GPU.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, a tiny model, plain PyTorch")
    parser.add_argument("--dtype", choices=("bfloat16", "fp8"), help="of the weights; unset: by the card's memory")
    parser.add_argument("--scratch", help="folder for model and runs; unset: memory, then disk, where there is room")
    parser.add_argument("--out", type=Path, help="JSON lines as parts are done; what the file has is not done again")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command with --out goes on")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    start_s = time.monotonic()
    options = _parser().parse_args(arguments)
    if options.rehearse:
        rehearse()
    elif (reason := why_no_hopper()) is not None:
        print(unusable(reason), file=sys.stderr)
        return UNUSABLE
    accelerator = Accelerator(torch.device("cpu" if options.rehearse else "cuda"))
    is_large = options.rehearse or torch.cuda.get_device_properties(0).total_memory > _LARGE_CARD_BYTES
    fp8 = options.dtype == "fp8" or (options.dtype is None and not is_large)
    end_s = start_s + (60 * options.minutes if options.minutes else float(2**20))
    with tempfile.TemporaryDirectory() as temporary:
        try:
            scratch = _scratch(options, Path(temporary), num_bytes=(31 if fp8 else 60) * 10**9)
        except NotDoneError as error:
            print(f"{error}.", file=sys.stderr)
            return UNUSABLE
        scratch.mkdir(parents=True, exist_ok=True)
        runs = Runs(scratch, _sizes(is_rehearsal=options.rehearse), fp8=fp8, is_rehearsal=options.rehearse, end_s=end_s)
        code = do_parts(options.out or Path(temporary) / "job.jsonl", runs, accelerator, end_s)
        if code == OK:
            shutil.rmtree(scratch)
        else:
            print(f"model and runs are in {scratch}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
