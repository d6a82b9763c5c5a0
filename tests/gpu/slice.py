"""One GPU's exact share of DeepSeek-V3's published deployment units, timed on one Hopper GPU.

    decode     EP144: 61 layers, attention, 1 shared and 2 routed experts, KV of 4,989 tokens per request
    prefill    EP32: 1 shared and 9 routed experts, 16,384 tokens in prompts of 4,096

Weights are random, in FP8. Rows come as balanced routing over all GPUs would send them; dispatch and combine are local
copies of the same bytes (copies.py). Added to the measured times are published times of the exchange, once not hidden
and once under the published schedules (schedule.py). docs/gpu-checks.md explains the lines.

    python tests/gpu/slice.py [--wheels FOLDER] [--decode | --prefill] [--requests 64 128 256]
                              [--triton-alone] [--out FILE] [--minutes M] [--json]
    python tests/gpu/slice.py --rehearse       on the CPU, a tiny model, Triton's interpreter, no times

Each batch size is a piece of work of a child process (supervised.py): one that brings it down costs that one alone, and
is tried once more without deep_gemm and flash_mla (--triton-alone).

Exit codes: 0 done, 1 a result was not finite or a batch size failed, 2 no such GPU or a wrong option, 3 time was up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from accelerator import Accelerator, rehearse, unusable, why_no_hopper  # noqa: E402
from figures import Figures, decode_exchange_s, describe, overlapped, prefill_exchange_s  # noqa: E402
from roofline import decode_stages, floors_s, prefill_stages  # noqa: E402
from steps import Stepper, decode_step, prefill_step  # noqa: E402
from supervised import read_record, supervise, write_line  # noqa: E402
from wheels import WheelError, unpack_wheels  # noqa: E402

from batchinfer.config import PAGE_TOKENS  # noqa: E402

OK, FAILED, UNUSABLE, UNFINISHED = 0, 1, 2, 3
_RUNS = 10
_SILENT_S = 400.0  # weights, compiling and two batches take less
_PREFILL = "prefill"
_ALONE = ", Triton alone"  # behind what a piece of work is called
_KV_TOKENS, _PROMPT_TOKENS, _BATCH_TOKENS = 4989, 4096, 16384


def run_decode(
    share: Any, pages: torch.Tensor, table: torch.Tensor, kv_tokens: int, accelerator: Accelerator
) -> Figures:
    """One batch size of decode: as two micro-batches of half of it, and in one piece."""
    step = decode_step(share, table[: len(table) // 2], kv_tokens)
    half = Stepper(share, step, pages, accelerator)
    logits = half.output.logits.clone()
    figures = Figures(share.title, len(table), dict(half.stages.names()), half.is_finite)
    if not accelerator.is_rehearsal:
        figures.half_s, _ = half.seconds()
    del half
    accelerator.release()  # a graph's memory is its own: three of them might not fit
    if not accelerator.is_rehearsal:
        figures.take_stages(*Stepper(share, step, pages, accelerator, with_stages=True).seconds())
        accelerator.release()
    whole = Stepper(share, decode_step(share, table, kv_tokens), pages, accelerator)
    figures.is_finite &= whole.is_finite
    figures.difference = _difference(logits, whole.output.logits)
    if accelerator.is_rehearsal:
        return figures
    figures.whole_s, _ = whole.seconds()
    num_layers = share.config.num_moe_layers
    figures.exchange_s = num_layers * sum(decode_exchange_s(len(table)))
    overlapped(figures, num_layers, *decode_exchange_s(len(table) // 2), is_decode=True)
    stages = decode_stages(share.config, share.unit.num_slots, len(table) // 2, kv_tokens)
    figures.floor_s = floors_s(stages, accelerator.name)
    return figures


def _difference(logits: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest difference between the first rows of both, of the largest value."""
    off = (logits.float() - whole[: len(logits)].float()).abs().max()
    return float(off / logits.float().abs().max())


def run_prefill(share: Any, num_prompts: int, prompt_tokens: int, accelerator: Accelerator) -> Figures:
    """A batch of prefill as two micro-batches of half its prompts."""
    half_prompts = num_prompts // 2
    pages = share.model.new_pages(half_prompts * -(-prompt_tokens // PAGE_TOKENS))
    step = prefill_step(share, half_prompts, prompt_tokens)
    half = Stepper(share, step, pages, accelerator)
    is_finite = half.is_finite and bool(torch.isfinite(pages).all())
    figures = Figures(share.title, num_prompts * prompt_tokens, dict(half.stages.names()), is_finite)
    if accelerator.is_rehearsal:
        return figures
    figures.half_s, _ = half.seconds()
    del half
    figures.take_stages(*Stepper(share, step, pages, accelerator, with_stages=True).seconds())
    figures.whole_s = 2 * figures.half_s
    num_layers = share.config.num_moe_layers - 1  # the last one has next to nothing to do
    exchange = prefill_exchange_s(half_prompts * prompt_tokens, share.config.hidden_size)
    figures.exchange_s = 2 * num_layers * sum(exchange)
    overlapped(figures, num_layers, *exchange, is_decode=False)
    stages = prefill_stages(share.config, share.unit.num_slots, half_prompts, prompt_tokens)
    figures.floor_s = floors_s(stages, accelerator.name)
    return figures


def _hold(share: Any) -> str:
    held = share.gigabytes()
    parts = ", ".join(f"{part} {size:.3g}" for part, size in held.items())
    layers = share.config.num_hidden_layers
    return f"{share.title}: {layers} layers, all distinct; {sum(held.values()):.3g} GB of weights ({parts})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time one GPU's share of DeepSeek-V3's deployment units.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--decode", action="store_true", help="decode alone")
    only.add_argument("--prefill", action="store_true", help="prefill alone")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128, 192, 256], help="per GPU, even numbers")
    parser.add_argument("--triton-alone", action="store_true", help="without deep_gemm and flash_mla")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, a tiny model")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack onto sys.path")
    parser.add_argument(
        "--out", type=Path, help="JSON lines as batch sizes are done; those in the file are not run again"
    )
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command with --out goes on")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # this is the child; its file
    return parser


def _why_not(options: argparse.Namespace) -> str | None:
    """Return why the slice cannot run with these options here, or None."""
    odd = [count for count in options.requests if count < 2 or count % 2]
    if odd:
        return f"--requests {odd[0]} is no even number from 2 on; two micro-batches share the requests."
    try:
        if options.wheels is not None:
            unpack_wheels(options.wheels)
    except WheelError as error:
        return f"--wheels: {error}."
    if importlib.util.find_spec("safetensors") is None:
        return "there is no safetensors, which the model's code imports; put its wheel into a folder for --wheels."
    reason = None if options.rehearse else why_no_hopper()
    return reason and unusable(reason)


def jobs_of(options: argparse.Namespace) -> dict[str, int]:
    """The pieces of work, by what they are called in files: requests of decode, 0 for prefill."""
    requests = [4] if options.rehearse else sorted(set(options.requests))
    jobs = {} if options.prefill else {f"decode {count}": count for count in requests}
    if not options.decode:
        jobs[_PREFILL] = 0
    return {key + _ALONE: count for key, count in jobs.items()} if options.triton_alone else jobs


def measure(
    jobs: dict[str, int],
    accelerator: Accelerator,
    begin: Callable[[str], object],
    end: Callable[..., object],
    note: Callable[[str], object],
) -> None:
    """Run these pieces of work, telling before each and after it; `note` takes what else there is to say."""
    from candidates import NAMES
    from share import DECODE, DEEPSEEK_V3, PREFILL, TINY, Share, config_of

    is_tiny, key_of = accelerator.is_rehearsal, {count: key for key, count in jobs.items()}
    names = ("triton",) if any(key.endswith(_ALONE) for key in jobs) else NAMES
    config, kv_tokens = config_of(TINY if is_tiny else DEEPSEEK_V3), 70 if is_tiny else _KV_TOKENS
    requests = [count for count in jobs.values() if count]
    if requests:
        begin(key_of[requests[0]])
        share = Share(DECODE, config, accelerator.device, names)
        note(_hold(share))
        note(f"operations: {share.origin}")
        per_request = -(-kv_tokens // PAGE_TOKENS)
        page_bytes = config.kv_bytes_per_token(2) * PAGE_TOKENS
        fitting = [count for count in requests if accelerator.fits(count * per_request * page_bytes)]
        if fitting:
            pages = share.model.new_pages(fitting[-1] * per_request)
            for layer_pages in pages:
                layer_pages.normal_()
            table = torch.arange(fitting[-1] * per_request).view(-1, per_request)
            note(f"KV of {fitting[-1]} requests of {kv_tokens} tokens: {pages.nbytes / 1e9:.3g} GB")
            for count in fitting:
                begin(key_of[count])
                end(key_of[count], figures=run_decode(share, pages, table[:count], kv_tokens, accelerator))
            del pages, layer_pages
        for count in requests[len(fitting) :]:
            end(key_of[count], not_run=f"{count} requests of {kv_tokens} tokens do not fit this card")
        del share
        accelerator.release()
    if 0 in key_of:
        begin(key_of[0])
        share = Share(PREFILL, config, accelerator.device, names)
        note(_hold(share))
        prompt_tokens, num_prompts = (20, 4) if is_tiny else (_PROMPT_TOKENS, _BATCH_TOKENS // _PROMPT_TOKENS)
        end(key_of[0], figures=run_prefill(share, num_prompts, prompt_tokens, accelerator))


def work(options: argparse.Namespace, jobs: dict[str, int]) -> int:
    """The child: do what the file lacks, and say it."""
    path, accelerator = options.work, _accelerator(options)
    record, machine = read_record(path), accelerator.describe()
    if record.header is None:
        write_line(path, machine=machine)
    elif record.header["machine"] != machine:
        print(f"{path} has results of another machine or of other versions; name another file.", file=sys.stderr)
        return UNUSABLE

    def end(key: str, figures: Figures | None = None, **result: str) -> None:
        write_line(path, done=key, **(result if figures is None else {"figures": asdict(figures)}))
        print(result["not_run"] if figures is None else describe(figures), file=sys.stderr, flush=True)

    def note(words: str) -> None:
        write_line(path, note=words)
        print(words, file=sys.stderr, flush=True)

    left = {key: jobs[key] for key in record.left(jobs)}
    with torch.inference_mode():
        measure(left, accelerator, lambda key: write_line(path, begun=key), end, note)
    return OK


def _once_more(options: argparse.Namespace, died: dict[str, int]) -> argparse.Namespace:
    """Options for these pieces of work without deep_gemm and flash_mla."""
    requests = [count for count in died.values() if count]
    return argparse.Namespace(
        **vars(options)
        | {"triton_alone": True, "decode": 0 not in died.values(), "prefill": not requests, "requests": requests}
    )


def _arguments(options: argparse.Namespace, path: Path) -> list[str]:
    """Return the arguments of the child that does this work."""
    arguments = ["--requests", *map(str, options.requests)] if options.requests else []
    for name in ("decode", "prefill", "triton_alone", "rehearse"):
        if getattr(options, name):
            arguments.append("--" + name.replace("_", "-"))
    return [*arguments, *(["--wheels", str(options.wheels)] if options.wheels else []), "--work", str(path)]


def _in_this_process(
    options: argparse.Namespace, jobs: dict[str, int]
) -> tuple[dict[str, str], list[str], dict[str, dict[str, Any]]]:
    """Rehearse; return the machine, the notes, and the result of each piece of work."""
    notes: list[str] = []
    results: dict[str, dict[str, Any]] = {}

    def end(key: str, figures: Figures | None = None, **result: str) -> None:
        results[key] = result if figures is None else {"figures": asdict(figures)}

    accelerator = _accelerator(options)
    with torch.inference_mode():
        measure(jobs, accelerator, lambda key: None, end, notes.append)
    return accelerator.describe(), notes, results


def _accelerator(options: argparse.Namespace) -> Accelerator:
    return Accelerator(torch.device("cpu" if options.rehearse else "cuda"), _RUNS)


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    start_s = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if options.rehearse:
        rehearse()
    reason = _why_not(options)
    if reason is not None:
        print(reason, file=sys.stderr)
        return UNUSABLE
    jobs, why_not = jobs_of(options), None
    if options.work is not None:
        return work(options, jobs)
    if options.rehearse and options.out is None:
        described, notes, results = _in_this_process(options, jobs)
    else:
        end_s = None if options.minutes is None else start_s + 60 * options.minutes
        with tempfile.TemporaryDirectory() as folder:
            path = options.out or Path(folder) / "slice.jsonl"
            command = [sys.executable, __file__]
            why_not = supervise(
                [*command, *_arguments(options, path)], list(jobs), path, silent_s=_SILENT_S, end_s=end_s
            )
            record = read_record(path)
            died = {key: count for key, count in jobs.items() if "died" in record.done.get(key, {})}
            if died and why_not is None and not options.triton_alone:
                print(f"{', '.join(died)}: once more without deep_gemm and flash_mla", file=sys.stderr, flush=True)
                more = _once_more(options, died)
                why_not = supervise(
                    [*command, *_arguments(more, path)], list(jobs_of(more)), path, silent_s=_SILENT_S, end_s=end_s
                )
                jobs, record = jobs | jobs_of(more), read_record(path)
        described, notes, results = (record.header or {"machine": {}})["machine"], record.notes, record.done
    figures = {key: Figures(**results[key]["figures"]) for key in jobs if "figures" in results.get(key, {})}
    failed = {key: results[key]["died"] for key in jobs if "died" in results.get(key, {})}
    if options.json:
        document = {"machine": described, "notes": notes, "figures": [asdict(one) for one in figures.values()]}
        print(json.dumps(document | {"failed": failed}, indent=1))
    else:
        print(", ".join(f"{name} {value}" for name, value in described.items()))
        if options.rehearse:
            print("A rehearsal: a tiny model in Triton's interpreter; no times are taken.")
        print("\n".join([*dict.fromkeys(notes), *map(describe, figures.values())]))
        for key in jobs:
            if "not_run" in results.get(key, {}):
                print(results[key]["not_run"])
    wrong = [one for one in figures.values() if not one.is_finite]
    for one in wrong:
        print(f"{one.unit}, {one.tokens} tokens: results are not finite.", file=sys.stderr)
    for key, why in failed.items():
        print(f"{key}: its process ended: {why}.", file=sys.stderr)
    if why_not is not None:
        print(f"not all of it was run: {why_not}.", file=sys.stderr)
    if wrong or failed or not figures:
        return FAILED
    return OK if why_not is None else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
