"""Checks of matrix products and experts at DeepSeek-V3's shapes."""

# T rows, N columns of the result, K depth, G groups (experts), M rows of a group, D hidden, F intermediate

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import candidates
import exact
import published
import torch
from cases import ALL, Case, Dims, Function, Work, bytes_of, expert_weight, normal, parts_of, weight

from batchinfer_kernels import reference
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp8 import FP8, ROW_BLOCK
from batchinfer_kernels.reference.places import in_order

BOTH = ("hopper", "triton")
_MASKED = (*BOTH, candidates.DESCRIPTORS)
# of this project, columns and depth: queries, latents, output; the MLPs of dense layers and of the shared expert
_PROJECTIONS = (
    (1536, 7168),
    (24576, 1536),
    (576, 7168),
    (7168, 16384),
    (36864, 7168),
    (7168, 18432),
    (4096, 7168),
    (7168, 2048),
)
_FORMS = ("fp8", "bf16", "int4", "fp4")  # of experts' weights; deep_gemm has the first two
_TILE = 128  # groups of single products are whole tiles, as in the published table


def product_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Dense, batched and grouped products, and experts of both layouts."""
    if is_tiny:
        linear, dense = [(3, 128, 256)], [(1, 8, 128, 256)]
        contiguous, masked = [(2, _TILE, 128, 256)], [(2, _TILE, 128, 256)]
        tokens, decode_rows = 40, 5
    else:
        linear = [(num_rows, *shape) for num_rows in (128, 4096) for shape in _PROJECTIONS] + [(1, 24576, 1536)]
        dense, contiguous, masked = (list(of) for of in (published.DENSE, published.CONTIGUOUS, published.MASKED))
        if is_quick:
            linear, dense, contiguous, masked = linear[:6], dense[6:18:2], contiguous[:2], masked[2:4]
        tokens, decode_rows = 4096, 128
    cases = []
    for op, table, shapes in (
        (candidates.DENSE, published.DENSE, dense),
        (candidates.CONTIGUOUS, published.CONTIGUOUS, contiguous),
        (candidates.MASKED, published.MASKED, masked),
    ):
        for shape in shapes:
            words = "fp8 {} groups of {} x {} x {}" if op != candidates.DENSE else "fp8 {1} x {2} x {3}"
            cases.append(Case(op, words.format(*shape), partial(_product, *shape), BOTH, table.get(shape)))
    for num_rows, num_columns, depth in linear:
        words = f"fp8 {num_rows} x {num_columns} x {depth}"
        cases.append(Case("linear", words, partial(_linear, num_rows, num_columns, depth, True), BOTH))
    for num_experts in (2, 3 if is_tiny else 9):  # of a GPU in decode and in prefill
        rows = decode_rows * 4 if num_experts == 2 else tokens
        for form in _FORMS if not is_tiny else ("fp8", "int4") if num_experts == 2 else ("bf16", "fp4"):
            words, names = f"{form} {num_experts} experts, {rows} rows", BOTH if form in _FORMS[:2] else ("triton",)
            cases.append(Case("grouped_mlp", words, partial(_experts, dims, num_experts, rows, form), names))
            cases.append(_masked(dims, num_experts, rows, form))
        if not is_tiny:  # the time of reading weights alone
            cases += [_masked(dims, num_experts, 32 * num_experts, form) for form in _FORMS[:2]]
    # as decode on 144 GPUs has them: rows in FP8 in blocks with room for 128 tokens of each GPU
    filled, room = (decode_rows * 4, _TILE) if is_tiny else (1024, 18432)
    words = f"fp8 2 experts, {filled} rows in FP8, room {room}"
    cases.append(Case("masked_mlp", words, partial(_masked_experts, dims, 2, filled, "fp8", room), _MASKED))
    return [
        *cases,
        Case(
            "linear",
            f"bf16 {decode_rows} x {dims.vocabulary} x {dims.hidden}",
            partial(_linear, decode_rows, dims.vocabulary, dims.hidden, False),
        ),
        Case(
            "batched_linear",
            f"{dims.heads} of {decode_rows} x {dims.latent} x {dims.nope}",
            partial(_batched, dims.heads, decode_rows, dims.latent, dims.nope),
        ),
        Case(
            "batched_linear",
            f"{dims.heads} of {decode_rows} x {dims.value} x {dims.latent}",
            partial(_batched, dims.heads, decode_rows, dims.value, dims.latent),
        ),
        Case("router", f"{tokens} x {dims.experts} x {dims.hidden}", partial(_router, dims, tokens)),
        Case("pack_router", f"{dims.experts} x {dims.hidden}", partial(_pack_router, dims)),
        Case("pack", f"fp8 {dims.hidden} x {dims.expert}", partial(_pack, dims)),
    ]


def _masked(dims: Dims, num_experts: int, num_rows: int, form: str) -> Case:
    words, names = f"{form} {num_experts} experts, {num_rows} rows", _MASKED if form in _FORMS[:2] else ("triton",)
    return Case("masked_mlp", words, partial(_masked_experts, dims, num_experts, num_rows, form, None), names)


def _linear(num_rows: int, num_columns: int, depth: int, fp8: bool, device: torch.device) -> Work:
    x, held = normal(num_rows, depth, device=device), weight(num_columns, depth, device=device, fp8=fp8)
    return Work(
        run=lambda function, rows: function(x[rows], held),
        expected=lambda: exact.linear(x, held),
        measure="diff" if fp8 else "relative",
        parts=parts_of(num_rows),
        flops=2 * num_rows * num_columns * depth,
        num_bytes=bytes_of(x, held) + 2 * num_rows * num_columns,
        is_fp8=fp8,
    )


def _batched(num_batches: int, num_rows: int, num_columns: int, depth: int, device: torch.device) -> Work:
    x = normal(num_rows, num_batches, depth, device=device)  # as attention has them: heads within tokens
    held = weight(num_batches, num_columns, depth, device=device, fp8=False)
    assert isinstance(held, torch.Tensor)
    return Work(
        run=lambda function, rows: function(x[rows].transpose(0, 1), held).transpose(0, 1),
        expected=lambda: torch.bmm(x.transpose(0, 1).double(), held.double().mT).transpose(0, 1),
        measure="relative",
        parts=parts_of(num_rows),
        flops=2 * num_batches * num_rows * num_columns * depth,
        num_bytes=bytes_of(x, held) + 2 * num_batches * num_rows * num_columns,
    )


def _product(num_groups: int, num_rows: int, num_columns: int, depth: int, device: torch.device) -> Work:
    """One product of rows that are in FP8; scales lie by column, as the libraries' kernels take them."""
    x = normal(num_groups * num_rows, depth, device=device)
    values, scales = reference.quantize_fp8_block(x, ROW_BLOCK)
    x_GMK, scales_GMJ = values.unflatten(0, (num_groups, -1)), scales.unflatten(0, (num_groups, -1))
    held = weight(num_groups, num_columns, depth, device=device, fp8=True)
    assert isinstance(held, BlockScaled)

    def laid_out(function: Function, groups: slice) -> torch.Tensor:
        own = scales_GMJ[groups]
        if candidates.takes_blocks_of_scales(function):
            return own.mT.contiguous().mT
        return own.flatten(0, 1).t().contiguous().t()

    def call(function: Function, row_scales: torch.Tensor, groups: slice) -> torch.Tensor:
        return function(x_GMK[groups], row_scales, BlockScaled(held.values[groups], held.scales[groups]))

    def timed() -> Callable[[Function], torch.Tensor]:
        """The scales are laid out by the first call alone."""
        ready: dict[Function, torch.Tensor] = {}

        def run(function: Function) -> torch.Tensor:
            if function not in ready:
                ready[function] = laid_out(function, ALL)
            return call(function, ready[function], ALL)

        return run

    def expected() -> torch.Tensor:
        return torch.cat([exact.linear(x[group * num_rows :][:num_rows], held[group]) for group in range(num_groups)])

    return Work(
        run=lambda function, groups: call(function, laid_out(function, groups), groups),
        expected=expected,
        measure="diff",
        parts=() if num_groups == 1 else (slice(0, 1), slice(num_groups // 2, num_groups)),
        flops=2 * num_groups * num_rows * num_columns * depth,
        num_bytes=bytes_of(values, scales, held) + 2 * num_groups * num_rows * num_columns,
        take=lambda whole, groups: whole.unflatten(0, (num_groups, -1))[groups].flatten(0, 1),
        timed=timed(),
        is_fp8=True,
    )


def _counts(num_experts: int, num_rows: int) -> list[int]:
    """Return uneven rows of two or more experts: the first has half more than its share, the last one the rest."""
    share = num_rows // num_experts
    counts = [share * 3 // 2, *[share * 9 // 10] * (num_experts - 2)]
    return [*counts, num_rows - sum(counts)]


def _experts(dims: Dims, num_experts: int, num_rows: int, form: str, device: torch.device) -> Work:
    gate_up = expert_weight(num_experts, 2 * dims.expert, dims.hidden, device=device, form=form)
    down = expert_weight(num_experts, dims.hidden, dims.expert, device=device, form=form, seed=100)
    counts, x = _counts(num_experts, num_rows), normal(num_rows, dims.hidden, device=device)
    expert_M = torch.arange(num_experts, device=device).repeat_interleave(torch.tensor(counts, device=device))
    num_rows_E = torch.tensor(counts, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        return in_order(function(x[rows], torch.bincount(expert_M[rows], minlength=num_experts), gate_up, down))

    return Work(
        run=run,
        expected=lambda: exact.experts(x, counts, gate_up, down),
        measure="diff" if form == "fp8" else "relative",
        parts=parts_of(num_rows),
        flops=6 * num_rows * dims.hidden * dims.expert,
        num_bytes=bytes_of(gate_up, down, x, x),
        timed=lambda function: function(x, num_rows_E, gate_up, down),
        is_fp8=form == "fp8",
    )


def _masked_experts(
    dims: Dims, num_experts: int, num_rows: int, form: str, room: int | None, device: torch.device
) -> Work:
    """Rows in bfloat16 and just enough room, or in FP8 with scales by column and the room that is asked for."""
    gate_up = expert_weight(num_experts, 2 * dims.expert, dims.hidden, device=device, form=form)
    down = expert_weight(num_experts, dims.hidden, dims.expert, device=device, form=form, seed=100)
    counts, is_rounded = _counts(num_experts, num_rows), room is not None
    room = room or -(-max(counts) // _TILE) * _TILE
    num_rows_E = torch.tensor(counts, device=device)
    is_row_EC = torch.arange(room, device=device) < num_rows_E[:, None]
    plain_ECD = torch.full((num_experts, room, dims.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    plain_ECD[is_row_EC] = normal(num_rows, dims.hidden, device=device)
    x_ECD, scales = _rounded(plain_ECD, counts) if is_rounded else (plain_ECD, None)

    def run(function: Function, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(room)
        y_ECD = function(
            x_ECD[:, rows].contiguous(),
            (num_rows_E - start).clamp(0, stop - start),
            gate_up,
            down,
            None if scales is None else scales.mT[..., rows].contiguous().mT,
            expected_rows=max(1, num_rows // num_experts),
        )
        return torch.where(is_row_EC[:, rows, None], y_ECD, 0)

    def expected() -> torch.Tensor:
        y_ECD = torch.zeros(plain_ECD.shape, dtype=torch.float32, device=device)
        y_ECD[is_row_EC] = exact.experts(plain_ECD[is_row_EC], counts, gate_up, down).float()
        return y_ECD

    return Work(
        run=run,
        expected=expected,
        measure="diff" if form == "fp8" else "relative",
        parts=parts_of(counts[0]),
        flops=6 * num_rows * dims.hidden * dims.expert,
        num_bytes=bytes_of(gate_up, down) + (3 if is_rounded else 4) * num_rows * dims.hidden,
        take=lambda whole, rows: whole[:, rows],
        timed=lambda function: function(
            x_ECD, num_rows_E, gate_up, down, scales, expected_rows=max(1, num_rows // num_experts)
        ),
        is_fp8=form == "fp8",
    )


def _rounded(plain_ECD: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in FP8, and scales as DeepEP's low-latency mode gives them; behind the rows stands anything."""
    num_experts, room, hidden = plain_ECD.shape
    device = plain_ECD.device
    x_ECD = torch.full(plain_ECD.shape, 0x7F, dtype=torch.uint8, device=device)  # not a number
    scales_EJC = torch.full((num_experts, -(-hidden // ROW_BLOCK[1]), room), torch.nan, device=device)
    for expert, count in enumerate(counts):
        values, scales = reference.quantize_fp8_block(plain_ECD[expert, :count], ROW_BLOCK)
        x_ECD[expert, :count], scales_EJC[expert, :, :count] = values.view(torch.uint8), scales.t()
    return x_ECD.view(FP8), scales_EJC.mT


def _router(dims: Dims, num_rows: int, device: torch.device) -> Work:
    x = normal(num_rows, dims.hidden, device=device)
    weight_ED = normal(dims.experts, dims.hidden, device=device, seed=1, dtype=torch.float32) / dims.hidden**0.5
    packed: list[torch.Tensor] = []  # once, as a model does

    def run(function: Function, rows: slice) -> torch.Tensor:
        if not packed:
            packed.append(candidates.function("triton", "pack_router")(weight_ED))
        return function(x[rows], packed[0])

    return Work(
        run=run,
        expected=lambda: x.double() @ weight_ED.double().T,
        measure="relative",
        parts=parts_of(num_rows),
        flops=2 * num_rows * dims.experts * dims.hidden,
        num_bytes=bytes_of(x, weight_ED) + 4 * num_rows * dims.experts,
    )


def _pack_router(dims: Dims, device: torch.device) -> Work:
    weight_ED = normal(dims.experts, dims.hidden, device=device, dtype=torch.float32)
    return Work(
        run=lambda function, rows: function(weight_ED[rows]).double().sum(0),
        expected=weight_ED.double,
        measure="relative",
        parts=parts_of(dims.experts),
        flops=0,
        num_bytes=2.5 * bytes_of(weight_ED),
        timed=lambda function: function(weight_ED),
    )


def _pack(dims: Dims, device: torch.device) -> Work:
    plain = weight(dims.hidden, dims.expert, device=device, fp8=False)
    assert isinstance(plain, torch.Tensor)

    def run(function: Function, rows: slice) -> torch.Tensor:
        packed = function(plain[rows], eight_bit=True)
        assert isinstance(packed, BlockScaled)
        return packed.values

    return Work(
        run=run,
        expected=lambda: reference.pack(plain.cpu(), eight_bit=True).values,
        measure="unequal",
        parts=(slice(0, 128),),
        flops=0,
        num_bytes=1.5 * bytes_of(plain),
        timed=lambda function: run(function, ALL),
    )
