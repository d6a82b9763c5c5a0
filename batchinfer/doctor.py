"""What this machine can run. Called by `batchinfer doctor`."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch

from batchinfer import __version__
from batchinfer.engine.core_bench import measure_core_use
from batchinfer.engine.free_memory import free_memory_bytes
from batchinfer.parallel.mesh import explain_exchanges
from batchinfer_kernels import backend
from batchinfer_kernels.block_scaled import BlockScaled
from batchinfer_kernels.cpu import build as cpu_build

LIBRARIES = ("torch", "pyarrow", "duckdb", "tokenizers", "safetensors", "pydantic")
BENCH_SIZE = 2048
BENCH_BYTES = 2**28
REPEATS = 5


def examine(*, bench: bool) -> str:
    """The whole report as text; with `bench` also measured limits (about twenty seconds)."""
    lines = [
        f"batchinfer {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "  " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        f"processor   {_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch",
        f"memory      {free_memory_bytes() / 2**30:.1f} GiB free",
        f"GPU         {_gpu()}",
        f"invariance  {_invariance()}",
        f"dtype fp8   {_eight_bits()}",
        f"C++         {cpu_build.explain()}",
        "",
        "kernels     (chosen ones marked *)",
        *_kernel_lines("cpu"),
        *(["", "kernels on a GPU", *_kernel_lines("cuda")] if torch.cuda.is_available() else []),
        "",
        "exchanges   (of rows between ranks: cluster.exchange)",
        *(f"    {name:<22} {reason or 'can run'}" for name, reason in explain_exchanges().items()),
    ]
    if bench:
        lines += ["", f"measured    (medians of {REPEATS})", *_bench_lines()]
    return "\n".join(lines)


def rows_are_invariant() -> bool:
    """Whether a row of a float32 matrix product here is the same bit for bit whatever rows stand beside it."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in [(64, 96), (256, 512), (1024, 384)]:
        weight = torch.randn(inner, outer, generator=generator)
        rows = torch.randn(128, inner, generator=generator)
        whole = rows @ weight
        if any(not torch.equal(rows[:count] @ weight, whole[:count]) for count in range(8, 129, 8)):
            return False
    return True


def _kernel_lines(device: str) -> list[str]:
    return [
        f"  {'*' if row.chosen else ' '} {row.op:<22} {row.candidate:<10} {row.reason or ''}".rstrip()
        for row in backend.explain(device=device)
    ]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or 'unknown'} ({torch.backends.cpu.get_cpu_capability()})"


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none that this torch can use"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _invariance() -> str:
    if rows_are_invariant():
        return "float32 results do not depend on what is batched together"
    return "WARNING: float32 matrix rows here depend on the rows beside them; outputs may vary in rare ties"


def _eight_bits() -> str:
    """How weights of 8 bits are held on this machine's processor, and by what."""
    pack = backend.select("pack", dtype=torch.bfloat16)
    if isinstance(pack.run(torch.zeros(1, 1, dtype=torch.bfloat16), eight_bit=True), BlockScaled):
        return f"on the CPU in E4M3 by emulation ({pack.name}), which is slow"
    return f"on the CPU as 8-bit integers ({pack.name})"


def _bench_lines() -> list[str]:
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.randn(BENCH_SIZE, BENCH_SIZE).to(dtype)
        gflops = 2 * BENCH_SIZE**3 / _median_seconds(partial(torch.mm, square, square)) / 1e9
        lines.append(f"  matrix product {str(dtype).removeprefix('torch.'):<9} {gflops:10,.0f} GFLOP/s")
    block = torch.zeros(BENCH_BYTES // 4)
    target = torch.empty_like(block)
    seconds = _median_seconds(partial(target.copy_, block))
    lines.append(f"  memory copy (read + write) {2 * BENCH_BYTES / seconds / 1e9:8,.1f} GB/s")
    return lines + _core_lines()


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
