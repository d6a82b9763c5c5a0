"""Stand-ins for deep_gemm and flash_mla, which run on Hopper GPUs only: their names and signatures, in plain PyTorch.

Signatures and checks are those of DeepGEMM 2.6.1 (csrc/apis/gemm.hpp), sgl-deep-gemm 0.1.2 (deep_gemm/__init__.py),
FlashMLA (flash_mla/flash_mla_interface.py, its first version and that of 2026-04) and sgl-flash-mla 1.0.0, so that a
wrong keyword is a TypeError here as well. What would be garbage on a GPU is NaN: rows of nobody, and what a kernel
writes beyond a block. What would go unnoticed there fails here: metadata for other lengths.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import torch

from batchinfer_kernels.reference.fp8 import block_product
from support import hopper_sparse_stand_ins as sparse

FP8 = torch.float8_e4m3fn
TILE = 128
COPIED = []  # shapes of rows whose scales the library had to put into its own order


def ceil_div(x, y):
    return -(-x // y)


# ---- deep_gemm


def check_k_major(x, dtype):
    assert x.dtype == dtype
    assert x.is_contiguous()
    assert x.shape[-1] % 16 == 0, "a row's address is not a multiple of 16 bytes"


def check_result(d, *shape):
    assert d.dtype == torch.bfloat16
    assert d.is_contiguous()
    assert d.shape == shape


def check_row_scales(scales, *shape):
    assert scales.dtype == torch.float32
    assert scales.shape == (*shape[:-1], ceil_div(shape[-1], 128))
    # with the rows next to each other in memory they are taken as they are, in plain order the library copies them
    # first, and anything else it copies slowly (csrc/jit_kernels/impls/smxx_layout.hpp)
    step = ceil_div(shape[-2], 4) * 4
    by_column = (1, step) if scales.dim() == 2 else (step * scales.shape[-1], 1, step)
    if scales.stride() != by_column:
        assert scales.is_contiguous()
        COPIED.append(shape)


def check_weight(b, *shape):
    values, scales = b
    check_k_major(values, FP8)
    assert values.shape == shape
    assert scales.dtype == torch.float32
    assert scales.is_contiguous()
    assert scales.shape == (*shape[:-2], ceil_div(shape[-2], 128), ceil_div(shape[-1], 128))


def wide_product(a, b):
    return (a.double() @ b.double().T).bfloat16()


def dense_fp8(a, b, d, c, compiled_dims):
    assert type(a) is tuple
    assert type(b) is tuple
    assert c is None, "Hopper's dense FP8 product adds to nothing"
    assert compiled_dims in ("nk", "")
    (values, scales), (num_rows, depth) = a, a[0].shape
    assert num_rows > 0
    check_k_major(values, FP8)
    check_row_scales(scales, num_rows, depth)
    check_weight(b, len(b[0]), depth)
    check_result(d, num_rows, len(b[0]))
    d.copy_(block_product(values, scales, *b))


def check_contiguous(rows, d, num_columns, grouped_layout, num_groups):
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.is_contiguous()
    assert grouped_layout.shape == (len(rows),)
    assert len(rows) % TILE == 0
    assert int(grouped_layout.max()) < num_groups
    check_result(d, len(rows), num_columns)
    for tile in grouped_layout.view(-1, TILE):
        (is_row,) = torch.where(tile >= 0)
        assert is_row.tolist() == list(range(len(is_row))), "rows do not begin at the tile's start"
        assert len(tile[is_row].unique()) <= 1, "a tile has rows of two groups"
    d.fill_(torch.nan)


def contiguous_fp8(a, b, d, grouped_layout):
    (values, scales), num_groups = a, len(b[0])
    check_k_major(values, FP8)
    check_row_scales(scales, *values.shape)
    check_weight(b, num_groups, b[0].shape[1], values.shape[1])
    check_contiguous(values, d, b[0].shape[1], grouped_layout, num_groups)
    for group in range(num_groups):
        rows = grouped_layout == group
        d[rows] = block_product(values.view(torch.uint8)[rows].view(FP8), scales[rows], b[0][group], b[1][group]).to(d)


def contiguous_bf16(a, b, d, grouped_layout):
    check_k_major(a, torch.bfloat16)
    check_k_major(b, torch.bfloat16)
    check_contiguous(a, d, b.shape[1], grouped_layout, len(b))
    for group in range(len(b)):
        rows = grouped_layout == group
        d[rows] = wide_product(a[rows], b[group])


def check_masked(rows, d, num_columns, masked_m, expected_m):
    num_groups, room, _ = rows.shape
    assert room % TILE == 0, "the last tile of a block would be written into the next block"
    assert masked_m.dtype == torch.int32
    assert masked_m.is_contiguous()
    assert masked_m.shape == (num_groups,)
    assert type(expected_m) is int
    assert 0 < expected_m <= room
    check_result(d, num_groups, room, num_columns)
    d.fill_(torch.nan)


def masked_fp8(a, b, d, masked_m, expected_m):
    (values, scales), num_groups = a, len(b[0])
    check_k_major(values, FP8)
    check_row_scales(scales, *values.shape)
    check_weight(b, num_groups, b[0].shape[1], values.shape[2])
    check_masked(values, d, b[0].shape[1], masked_m, expected_m)
    for group, count in enumerate(masked_m.tolist()):
        if count:
            d[group, :count] = block_product(values[group, :count], scales[group, :count], b[0][group], b[1][group])


def masked_bf16(a, b, d, masked_m, expected_m):
    check_k_major(a, torch.bfloat16)
    check_k_major(b, torch.bfloat16)
    check_masked(a, d, b.shape[1], masked_m, expected_m)
    for group, count in enumerate(masked_m.tolist()):
        d[group, :count] = wide_product(a[group, :count], b[group])


def deep_gemm_upstream():
    """DeepGEMM 2.6.1."""
    module = ModuleType("deep_gemm")
    module.__version__ = "2.6.1"

    def fp8_gemm_nt(
        a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk", disable_ue8m0_cast=False
    ):
        assert (recipe, recipe_a, recipe_b, disable_ue8m0_cast) == (None, None, None, False)
        dense_fp8(a, b, d, c, compiled_dims)

    def m_grouped_fp8_gemm_nt_contiguous(
        a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True, expected_m_for_psum_layout=None,
    ):  # fmt: skip
        assert (recipe, compiled_dims, use_psum_layout) == (None, "nk", False)
        contiguous_fp8(a, b, d, grouped_layout)

    def m_grouped_fp8_gemm_nt_masked(
        a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):  # fmt: skip
        assert (recipe, compiled_dims) == (None, "nk")
        masked_fp8(a, b, d, masked_m, expected_m)

    def m_grouped_bf16_gemm_nt_contiguous(
        a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False, ensure_zero_padding=True,
        expected_m_for_psum_layout=None,
    ):  # fmt: skip
        assert (compiled_dims, use_psum_layout) == ("nk", False)
        contiguous_bf16(a, b, d, grouped_layout)

    def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):
        assert compiled_dims == "nk"
        masked_bf16(a, b, d, masked_m, expected_m)

    for function in (
        fp8_gemm_nt,
        m_grouped_fp8_gemm_nt_contiguous,
        m_grouped_fp8_gemm_nt_masked,
        m_grouped_bf16_gemm_nt_contiguous,
        m_grouped_bf16_gemm_nt_masked,
    ):
        setattr(module, function.__name__, function)
    sparse.add_upstream_logits(module)
    return module


def deep_gemm_sgl():
    """sgl-deep-gemm 0.1.2: the masked product in FP8 has other names, and the contiguous one fewer parameters."""
    module = ModuleType("deep_gemm")
    module.__version__ = "0.1.2"

    def fp8_fp4_gemm_nt(
        a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="", disable_ue8m0_cast=False
    ):
        dense_fp8(a, b, d, c, compiled_dims)

    def m_grouped_fp8_fp4_gemm_nt_contiguous(
        a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False, use_psum_layout=False, expected_m_for_psum_layout=None,
    ):  # fmt: skip
        contiguous_fp8(a, b, d, grouped_layout)

    def m_grouped_fp8_fp4_gemm_nt_masked(
        a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims="nk",
        disable_ue8m0_cast=False,
    ):  # fmt: skip
        masked_fp8(a, b, d, masked_m, expected_m)

    def m_grouped_bf16_gemm_nt_contiguous(
        a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False, expected_m_for_psum_layout=None
    ):
        contiguous_bf16(a, b, d, grouped_layout)

    def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims="nk"):
        masked_bf16(a, b, d, masked_m, expected_m)

    module.fp8_gemm_nt = module.fp8_fp4_gemm_nt = fp8_fp4_gemm_nt
    module.m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
    module.m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
    module.fp8_m_grouped_gemm_nt_masked = module.m_grouped_fp8_fp4_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
    module.m_grouped_bf16_gemm_nt_contiguous = m_grouped_bf16_gemm_nt_contiguous
    module.bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked
    sparse.add_sgl_logits(module)
    return module


def deep_gemm_1_0():
    """The package deep_gemm 1.0.0: its names are others, and its headers are missing."""
    module = ModuleType("deep_gemm")

    def gemm_fp8_fp8_bf16_nt(lhs, rhs, out):
        raise AssertionError("Cannot find GEMM include directory")

    module.gemm_fp8_fp8_bf16_nt = gemm_fp8_fp8_bf16_nt
    module.m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = gemm_fp8_fp8_bf16_nt
    module.m_grouped_gemm_fp8_fp8_bf16_nt_masked = gemm_fp8_fp8_bf16_nt
    return module


# ---- flash_mla


def dense_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal):
    """Check and compute as csrc/api/dense_decode.h does."""
    num_requests, num_queries, _, width = q.shape
    assert num_requests > 0, "batch size must be positive"
    assert q.dtype == k_cache.dtype == torch.bfloat16
    assert (width, head_dim_v) == (576, 512)
    assert k_cache.shape[1:] == (64, 1, width)
    assert q.is_contiguous()
    assert k_cache.stride(-1) == 1
    for index in (block_table, cache_seqlens):
        assert index.dtype == torch.int32
        assert index.is_contiguous()
        assert len(index) == num_requests
    assert softmax_scale is not None, "its own default is not that of the model"
    out = torch.zeros(*q.shape[:-1], head_dim_v)
    log_sums = torch.full((num_requests, q.shape[2], num_queries), torch.inf)
    for request, count in enumerate(cache_seqlens.tolist()):
        pages = block_table[request, : ceil_div(count, 64)].long()
        keys = k_cache[pages].flatten(0, 2)[:count].float()
        for query in range(num_queries if count else 0):
            seen = keys[: count - num_queries + query + 1 if causal else count]
            scores = q[request, query].float() @ seen.T * softmax_scale
            out[request, query] = torch.softmax(scores, dim=-1) @ seen[:, :head_dim_v]
            log_sums[request, :, query] = torch.logsumexp(scores, dim=-1).nan_to_num(nan=torch.inf)
    return out.bfloat16(), log_sums


def flash_mla_first():
    """The first version: metadata in two tensors."""
    module = ModuleType("flash_mla")
    module.__version__, module.num_schedules = "1.0.0", 0

    def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
        assert cache_seqlens.dtype == torch.int32
        assert num_heads_k == 1
        module.num_schedules += 1
        return cache_seqlens.clone(), torch.tensor([num_heads_per_head_k], dtype=torch.int32)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
        causal=False,
    ):  # fmt: skip
        assert torch.equal(tile_scheduler_metadata, cache_seqlens), "metadata of other lengths"
        assert num_splits.tolist() == [q.shape[1] * q.shape[2]]
        return dense_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    return module


NUM_SMS = 132  # of a Hopper GPU


def equal_shares(lengths, num_parts, page=64, overhead=5):
    """FlashMLA's own cuts (get_mla_metadata_kernel): each part of the GPU gets as many pages as the others."""
    assert 4 * (5 * len(lengths) + 1) <= 227 * 1024, "cudaFuncSetAttribute fails, and the process exits"
    pages = [max(1, -(-length // page)) for length in lengths.tolist()]
    share = -(-sum(count + overhead for count in pages) // num_parts) + overhead
    request = block = split = num_splits = 0
    parts, splits = [], [0]
    for _ in range(num_parts):
        begin, begin_block, begin_split, is_first_cut, left = request, block, split, block != 0, share
        while request < len(pages):
            rest = pages[request] - block
            if left < rest + overhead:
                if left > overhead:
                    block, split = block + left - overhead, split + 1
                break
            num_splits += split + 1
            splits.append(num_splits)
            left -= rest + overhead
            request, block, split = request + 1, 0, 0
        end = request if block else request - 1
        end_block = block or (0 if lengths[end] == 0 else pages[end])
        is_last_cut = end_block != pages[end] and int(lengths[end]) != 0
        if begin == end:
            is_first_cut = is_last_cut = is_first_cut or is_last_cut
        parts.append([begin, end, begin_block, end_block, begin_split, is_first_cut, is_last_cut, -1])
    assert (request, block, split) == (len(pages), 0, 0)
    return torch.tensor(parts, dtype=torch.int32), torch.tensor(splits, dtype=torch.int32)


def pieces_of(cuts, splits, lengths, page=64):
    """Return the pages of each piece of each request, in order, as the kernels read the cuts."""
    pieces = [{} for _ in lengths]
    for begin, end, begin_block, end_block, begin_split, is_first_cut, is_last_cut, _ in cuts.tolist():
        if begin >= len(pieces):
            continue
        for request in range(begin, end + 1):
            first = begin_block if request == begin else 0
            behind = end_block if request == end else -(-int(lengths[request]) // page)
            is_cut = is_first_cut if request == begin else is_last_cut if request == end else False
            piece = begin_split if request == begin else 0
            assert piece not in pieces[request], "two parts write one piece"
            assert is_cut == (splits[request + 1] - splits[request] > 1), "whole and in pieces at once"
            pieces[request][piece] = (first, behind)
    for request, found in enumerate(pieces):
        if not found and not lengths[request]:  # no keys: the result may be anything
            pieces[request] = []
            continue
        assert sorted(found) == list(range(int(splits[request + 1] - splits[request]))), "a piece is missing"
        ordered = [found[piece] for piece in sorted(found)]
        covered = [page for first, behind in ordered for page in range(first, behind)]
        assert covered == list(range(-(-int(lengths[request]) // page))), "a page is read twice, or never"
        pieces[request] = ordered
    return pieces


@dataclasses.dataclass
class FlashMLASchedMeta:
    config: tuple | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    pieces: list | None = None  # for tests

    def use(self, q, k_cache, lengths, causal, topk=None):
        """Made at the first call; later ones must be of the same shapes (checked by the library) and lengths (not)."""
        config = (*q.shape, *k_cache.shape[1:], causal, topk)
        if self.config is None:
            self.config, self.lengths = config, lengths.clone()
            if topk is None and not lengths.is_meta:
                num_parts = max(1, NUM_SMS // -(-q.shape[1] * q.shape[2] // 64))
                if self.tile_scheduler_metadata is None:
                    self.tile_scheduler_metadata, self.num_splits = equal_shares(lengths, num_parts)
                assert self.tile_scheduler_metadata.shape == (num_parts, 8)
                assert self.tile_scheduler_metadata.dtype == self.num_splits.dtype == torch.int32
                self.pieces = pieces_of(self.tile_scheduler_metadata, self.num_splits, lengths)
        assert self.config == config, "Your input arguments are inconsistent with sched_meta"
        assert torch.equal(self.lengths, lengths), "metadata of other lengths"

    def decode(self, q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal, is_fp8, indices):
        """Dense where there are no lists, sparse over rows in FP8 where there are."""
        if indices is None:
            assert not is_fp8
            self.use(q, k_cache, cache_seqlens, causal)
            results = dense_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal)
            for request, pieces in enumerate(self.pieces or []):
                if not pieces:
                    for result in results:
                        result[request] = torch.nan
            return results
        assert not causal, "causal must be False when sparse attention is enabled"
        assert is_fp8
        assert scale is not None, "its own default is not that of the model"
        self.use(q, k_cache, torch.tensor(len(q)), causal, indices.shape[-1])  # lengths take no part
        return sparse.sparse_fp8_decode(q, k_cache, indices, head_dim_v, scale)


def flash_mla_later():
    """FlashMLA of 2026-04."""
    module = ModuleType("flash_mla")
    module.__version__, module.num_schedules = "1.0.0+9241ae3", 0

    def get_mla_metadata(*args, **kwargs):
        module.num_schedules += 1
        return FlashMLASchedMeta(), None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
    ):  # fmt: skip
        assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
        assert num_splits is None
        assert attn_sink is extra_k_cache is extra_indices_in_kvcache is None
        assert topk_length is extra_topk_length is None, "V3.2 does not support dynamic topk length"
        return tile_scheduler_metadata.decode(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices
        )

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    sparse.add_later_sparse(module)
    return module


def flash_mla_sgl(legacy=True):
    """sgl-flash-mla 1.0.0: dense decode only with use_legacy."""
    module = ModuleType("flash_mla")
    module.__version__, module.num_schedules = "1.0.0", 0
    module.has_legacy = lambda: legacy

    def get_mla_metadata(*args, **kwargs):
        module.num_schedules += 1
        return FlashMLASchedMeta(), None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
        use_legacy=False, kv_format=None, descale_q=None, descale_k=None,
    ):  # fmt: skip
        assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
        assert num_splits is None
        assert use_legacy, "Hopper's kernels, and rows of 656 bytes, are legacy alone"
        assert kv_format is descale_q is descale_k is None
        assert attn_sink is extra_k_cache is extra_indices_in_kvcache is None
        assert topk_length is extra_topk_length is None, "V3.2 does not support dynamic topk length"
        assert not enable_batch_invariant
        return tile_scheduler_metadata.decode(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, is_fp8_kvcache, indices
        )

    module.get_mla_metadata, module.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    sparse.add_sgl_sparse(module)
    return module


def flash_mla_without_hopper():
    """FlashMLA's release of 2026.09.30: sparse attention on newer GPUs only."""
    module = ModuleType("flash_mla")
    module.__version__ = "2026.9.30"
    module.get_mla_metadata = lambda *args, **kwargs: (FlashMLASchedMeta(), None)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None,
        softmax_scale=None, causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None,
        extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, enable_batch_invariant=False,
    ):  # fmt: skip
        raise AssertionError("Sparse attention is required: `indices` must be provided")

    module.flash_mla_with_kvcache = flash_mla_with_kvcache
    return module
