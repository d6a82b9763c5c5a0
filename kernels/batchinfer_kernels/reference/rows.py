"""Operations on rows between the products, in plain PyTorch: positions and pages, the order of experts' rows, tokens.

A row's result does not depend on the rows it is computed with.
"""

# T tokens, H heads, A query width, R rotary width, C latent width, W = C + R, D hidden, E experts, K experts per token
# M (token, expert) entries, S rows of logits, V vocabulary, A most likely tokens

import math
from typing import NamedTuple

import torch

from batchinfer_kernels.reference.places import ExpertRows, stored_rows
from batchinfer_kernels.reference.pointwise import rms_norm, rope

WEIGHT_UNIT = 2**44  # the largest weight of a draw
# The logit of a token that may not come: finite, as rows are checked for that, and too small to be drawn.
FORBIDDEN = -1e30
MAX_TOKENS = 2**19 - 1  # of a vocabulary, so that sums of weights fit into 63 bits


class NewKeys(NamedTuple):
    """The latents and keys that a step's tokens add to the pages of one layer.

    latents_TW: [T, C + R], the latent before its norm, then the rotary key.
    norm_C: weight of the latent's norm, which has this `eps`.
    cos, sin: [T, R / 2] float32.
    pages: [num_pages, 64, C + R]; rows of the tokens are written.
    slots_T: [T] int64, page id * 64 + offset.
    interleaved: as in `pointwise.rope`.
    """

    latents_TW: torch.Tensor
    norm_C: torch.Tensor
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    pages: torch.Tensor
    slots_T: torch.Tensor
    interleaved: bool


def rope_and_cache(q_THA: torch.Tensor, new: NewKeys) -> torch.Tensor:
    """Give queries and keys their positions, and write the tokens' latents to their pages.

    Args:
        q_THA: queries, the last R values of each to be rotated; may be changed in place.

    Returns:
        [T, H, A], the queries rotated.
    """
    latents_TW, norm_C, eps, cos, sin, pages, slots_T, interleaved = new
    latent_dim, rotary = len(norm_C), 2 * cos.shape[-1]
    latent_TC, key_TR = latents_TW.split([latent_dim, rotary], dim=-1)
    key_TR = rope(key_TR, cos, sin, interleaved=interleaved)
    pages.view(-1, latent_dim + rotary)[slots_T] = torch.cat([rms_norm(latent_TC, norm_C, eps), key_TR], dim=-1)
    plain, rotated = q_THA.split([q_THA.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([plain, rope(rotated, cos, sin, interleaved=interleaved)], dim=-1)


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, expert) entries by expert, tokens in order within one.

    Args:
        ids_TK: [T, K] int64, the expert of each entry.

    Returns:
        The token behind each sorted row [M]; the sorted row of each entry [M]; entries per expert [E]; all int64.
    """
    ids_M = ids_TK.flatten()
    order_M = torch.argsort(ids_M, stable=True)
    inverse_M = torch.empty_like(order_M)
    inverse_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_M.device)
    # bincount would read its result on the host
    return order_M // ids_TK.shape[1], inverse_M, counts_E.scatter_add_(0, ids_M, torch.ones_like(ids_M))


def sum_per_token(sorted_MD: ExpertRows, inverse_M: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return each token's weighted sum over its experts, one after the other; [T, D] float32.

    Product and sum are rounded separately; a fused multiply-add would round differently in a tensor's tail.

    Args:
        sorted_MD: rows sorted by expert, PlacedRows included.
        inverse_M: the sorted row of each (token, expert) entry.
    """
    num_tokens, topk = weights_TK.shape
    sorted_MD, inverse_M = stored_rows(sorted_MD, inverse_M)
    inverse_TK = inverse_M.view(num_tokens, topk)
    total_TD = torch.zeros(num_tokens, sorted_MD.shape[-1], dtype=torch.float32, device=sorted_MD.device)
    for k in range(topk):
        total_TD += sorted_MD[inverse_TK[:, k]].float() * weights_TK[:, k, None]
    return total_TD


def add_sums(hidden_TD: torch.Tensor, sums_TD: torch.Tensor, added_TD: torch.Tensor | None) -> torch.Tensor:
    """Return hidden + (sums + added); the float32 sum in brackets is rounded once to hidden's dtype, then added."""
    total_TD = sums_TD if added_TD is None else sums_TD + added_TD.float()
    return hidden_TD + total_TD.to(hidden_TD.dtype)


def cos_sin(angles: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of float32 angles, each times `scale`; in float64, rounded once to float32."""
    angles64 = angles.double()
    return (angles64.cos() * scale).float(), (angles64.sin() * scale).float()


def draw(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    uniform_S: torch.Tensor,
) -> torch.Tensor:
    """Draw a token of each row after temperature, top_k, top_p and min_p in this order; [S] int64.

    Of the tokens that stay (`kept_weights`) the result is the first in vocabulary order up to which the weights are
    more than `uniform` of their sum. All sums are exact, so tokens depend on no order of sums, on any device.

    Args:
        logits_SV: float32, finite.
        temperature_S: float64, above 0.
        top_k_S: int64, 0: all.
        top_p_S: float64; all tokens stay from 1 on.
        min_p_S: float64, at most 1.
        uniform_S: float64 in [0, 1).

    Raises:
        ValueError: the vocabulary is larger than MAX_TOKENS, so that sums might not fit.
    """
    check_vocabulary(logits_SV.shape[-1])
    running_SV = kept_weights(logits_SV, temperature_S, top_k_S, top_p_S, min_p_S).cumsum(dim=-1)
    total_S = running_SV[:, -1]
    target_S = torch.minimum((uniform_S * total_S.double()).long(), total_S - 1)
    return torch.searchsorted(running_SV, target_S[:, None], right=True)[:, 0]


def check_vocabulary(num_tokens: int) -> None:
    """Raise ValueError if sums over the vocabulary might not fit; see `draw`."""
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"a vocabulary of {num_tokens} tokens, more than {MAX_TOKENS}")


def kept_weights(
    logits_SV: torch.Tensor,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
) -> torch.Tensor:
    """Return the weights by which `draw` draws, [S, V] int64: probabilities in units of 2^-44 of the largest, or 0.

    Tokens are ordered by their weights, equal ones by their ids. top_k keeps the first k; top_p those with less before
    them than its share of the sum that top_k left, and always the first; min_p those with its share of the largest
    weight. All others have weight 0.
    """
    logits64_SV = logits_SV.double()
    powers = ((logits64_SV - logits64_SV.amax(dim=-1, keepdim=True)) / temperature_S[:, None]).exp()
    weights = (powers * WEIGHT_UNIT).round().long()
    if ((top_k_S > 0) | (top_p_S < 1)).any():
        ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
        rank_V = torch.arange(weights.shape[-1], device=weights.device)
        ordered = ordered * ((rank_V < top_k_S[:, None]) | (top_k_S <= 0)[:, None])
        until = ordered.cumsum(dim=-1)
        limit_S = (top_p_S * until[:, -1].double()).ceil().long()
        inside = (until - ordered < limit_S[:, None]) | (rank_V == 0) | (top_p_S >= 1)[:, None]
        weights = torch.zeros_like(weights).scatter_(1, order, ordered * inside)
    floor_S = (min_p_S * WEIGHT_UNIT).ceil().long()
    return weights * (weights >= floor_S[:, None])


def log_sum_exp(logits_SV: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of e to each logit, [S] float64; subtract it from a logit for a log probability.

    torch's own sum has an order that depends on the number of rows and of threads. Here halves are added to each other
    until one value is left, so that the vocabulary's size alone decides.
    """
    largest_S = logits_SV.amax(dim=-1).double()
    powers_SV = logits_SV.double().sub_(largest_S[:, None]).exp_()
    width = powers_SV.shape[-1]
    while width > 1:
        half = (width + 1) // 2
        powers_SV[:, : width - half] += powers_SV[:, half:width]
        width = half
    return largest_S + powers_SV[:, 0].log()


def gather_rows(rows_NW: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
    """Return rows by number, int64 from 0 on; [T, W]."""
    return rows_NW[index_T]


def copy_rows(rows_NW: torch.Tensor, from_M: torch.Tensor, to_M: torch.Tensor) -> None:
    """Copy the old row from_M to row to_M, in place, for all at once; numbers are int64 from 0 on, to_M distinct."""
    rows_NW[to_M] = rows_NW[from_M]


def argmax(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest token of each row ([S] int64, lowest index among equals) and whether the row is finite."""
    if logits_SV.device.type != "cpu":
        return logits_SV.argmax(dim=-1), torch.isfinite(logits_SV).all(dim=-1)
    # numpy's argmax is many times quicker than torch's here; almost always all rows are finite, which their sum shows
    tokens = torch.from_numpy(logits_SV.numpy().argmax(axis=-1))
    if math.isfinite(float(logits_SV.sum())):
        return tokens, torch.ones(len(logits_SV), dtype=torch.bool)
    return tokens, torch.isfinite(logits_SV).all(dim=-1)


def apply_token_bitmask(logits_SV: torch.Tensor, rows_M: torch.Tensor, allowed_MW: torch.Tensor) -> None:
    """Give tokens that may not come the logit FORBIDDEN, in place.

    Args:
        logits_SV: float32.
        rows_M: [M] int64, rows of which some tokens may not come, none twice.
        allowed_MW: [M, ceil(V / 32)] int32, contiguous; token t may come if bit t % 32 of word t / 32 is set.
    """
    places_8 = torch.arange(8, dtype=torch.uint8, device=logits_SV.device)
    bits_MV = (allowed_MW.view(torch.uint8)[..., None] >> places_8 & 1).flatten(1)[:, : logits_SV.shape[1]]
    logits_SV[rows_M] = logits_SV[rows_M].masked_fill(bits_MV == 0, FORBIDDEN)


def most_likely(logits_SV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of the largest logits, largest first and the lowest id first among equals.

    So a row's first tokens do not depend on `count`, which the batch decides; those of torch.topk may. The host does
    not wait for a device.

    Args:
        logits_SV: float32.

    Returns:
        ([S, A] int64 tokens, [S, A] their logits); A is `count`, or V if that is less. Entries of a row that is not
        finite mean nothing.
    """
    if not logits_SV.is_cpu:
        return _largest_keys(logits_SV, min(count, logits_SV.shape[1]))
    values_SA, tokens_SA = torch.topk(logits_SV, min(count, logits_SV.shape[1]), dim=-1)
    if not values_SA.shape[1]:
        return tokens_SA, values_SA
    tokens_SA, order_SA = tokens_SA.sort(dim=1)
    values_SA, order_2_SA = values_SA.gather(1, order_SA).sort(dim=1, descending=True, stable=True)
    tokens_SA = tokens_SA.gather(1, order_2_SA)
    # more tokens than there is room for may be as likely as the last one
    is_cut_S = (logits_SV >= values_SA[:, -1:]).sum(dim=1) > values_SA.shape[1]
    for row in is_cut_S.nonzero()[:, 0].tolist():
        tokens = (logits_SV[row] >= values_SA[row, -1]).nonzero()[:, 0]
        first = logits_SV[row, tokens].sort(descending=True, stable=True).indices[: values_SA.shape[1]]
        tokens_SA[row] = tokens[first]
    return tokens_SA, values_SA


def _largest_keys(logits_SV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the same tokens by distinct keys of 64 bits; on a CPU many times slower.

    The upper half of a key has the bits of a logit, turned so that they are ordered as logits are; the lower half has
    the number of tokens behind this one.
    """
    last = logits_SV.shape[1] - 1
    bits_SV = (logits_SV + 0.0).view(torch.int32)  # the two zeros are equals
    ordered_SV = (bits_SV ^ ((bits_SV >> 31) & 0x7FFFFFFF)).long()
    keys_SV = (ordered_SV << 32) + torch.arange(last, -1, -1, device=logits_SV.device)
    tokens_SA = last - (keys_SV.topk(count, dim=-1).values & 0xFFFFFFFF)
    return tokens_SA, logits_SV.gather(1, tokens_SA)
