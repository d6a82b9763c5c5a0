"""Times of single operations: measured on the accelerator itself (aiconfigurator.py), or from published kernel tables.

The published tables are of an H800. Another accelerator is assumed to reach the same share of its own peaks: a table
row nearer to the memory limit scales with the memory rate, the others with the arithmetic peak.
"""

# M rows, N x K weight, G groups (experts)

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log

from batchinfer.sim.hardware import REFERENCE, Accelerator

Table = dict[tuple[int, int], tuple[tuple[float, float, float], ...]]

# DeepGEMM's tables (github.com/deepseek-ai/DeepGEMM, README at a6d97a1, February 2025; H800, FP8 in, BF16 out):
# (N, K) -> ((rows, TFLOP/s, GB/s), ...)
DENSE: Table = {
    (2112, 7168): ((64, 206, 1688), (128, 352, 1509), (4096, 1058, 527)),
    (24576, 1536): ((64, 289, 2455), (128, 535, 2448), (4096, 990, 786)),
    (32768, 512): ((64, 219, 2143), (128, 358, 2103), (4096, 590, 1232)),
    (7168, 16384): ((64, 336, 2668), (128, 645, 2604), (4096, 1358, 343)),
    (4096, 7168): ((64, 287, 2320), (128, 533, 2221), (4096, 1304, 500)),
    (7168, 2048): ((64, 295, 2470), (128, 510, 2277), (4096, 1025, 697)),
}
# rows are per group
GROUPED_CONTIGUOUS: Table = {
    (4096, 7168): ((4096, 1288, 494), (8192, 1297, 418)),
    (7168, 2048): ((4096, 1093, 743), (8192, 1099, 681)),
}
GROUPED_MASKED: Table = {
    (4096, 7168): ((256, 932, 2064), (512, 1040, 1288), (1024, 1233, 924)),
    (7168, 2048): ((256, 815, 2047), (512, 916, 1405), (1024, 925, 968)),
}
TABLES = {"dense": DENSE, "contiguous": GROUPED_CONTIGUOUS, "masked": GROUPED_MASKED}
# FlashMLA (github.com/deepseek-ai/FlashMLA, README, April 2025; H800): dense decode over BF16 latents
MLA_DECODE_FLOPS = 660e12
MLA_DECODE_BYTES_PER_S = 3000e9
# docs/hopper.md, H100: flash_mla over FP8 pages by that over BF16 ones, 128 requests of 4,989 tokens (H200: 435 / 636)
MLA_FP8_SHARE = 441 / 594
# DeepSeek's training trace (github.com/deepseek-ai/profile-data, train.json; H800): causal attention forward, 128
# heads, query 192, value 128, 4,096 tokens, 1.24 ms while 20 of 132 SMs communicate
TRACE_ATTENTION_FLOPS = 128 * (192 + 128) * 4096**2 / 1.24e-3
TRACE_COMPUTE_SMS = 112
# rate of a kernel that only moves data: the best rate of the tables above
STREAM_BYTES_PER_S = 3000e9


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A row of a table: the rates of a product of this many rows."""

    rows: float
    flops: float
    bytes_per_s: float


def product_s(rows: float, n: int, k: int, gpu: Accelerator, *, sms_share: float = 1.0, has_fp4: bool = False) -> float:
    """Return the seconds of a product with weights [rows, k] x [k, n], in FP8 unless measured rates have others.

    Args:
        rows: tokens; 0 takes no time.
        sms_share: share of the SMs that compute; arithmetic slows down with it, reading memory does not.
        has_fp4: whether FP4 checkpoints have these weights in FP4.
    """
    if gpu.rates is not None and rows > 0:
        seconds = gpu.rates.product_s(rows, n, k, dtype=gpu.rates.weights_dtype(has_fp4=has_fp4))
        if seconds is not None:
            return _on_some_sms(seconds, 2.0 * rows * n * k, _product_bytes(rows, n, k), gpu, sms_share)
    return _table_s("dense", rows, n, k, _product_bytes(rows, n, k), gpu, 1, sms_share)


def grouped_product_s(
    rows_per_group: float, groups: int, n: int, k: int, gpu: Accelerator, *, masked: bool, sms_share: float = 1.0
) -> float:
    """Return the seconds of one FP8 product per expert, `masked` as in decode or contiguous as in prefill."""
    kind = "masked" if masked else "contiguous"
    num_bytes = groups * _product_bytes(rows_per_group, n, k)
    return _table_s(kind, rows_per_group, n, k, num_bytes, gpu, groups, sms_share)


def bf16_product_s(rows: float, n: int, k: int, gpu: Accelerator, *, batch: int = 1, sms_share: float = 1.0) -> float:
    """Return the seconds of `batch` BF16 products: the FP8 table's share of the peak, twice the bytes."""
    flops = 2.0 * batch * rows * n * k
    if gpu.rates is not None and rows > 0 and batch == 1:
        seconds = gpu.rates.product_s(rows, n, k, dtype="bfloat16")
        if seconds is not None:
            return _on_some_sms(seconds, 2 * flops, 2 * _product_bytes(rows, n, k), gpu, sms_share)
    share = _point("dense", max(rows, 4096.0), n, k).flops / REFERENCE.fp8_flops
    num_bytes = 2.0 * batch * (rows * k + n * k + rows * n)
    return max(flops / (share * gpu.bf16_flops * sms_share), num_bytes / stream_rate(gpu))


def prefill_attention_s(pairs: float, heads: int, qk_dim: int, v_dim: int, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of core attention in its plain form over (query, key) pairs."""
    flops = 2.0 * pairs * heads * (qk_dim + v_dim)
    whole_gpu = TRACE_ATTENTION_FLOPS * REFERENCE.num_sms / TRACE_COMPUTE_SMS
    return flops / (whole_gpu * sms_share * gpu.bf16_flops / REFERENCE.bf16_flops)


def decode_attention_s(
    kv_tokens: float,
    heads: int,
    latent_dim: int,
    value_dim: int,
    gpu: Accelerator,
    *,
    row_bytes: int | None = None,
    rate_share: float = 1.0,
) -> float:
    """Return the seconds of core attention in its absorbed form over `kv_tokens` in all, of one query token each.

    Args:
        row_bytes: read of a KV token; None: those of `latent_dim` values in BF16. Arithmetic is in BF16 in any case.
        rate_share: of arithmetic over BF16 values that is left next to widening others.
    """
    flops = 2.0 * kv_tokens * heads * (latent_dim + value_dim)
    by_arithmetic = flops / (MLA_DECODE_FLOPS * rate_share * gpu.bf16_flops / REFERENCE.bf16_flops)
    num_bytes = kv_tokens * (2.0 * latent_dim if row_bytes is None else row_bytes)
    return max(by_arithmetic, num_bytes / stream_rate(gpu, MLA_DECODE_BYTES_PER_S))


def stream_s(num_bytes: float, gpu: Accelerator, *, kernels: int = 0) -> float:
    """Return the seconds to read and write `num_bytes` in all.

    Args:
        kernels: that share this work; each takes at least the shortest time measured, if there are measurements.
    """
    least_s = 0.0 if gpu.rates is None or not num_bytes else kernels * gpu.rates.kernel_s
    return num_bytes / stream_rate(gpu) + least_s


def _on_some_sms(seconds: float, flops: float, num_bytes: float, gpu: Accelerator, sms_share: float) -> float:
    """Return the seconds of a measured operation on a share of the SMs; reading memory does not slow down.

    Args:
        flops: FP8 operations whose computing takes as long as that of this operation; with `num_bytes` they decide
            whether computing or reading takes longer.
    """
    return seconds / sms_share if flops / gpu.fp8_flops > num_bytes / gpu.hbm_bytes_per_s else seconds


def stream_rate(gpu: Accelerator, on_reference: float = STREAM_BYTES_PER_S) -> float:
    """Return the bytes/s of memory that a kernel reaches."""
    return on_reference * gpu.hbm_bytes_per_s / REFERENCE.hbm_bytes_per_s


def _product_bytes(rows: float, n: int, k: int) -> float:
    """Return the bytes of FP8 inputs and weights and BF16 outputs."""
    return rows * k + n * k + 2.0 * rows * n


def _table_s(
    kind: str, rows: float, n: int, k: int, num_bytes: float, gpu: Accelerator, groups: int, sms_share: float
) -> float:
    """Return seconds by the nearest shape of a table: interpolated between rows, at the last row's rate beyond.

    Fewer rows than in the table wait for the same weights: their bytes/s are held, not their FLOP/s.
    """
    if rows <= 0 or groups <= 0:
        return 0.0
    point = _point(kind, rows, n, k)
    flops = 2.0 * groups * rows * n * k
    arithmetic_share = point.flops / REFERENCE.fp8_flops
    memory_share = point.bytes_per_s / REFERENCE.hbm_bytes_per_s
    if rows < _points(kind, n, k)[0].rows:
        return num_bytes / (memory_share * gpu.hbm_bytes_per_s)
    if memory_share > arithmetic_share:
        return flops / (point.flops * gpu.hbm_bytes_per_s / REFERENCE.hbm_bytes_per_s)
    return flops / (arithmetic_share * gpu.fp8_flops * sms_share)


def _point(kind: str, rows: float, n: int, k: int) -> KernelRate:
    """Interpolate between two rows of a table, time as a power of rows, so that more rows never take less time."""
    points = _points(kind, n, k)
    if rows <= points[0].rows:
        return points[0]
    for low, high in pairwise(points):
        if rows <= high.rows:
            part = log(rows / low.rows) / log(high.rows / low.rows)
            flops = low.flops * (high.flops / low.flops) ** part
            return KernelRate(rows, flops, low.bytes_per_s * (high.bytes_per_s / low.bytes_per_s) ** part)
    return points[-1]


@cache
def _points(kind: str, n: int, k: int) -> tuple[KernelRate, ...]:
    """Return the rows of the measured shape that is nearest to n x k in proportion."""
    table = TABLES[kind]
    shape = min(table, key=lambda shape: abs(log(shape[0] / n)) + abs(log(shape[1] / k)))
    return tuple(KernelRate(rows, tflops * 1e12, gbytes * 1e9) for rows, tflops, gbytes in table[shape])
