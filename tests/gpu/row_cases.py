"""Checks of the operations between the products: norms, gate, order and sums of rows, rounding, the largest logit."""

# T tokens, D hidden, E experts, K experts per token, M = T * K entries

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from cases import ALL, Case, Dims, Function, Work, bytes_of, normal, parts_of

from batchinfer_kernels import reference
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.reference.fp8 import ROW_BLOCK, dequantize_fp8_rows
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.places import ExpertRows, PlacedRows


def row_cases(dims: Dims, *, is_tiny: bool, is_quick: bool) -> list[Case]:
    """Each at the tokens of a prefill batch and, where it is part of decode, of a decode step."""
    tokens = (37,) if is_tiny else (16384,) if is_quick else (128, 16384)
    cases = []
    for num_rows in tokens:
        cases += [
            Case("rms_norm", f"{num_rows} x {dims.hidden}", partial(_norm, num_rows, dims.hidden)),
            Case("rms_norm_fp8", f"{num_rows} x {dims.hidden}", partial(_norm_fp8, num_rows, dims.hidden)),
            Case("silu_mul", f"{num_rows} x {dims.dense}", partial(_silu, num_rows, dims.dense)),
            Case("gate", f"{num_rows} x {dims.experts}", partial(_gate, dims, num_rows)),
            Case("sort_by_expert", f"{num_rows * dims.topk} entries", partial(_sort, dims, num_rows)),
            Case("expert_places", f"{num_rows * dims.topk} entries", partial(_places, dims, num_rows)),
            *(
                Case(
                    "sum_per_token",
                    f"{num_rows} x {dims.topk} x {dims.hidden}{words}",
                    partial(_sums, dims, num_rows, lie),
                )
                for words, lie in (("", False), (", at places", True))
            ),
            Case("add_sums", f"{num_rows} x {dims.hidden}", partial(_add, dims, num_rows)),
            Case("quantize_fp8_block", f"{num_rows} x {dims.hidden}, rows", partial(_quantize, num_rows, dims.hidden)),
            Case("quantize_fp8_rows", f"{num_rows} x {dims.hidden}", partial(_quantize_rows, num_rows, dims.hidden)),
            Case("dequantize_fp8_block", f"{num_rows} x {dims.hidden}", partial(_dequantize, num_rows, dims.hidden)),
        ]
    last = tokens[0] if is_tiny else 128
    filled, room = (3, 40) if is_tiny else (512, 18432)  # decode's: 2 experts of 256, 128 tokens of each of 144 GPUs
    cases.append(
        Case(
            "silu_mul_blocks",
            f"fp8 2 x {filled} of {room} x {dims.expert}",
            partial(_silu_blocks, filled, room, dims.expert),
        )
    )
    drawn = 12 if is_tiny else last  # of each kind of filters one
    return [
        *cases,
        Case("argmax", f"{last} x {dims.vocabulary}", partial(_argmax, last, dims.vocabulary)),
        Case("draw", f"{drawn} x {dims.vocabulary}", partial(_draw, drawn, dims.vocabulary)),
    ]


def _norm(num_rows: int, width: int, device: torch.device) -> Work:
    x, scale = 3 * normal(num_rows, width, device=device), normal(width, device=device, seed=1)
    return Work(
        run=lambda function, rows: function(x[rows], scale, 1e-6),
        expected=lambda: reference.rms_norm(x.double(), scale.double(), 1e-6),
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=2 * bytes_of(x),
    )


def _norm_fp8(num_rows: int, width: int, device: torch.device) -> Work:
    """[T, 2 * D]: the norm, and how far its rounded rows are from those that the reference makes of it."""
    x, scale = 3 * normal(num_rows, width, device=device), normal(width, device=device, seed=1)

    def run(function: Function, rows: slice) -> torch.Tensor:
        normed, rounded = function(x[rows], scale, 1e-6, keeps=True)
        again = dequantize_fp8_rows(*reference.quantize_fp8_rows(normed.cpu()), torch.float32).to(device)
        off = dequantize_fp8_rows(rounded.values, rounded.scales, torch.float32) - again
        return torch.cat([normed.float(), off], dim=1)

    def expected() -> torch.Tensor:
        exact = reference.rms_norm(x.double(), scale.double(), 1e-6)
        return torch.cat([exact, torch.zeros_like(exact)], dim=1)

    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=2 * bytes_of(x) + x.numel(),
        timed=lambda function: function(x, scale, 1e-6, keeps=True),
    )


def _silu(num_rows: int, width: int, device: torch.device) -> Work:
    gate, up = normal(num_rows, 2 * width, device=device).chunk(2, dim=-1)
    return Work(
        run=lambda function, rows: function(gate[rows], up[rows]),
        expected=lambda: F.silu(gate.double()) * up.double(),
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=3 * bytes_of(up),
    )


def _gate(dims: Dims, num_rows: int, device: torch.device) -> Work:
    logits = 2 * normal(num_rows, dims.experts, device=device, dtype=torch.float32)
    bias = 0.1 * normal(dims.experts, device=device, seed=1, dtype=torch.float32)
    rule = GateRule("noaux_tc", dims.topk, dims.groups, dims.topk_groups, normalize=True, scale=2.5)
    counted = torch.zeros(dims.experts, dtype=torch.int64, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        """[T, E] weights, zero where an expert is not chosen; [T, E + 1]: how many are."""
        counts = torch.zeros(dims.experts, dtype=torch.int64, device=device)
        ids, weights = function(logits[rows], bias.to(logits.device), rule, counts)
        dense = torch.zeros(len(ids), dims.experts, device=ids.device).scatter_(1, ids, weights)
        assert torch.equal(counts, (dense != 0).sum(0)), "experts are not counted as they are chosen"
        return torch.cat([dense, (dense != 0).sum(1, keepdim=True)], dim=1)

    def expected() -> torch.Tensor:
        ids, weights = reference.gate(logits.cpu(), bias.cpu(), rule)
        dense = torch.zeros(num_rows, dims.experts).scatter_(1, ids, weights)
        return torch.cat([dense, torch.full((num_rows, 1), dims.topk)], dim=1).to(device)

    return Work(
        run=run,
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(logits) + 12 * num_rows * dims.topk,
        timed=lambda function: function(logits, bias, rule, counted),
    )


def _ids(dims: Dims, num_rows: int, device: torch.device) -> torch.Tensor:
    """[T, K] experts of the tokens, all different within one."""
    scores = normal(num_rows, dims.experts, device=device, dtype=torch.float32)
    return scores.topk(dims.topk, dim=-1).indices


def _sort(dims: Dims, num_rows: int, device: torch.device) -> Work:
    ids_TK = _ids(dims, num_rows, device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        return torch.cat(function(ids_TK[rows], dims.experts))

    return Work(
        run=run,
        expected=lambda: torch.cat(reference_rows.sort_by_expert(ids_TK.cpu(), dims.experts)),
        measure="unequal",
        parts=(ALL,),  # what comes out depends on all entries; a second run must give the same
        flops=0,
        num_bytes=3 * bytes_of(ids_TK),
        timed=lambda function: function(ids_TK, dims.experts),
    )


def _places(dims: Dims, num_rows: int, device: torch.device) -> Work:
    tokens_M, _, counts_E = reference_rows.sort_by_expert(_ids(dims, num_rows, torch.device("cpu")), dims.experts)
    tokens_M = tokens_M.to(device)

    def run(function: Function, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.long() for part in function(counts, len(tokens), 128, tokens)])

    on_device = counts_E.to(device)
    return Work(
        run=lambda function, rows: run(function, on_device, tokens_M),
        expected=lambda: run(reference.expert_places, counts_E, tokens_M.cpu()),
        measure="unequal",
        parts=(ALL,),
        flops=0,
        num_bytes=3 * bytes_of(tokens_M),
    )


def _sums(dims: Dims, num_rows: int, is_placed: bool, device: torch.device) -> Work:
    """Make a case with rows in their order, or at the places where deep_gemm's grouped product leaves them."""
    _, place_M, counts_E = reference_rows.sort_by_expert(_ids(dims, num_rows, device), dims.experts)
    sorted_MD = normal(num_rows * dims.topk, dims.hidden, device=device)
    rows: ExpertRows = sorted_MD
    if is_placed:
        places = reference.expert_places(counts_E, len(sorted_MD), 128)
        values_SD = sorted_MD.new_full((len(places.expert_S), dims.hidden), torch.nan)
        values_SD[places.place_M] = sorted_MD
        rows = PlacedRows(values_SD, places.place_M)
    weights = normal(num_rows, dims.topk, device=device, seed=1, dtype=torch.float32).abs()
    places_TK = place_M.view(num_rows, dims.topk)

    def expected() -> torch.Tensor:
        total = torch.zeros(num_rows, dims.hidden, dtype=torch.float64, device=device)
        for k in range(dims.topk):
            total += sorted_MD[places_TK[:, k]].double() * weights[:, k, None].double()
        return total

    return Work(
        run=lambda function, tokens: function(rows, places_TK[tokens].flatten(), weights[tokens]),
        expected=expected,
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(sorted_MD) + 4 * num_rows * dims.hidden,
    )


def _add(dims: Dims, num_rows: int, device: torch.device) -> Work:
    hidden, shared = normal(num_rows, dims.hidden, device=device), normal(num_rows, dims.hidden, device=device, seed=1)
    sums = normal(num_rows, dims.hidden, device=device, seed=2, dtype=torch.float32)
    return Work(
        run=lambda function, rows: function(hidden[rows], sums[rows], shared[rows]),
        expected=lambda: hidden.double() + sums.double() + shared.double(),
        measure="relative",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(hidden, hidden, shared, sums),
    )


def _quantize(num_rows: int, width: int, device: torch.device) -> Work:
    x = normal(num_rows, width, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        """Values and scales as bytes, row by row."""
        values, scales = function(x[rows], ROW_BLOCK)
        return torch.cat([values.view(torch.uint8), scales.contiguous().view(torch.uint8)], dim=1)

    return Work(
        run=run,
        expected=lambda: run(lambda rows, block: reference.quantize_fp8_block(rows.cpu(), block), ALL),
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=1.5 * bytes_of(x),
        timed=lambda function: function(x, ROW_BLOCK),
    )


def _quantize_rows(num_rows: int, width: int, device: torch.device) -> Work:
    x = normal(num_rows, width, device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        """Values and scales as bytes, row by row."""
        values, scales = function(x[rows])
        return torch.cat([values.view(torch.uint8), scales.contiguous().view(torch.uint8)], dim=1)

    return Work(
        run=run,
        expected=lambda: run(lambda rows: reference.quantize_fp8_rows(rows.cpu()), ALL),
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=1.5 * bytes_of(x),
        timed=lambda function: function(x),
    )


def _silu_blocks(filled: int, room: int, width: int, device: torch.device) -> Work:
    """Two blocks, of which `filled` rows count; only these are compared."""
    gate_up = normal(2, room, 2 * width, device=device)
    gate_up[:, filled:] = torch.nan
    counts = torch.tensor([filled, filled], device=device)

    def run(function: Function, rows: slice) -> torch.Tensor:
        start, stop, _ = rows.indices(filled)
        values, scales = function(gate_up[:, start:].contiguous(), (counts - start).clamp(0, stop - start), fp8=True)
        return dequantize_fp8_rows(values[:, : stop - start], scales[:, : stop - start], torch.float32)

    def expected() -> torch.Tensor:
        values, scales = reference.silu_mul_blocks(gate_up[:, :filled].cpu(), fp8=True)
        assert scales is not None
        return dequantize_fp8_rows(values, scales, torch.float32)

    return Work(
        run=run,
        expected=lambda: expected().to(device),
        measure="diff",  # exp differs in its last bit from the CPU's, and with it an E4M3 value here and there
        parts=parts_of(filled),
        flops=0,
        num_bytes=2 * filled * width * 5,
        take=lambda whole, rows: whole[:, rows],
        timed=lambda function: function(gate_up, counts, fp8=True),
    )


def _dequantize(num_rows: int, width: int, device: torch.device) -> Work:
    values, scales = reference.quantize_fp8_block(normal(num_rows, width, device=device), ROW_BLOCK)

    def run(function: Function, rows: slice) -> torch.Tensor:
        return function(values[rows], scales[rows], torch.bfloat16, ROW_BLOCK)

    return Work(
        run=run,
        expected=lambda: reference.dequantize_fp8_block(values.cpu(), scales.cpu(), torch.bfloat16, ROW_BLOCK),
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=3 * bytes_of(values),
    )


def _argmax(num_rows: int, width: int, device: torch.device) -> Work:
    logits = normal(num_rows, width, device=device, dtype=torch.float32)
    logits[0, 7] = torch.nan

    def run(function: Function, rows: slice) -> torch.Tensor:
        """[S, 2]: the largest (0 where the row is not finite), and whether it is finite."""
        largest, is_finite = function(logits[rows])
        return torch.stack([torch.where(is_finite, largest, 0), is_finite.long()], dim=1)

    return Work(
        run=run,
        expected=lambda: run(lambda rows: reference_rows.argmax(rows.cpu()), ALL),
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(logits),
        timed=lambda function: function(logits),
    )


def _draw(num_rows: int, width: int, device: torch.device) -> Work:
    """Make a case with all filters: rows take turns at top_k, and most of them have a top_p."""
    logits = 2 * normal(num_rows, width, device=device, dtype=torch.float32)
    row = torch.arange(num_rows, device=device)
    shares = [0.5 + row % 3, torch.where(row % 4 == 0, 1.0, 0.95), 0.02 * (row % 2), (row + 0.5) / num_rows]
    temperature, top_p, min_p, uniform = (values.double() for values in shares)
    top_k = row % 2 * 40

    def run(function: Function, rows: slice) -> torch.Tensor:
        settings = temperature, top_k, top_p, min_p, uniform
        return function(logits[rows], *(values[rows] for values in settings))[:, None]

    def expected() -> torch.Tensor:
        settings = temperature, top_k, top_p, min_p, uniform
        return reference_rows.draw(logits.cpu(), *(values.cpu() for values in settings))[:, None]

    return Work(
        run=run,
        expected=expected,
        measure="unequal",
        parts=parts_of(num_rows),
        flops=0,
        num_bytes=bytes_of(logits),
    )
