"""The results of the scripts of run.sh in a folder, as Markdown; docs/gpu-checks.md explains them.

python tests/gpu/summary.py RESULTS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import HIT_SHARE
from supervised import Record, read_record

_HOPPER = ("hopper", "hopper-invariant", "hopper-pieces")
_CANDIDATES = (*_HOPPER, "triton", "triton-descriptors", "triton-ahead", "sdpa")


def summary(folder: Path) -> str:
    """All that is known so far."""
    check, one_share, *jobs = (
        read_record(folder / f"{name}.jsonl") for name in ("check", "slice", "job", "ranks", "stream")
    )
    lines = [*_machine(check, one_share, *jobs), *_check(check), *_slice(one_share)]
    return "\n".join([*lines, *(line for one in jobs for line in _job(one))]) + "\n"


def _machine(*records: Record) -> Iterator[str]:
    header = next((record.header for record in records if record.header is not None), None)
    if header is None:
        yield "Nothing has been measured."
        return
    yield ", ".join(f"{name} {value}" for name, value in header["machine"].items() if value != "none")
    limits = header.get("limits")
    if limits:
        words = ("TFLOP/s bfloat16", "TFLOP/s FP8", "GB/s copied")
        yield "\nMeasured limits: " + ", ".join(
            f"{_number(value)} {word}" for value, word in zip(limits.values(), words, strict=True)
        )


def _check(record: Record) -> Iterator[str]:
    if not record.done:
        return
    yield "\n| operation | candidate | shape | error | alone | ms | TFLOP/s | GB/s | limit % | published |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    not_run: dict[str, str] = {}
    failures: list[str] = []
    for key, result in record.done.items():
        op, candidate, shape = _named(key)
        if "not_run" in result:
            not_run[f"{candidate} {op}"] = result["not_run"]
            continue
        row = result.get("row") or {"failure": f"its process ended: {result['died']}"}
        if row["failure"]:
            failures.append(f"{key}: {row['failure']}")
        yield "| " + " | ".join([op, candidate, shape, *_cells(row)]) + " |"
    yield f"\n{len(record.done) - len(not_run)} checks, {len(failures)} failed"
    yield from (f"\nFAILED {words}" for words in failures)
    yield from (f"\nNot run: {name}: {why}" for name, why in not_run.items())


def _named(key: str) -> tuple[str, str, str]:
    """Operation, candidate and shape of a check; see check.jobs_of."""
    for candidate in (
        "hopper",
        "hopper-invariant",
        "hopper-pieces",
        "triton",
        "triton-descriptors",
        "triton-ahead",
        "sdpa",
    ):
        op, found, shape = key.partition(f", {candidate}, ")
        if found:
            return op, candidate, shape
    return key, "", ""


def _cells(row: dict[str, Any]) -> list[str]:
    """Return the cells after the shape."""
    error = "" if row.get("error") is None else f"{row['error']:.1e} {row['measure']}"
    share = row.get("share")
    published = (
        "" if row.get("published_tflops") is None else f"{row['published_tflops']:.0f}, {row['published_gb_s']:.0f}"
    )
    return [
        error,
        row.get("company", ""),
        _number(row.get("ms"), 3),
        _number(row.get("tflops")),
        _number(row.get("gb_s")),
        _number(None if share is None else 100 * share),
        published,
    ]


def _slice(record: Record) -> Iterator[str]:
    if not record.done:
        return
    yield "\n| unit | requests or tokens | alone, tokens/s per GPU | exchange after it | published schedule | hidden |"
    yield "|---|---|---|---|---|---|"
    for key, result in record.done.items():
        figures = result.get("figures")
        if figures is None:
            yield f"| {key} | {result.get('not_run') or 'its process ended: ' + result['died']} | | | | |"
            continue
        cells = [""] * 4
        if figures["whole_s"] is not None:
            seconds = (figures["whole_s"], figures["whole_s"] + figures["exchange_s"], figures["overlapped_s"])
            cells = [_rate(figures["unit"], figures["tokens"] / one) for one in seconds]
            cells.append(f"{100 * (1 - figures['exposed_s'] / figures['exchange_s']):.0f} %")
        yield "| " + " | ".join([figures["unit"], f"{figures['tokens']:,}", *cells]) + " |"


def _job(record: Record) -> Iterator[str]:
    """The lines that job.py, ranks.py or stream.py prints."""
    for part, result in record.done.items():
        row = result["row"]
        failure = f"FAILED {part}: {row['failure']}\n" if row["failure"] else ""
        yield f"\n{failure}```\n{row.get('text', part)}\n```"


def _rate(unit: str, rate: float) -> str:
    hits = f" ({rate / (1 - HIT_SHARE):,.0f} with hits)" if unit.startswith("prefill") else ""
    return f"{rate:,.0f}{hits}"


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/gpu/summary.py RESULTS")
    print(summary(Path(sys.argv[1])), end="")
