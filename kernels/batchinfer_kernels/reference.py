"""Every operation in plain PyTorch: the oracle for faster versions, and what runs where there is no faster one.

In float32 a row's result is bit-identical whatever other rows are beside it, so that an output never depends on how
requests were batched or prompts cut. Three habits give that, and every operation here keeps them:

- a matrix product gets its rows in multiples of 8, each starting at an aligned address, and so does its result (the
  CPU library uses other summation orders for fewer rows, and in narrow products for unaligned ones);
- exp and whatever is built on it, and all sums that are not matrix products, run in float64 and are rounded once
  (float32 exp differs between the vectorised body of a tensor and its tail);
- attention sums over keys page by page, in ascending order, so that masked pages behind a row change nothing.
"""

# T tokens (rows), D hidden, F intermediate, E experts, K experts per token, G expert groups
# H heads, N query/key width without position, R rotary width, V value width, C latent width, W = C + R
# B requests, Q query tokens per request, P pages, S = 64 tokens per page, X = P * S keys

from __future__ import annotations

import torch
import torch.nn.functional as F

PAGE_TOKENS = 64

_ROW_MULTIPLE = 8
_COLUMN_MULTIPLE = 4  # 16 bytes of float32
_ALIGNMENT_BYTES = 64
# Most attention scores held at once (float32: 16 MB); decides how many queries or requests go into one piece.
_MAX_SCORES = 4 * 2**20
_MAX_QUERY_TILE = 128
_MAX_DECODE_VALUES = 8 * 2**20
_FP8_MAX = 448.0
_FP8_MIN_AMAX = 1e-4


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias.

    Args:
        x: [T, in], any T.
        weight: [out, in], same dtype.
        bias: [out] or None.

    Returns:
        [T, out] in the dtype of x.
    """
    y = F.linear(_aligned(x), weight)[: x.shape[0]]
    return y if bias is None else y + bias


def batched_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x · y for every batch: [B, T, M] and [B, M, N] to [B, T, N], any T."""
    num_columns = y.shape[-1]
    if num_columns % _COLUMN_MULTIPLE:
        y = F.pad(y, (0, -num_columns % _COLUMN_MULTIPLE))
    return torch.bmm(_aligned(x), y)[:, : x.shape[1], :num_columns]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x ÷ root mean square over the last dim × weight; [..., D] and [D] to [..., D] in the dtype of x."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, the SwiGLU activation (arXiv 2002.05202); both [T, F], result in their dtype."""
    wide = gate.double()
    return (wide * _sigmoid(wide)).to(gate.dtype) * up


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Rotate pairs of values by the angle of their position (arXiv 2104.09864).

    Args:
        x: [T, ..., R].
        cos, sin: [T, R / 2] float32.
        interleaved: pairs are (0, 1), (2, 3), …; otherwise (0, R / 2), (1, R / 2 + 1), …

    Returns:
        [T, ..., R] in the dtype of x and the same order of values.
    """
    shape = (x.shape[0], *[1] * (x.dim() - 2), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    wide = x.float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


def gate(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    *,
    method: str,
    topk: int,
    num_groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token and their weights. Equal scores: the lower index goes first.

    "noaux_tc" (DeepSeek-V3 report section 2.1.2): sigmoid scores; the bias is added for choosing only; groups rank by
    the sum of their best two; weights are the plain scores, divided by their sum when `normalize`, times `scale`.
    "greedy" and "group_limited_greedy" (DeepSeek-V2 report section 2.1.2): softmax scores; groups rank by their best
    one. Here weights are either normalised or scaled, never both, as in the models' own code (other libraries scale
    always, which differs only where `normalize` is on; no published V2 model turns it on).

    Args:
        logits_TE: [T, E] float32.
        bias_E: [E] float32, for "noaux_tc".
        topk: experts per token.
        num_groups, topk_groups: groups of consecutive experts, and how many of them a token may use.

    Returns:
        ids [T, topk] int64 by descending score, weights [T, topk] float32.
    """
    wide = logits_TE.double()
    if method == "noaux_tc":
        scores_TE = _sigmoid(wide).float()
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        allowed_TE = _groups_allowed(choice_TE, num_groups, topk_groups, best=2)
        choice_TE = choice_TE.masked_fill(~allowed_TE, -torch.inf)
    else:
        scores_TE = torch.softmax(wide, dim=-1).float()
        choice_TE = scores_TE
        if method == "group_limited_greedy":
            choice_TE = choice_TE.masked_fill(~_groups_allowed(choice_TE, num_groups, topk_groups, best=1), 0.0)
    ids_TK = _top_indices(choice_TE, topk)
    weights_TK = scores_TE.gather(1, ids_TK).double()
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    if method == "noaux_tc" or not normalize:
        weights_TK = weights_TK * scale
    return ids_TK, weights_TK.float()


def grouped_mlp(
    x: torch.Tensor, num_rows_E: torch.Tensor, gate_up_EFD: torch.Tensor, down_EDF: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of several experts over rows sorted by expert (contiguous layout).

    Reads the counts on the host, so it cannot be part of a captured graph.

    Args:
        x: [rows, D]; expert 0's rows first.
        num_rows_E: [E] int64, rows of each expert, adding up to `rows`.
        gate_up_EFD: [E, 2 * F, D], the gate projection above the up projection.
        down_EDF: [E, D, F].

    Returns:
        [rows, D] in the dtype of x.
    """
    out = torch.empty_like(x)
    start = 0
    for expert, num_rows in enumerate(num_rows_E.tolist()):
        if num_rows:
            rows = slice(start, start + num_rows)
            gate_TF, up_TF = linear(x[rows], gate_up_EFD[expert]).chunk(2, dim=-1)
            out[rows] = linear(silu_mul(gate_TF, up_TF), down_EDF[expert])
            start += num_rows
    return out


def mla_prefill(
    q_THA: torch.Tensor,
    pages: torch.Tensor,
    page_ids_P: torch.Tensor,
    positions_T: torch.Tensor,
    kv_b_HZC: torch.Tensor,
    *,
    context_tokens: int,
    v_dim: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of one request's chunk in the plain form: per-head keys and values from the latents.

    DeepSeek-V2 report section 2.1. The chunk's own latents must already stand in the pages.

    Args:
        q_THA: [T, H, N + R], rotary part last.
        pages: [num_pages, S, C + R], one layer.
        page_ids_P: [ceil(context_tokens / S)] int64, the request's pages in order.
        positions_T: [T] int64; a token sees the keys at its own position and before.
        kv_b_HZC: [H, N + V, C], from latent to key (N rows), then value (V rows).
        context_tokens: tokens in the pages, this chunk included; what stands behind them is ignored.
        v_dim: V.
        scale: factor on the scores.

    Returns:
        [T, H, V] in the dtype of q.
    """
    num_tokens, num_heads, _ = q_THA.shape
    latent_dim, rope_dim = kv_b_HZC.shape[-1], pages.shape[-1] - kv_b_HZC.shape[-1]
    latent_XW = pages[page_ids_P].flatten(0, 1)
    latent_XW[context_tokens:] = 0  # leftovers of earlier owners; even inf must not reach a product
    kv_XHZ = linear(latent_XW[:, :latent_dim], kv_b_HZC.flatten(0, 1)).unflatten(-1, (num_heads, -1)).float()
    k_nope_XHN, v_XHV = kv_XHZ.split([kv_XHZ.shape[-1] - v_dim, v_dim], dim=-1)
    k_rope_XHR = latent_XW[:, None, latent_dim:].float().expand(-1, num_heads, rope_dim)
    k_HXA = torch.cat([k_nope_XHN, k_rope_XHR], dim=-1).transpose(0, 1).contiguous()
    v_HPSV = v_XHV.transpose(0, 1).contiguous().unflatten(1, (-1, PAGE_TOKENS))

    out_THV = q_THA.new_empty(num_tokens, num_heads, v_dim)
    tile = _query_tile(num_heads * k_HXA.shape[1])
    for start in range(0, num_tokens, tile):
        rows = slice(start, min(start + tile, num_tokens))
        # The tile's own positions bound its pages, in host arithmetic: a chunk is a run of consecutive positions.
        num_keys = _whole_pages(context_tokens - num_tokens + rows.stop)
        q_HTA = q_THA[rows].transpose(0, 1).float()
        seen_TX = _key_positions(num_keys, pages.device) <= positions_T[rows, None]
        out_HTV = _attend(q_HTA, k_HXA[:, :num_keys], v_HPSV[:, : num_keys // PAGE_TOKENS], seen_TX, scale)
        out_THV[rows] = out_HTV.transpose(0, 1).to(q_THA.dtype)
    return out_THV


def mla_decode(
    q_THW: torch.Tensor,
    pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    kv_tokens_B: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention of many requests in the absorbed form: queries meet the latents directly.

    DeepSeek-V2 report section 2.1.2: one shared key of width C + R per token, whose first C values are the value too.

    Args:
        q_THW: [B * Q, H, C + R], request-major, queries already multiplied by the key up-projection.
        pages: [num_pages, S, C + R], one layer.
        page_table_BP: [B, P] int64, pages of each request in order; padding is any valid page.
        kv_tokens_B: [B] int64, tokens in each request's pages, the new ones included.
        positions_T: [B * Q] int64; a token sees the keys at its own position and before.
        latent_dim: C.
        scale: factor on the scores.

    Returns:
        [B * Q, H, C] in the dtype of q, to be multiplied by the value up-projection.
    """
    num_requests, num_pages = page_table_BP.shape
    num_rows, num_heads, width = q_THW.shape
    out_THC = q_THW.new_empty(num_rows, num_heads, latent_dim)
    if num_requests == 0:
        return out_THC
    num_queries = num_rows // num_requests
    num_keys = num_pages * PAGE_TOKENS
    keys_X = _key_positions(num_keys, pages.device)
    piece = max(1, _MAX_DECODE_VALUES // (num_keys * (width + num_queries * num_heads)))
    for start in range(0, num_requests, piece):
        stop = min(start + piece, num_requests)
        rows = slice(start * num_queries, stop * num_queries)
        latent_BXW = pages[page_table_BP[start:stop]].flatten(1, 2)
        latent_BXW.masked_fill_((keys_X >= kv_tokens_B[start:stop, None])[..., None], 0)
        latent_BXW = latent_BXW.float()
        # all heads of a request share its keys, so they are rows of one product
        q_BLW = q_THW[rows].unflatten(0, (-1, num_queries)).flatten(1, 2).float()
        seen_BQX = keys_X <= positions_T[rows].view(-1, num_queries, 1)
        seen_BLX = seen_BQX[:, :, None].expand(-1, -1, num_heads, -1).flatten(1, 2)
        v_BPSC = latent_BXW[..., :latent_dim].unflatten(1, (num_pages, PAGE_TOKENS))
        out_BLC = _attend(q_BLW, latent_BXW, v_BPSC, seen_BLX, scale)
        out_THC[rows] = out_BLC.reshape(-1, num_heads, latent_dim).to(q_THW.dtype)
    return out_THC


def quantize_fp8_block(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to FP8 E4M3 with one scale per block (DeepSeek-V3 report section 3.3.2).

    Args:
        weight: [N, M] float; blocks at the right and lower edge may be smaller than `block`.
        block: rows and columns that share a scale.

    Returns:
        [N, M] float8_e4m3fn and scales [ceil(N / rows), ceil(M / columns)] float32: weight ≈ quantised × scale.
    """
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = blocks.abs().amax(dim=(1, 3)).clamp_min(_FP8_MIN_AMAX) / _FP8_MAX
    quantised = (weight.float() / _spread(scale, weight.shape, block)).clamp(-_FP8_MAX, _FP8_MAX)
    return quantised.to(torch.float8_e4m3fn), scale


def dequantize_fp8_block(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: tuple[int, int] = (128, 128)
) -> torch.Tensor:
    """weight × its block's scale, multiplied in float32 and rounded once to `dtype`; shapes as quantize_fp8_block."""
    return (weight.float() * _spread(scale, weight.shape, block)).to(dtype)


def _attend(
    q_BLA: torch.Tensor, k_BXA: torch.Tensor, v_BPSV: torch.Tensor, seen_LX: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q · kᵀ × scale) · v in float32 over batches B (heads or requests) of L queries.

    Every row must see at least one key. `seen_LX` is [L, X] or [B, L, X]; returns [B, L, V].
    """
    num_pages = v_BPSV.shape[1]
    scores_BLX = batched_matmul(q_BLA, k_BXA.transpose(1, 2)) * scale
    scores_BLX.masked_fill_(~seen_LX, -torch.inf)
    peak_BL1 = scores_BLX.amax(-1, keepdim=True)
    weights_BLX = scores_BLX.double().sub_(peak_BL1).exp_().float()

    weights_BLPS = weights_BLX.unflatten(-1, (num_pages, PAGE_TOKENS))
    totals_BLP = weights_BLPS.sum(-1, dtype=torch.float64)
    weights_PBLS = weights_BLPS.permute(2, 0, 1, 3).contiguous()
    total_BL = torch.zeros_like(totals_BLP[:, :, 0])
    out_BLV = total_BL.new_zeros(*total_BL.shape, v_BPSV.shape[-1])
    for page in range(num_pages):
        total_BL += totals_BLP[:, :, page]
        out_BLV += batched_matmul(weights_PBLS[page], v_BPSV[:, page])
    return (out_BLV / total_BL[..., None]).float()


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x with zero rows added up to a multiple of 8, every row at an aligned address; the last dim keeps its size."""
    rows, columns = x.shape[-2:]
    if rows % _ROW_MULTIPLE or columns % _COLUMN_MULTIPLE:
        return F.pad(x, (0, -columns % _COLUMN_MULTIPLE, 0, -rows % _ROW_MULTIPLE))[..., :columns]
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_BYTES else x


def _sigmoid(wide: torch.Tensor) -> torch.Tensor:
    """Sigmoid of a float64 tensor from exp alone (the library's own differs between body and tail of a tensor)."""
    return 1.0 / (1.0 + torch.exp(-wide))


def _top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest values of each row, largest first, ties by lowest index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _groups_allowed(choice_TE: torch.Tensor, num_groups: int, topk_groups: int, *, best: int) -> torch.Tensor:
    """[T, E] bool: experts in the groups whose `best` largest scores add up to the most."""
    if topk_groups == num_groups:
        return torch.ones_like(choice_TE, dtype=torch.bool)
    grouped_TGS = choice_TE.unflatten(-1, (num_groups, -1))
    best_TGB = grouped_TGS.topk(best, dim=-1).values
    # at most two values, so the sum has no order to depend on
    chosen_TG = torch.zeros_like(best_TGB[..., 0], dtype=torch.bool)
    chosen_TG.scatter_(1, _top_indices(best_TGB.sum(-1), topk_groups), True)
    return chosen_TG[..., None].expand_as(grouped_TGS).flatten(-2)


def _query_tile(scores_per_query: int) -> int:
    """Queries worked on together: as many as the bound on scores allows, in whole steps of the row multiple."""
    fitting = _MAX_SCORES // max(1, scores_per_query) // _ROW_MULTIPLE * _ROW_MULTIPLE
    return min(max(fitting, _ROW_MULTIPLE), _MAX_QUERY_TILE)


def _whole_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def _key_positions(num_keys: int, device: torch.device) -> torch.Tensor:
    return torch.arange(num_keys, device=device)


def _spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """One scale per value instead of one per block, cut to the shape of the weight."""
    wide = scale.repeat_interleave(block[0], dim=0)[: shape[0]]
    return wide.repeat_interleave(block[1], dim=1)[:, : shape[1]]
