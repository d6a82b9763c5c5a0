"""The operations that DeepSeek's libraries have for Hopper GPUs; the `reference` functions document them.

    linear                 deep_gemm, dense                     weights in FP8
    grouped_mlp            deep_gemm, grouped "contiguous"      weights in FP8 or bfloat16
    masked_mlp             deep_gemm, grouped "masked"          weights in FP8 or bfloat16
    mla_decode             flash_mla, dense decode              queries and pages in bfloat16

Shapes must be whole tiles: columns in multiples of 64, depth in multiples of 128; heads of 512 + 64 latent values.
Nothing here reads a device tensor on the host.

deep_gemm rounds and adds as reference/fp8.py describes, but adds a block's products in the tensor cores' order.
flash_mla splits a request's keys by the step's other requests, so that the last bits of a row may depend on its batch.
It has no dense prefill for Hopper.
Sources: DeepGEMM's and FlashMLA's interfaces at github.com/deepseek-ai, of the versions in libraries.py.
"""

# T tokens (rows), D hidden, F intermediate, E experts, C rows of room per expert, M (token, expert) rows in the order
# of experts, S places of rows when each expert starts at a whole tile, J blocks of depth
# H heads, W latent and rotary width, B requests, Q query tokens per request, P pages

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from batchinfer_kernels import reference
from batchinfer_kernels.hopper import libraries
from batchinfer_kernels.hopper.libraries import is_on_gpu
from batchinfer_kernels.implementation import implementation
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.experts import ExpertBiases, other_form
from batchinfer_kernels.reference.fp8 import FP8, ScaledRows, dequantize_fp8_rows
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.places import ExpertPlaces, ExpertRows, PlacedRows
from batchinfer_kernels.reference.pointwise import SWIGLU, Activation

_SCHEDULE = "hopper"  # key in a step's schedule
_TILE_ROWS = 128  # a tile must not have rows of two experts, and the last one of a block is written whole
_COLUMN_MULTIPLE, _DEPTH_MULTIPLE = 64, 128
# flash_mla's own cuts take five numbers per request, and one, of a block's 227 KiB of shared memory; else it exits
_MOST_REQUESTS = (227 * 1024 // 4 - 1) // 5
LATENT_DIM, WIDTH = 512, 576

Weight = torch.Tensor | BlockScaled
Rows = tuple[torch.Tensor, torch.Tensor | None]  # rows, with their scales in FP8
Quantize = Callable[..., tuple[torch.Tensor, torch.Tensor]]


# ---- rejected arguments


def _product(x: torch.Tensor | ScaledRows, weight: Weight, *_: Any, **__: Any) -> str | None:
    """Reject weights that are not in FP8 blocks of whole tiles, rows that are not in bfloat16 on a GPU."""
    if not isinstance(weight, BlockScaled):
        return "the weight is not in FP8 blocks"
    if isinstance(x, ScaledRows):
        return _no_tiles(x.values, weight)
    if x.dtype is not torch.bfloat16:
        return f"rows are in {x.dtype}"
    return _no_tiles(x, weight)


def _grouped(
    x: torch.Tensor,
    _: Any,
    gate_up: Any,
    down: Any,
    tokens_M: Any = None,
    scales: Any = None,
    *,
    tile_rows: int = 1,
    **options: Any,
) -> str | None:
    """Reject weights not in FP8 blocks or bfloat16 (as far as deep_gemm has that), whole tiles and on a GPU."""
    if reason := other_form(**options):
        return reason
    if tile_rows not in (1, _TILE_ROWS):
        return f"experts' rows do not begin at multiples of {_TILE_ROWS}"
    return _no_experts(x, scales, gate_up, down, libraries.BF16_CONTIGUOUS)


def _masked(x: torch.Tensor, _: Any, gate_up: Any, down: Any, scales: Any = None, **options: Any) -> str | None:
    """Reject weights not in FP8 blocks or bfloat16 (as far as deep_gemm has that), whole tiles and on a GPU."""
    return other_form(**options) or _no_experts(x, scales, gate_up, down, libraries.BF16_MASKED)


def rejects_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, **_: Any) -> str | None:
    """Reject tensors that are not in bfloat16 on a GPU, other widths than 512 + 64."""
    pages = keys.pages
    if not is_on_gpu(q_THW, pages):
        return "tensors are not on a GPU"
    if not q_THW.dtype is pages.dtype is torch.bfloat16:
        return "queries or pages are not in bfloat16"
    is_fitting = (q_THW.shape[-1], latent_dim, pages.shape[1]) == (WIDTH, LATENT_DIM, PAGE_TOKENS)
    return None if is_fitting else "heads are not of 512 + 64 latent values"


def _decode_in_library_cuts(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, **_: Any) -> str | None:
    """Reject tensors that are not in bfloat16 on a GPU, other widths than 512 + 64, more than 11,622 requests."""
    if len(keys.page_table_BP) > _MOST_REQUESTS:
        return "there are more requests than flash_mla can cut a step for"
    return rejects_decode(q_THW, keys, latent_dim=latent_dim)


def why_not_auto_decode() -> str:
    """Return the reason why "auto" passes flash_mla's own cuts over."""
    return "a request's last bits would depend on the other requests of its batch, so only by name"


def _no_experts(
    x: torch.Tensor, scales: torch.Tensor | None, gate_up: Any, down: Any, bfloat16_names: tuple[str, ...]
) -> str | None:
    if x.dtype is not (torch.bfloat16 if scales is None else FP8):
        return f"rows are in {x.dtype}"
    reason = _no_tiles(x, gate_up, down)
    if reason is not None or (isinstance(gate_up, BlockScaled) and isinstance(down, BlockScaled)):
        return reason
    if (
        isinstance(gate_up, BlockScaled)
        or isinstance(down, BlockScaled)
        or not gate_up.dtype is down.dtype is torch.bfloat16
    ):
        return "weights are not all in FP8 blocks or all in bfloat16"
    return None if libraries.deep_gemm(bfloat16_names) is not None else "deep_gemm has no such product in bfloat16"


def _no_tiles(x: torch.Tensor, *weights: Any) -> str | None:
    """Return why the operands are not all on a GPU with weights of whole tiles, or None."""
    for weight in weights:
        if not isinstance(weight, Weight):
            return "a weight is packed for another candidate"
        plain = weight.values if isinstance(weight, BlockScaled) else weight
        num_columns, depth = plain.shape[-2:]
        if num_columns % _COLUMN_MULTIPLE or depth % _DEPTH_MULTIPLE:
            return "a weight is not whole tiles of 64 x 128"
        if not is_on_gpu(x, plain):
            return "tensors are not on a GPU"
    return None


# ---- the operations


@implementation(rejects=_product, uses=("quantize_fp8_rows",))
def linear(
    x: torch.Tensor | ScaledRows,
    weight: BlockScaled,
    bias: torch.Tensor | None = None,
    *,
    float32_out: bool = False,
    residual: torch.Tensor | None = None,
    quantize_fp8_rows: Quantize = reference.quantize_fp8_rows,
) -> torch.Tensor:
    y = torch.empty(len(x), len(weight.values), dtype=torch.bfloat16, device=weight.values.device)
    if len(x):
        gemm = _gemm(libraries.FP8_GEMM)
        rows = (x.values, x.scales) if isinstance(x, ScaledRows) else quantize_fp8_rows(x)
        gemm(rows, (weight.values, weight.scales), y, compiled_dims="nk")
    y = y if bias is None else y + bias
    y = y if residual is None else residual + y
    return y.float() if float32_out else y


@implementation(rejects=_grouped, uses=("quantize_fp8_rows", "silu_mul_blocks", "expert_places"))
def grouped_mlp(
    x: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    tokens_M: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    tile_rows: int = 1,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
    quantize_fp8_rows: Quantize = reference.quantize_fp8_rows,
    silu_mul_blocks: Callable[..., Rows] = reference.silu_mul_blocks,
    expert_places: Callable[..., ExpertPlaces] = reference.expert_places,
) -> ExpertRows:
    """Move rows so that each expert starts at a whole tile, unless they came so; the result stays in these places.

    The number of tiles is known only on the device, so there is room for the most there can be. Places without rows are
    marked, and tiles without rows are skipped.
    """
    num_rows = len(x) if tokens_M is None else len(tokens_M)
    if num_rows == 0:
        return torch.empty(0, x.shape[-1], dtype=torch.bfloat16, device=x.device)
    x, scales = _rows_for(gate_up_EFD, x, scales, quantize_fp8_rows)
    place_M, expert_S, source_S = expert_places(num_rows_E, num_rows, _TILE_ROWS, tokens_M)
    if tile_rows == 1:
        x = _bytes(_bytes(x).index_select(0, source_S), x.dtype)
        # column by column, as the library reads them
        scales = None if scales is None else scales.t().index_select(1, source_S).t()
    expert_S = expert_S[: len(x)]
    product = partial(_product_by_expert, libraries.FP8_CONTIGUOUS, libraries.BF16_CONTIGUOUS, (expert_S,))
    gate_up_SF = product(x, scales, gate_up_EFD)
    active, active_scales = silu_mul_blocks(gate_up_SF[None], fp8=isinstance(down_EDF, BlockScaled))
    y_SD = product(active[0], None if active_scales is None else active_scales[0], down_EDF)
    return PlacedRows(y_SD, place_M) if tile_rows == 1 else y_SD


@implementation(rejects=_masked, uses=("quantize_fp8_rows", "silu_mul_blocks"))
def masked_mlp(
    x_ECD: torch.Tensor,
    num_rows_E: torch.Tensor,
    gate_up_EFD: Weight,
    down_EDF: Weight,
    scales: torch.Tensor | None = None,
    *,
    expected_rows: int | None = None,
    activation: Activation = SWIGLU,
    biases: ExpertBiases | None = None,
    quantize_fp8_rows: Quantize = reference.quantize_fp8_rows,
    silu_mul_blocks: Callable[..., Rows] = reference.silu_mul_blocks,
) -> torch.Tensor:
    room = x_ECD.shape[1]
    if x_ECD.numel() == 0:
        return torch.empty(x_ECD.shape, dtype=torch.bfloat16, device=x_ECD.device)
    num_rows_E = num_rows_E.to(torch.int32).contiguous()
    x_ECD, scales = _rows_for(gate_up_EFD, x_ECD, scales, quantize_fp8_rows, num_rows_E)
    missing = -room % _TILE_ROWS
    if missing:  # a block's last tile is written whole: without this the next block's first rows would be overwritten
        x_ECD = _bytes(F.pad(_bytes(x_ECD), (0, 0, 0, missing)), x_ECD.dtype)
        scales = None if scales is None else F.pad(scales.mT, (0, missing)).mT
    which_rows = num_rows_E, max(1, min(expected_rows or room, room))
    product = partial(_product_by_expert, libraries.FP8_MASKED, libraries.BF16_MASKED, which_rows)
    gate_up_ECF = product(x_ECD, scales, gate_up_EFD)
    active, active_scales = silu_mul_blocks(gate_up_ECF, num_rows_E, fp8=isinstance(down_EDF, BlockScaled))
    return product(active, active_scales, down_EDF)[:, :room]


@implementation(rejects=_decode_in_library_cuts)
def mla_decode(q_THW: torch.Tensor, keys: PagedKeys, *, latent_dim: int, scale: float) -> torch.Tensor:
    """Decode, taking a request's queries as its last Q tokens, as in every decode step.

    Positions are not read. A request without tokens gives zeros. The split of the work over the GPU depends on
    `kv_tokens_B`: it is computed once per `schedule`, which therefore belongs to one step (and micro-batch).
    """
    return decode(q_THW, keys, latent_dim, scale, _library_cuts)


def decode(
    q_THW: torch.Tensor,
    keys: PagedKeys,
    latent_dim: int,
    scale: float,
    cuts_of: Callable[[torch.Tensor, int], tuple[Any, Any]],
) -> torch.Tensor:
    """Decode with the cuts of `cuts_of(kv_tokens_B, queries of a request x heads)`, in the library's form."""
    pages, page_table_BP, kv_tokens_B, _, schedule, _ = keys
    num_requests, (num_rows, num_heads, _) = len(page_table_BP), q_THW.shape
    if num_rows == 0:
        return q_THW.new_empty(0, num_heads, latent_dim)
    q_BQHW = q_THW.contiguous().unflatten(0, (num_requests, -1))
    schedule = {} if schedule is None else schedule
    if _SCHEDULE not in schedule:
        kv_tokens = kv_tokens_B.to(torch.int32).contiguous()
        cuts = cuts_of(kv_tokens, q_BQHW.shape[1] * num_heads)
        schedule[_SCHEDULE] = kv_tokens_B, page_table_BP.to(torch.int32).contiguous(), kv_tokens, cuts
    source, page_table, kv_tokens, cuts = schedule[_SCHEDULE]
    assert source is kv_tokens_B, "a schedule serves one step: another one has other lengths"
    out_BQHC, _ = call_decode(q_BQHW, pages, page_table, kv_tokens, cuts, scale)
    return out_BQHC.flatten(0, 1)


def call_decode(
    q_BQHW: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    kv_tokens_B: torch.Tensor,
    cuts: tuple[Any, Any],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flash_mla's results, [B, Q, H, C], and logarithms of the sums of exp(score), [B, H, Q] float32.

    Args:
        page_table_BP, kv_tokens_B: int32.
    """
    out_BQHC, log_sums_BHQ = libraries.flash_mla().flash_mla_with_kvcache(
        q_BQHW,
        pages[:, :, None],
        page_table_BP,
        kv_tokens_B,
        LATENT_DIM,
        *cuts,
        softmax_scale=scale,
        causal=True,
        **({"use_legacy": True} if "use_legacy" in libraries.decode_parameters() else {}),
    )
    return out_BQHC, log_sums_BHQ


def _library_cuts(kv_tokens_B: torch.Tensor, rows_per_request: int) -> tuple[Any, Any]:
    """Cut a step as flash_mla does by default, with one head of keys for all queries."""
    return libraries.flash_mla().get_mla_metadata(kv_tokens_B, rows_per_request, 1)


def _product_by_expert(
    fp8_names: tuple[str, ...],
    bfloat16_names: tuple[str, ...],
    which_rows: tuple[Any, ...],
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    weight: Weight,
) -> torch.Tensor:
    """Multiply rows [..., M] by their experts' weights [E, N, M] to [..., N]; `which_rows` assigns rows to experts."""
    plain = weight.values if isinstance(weight, BlockScaled) else weight
    out = rows.new_empty(*rows.shape[:-1], plain.shape[1], dtype=torch.bfloat16)
    if isinstance(weight, BlockScaled):
        _gemm(fp8_names)((rows, scales), (weight.values, weight.scales), out, *which_rows)
    else:
        _gemm(bfloat16_names)(rows, weight, out, *which_rows)
    return out


def _rows_for(
    weight: Weight,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    quantize_fp8_rows: Quantize,
    num_rows_E: torch.Tensor | None = None,
) -> Rows:
    """Convert rows to the form in which they meet this weight: both in FP8, or both in bfloat16."""
    if not isinstance(weight, BlockScaled):
        return (x if scales is None else dequantize_fp8_rows(x, scales, torch.bfloat16)).contiguous(), None
    if scales is not None:
        return x.contiguous(), scales
    return quantize_fp8_rows(x, num_rows_E)


def _bytes(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """View FP8 rows as bytes, which all data-moving operations take, or (with a dtype) back; return other rows."""
    if dtype is None:
        return x.view(torch.uint8) if x.dtype is FP8 else x
    return x.view(dtype)


def _gemm(names: tuple[str, ...]) -> Callable[..., None]:
    gemm = libraries.deep_gemm(names)
    assert gemm is not None, f"the probe has found no {names[0]}"
    return gemm
