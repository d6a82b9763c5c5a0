"""Every operation in plain PyTorch: the oracle for faster versions, and the fallback where no faster one can run.

The docstrings here are the contract of each operation. In float32 a row's result is bit-identical whatever other rows
it is computed with, so that an output never depends on how requests were batched or prompts cut. Three habits ensure
this: how products get their rows (products.py), float64 for exp and for sums that are not products (pointwise.py), and
attention page by page (mla.py).

Whether these suffice depends on the processor and its library: row_check.py measures it. The number of threads has to
stay the same, unless every matrix has a multiple of 16 rows: the CPU library may give each thread some columns of a
product, and few columns are summed in another order.
"""

from collections.abc import Callable
from typing import Any

from batchinfer_kernels.reference.compressed import attend_entries, choose_entries, pool_entries, rotate_heads
from batchinfer_kernels.reference.experts import grouped_mlp, masked_mlp, silu_mul_blocks
from batchinfer_kernels.reference.fp8 import dequantize_fp8_block, quantize_fp8_block, quantize_fp8_rows
from batchinfer_kernels.reference.fp8_pages import mla_decode_fp8, mla_prefill_fp8, rope_and_cache_fp8
from batchinfer_kernels.reference.gating import gate
from batchinfer_kernels.reference.gqa import (
    gqa_decode,
    gqa_decode_fp8,
    gqa_prefill,
    gqa_prefill_fp8,
    gqa_rope_and_cache,
    gqa_rope_and_cache_fp8,
)
from batchinfer_kernels.reference.hyper import join_streams, leave_streams, stream_mix, stream_products
from batchinfer_kernels.reference.index_fp8 import hadamard_fp8
from batchinfer_kernels.reference.mla import mla_decode, mla_prefill
from batchinfer_kernels.reference.pieces import merge_pieces, spread_queries
from batchinfer_kernels.reference.places import expert_places
from batchinfer_kernels.reference.pointwise import rms_norm, rms_norm_fp8, silu_mul
from batchinfer_kernels.reference.products import batched_linear, linear, pack, pack_router, router
from batchinfer_kernels.reference.rows import (
    add_sums,
    apply_token_bitmask,
    argmax,
    copy_rows,
    cos_sin,
    draw,
    gather_rows,
    log_sum_exp,
    most_likely,
    rope_and_cache,
    sort_by_expert,
    sum_per_token,
)
from batchinfer_kernels.reference.sparse import best_slots, choose_keys, index_cache, mla_sparse, rotated_queries

OPERATIONS: tuple[Callable[..., Any], ...] = (
    pack,
    pack_router,
    linear,
    batched_linear,
    router,
    rms_norm,
    rms_norm_fp8,
    silu_mul,
    silu_mul_blocks,
    gate,
    rope_and_cache,
    grouped_mlp,
    masked_mlp,
    sort_by_expert,
    expert_places,
    sum_per_token,
    add_sums,
    gather_rows,
    copy_rows,
    cos_sin,
    argmax,
    draw,
    log_sum_exp,
    most_likely,
    apply_token_bitmask,
    mla_prefill,
    mla_decode,
    spread_queries,
    merge_pieces,
    rope_and_cache_fp8,
    mla_prefill_fp8,
    mla_decode_fp8,
    gqa_rope_and_cache,
    gqa_prefill,
    gqa_decode,
    gqa_rope_and_cache_fp8,
    gqa_prefill_fp8,
    gqa_decode_fp8,
    index_cache,
    choose_keys,
    mla_sparse,
    rotated_queries,
    hadamard_fp8,
    best_slots,
    rotate_heads,
    pool_entries,
    choose_entries,
    attend_entries,
    stream_products,
    stream_mix,
    join_streams,
    leave_streams,
    quantize_fp8_block,
    quantize_fp8_rows,
    dequantize_fp8_block,
)
