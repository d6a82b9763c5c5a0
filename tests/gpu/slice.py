"""What one GPU would do in DeepSeek-V3's published deployment units: its exact share, timed on one Hopper GPU.

    decode     EP144: 61 layers, attention, 1 shared and 2 routed experts, KV of 4,989 tokens per request
    prefill    EP32: 1 shared and 9 routed experts, 16,384 tokens in prompts of 4,096

Weights are random, in FP8. Rows come as balanced routing over all GPUs would send them; dispatch and combine are local
copies of the same bytes (copies.py). Added to the measured times are published times of the exchange, once not hidden
and once under the published schedules (schedule.py). docs/hopper.md explains the lines.

    python tests/gpu/slice.py [--wheels FOLDER] [--decode | --prefill] [--requests 64 128 256]
                              [--out FILE] [--minutes M] [--json]
    python tests/gpu/slice.py --rehearse       on the CPU, a tiny model, Triton's interpreter, no times

Each batch size is a piece of work of a child process (supervised.py): one that brings it down costs that one alone.

Exit codes: 0 done, 1 a result was not finite or a batch size failed, 2 no such GPU or a wrong option, 3 time was up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from accelerator import Accelerator, why_no_hopper  # noqa: E402
from schedule import decode_tasks, finish_s, prefill_tasks  # noqa: E402
from stages import StageEvents  # noqa: E402
from supervised import read_record, supervise, write_line  # noqa: E402
from wheels import WheelError, unpack_wheels  # noqa: E402

from batchinfer.config import PAGE_TOKENS  # noqa: E402
from batchinfer.model.step import (  # noqa: E402
    PrefillSpan,
    StepInput,
    StepTensors,
)
from batchinfer.parallel.overlap import run_to_end  # noqa: E402

OK, FAILED, UNUSABLE, UNFINISHED = 0, 1, 2, 3
_RUNS = 10
_SILENT_S = 400.0  # weights, compiling and two batches take less
_PREFILL = "prefill"
_KV_TOKENS, _PROMPT_TOKENS, _BATCH_TOKENS = 4989, 4096, 16384
_HIT_SHARE = 0.563  # of input tokens, open-infra-index day 6
# github.com/deepseek-ai/DeepEP docs/legacy.md, H800 with 400 Gb/s InfiniBand. Low latency, EP128, 128 tokens per rank:
_DISPATCH_US, _COMBINE_US, _TOKENS = 192, 369, 128
# Normal mode, EP32: GB/s per rank, counted as if each token went to all 4 nodes; 24 of 132 SMs are busy with it.
_DISPATCH_GB_S, _COMBINE_GB_S, _NODES = 58, 57, 4
_COMPUTE_SMS, _SMS = 108, 132


@dataclass
class Figures:
    """Times of one batch size; seconds are None in a rehearsal.

    Args:
        stages: names and how often they came in the micro-batch, then their seconds there.
        whole_s: the batch in one piece.
        half_s: one of its two micro-batches.
        exchange_s: published seconds of the exchanges of the whole batch.
        overlapped_s: two micro-batches under the published schedule.
        exposed_s: of these, seconds in which rows are waited for.
    """

    unit: str
    tokens: int
    stages: dict[str, int]
    is_finite: bool
    stage_s: dict[str, float] = field(default_factory=dict)
    whole_s: float | None = None
    half_s: float | None = None
    exchange_s: float | None = None
    overlapped_s: float | None = None
    exposed_s: float | None = None


def decode_step(share: Any, table: torch.Tensor, kv_tokens: int) -> StepInput:
    """The next token of each request, on the host; its latent goes behind the `kv_tokens` - 1 before it."""
    num_requests, last = len(table), kv_tokens - 1
    return StepInput(
        tokens=torch.arange(num_requests) % share.config.vocab_size,
        positions=torch.full((num_requests,), last),
        slots=table[:, last // PAGE_TOKENS] * PAGE_TOKENS + last % PAGE_TOKENS,
        logit_rows=torch.arange(num_requests),
        page_table=table,
        kv_tokens=torch.full((num_requests,), kv_tokens),
    )


def prefill_step(share: Any, num_prompts: int, prompt_tokens: int) -> StepInput:
    """Whole prompts, none of it computed before, on the host; logits of each one's last token."""
    per_prompt = -(-prompt_tokens // PAGE_TOKENS)
    pages = torch.arange(num_prompts * per_prompt).view(num_prompts, per_prompt)
    positions = torch.arange(prompt_tokens)
    slots = (pages[:, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS).flatten()
    spans = tuple(
        PrefillSpan(place * prompt_tokens, prompt_tokens, prompt_tokens, ids) for place, ids in enumerate(pages)
    )
    tokens = torch.arange(len(slots)) % share.config.vocab_size
    last = torch.arange(1, num_prompts + 1) * prompt_tokens - 1
    return StepInput(tokens, positions.repeat(num_prompts), slots, last, prefill=spans)


class Stepper:
    """One step that can be run again and again: as a captured graph in decode, call by call in prefill."""

    def __init__(self, share: Any, step: StepInput, pages: torch.Tensor, accelerator: Accelerator):
        self.accelerator = accelerator
        self.stages = StageEvents(is_timed=not accelerator.is_rehearsal)
        tensors = StepTensors.of(step, accelerator.device)

        def run() -> None:
            self.stages.events.clear()
            self.output = run_to_end(share.model.points(tensors, pages, self.stages))

        run()  # compiles
        self._run: Callable[[], Any] = run
        if step.page_table is not None and not accelerator.is_rehearsal:
            run()  # what compiles or is allocated once is done before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            self._run = graph.replay
            self._run()
        accelerator.wait()

    @property
    def is_finite(self) -> bool:
        """Whether all logits are."""
        return bool(torch.isfinite(self.output.logits).all())

    def seconds(self) -> tuple[float, dict[str, float]]:
        """Median seconds of the step and of each stage in it."""
        steps: list[float] = []
        stages: dict[str, list[float]] = {}
        for _ in range(self.accelerator.runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._run()
            end.record()
            torch.cuda.synchronize()
            steps.append(start.elapsed_time(end) / 1e3)
            for name, seconds in self.stages.seconds().items():
                stages.setdefault(name, []).append(seconds)
        return statistics.median(steps), {name: statistics.median(values) for name, values in stages.items()}


def decode_exchange_s(num_tokens: int) -> tuple[float, float]:
    """Published seconds of one layer's dispatch and combine, in proportion to the tokens of a rank."""
    return tuple(1e-6 * us * num_tokens / _TOKENS for us in (_DISPATCH_US, _COMBINE_US))  # type: ignore[return-value]


def prefill_exchange_s(num_tokens: int, hidden: int) -> tuple[float, float]:
    """Published rates applied to the bytes of a rank: FP8 with a scale per 128 values there, bfloat16 back."""
    values = num_tokens * _NODES * hidden / 1e9
    return values * (1 + 4 / 128) / _DISPATCH_GB_S, values * 2 / _COMBINE_GB_S


def overlapped(figures: Figures, num_layers: int, dispatch_s: float, combine_s: float, *, is_decode: bool) -> None:
    """Fill in what two micro-batches take under the published schedule.

    What packing and copying take here counts as computing, although part of it is in the published times too. In
    prefill computing has 108 of 132 SMs.
    """
    assert figures.half_s is not None
    stretch = 1.0 if is_decode else _SMS / _COMPUTE_SMS
    stages = {name: seconds / num_layers for name, seconds in figures.stage_s.items()}
    before = "ATTN-1" if is_decode else "ATTN"
    stages[before] += stages.pop("DISPATCH", 0.0)
    stages["MLP"] += stages.pop("COMBINE", 0.0)
    names = ("ATTN-0", "ATTN-1", "SHARED", "MLP") if is_decode else ("ATTN", "SHARED", "MLP")
    per_layer = {name: stretch * stages[name] for name in names}
    computing_s = 2 * num_layers * sum(per_layer.values())
    rest_s = max(0.0, stretch * 2 * figures.half_s - computing_s)  # dense layers, logits, sums into the stream
    tasks = (decode_tasks if is_decode else prefill_tasks)(num_layers, per_layer, dispatch_s, combine_s)
    finish = finish_s(tasks)
    figures.overlapped_s, figures.exposed_s = finish + rest_s, max(0.0, finish - computing_s)


def run_decode(
    share: Any, pages: torch.Tensor, table: torch.Tensor, kv_tokens: int, accelerator: Accelerator
) -> Figures:
    """One batch size of decode: in one piece, and as two micro-batches of half of it."""
    half = Stepper(share, decode_step(share, table[: len(table) // 2], kv_tokens), pages, accelerator)
    figures = Figures(share.unit.name, len(table), dict(half.stages.names()), half.is_finite)
    if accelerator.is_rehearsal:
        return figures
    figures.half_s, figures.stage_s = half.seconds()
    del half
    figures.whole_s, _ = Stepper(share, decode_step(share, table, kv_tokens), pages, accelerator).seconds()
    num_layers = share.config.num_moe_layers
    figures.exchange_s = num_layers * sum(decode_exchange_s(len(table)))
    overlapped(figures, num_layers, *decode_exchange_s(len(table) // 2), is_decode=True)
    return figures


def run_prefill(share: Any, num_prompts: int, prompt_tokens: int, accelerator: Accelerator) -> Figures:
    """A batch of prefill as two micro-batches of half its prompts."""
    half_prompts = num_prompts // 2
    pages = share.model.new_pages(half_prompts * -(-prompt_tokens // PAGE_TOKENS))
    half = Stepper(share, prefill_step(share, half_prompts, prompt_tokens), pages, accelerator)
    is_finite = half.is_finite and bool(torch.isfinite(pages).all())
    figures = Figures(share.unit.name, num_prompts * prompt_tokens, dict(half.stages.names()), is_finite)
    if accelerator.is_rehearsal:
        return figures
    figures.half_s, figures.stage_s = half.seconds()
    figures.whole_s = 2 * figures.half_s
    num_layers = share.config.num_moe_layers - 1  # the last one has next to nothing to do
    exchange = prefill_exchange_s(half_prompts * prompt_tokens, share.config.hidden_size)
    figures.exchange_s = 2 * num_layers * sum(exchange)
    overlapped(figures, num_layers, *exchange, is_decode=False)
    return figures


def describe(figures: Figures) -> str:
    """Lines for a reader."""
    title = f"{figures.unit}, {figures.tokens:,} tokens per step"
    if figures.half_s is None or figures.whole_s is None:
        counted = ", ".join(f"{name} {count}" for name, count in figures.stages.items())
        return f"{title}\n  stages of a micro-batch and how often they ran: {counted}"
    assert figures.exchange_s is not None
    assert figures.overlapped_s is not None
    assert figures.exposed_s is not None
    staged_s = sum(figures.stage_s.values())
    stages = {**figures.stage_s, "the rest": figures.half_s - staged_s}
    lines = [title, f"  {'micro-batch of half':<34}{1e3 * figures.half_s:9.2f} ms"]
    lines += [f"    {name:<32}{1e3 * seconds:9.2f} ms" for name, seconds in stages.items()]
    hidden = 1 - figures.exposed_s / figures.exchange_s
    for words, seconds in (
        ("computing and copies alone", figures.whole_s),
        ("published exchange after it", figures.whole_s + figures.exchange_s),
        (f"published schedule, {hidden:.0%} hidden", figures.overlapped_s),
    ):
        rate = figures.tokens / seconds
        hits = (
            f", {rate / (1 - _HIT_SHARE):,.0f} with {_HIT_SHARE:.1%} hits" if figures.unit.startswith("prefill") else ""
        )
        lines.append(f"  {words:<34}{1e3 * seconds:9.2f} ms  {rate:,.0f} tokens/s per GPU{hits}")
    return "\n".join(lines)


def _hold(share: Any) -> str:
    held = share.gigabytes()
    parts = ", ".join(f"{part} {size:.3g}" for part, size in held.items())
    layers = share.config.num_hidden_layers
    return f"{share.unit.name}: {layers} layers, all distinct; {sum(held.values()):.3g} GB of weights ({parts})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time one GPU's share of DeepSeek-V3's deployment units.")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--decode", action="store_true", help="decode alone")
    only.add_argument("--prefill", action="store_true", help="prefill alone")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128, 192, 256], help="per GPU, even numbers")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, a tiny model")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack onto sys.path")
    parser.add_argument(
        "--out", type=Path, help="JSON lines as batch sizes are done; those in the file are not run again"
    )
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command with --out goes on")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # this is the child; its file
    return parser


def _why_not(options: argparse.Namespace) -> str | None:
    """Why the slice cannot run with these options here, or None."""
    odd = [count for count in options.requests if count < 2 or count % 2]
    if odd:
        return f"--requests {odd[0]} is no even number from 2 on; two micro-batches share the requests"
    try:
        if options.wheels is not None:
            unpack_wheels(options.wheels)
    except WheelError as error:
        return f"--wheels: {error}"
    if importlib.util.find_spec("safetensors") is None:
        return "there is no safetensors, which the model's code imports; put its wheel into a folder for --wheels"
    reason = None if options.rehearse else why_no_hopper()
    return reason and f"{reason}; this needs a Hopper GPU (H100, H200, H800), or --rehearse on the CPU"


def jobs_of(options: argparse.Namespace) -> dict[str, int]:
    """The pieces of work, by what they are called in files: requests of decode, 0 for prefill."""
    requests = [4] if options.rehearse else sorted(set(options.requests))
    jobs = {} if options.prefill else {f"decode {count}": count for count in requests}
    return jobs if options.decode else jobs | {_PREFILL: 0}


def measure(
    jobs: dict[str, int],
    accelerator: Accelerator,
    begin: Callable[[str], object],
    end: Callable[..., object],
    note: Callable[[str], object],
) -> None:
    """Run these pieces of work, telling before each and after it; `note` takes what else there is to say."""
    from share import DECODE, DEEPSEEK_V3, PREFILL, TINY, Share, config_of

    is_tiny = accelerator.is_rehearsal
    config, kv_tokens = config_of(TINY if is_tiny else DEEPSEEK_V3), 70 if is_tiny else _KV_TOKENS
    requests = [count for key, count in jobs.items() if key != _PREFILL]
    if requests:
        begin(f"decode {requests[0]}")
        share = Share(DECODE, config, accelerator.device)
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
                begin(f"decode {count}")
                end(f"decode {count}", figures=run_decode(share, pages, table[:count], kv_tokens, accelerator))
            del pages, layer_pages
        for count in requests[len(fitting) :]:
            end(f"decode {count}", not_run=f"{count} requests of {kv_tokens} tokens do not fit this card")
        del share
        accelerator.release()
    if _PREFILL in jobs:
        begin(_PREFILL)
        share = Share(PREFILL, config, accelerator.device)
        note(_hold(share))
        prompt_tokens, num_prompts = (20, 4) if is_tiny else (_PROMPT_TOKENS, _BATCH_TOKENS // _PROMPT_TOKENS)
        end(_PREFILL, figures=run_prefill(share, num_prompts, prompt_tokens, accelerator))


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

    left = {key: count for key, count in jobs.items() if key not in record.done}
    with torch.inference_mode():
        measure(left, accelerator, lambda key: write_line(path, begun=key), end, note)
    return OK


def _in_this_process(
    options: argparse.Namespace, jobs: dict[str, int]
) -> tuple[dict[str, str], list[str], dict[str, dict[str, Any]]]:
    """A rehearsal: the machine, what is held, and what became of each piece of work."""
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
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        with suppress(ImportError):  # without triton nothing of it is rehearsed
            from interpreter import multiply_in_float64

            multiply_in_float64()
    reason = _why_not(options)
    if reason is not None:
        print(f"{reason}.", file=sys.stderr)
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
            command = [sys.executable, __file__, *arguments, "--work", str(path)]
            why_not = supervise(command, list(jobs), path, silent_s=_SILENT_S, end_s=end_s)
            record = read_record(path)
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
