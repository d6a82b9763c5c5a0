"""Checks and times every operation for GPUs on one Hopper GPU, and prints one table.

For a bare machine: it needs torch, triton and a CUDA toolkit, and this repository as it lies. Wheels of deep_gemm and
flash_mla may stand in a folder; nothing is installed. docs/gpu-checks.md explains the columns.

    python tests/gpu/check.py [--wheels FOLDER] [--quick] [--only OPERATION …] [--part I/N] [--out FILE] [--minutes M]
                              [--json]
    python tests/gpu/check.py --rehearse       on the CPU, tiny shapes, Triton's interpreter, no times

The checks run in a child process (supervised.py): a kernel that brings it down fails its own row alone.

Exit codes: 0 all checks hold, 1 one failed, 2 no such GPU or a wrong option, 3 time was up before all were done.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import candidates  # noqa: E402
import exact  # noqa: E402
import torch  # noqa: E402
from accelerator import Accelerator, Limits, rehearse, unusable, why_no_hopper  # noqa: E402
from attention_cases import attention_cases  # noqa: E402
from cases import ALL, TINY, Case, Dims, Function, Work, may_differ_in_company  # noqa: E402
from compressed_cases import compressed_cases  # noqa: E402
from gqa_cases import gqa_cases  # noqa: E402
from product_cases import product_cases  # noqa: E402
from row_cases import row_cases  # noqa: E402
from sparse_cases import sparse_cases  # noqa: E402
from supervised import RESTART, read_record, supervise, write_line  # noqa: E402
from wheels import WheelError, unpack_wheels  # noqa: E402

OK, FAILED, UNUSABLE, UNFINISHED = 0, 1, 2, 3
_QUICK_RUNS = 5
_SILENT_S = 240.0  # no check takes so long, whatever it compiles


@dataclass
class Row:
    """One line of the table; times and rates are None in a rehearsal."""

    op: str
    candidate: str
    shape: str
    measure: str = ""
    error: float | None = None
    company: str = ""  # whether rows keep their bits without the other rows
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
    makers = (product_cases, attention_cases, gqa_cases, sparse_cases, compressed_cases, row_cases)
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
    if peak and limits.copy_gb_s:
        row.share = max(row.tflops / peak, row.gb_s / limits.copy_gb_s)


def _check_company(row: Row, work: Work, function: Function, result: torch.Tensor) -> None:
    """Whether parts of the rows, run alone, have the bits that they have among all rows."""
    is_same = all(exact.same_bits(work.run(function, part), work.take(result, part)) for part in work.parts)
    row.company = "same" if is_same else "differs"
    if not is_same and not may_differ_in_company(function):
        row.failure = row.failure or "a row's bits depend on the rows beside it"


def jobs_of(cases: list[Case]) -> dict[str, tuple[Case, str]]:
    """Every candidate of every case, by what it is called in files."""
    return {f"{case.op}, {name}, {case.shape}": (case, name) for case in cases for name in case.names}


def run_jobs(
    jobs: dict[str, tuple[Case, str]],
    accelerator: Accelerator,
    limits: Limits | None,
    begin: Callable[[str], object],
    end: Callable[..., object],
) -> None:
    """Run these checks, telling before each and after it; what comes after it is a row, or why there is none."""
    for key, (case, name) in jobs.items():
        begin(key)
        reason = candidates.why_not(name, case.op)
        if reason is not None:
            end(key, not_run=reason)
            continue
        row = run_case(case, name, accelerator, limits)
        # a run that is ended early leaves at least these lines
        words = row.failure or f"error {row.error:.1e}, {_number(row.ms, 3)} ms, {_number(row.tflops)} TFLOP/s"
        print(f"{key}: {words}", file=sys.stderr, flush=True)
        end(key, row=asdict(row))
        accelerator.release()


def work(options: argparse.Namespace, jobs: dict[str, tuple[Case, str]]) -> int:
    """The child: do what the file lacks."""
    path, accelerator = options.work, _accelerator(options)
    record = read_record(path)
    machine = accelerator.describe()
    if record.header is None:
        limits = None if options.rehearse else accelerator.limits()
        write_line(path, machine=machine, limits=limits and asdict(limits))
    elif record.header["machine"] != machine:
        print(f"{path} has results of another machine or of other versions; name another file.", file=sys.stderr)
        return UNUSABLE
    else:
        limits = record.header["limits"] and Limits(**record.header["limits"])

    def end(key: str, **result: Any) -> None:
        write_line(path, done=key, **result)
        if result.get("row", {}).get("failure") and not accelerator.works():
            sys.exit(RESTART)

    left = {key: jobs[key] for key in record.left(jobs)}
    run_jobs(left, accelerator, limits, lambda key: write_line(path, begun=key), end)
    return OK


def _in_this_process(
    options: argparse.Namespace, jobs: dict[str, tuple[Case, str]]
) -> tuple[dict[str, str], None, dict[str, dict[str, Any]]]:
    """A rehearsal: the machine, no limits, and what became of each check."""
    accelerator, results = _accelerator(options), {}
    run_jobs(jobs, accelerator, None, lambda key: None, lambda key, **result: results.update({key: result}))
    return accelerator.describe(), None, results


def _rows(jobs: dict[str, tuple[Case, str]], results: dict[str, dict[str, Any]]) -> tuple[list[Row], dict[str, str]]:
    """The rows of the table, and per candidate and operation why it was not run."""
    rows, skipped = [], {}
    for key, (case, name) in jobs.items():
        result = results.get(key, {})
        if "row" in result:
            rows.append(Row(**result["row"]))
        elif "died" in result:
            rows.append(Row(case.op, name, case.shape, failure=f"its process ended: {result['died']}"))
        elif "not_run" in result:
            skipped[f"{name} {case.op}"] = result["not_run"]
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
            f"measured limits: {_number(limits.bf16_tflops)} TFLOP/s bfloat16, {_number(limits.fp8_tflops)} TFLOP/s "
            f"FP8, {_number(limits.copy_gb_s)} GB/s copied (read and written)"
        )
        print(f"first calls (compilation included): {sum(row.first_s or 0 for row in rows):.0f} s")
    print(table(rows))
    for reason in dict.fromkeys(skipped.values()):
        print(f"not run: {', '.join(op for op, why in skipped.items() if why == reason)}: {reason}")
    num_failed = sum(bool(row.failure) for row in rows)
    print(f"{len(rows)} checks, {num_failed} failed")


def _part(words: str) -> tuple[int, int]:
    """I and N of "I/N"."""
    first, _, count = words.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise argparse.ArgumentTypeError(f'"{words}" is no part like 2/4')
    return int(first), int(count)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and time the operations for Hopper GPUs.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, tiny shapes")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to unpack onto sys.path")
    parser.add_argument("--only", nargs="+", metavar="OPERATION", help="these operations alone")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="each N-th check, from the I-th on")
    parser.add_argument("--out", type=Path, help="JSON lines as checks are done; what the file has is not run again")
    parser.add_argument("--minutes", type=float, help="stop after this time; the same command with --out goes on")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)  # this is the child; its file
    return parser


def _accelerator(options: argparse.Namespace) -> Accelerator:
    device = torch.device("cpu" if options.rehearse else "cuda")
    return Accelerator(device, _QUICK_RUNS) if options.quick else Accelerator(device)


def _supervised(
    options: argparse.Namespace, arguments: list[str], jobs: dict[str, tuple[Case, str]], end_s: float | None
) -> tuple[str | None, dict[str, Any], dict[str, dict[str, Any]]]:
    """Return why not all was done (None: it was), the file's first line, and the result of each check."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.out or Path(folder) / "check.jsonl"
        command = [sys.executable, __file__, *arguments, "--work", str(path)]
        why_not = supervise(command, list(jobs), path, silent_s=_SILENT_S, end_s=end_s)
        record = read_record(path)
    return why_not, record.header or {"machine": {}, "limits": None}, record.done


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    start_s = time.monotonic()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    if options.rehearse:
        rehearse()
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
    jobs = jobs_of([case for case in cases if case.op in (options.only or [case.op])])
    first, step = options.part
    jobs = {key: jobs[key] for key in list(jobs)[first - 1 :: step]}
    if options.work is not None:
        return work(options, jobs)
    reason = None if options.rehearse else why_no_hopper()
    if reason is not None:
        print(unusable(reason), file=sys.stderr)
        return UNUSABLE
    why_not = None
    if options.rehearse and options.out is None:
        described, limits, results = _in_this_process(options, jobs)
    else:
        end_s = None if options.minutes is None else start_s + 60 * options.minutes
        why_not, header, results = _supervised(options, arguments, jobs, end_s)
        described, limits = header["machine"], header["limits"] and Limits(**header["limits"])
    rows, skipped = _rows(jobs, results)
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
    if why_not is not None:
        print(f"not all of it was run: {why_not}.", file=sys.stderr)
    elif not rows:
        print("nothing could be checked: no candidate can run here.", file=sys.stderr)
    if not rows or any(row.failure for row in rows):
        return FAILED
    return OK if why_not is None else UNFINISHED


if __name__ == "__main__":
    sys.exit(main())
