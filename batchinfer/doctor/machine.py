"""The machine's report: versions, processor, kernels, exchanges and measured limits."""

import os
import platform
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch

from batchinfer import __version__
from batchinfer.doctor.core_bench import measure_core_use
from batchinfer.host_info import free_memory_bytes, num_cores, processor_name
from batchinfer.parallel.mesh import explain_exchanges
from batchinfer_kernels import registry
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.row_survey import DTYPES, Surveyed, survey_rows

LIBRARIES = ("torch", "pyarrow", "duckdb", "tokenizers", "safetensors", "pydantic")
BENCH_SIZE = 2048  # rows and columns of the matrices in the largest product that is timed
LEAST_SIZE = 256  # and in the first one
MOST_PRODUCT_S = 1.0  # of one product
BENCH_BYTES = 2**28
REPEATS = 5


def examine(*, bench: bool, every_kernel: bool = False) -> str:
    """Return the whole report as text.

    Args:
        bench: add measured limits, which takes about twenty seconds.
        every_kernel: a line for every operation and implementation, instead of a summary.
    """
    threads = torch.get_num_threads()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    lines = [
        f"batchinfer {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "  " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        f"processor   {processor_name()}, {_cores()}, {_counted(threads)} for torch",
        f"C++         {cpu_build.explain()}",
        *_numerics_lines(),
        f"plain       PyTorch with {torch.backends.cpu.get_cpu_capability()}",
        f"memory      {free_memory_bytes() / 2**30:.1f} GiB free",
        f"GPU         {_gpu()}",
        "",
        f"rows        (bits of a row alone and among others on the CPU, measured with {_counted(threads)})",
        *(_row_line(found) for found in survey_rows()),
        *(["    on a GPU               not measured, not promised"] if torch.cuda.is_available() else []),
    ]
    for device in devices:
        where = "" if device == "cpu" else " on a GPU"
        if every_kernel:
            lines += ["", f"kernels{where}     (chosen ones marked *)", *_kernel_lines(device)]
        else:
            heading = f"kernels{where}     (how many operations each runs; --all lists them)"
            lines += ["", heading, *_kernel_summary(device)]
    lines += [
        "",
        "exchanges   (of rows between ranks: cluster.exchange)",
        *(f"    {name:<22} {reason or 'can run'}" for name, reason in explain_exchanges().items()),
    ]
    if bench:
        lines += ["", f"measured    (medians of {REPEATS})", *_bench_lines()]
    return "\n".join(lines)


def _numerics_lines() -> list[str]:
    """Return the families of the C++ operations: machines with the same name compute the same bits."""
    if cpu_build.why_not() is not None:
        return []
    float32, narrow = cpu_build.numerics(torch.float32), cpu_build.numerics(torch.bfloat16)
    named = float32 if float32 == narrow else f"float32 {float32}, bfloat16, fp8 and int4 {narrow}"
    return [f"            sums {named}: the same bits on every machine that says this"]


def _cores() -> str:
    """Return the cores that this process can keep busy, out of the host's."""
    usable, all_cores = num_cores(), os.cpu_count() or 1
    return f"{usable} cores" if usable == all_cores else f"{usable} of {all_cores} cores"


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def _row_line(found: Surveyed) -> str:
    if found.why_unequal is None:
        return f"    {found.dtype:<22} equal, in {found.implementation}"
    return f"    {found.dtype:<22} NOT EQUAL, in {found.implementation}: {found.why_unequal}"


def _kernel_lines(device: str) -> list[str]:
    lines = []
    for row in registry.explain(device=device):
        lines.append(f"  {'*' if row.chosen else ' '} {row.op:<22} {row.candidate:<12} {row.reason}")
        if row.candidate != registry.REFERENCE:
            lines.append(f"{'':<28}does not take: {row.rejected_arguments}")
    return lines


def _kernel_summary(device: str) -> list[str]:
    """Return the chosen implementations per dtype, then the reasons why others were chosen for no operation."""
    lines, used = [], set()
    for name, dtype in DTYPES.items():
        chosen = Counter(registry.select(op, dtype=dtype, device=device).name for op in registry.ops())
        lines.append(f"    {name:<22} {', '.join(f'{kind} {count}' for kind, count in chosen.most_common())}")
        used |= set(chosen)
    reasons: dict[str, dict[str, None]] = {}
    for row in registry.explain(device=device):
        if row.candidate not in used:
            reasons.setdefault(row.candidate, {})[row.reason] = None
    return lines + [f"    not {name:<18} {'; '.join(why)}" for name, why in reasons.items()]


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that this torch can use"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _bench_lines() -> list[str]:
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        gflops = _product_flops(dtype) / 1e9
        lines.append(f"  matrix product {str(dtype).removeprefix('torch.'):<9} {gflops:10,.0f} GFLOP/s")
    block = torch.zeros(BENCH_BYTES // 4)
    target = torch.empty_like(block)
    seconds = _median_seconds(partial(target.copy_, block))
    lines.append(f"  memory copy (read + write) {2 * BENCH_BYTES / seconds / 1e9:8,.1f} GB/s")
    return lines + _core_lines()


def _product_flops(dtype: torch.dtype) -> float:
    """Return FLOP/s of a product of BENCH_SIZE, or of a smaller one where that would take longer than MOST_PRODUCT_S.

    On an AMD Zen 2 torch multiplies bfloat16 at a hundredth of the rate of float32.
    """
    size = LEAST_SIZE
    while True:
        square = torch.randn(size, size).to(dtype)
        seconds = _median_seconds(partial(torch.mm, square, square))
        if size >= BENCH_SIZE or 8 * seconds > MOST_PRODUCT_S:
            return 2 * size**3 / seconds
        size *= 2


def _core_lines() -> list[str]:
    try:
        use = measure_core_use()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return [f"  ranks per host could not be measured: {error}"]
    best = "one rank with all threads" if use.best_ranks == 1 else f"{use.best_ranks} ranks (cluster.prefill_ranks)"
    return [
        f"  experts, one rank with {use.num_cores} threads   {use.one_rank / 1e9:8,.1f} GB/s of weights",
        f"  experts, {use.num_cores} ranks of one thread    {use.rank_per_core / 1e9:8,.1f} GB/s of weights",
        f"  best on this host: {best}",
    ]


def _median_seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
