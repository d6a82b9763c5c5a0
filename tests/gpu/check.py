"""Checks and times every operation for GPUs on one Hopper GPU, and prints one table.

For a bare machine: it needs torch, triton and a CUDA toolkit, and this repository as it lies. Wheels of deep_gemm and
flash_mla may stand in a folder; nothing is installed. docs/hopper.md explains the columns.

    python tests/gpu/check.py [--wheels FOLDER] [--quick] [--only OPERATION …] [--json]
    python tests/gpu/check.py --rehearse       on the CPU, tiny shapes, Triton's interpreter, no times

Exit codes: 0 all checks hold, 1 one failed, 2 no such GPU or a wrong option.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import candidates  # noqa: E402
import exact  # noqa: E402
import torch  # noqa: E402
from accelerator import Accelerator, Limits, why_no_hopper  # noqa: E402
from attention_cases import attention_cases  # noqa: E402
from cases import ALL, TINY, Case, Dims, Function, Work, may_differ_in_company  # noqa: E402
from product_cases import product_cases  # noqa: E402
from row_cases import row_cases  # noqa: E402
from wheels import WheelError, unpack_wheels  # noqa: E402

OK, FAILED, UNUSABLE = 0, 1, 2
_QUICK_RUNS = 5


@dataclass
class Row:
    """One line of the table; times and rates are None in a rehearsal."""

    op: str
    candidate: str
    shape: str
    measure: str = ""
    error: float | None = None
    company: str = ""  # whether rows keep their bits without the rows beside them
    failure: str = ""
    first_s: float | None = None  # the first call, which compiles
    ms: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    share: float | None = None  # of what the card measured in this run allows
    published_tflops: float | None = None
    published_gb_s: float | None = None


def all_cases(dims: Dims, *, is_tiny: bool = False, is_quick: bool = False) -> list[Case]:
    """Every check, in the order of the table."""
    makers = (product_cases, attention_cases, row_cases)
    return [case for make in makers for case in make(dims, is_tiny=is_tiny, is_quick=is_quick)]


def run_case(case: Case, name: str, accelerator: Accelerator, limits: Limits | None) -> Row:
    """Check one candidate on one case and, outside a rehearsal, time it."""
    row = Row(case.op, name, case.shape)
    if case.published is not None:
        row.published_tflops, row.published_gb_s = case.published
    try:
        _check_and_time(row, case.make(accelerator.device), accelerator, limits)
    except Exception as error:  # a kernel that cannot be compiled or started is a failed check of this one row
        row.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return row


def _check_and_time(row: Row, work: Work, accelerator: Accelerator, limits: Limits | None) -> None:
    function = candidates.function(row.candidate, row.op)
    start_s = time.perf_counter()
    result = work.run(function, ALL)
    accelerator.wait()
    if limits is not None:
        row.first_s = time.perf_counter() - start_s
    row.measure, row.error = work.measure, exact.error(work.measure, result, work.expected())
    if not row.error <= exact.TOLERANCE[work.measure]:
        row.failure = f"error {row.error:.2g}, allowed is {exact.TOLERANCE[work.measure]:g}"
    if work.parts:
        _check_company(row, work, function, result)
    del result
    timed = work.timed
    call = (lambda: work.run(function, ALL)) if timed is None else (lambda: timed(function))
    call()
    if limits is None:
        return
    seconds = accelerator.seconds(call)
    row.ms, row.tflops, row.gb_s = seconds * 1e3, work.flops / seconds / 1e12, work.num_bytes / seconds / 1e9
    peak = limits.fp8_tflops if work.is_fp8 else limits.bf16_tflops
    row.share = max(row.tflops / peak, row.gb_s / limits.copy_gb_s)


def _check_company(row: Row, work: Work, function: Function, result: torch.Tensor) -> None:
    """Whether parts of the rows, run alone, have the bits that they have among all rows."""
    is_same = all(exact.same_bits(work.run(function, part), work.take(result, part)) for part in work.parts)
    row.company = "same" if is_same else "differs"
    if not is_same and not may_differ_in_company(function):
        row.failure = row.failure or "a row's bits depend on the rows beside it"


def run_all(cases: list[Case], accelerator: Accelerator, limits: Limits | None) -> tuple[list[Row], dict[str, str]]:
    """All cases on all candidates that can run, and per candidate and reason the operations that cannot."""
    rows, skipped = [], {}
    for case in cases:
        for name in case.names:
            reason = candidates.why_not(name, case.op)
            if reason is not None:
                skipped[f"{name} {case.op}"] = reason
                continue
            row = run_case(case, name, accelerator, limits)
            rows.append(row)
            accelerator.release()
            # a run that is ended early leaves at least these lines
            words = row.failure or f"error {row.error:.1e}, {_number(row.ms, 3)} ms, {_number(row.tflops)} TFLOP/s"
            print(f"{row.op}, {row.candidate}, {row.shape}: {words}", file=sys.stderr, flush=True)
    return rows, skipped


_COLUMNS = ("operation", "candidate", "shape", "error", "alone", "ms", "TFLOP/s", "GB/s", "limit %", "published")


def table(rows: list[Row]) -> str:
    """The rows with their columns below each other."""
    lines = [(*_COLUMNS, "")]
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.1e} {row.measure}"
        published = "-" if row.published_tflops is None else f"{row.published_tflops:.0f}, {row.published_gb_s:.0f}"
        times = (_number(row.ms, 3), _number(row.tflops), _number(row.gb_s), _number(row.share and 100 * row.share))
        failure = f"FAILED {row.failure}" if row.failure else ""
        lines.append((row.op, row.candidate, row.shape, error, row.company or "-", *times, published, failure))
    widths = [max(len(line[place]) for line in lines) for place in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join([*(word.ljust(width) for word, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    )


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _print(described: dict[str, str], limits: Limits | None, rows: list[Row], skipped: dict[str, str]) -> None:
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    if limits is None:
        print("A rehearsal: tiny shapes in Triton's interpreter; no times are taken.")
    else:
        print(
            f"measured limits: {limits.bf16_tflops:.0f} TFLOP/s bfloat16, {limits.fp8_tflops:.0f} TFLOP/s FP8, "
            f"{limits.copy_gb_s:,.0f} GB/s copied (read and written)"
        )
        print(f"first calls (compilation included): {sum(row.first_s or 0 for row in rows):.0f} s")
    print(table(rows))
    for reason in dict.fromkeys(skipped.values()):
        print(f"not run: {', '.join(op for op, why in skipped.items() if why == reason)}: {reason}")
    num_failed = sum(bool(row.failure) for row in rows)
    print(f"{len(rows)} checks, {num_failed} failed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and time the operations for Hopper GPUs.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, tiny shapes")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack onto sys.path")
    parser.add_argument("--only", nargs="+", metavar="OPERATION", help="these operations alone")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    options = _parser().parse_args(arguments)
    if options.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    try:
        if options.wheels is not None:
            unpack_wheels(options.wheels)
    except WheelError as error:
        print(f"--wheels: {error}.", file=sys.stderr)
        return UNUSABLE
    cases = all_cases(TINY if options.rehearse else Dims(), is_tiny=options.rehearse, is_quick=options.quick)
    unknown = set(options.only or ()) - {case.op for case in cases}
    if unknown:
        known = ", ".join(dict.fromkeys(case.op for case in cases))
        print(f"--only: there is no operation {', '.join(sorted(unknown))}; known are {known}.", file=sys.stderr)
        return UNUSABLE
    reason = None if options.rehearse else why_no_hopper()
    if reason is not None:
        print(f"{reason}; this needs a Hopper GPU (H100, H200, H800), or --rehearse on the CPU.", file=sys.stderr)
        return UNUSABLE
    device = torch.device("cpu" if options.rehearse else "cuda")
    accelerator = Accelerator(device, _QUICK_RUNS) if options.quick else Accelerator(device)
    limits = None if options.rehearse else accelerator.limits()
    rows, skipped = run_all([case for case in cases if case.op in (options.only or [case.op])], accelerator, limits)
    described = accelerator.describe()
    if options.json:
        document = {
            "machine": described,
            "limits": limits and asdict(limits),
            "rows": [asdict(row) for row in rows],
            "not_run": skipped,
        }
        print(json.dumps(document, indent=1, allow_nan=True))
    else:
        _print(described, limits, rows, skipped)
    if not rows:
        print("nothing could be checked: no candidate can run here.", file=sys.stderr)
    return OK if rows and not any(row.failure for row in rows) else FAILED


if __name__ == "__main__":
    sys.exit(main())
