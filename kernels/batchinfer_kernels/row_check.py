"""Measurement of whether a row of plain PyTorch's results has the same bits alone and among others on this machine.

The reference operations are written for this (`reference`), but their sums are those of the CPU library, which may
choose another order for other sizes, processors and numbers of threads. So the check runs the functions that the model
calls, with the model's own weights, at the number of threads in use.
"""

# T rows, B batches (heads), H heads, N columns of the result (out), M depth of the sum (in), A query/key width
# C latent width, R rotary width, W = C + R, Z key (without rotary) and value width, P pages

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.reference.gqa import GqaForm
from batchinfer_kernels.reference.mla import PAGE_TOKENS, PagedKeys
from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries

NUM_ROWS = 71  # one, and 70 others
MANY_ROWS = 300  # as in a step of prefill, where that is quick
_ALONE = (0, 1, 6, 8, 33, 70)  # places of rows that are computed alone
# How many rows together, the most revealing first: whole tiles of the CPU library, then sizes between them.
_TOGETHER = (8, 56, 16, 24, 40, 32, 48, 64, MANY_ROWS, 2, 3, 7, 9, 27, 70)
_SMALLEST = len(_ALONE) + 2  # ranges of rows that are always computed; others only within _MOST_SUMMED
_MOST_SUMMED = 2.0e9  # products of two values for one computation
_MOST_PAGES = 3  # of a request here
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


@dataclass(frozen=True, slots=True)
class RowComputation:
    """A computation over rows, each row for itself.

    compute: (start, stop) to the results of the rows from `start` to `stop`, [stop - start, ...], any 0 <= start < stop
        <= MANY_ROWS.
    cost: products of two values per row.
    """

    name: str
    compute: Callable[[int, int], torch.Tensor]
    cost: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Widths of latent attention, as in reference."""

    num_heads: int
    nope_dim: int
    rotary_dim: int
    value_dim: int
    latent_dim: int


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """Widths of an indexer, as in reference/sparse.py."""

    num_heads: int
    head_dim: int
    topk: int


def why_rows_differ(computations: Iterable[RowComputation]) -> str | None:
    """Return why a computation gives a row other bits in another batch, or None if no difference was found.

    Rows are computed alone and among 1 to 70 others (fewer combinations if that would take long), at several positions.

    Returns:
        A phrase that names the computation, the rows and the number of threads.
    """
    for computation in computations:
        found = _difference(computation)
        if found is not None:
            return found
    return None


def product(weight_NM: torch.Tensor, linear: Callable[..., torch.Tensor] = reference.linear) -> RowComputation:
    """Describe x · weightᵀ as the model computes it; `weight_NM` in the memory order of the model."""
    num_columns, depth = weight_NM.shape
    x_TM = _random(MANY_ROWS, depth, dtype=weight_NM.dtype)
    return RowComputation(
        f"a product with a weight of {num_columns} x {depth}",
        lambda start, stop: linear(x_TM[start:stop], weight_NM),
        num_columns * depth,
    )


def batched_product(
    weight_BNM: torch.Tensor, batched_linear: Callable[..., torch.Tensor] = reference.batched_linear
) -> RowComputation:
    """Describe x · weightᵀ for every batch; a row is one of each batch, next to each other in memory as heads are."""
    num_batches, num_columns, depth = weight_BNM.shape
    x_TBM = _random(MANY_ROWS, num_batches, depth, dtype=weight_BNM.dtype)
    return RowComputation(
        f"a product with {num_batches} weights of {num_columns} x {depth}",
        lambda start, stop: batched_linear(x_TBM[start:stop].transpose(0, 1), weight_BNM).transpose(0, 1),
        num_batches * num_columns * depth,
    )


def decode_attention(
    shape: AttentionShape,
    dtype: torch.dtype,
    mla_decode: Callable[..., torch.Tensor] = reference.mla_decode,
) -> RowComputation:
    """Describe absorbed attention; a row is a request: some have few keys and get pages up to the longest of a step."""
    width = shape.latent_dim + shape.rotary_dim
    pages = _random(2 * _MOST_PAGES, PAGE_TOKENS, width, dtype=dtype)
    q_THW = _random(MANY_ROWS, shape.num_heads, width, dtype=dtype)
    kv_tokens_T = (torch.arange(MANY_ROWS) * 37) % (_MOST_PAGES * PAGE_TOKENS) + 1
    table_TP = (torch.arange(MANY_ROWS)[:, None] + torch.arange(_MOST_PAGES)) % len(pages)

    def compute(start: int, stop: int) -> torch.Tensor:
        kv_tokens = kv_tokens_T[start:stop]
        num_pages = -(-int(kv_tokens.max()) // PAGE_TOKENS)
        keys = PagedKeys(pages, table_TP[start:stop, :num_pages].contiguous(), kv_tokens, kv_tokens - 1)
        return mla_decode(q_THW[start:stop], keys, latent_dim=shape.latent_dim, scale=width**-0.5)

    return RowComputation(
        f"attention of {shape.num_heads} heads over latents of {width}",
        compute,
        _MOST_PAGES * PAGE_TOKENS * shape.num_heads * (width + shape.latent_dim),
    )


def prefill_attention(
    shape: AttentionShape,
    kv_b_HZC: torch.Tensor,
    mla_prefill: Callable[..., torch.Tensor] = reference.mla_prefill,
) -> RowComputation:
    """Describe plain attention; a row is a token of a prompt, computed in a chunk from `start` to `stop`."""
    dtype, query_dim = kv_b_HZC.dtype, shape.nope_dim + shape.rotary_dim
    num_pages = -(-MANY_ROWS // PAGE_TOKENS)
    pages = _random(num_pages, PAGE_TOKENS, shape.latent_dim + shape.rotary_dim, dtype=dtype)
    q_THA = _random(MANY_ROWS, shape.num_heads, query_dim, dtype=dtype)

    def compute(start: int, stop: int) -> torch.Tensor:
        keys = PagedKeys(pages, torch.arange(num_pages)[None], torch.tensor([stop]), torch.arange(start, stop))
        num_tokens = torch.tensor([stop - start])
        options = {"v_dim": shape.value_dim, "scale": query_dim**-0.5}
        return mla_prefill(q_THA[start:stop], keys, kv_b_HZC, num_tokens, **options)

    keys_and_values = shape.num_heads * (shape.nope_dim + shape.value_dim) * shape.latent_dim
    over_keys = num_pages * PAGE_TOKENS * shape.num_heads * (query_dim + shape.value_dim)
    return RowComputation(
        f"attention of {shape.num_heads} heads over keys of {query_dim}", compute, keys_and_values + over_keys
    )


def grouped_attention(
    num_heads: int,
    head_dim: int,
    form: GqaForm,
    dtype: torch.dtype,
    gqa_decode: Callable[..., torch.Tensor] = reference.gqa_decode,
    gqa_prefill: Callable[..., torch.Tensor] = reference.gqa_prefill,
) -> Iterator[RowComputation]:
    """Describe grouped-query attention; a row is a request in decode, as above, and a token of a prompt in prefill."""
    pages = _random(2 * _MOST_PAGES, PAGE_TOKENS, 2 * form.num_kv_heads * head_dim, dtype=dtype)
    q_THA = _random(MANY_ROWS, num_heads, head_dim, dtype=dtype)
    kv_tokens_T = (torch.arange(MANY_ROWS) * 37) % (_MOST_PAGES * PAGE_TOKENS) + 1
    table_TP = (torch.arange(MANY_ROWS)[:, None] + torch.arange(_MOST_PAGES)) % len(pages)
    num_pages = -(-MANY_ROWS // PAGE_TOKENS)

    def decode(start: int, stop: int) -> torch.Tensor:
        kv_tokens = kv_tokens_T[start:stop]
        table_BP = table_TP[start:stop, : -(-int(kv_tokens.max()) // PAGE_TOKENS)].contiguous()
        return gqa_decode(q_THA[start:stop], PagedKeys(pages, table_BP, kv_tokens, kv_tokens - 1), form)

    def prefill(start: int, stop: int) -> torch.Tensor:
        table_1P = torch.arange(num_pages)[None] % len(pages)
        keys = PagedKeys(pages, table_1P, torch.tensor([stop]), torch.arange(start, stop))
        return gqa_prefill(q_THA[start:stop], keys, torch.tensor([stop - start]), form)

    name = f"attention of {num_heads} heads over {form.num_kv_heads} heads of keys of {head_dim}"
    per_key = PAGE_TOKENS * num_heads * 2 * head_dim
    yield RowComputation(name, decode, _MOST_PAGES * per_key)
    yield RowComputation(f"{name} in prefill", prefill, num_pages * per_key)


def sparse_attention(
    shape: AttentionShape,
    indexer: IndexerShape,
    dtype: torch.dtype,
    choose_keys: Callable[..., torch.Tensor] = reference.choose_keys,
    mla_sparse: Callable[..., torch.Tensor] = reference.mla_sparse,
) -> RowComputation:
    """Describe attention to chosen keys; a row is a token of a prompt; its chosen keys are part of the result."""
    width, num_pages = shape.latent_dim + shape.rotary_dim, -(-MANY_ROWS // PAGE_TOKENS)
    topk = min(indexer.topk, PAGE_TOKENS)
    num_pages += -(-topk // PAGE_TOKENS)
    pages = _random(num_pages, PAGE_TOKENS, width, dtype=dtype)
    index_pages = _random(num_pages, PAGE_TOKENS, indexer.head_dim, dtype=dtype)
    q_THW = _random(MANY_ROWS, shape.num_heads, width, dtype=dtype)
    q_THI = _random(MANY_ROWS, indexer.num_heads, indexer.head_dim, dtype=dtype)
    weights_TH = _random(MANY_ROWS, indexer.num_heads, dtype=torch.float32)
    angles = _random(MANY_ROWS, shape.rotary_dim // 2, dtype=torch.float32)

    def compute(start: int, stop: int) -> torch.Tensor:
        rows = slice(start, stop)
        queries = IndexQueries(q_THI[rows], weights_TH[rows], angles[rows].cos(), angles[rows].sin(), False)
        positions = torch.arange(start, stop) + topk
        keys = IndexedKeys(index_pages, torch.arange(num_pages)[None], torch.zeros_like(positions), positions)
        slots = choose_keys(queries, keys, topk=topk, scale=indexer.head_dim**-0.5)
        out = mla_sparse(q_THW[rows], pages, slots, latent_dim=shape.latent_dim, scale=width**-0.5)
        return torch.cat([out.flatten(1), slots.to(out.dtype)], dim=1)

    scored = num_pages * PAGE_TOKENS * indexer.num_heads * indexer.head_dim
    return RowComputation(
        f"attention of {shape.num_heads} heads to keys chosen by {indexer.num_heads}",
        compute,
        scored + topk * shape.num_heads * (width + shape.latent_dim),
    )


def _difference(computation: RowComputation) -> str | None:
    """Return the first found change of a row's bits as a phrase, or None."""
    together = computation.compute(0, NUM_ROWS)
    left = _MOST_SUMMED - NUM_ROWS * computation.cost
    for place, (start, stop) in enumerate(_ranges()):
        left -= (stop - start) * computation.cost
        if left < 0 and place >= _SMALLEST:
            break
        rows = computation.compute(start, stop)
        both = min(stop, NUM_ROWS)
        if not torch.equal(rows[: both - start], together[start:both]):
            count, threads = stop - start, torch.get_num_threads()
            return (
                f"{computation.name} gives a row other bits among {NUM_ROWS} rows than "
                f"{'alone' if count == 1 else f'among {count}'} ({threads} thread{'s' if threads > 1 else ''})"
            )
    return None


def _ranges() -> Iterator[tuple[int, int]]:
    """Yield ranges (start, stop) of rows to compute together, at several positions."""
    for row in _ALONE:
        yield row, row + 1
    for count in _TOGETHER:
        start = 5 * count % (NUM_ROWS - count + 1) if count < NUM_ROWS else 0
        yield start, start + count


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values between -1 and 1, the same for the same shape.

    A rank does not load torch's random generators. These are splitmix64's (Steele, Lea and Flood 2014), whose products
    overflow on purpose.
    """
    bits = torch.arange(1, torch.Size(shape).numel() + 1) * _GOLDEN
    for shift, factor in _MIX:
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
    return ((bits >> 40).float() / 2**23).view(shape).to(dtype)
