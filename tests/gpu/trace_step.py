"""The kernels of a step: one replay of a decode graph and one prefill step under torch's profiler.

    python tests/gpu/trace_step.py [--wheels FOLDER] [--out FOLDER] [--unit decode | prefill] [--layers 13]
                                   [--requests 128]
    python tests/gpu/trace_step.py --attention     Triton's attention kernels, twice each: for `ncu` before it
    python tests/gpu/trace_step.py --rehearse      on the CPU, a tiny model, PyTorch's operations instead of kernels

The model is the slice's with fewer layers (3 dense ones among them): kernels of a layer are the same in all of them.
Prints a table per unit: kernels by the time they take, how often each is started, and how long none of them runs. The
traces go to FOLDER, for Perfetto or Chrome.

Exit codes: 0 done, 2 no such GPU or a wrong option.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from accelerator import Accelerator, rehearse, unusable, why_no_hopper  # noqa: E402
from steps import Stepper, decode_step, prefill_step  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402
from wheels import WheelError, unpack_wheels  # noqa: E402

from batchinfer.config import PAGE_TOKENS  # noqa: E402
from batchinfer.model.config import ModelConfig  # noqa: E402

OK, UNUSABLE = 0, 2
_MOST_ROWS = 40
_KV_TOKENS = 4989
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_STARTS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


@dataclass
class Trace:
    """The kernels that ran in one step.

    Args:
        micros: of each kernel, all its starts together; zeros in a rehearsal.
        busy_us, whole_us: while some kernel ran, and from the first one's start to the last one's end.
        host: how often the host started kernels and waited, by the names of CUDA's calls.
    """

    name: str
    num_layers: int
    starts: Counter[str] = field(default_factory=Counter)
    micros: Counter[str] = field(default_factory=Counter)
    busy_us: float = 0.0
    whole_us: float = 0.0
    host: Counter[str] = field(default_factory=Counter)


def trace_of(name: str, num_layers: int, events: list[Any], *, is_rehearsal: bool) -> Trace:
    """Sum up a profiler's events; in a rehearsal PyTorch's operations take the place of kernels."""
    trace, spans = Trace(name, num_layers), []
    wanted = DeviceType.CPU if is_rehearsal else DeviceType.CUDA
    for event in events:
        if event.device_type == wanted:
            trace.starts[event.name] += 1
            if not is_rehearsal:
                trace.micros[event.name] += event.time_range.elapsed_us()
                spans.append((event.time_range.start, event.time_range.end))
        elif event.name in _WAITS or event.name in _STARTS:
            trace.host[event.name] += 1
    trace.busy_us = covered(spans)
    trace.whole_us = max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0.0
    return trace


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of some intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(trace: Trace) -> str:
    """The kernels that take most."""
    num_starts = sum(trace.starts.values())
    lines = [
        f"{trace.name}, {trace.num_layers} layers: {num_starts} kernels, {num_starts / trace.num_layers:.0f} a layer"
    ]
    if trace.whole_us:
        idle_us = trace.whole_us - trace.busy_us
        lines.append(
            f"  {trace.whole_us / 1e3:.2f} ms from the first to the last; none runs for {idle_us / 1e3:.2f} ms "
            f"({idle_us / trace.whole_us:.0%})"
        )
    if trace.host:
        lines.append("  on the host: " + ", ".join(f"{name} {count}" for name, count in trace.host.most_common()))
    lines.append(f"  {'us':>9} {'share':>6} {'starts':>6} {'us each':>8}  kernel")
    all_us = sum(trace.micros.values()) or 1.0
    ordered = sorted(trace.starts, key=lambda name: (-trace.micros[name], -trace.starts[name], name))
    for name in ordered[:_MOST_ROWS]:
        micros, count = trace.micros[name], trace.starts[name]
        lines.append(f"  {micros:9.0f} {micros / all_us:6.1%} {count:6} {micros / count:8.1f}  {name[:100]}")
    if left := ordered[_MOST_ROWS:]:
        micros = sum(trace.micros[name] for name in left)
        lines.append(f"  {micros:9.0f} {micros / all_us:6.1%} {'':6} {'':8}  {len(left)} others")
    return "\n".join(lines)


def profiled(name: str, stepper: Stepper, num_layers: int, out: Path | None) -> Trace:
    """One run of a step that has run before."""
    accelerator = stepper.accelerator
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not accelerator.is_rehearsal:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    stepper.run()
    accelerator.wait()
    with torch.profiler.profile(activities=activities) as profile:
        stepper.run()
        accelerator.wait()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(out / f"trace-{name.split(maxsplit=1)[0]}.json.gz"))
    return trace_of(name, num_layers, list(profile.events()), is_rehearsal=accelerator.is_rehearsal)


def trace_units(options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Both units of the slice, one after the other, or one of them."""
    from share import DEEPSEEK_V3, TINY, config_of

    config = config_of(TINY if accelerator.is_rehearsal else DEEPSEEK_V3 | {"num_hidden_layers": options.layers})
    if options.unit != "prefill":
        trace_decode(options, accelerator, config)
        accelerator.release()
    if options.unit != "decode":
        trace_prefill(options, accelerator, config)


def trace_decode(options: argparse.Namespace, accelerator: Accelerator, config: ModelConfig) -> None:
    """One replay of a graph."""
    from share import DECODE, Share

    requests, kv_tokens = (2, 70) if accelerator.is_rehearsal else (options.requests, _KV_TOKENS)
    per_request = -(-kv_tokens // PAGE_TOKENS)
    share = Share(DECODE, config, accelerator.device)
    pages = share.model.new_pages(requests * per_request)
    for layer_pages in pages:
        layer_pages.normal_()
    step = decode_step(share, torch.arange(len(pages[0])).view(-1, per_request), kv_tokens)
    print(f"operations: {share.origin}")
    stepper = Stepper(share, step, pages, accelerator)
    title = f"decode of {requests} requests"
    print(table(profiled(title, stepper, config.num_hidden_layers, options.out)), flush=True)


def trace_prefill(options: argparse.Namespace, accelerator: Accelerator, config: ModelConfig) -> None:
    """One step of whole prompts."""
    from share import PREFILL, Share

    prompts, prompt_tokens = (1, 20) if accelerator.is_rehearsal else (2, 4096)
    share = Share(PREFILL, config, accelerator.device)
    pages = share.model.new_pages(prompts * -(-prompt_tokens // PAGE_TOKENS))
    stepper = Stepper(share, prefill_step(share, prompts, prompt_tokens), pages, accelerator)
    title = f"prefill of {prompts * prompt_tokens} tokens"
    print(table(profiled(title, stepper, config.num_hidden_layers, options.out)), flush=True)


def run_attention(accelerator: Accelerator) -> None:
    """Triton's attention of prefill, in all forms, and of decode by turns, twice each."""
    import candidates
    from attention_cases import attention_cases
    from cases import ALL, TINY, Dims

    dims = TINY if accelerator.is_rehearsal else Dims()
    cases = attention_cases(dims, is_tiny=accelerator.is_rehearsal, is_quick=True)
    chosen = [next(case for case in cases if case.op == op) for op in ("mla_prefill", "mla_decode")]
    works = [(case, case.make(accelerator.device)) for case in chosen]
    for turn in range(2):
        for case, work in works:
            for name in ("triton", candidates.DESCRIPTORS, candidates.AHEAD):
                if name in case.names:
                    work.run(candidates.function(name, case.op), ALL)
                    accelerator.wait()
                    print(f"turn {turn + 1}: {case.op}, {name}, {case.shape}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Profile one step of DeepSeek-V3's deployment units.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, a tiny model")
    parser.add_argument("--attention", action="store_true", help="run Triton's attention alone")
    parser.add_argument("--unit", choices=("decode", "prefill"), help="this one alone")
    parser.add_argument("--layers", type=int, default=13, help="of the model, from 4 on")
    parser.add_argument("--requests", type=int, default=128, help="of the decode step")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack onto sys.path")
    parser.add_argument("--out", type=Path, help="folder for the traces")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.rehearse:
        rehearse()
    reason = None if options.rehearse else why_no_hopper()
    if options.layers < 4:
        reason = f"--layers {options.layers}: below 4 there are no experts"
    if reason is not None:
        print(unusable(reason), file=sys.stderr)
        return UNUSABLE
    try:
        if options.wheels is not None:
            unpack_wheels(options.wheels)
    except WheelError as error:
        print(f"--wheels: {error}.", file=sys.stderr)
        return UNUSABLE
    accelerator = Accelerator(torch.device("cpu" if options.rehearse else "cuda"))
    with torch.inference_mode():
        if options.attention:
            run_attention(accelerator)
        else:
            trace_units(options, accelerator)
    return OK


if __name__ == "__main__":
    sys.exit(main())
