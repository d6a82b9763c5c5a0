"""Add the predictions of NVIDIA's aiconfigurator to the rows of silicon_sample.csv that `simulate --against` predicts.

    python tests/bench/peer_aiconfigurator.py silicon_sample.csv with_peer.csv

Needs an interpreter with `pip install aiconfigurator==0.12.0`; nothing of batchinfer is used.
"""

import csv
import logging
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("aiconfigurator_tpot_ms", "aiconfigurator_tokens_per_s_per_gpu")
SIZES = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "batch_size")


def is_wanted(row: dict[str, str]) -> bool:
    """Return whether a row is of DeepSeek-R1 or V3 in FP8 with data-parallel attention and experts over its GPUs."""
    prefix = "" if row["mode"] == "agg" else "decode_"
    ranks = row[f"{prefix}attention_dp_size"]
    return (
        row["precision"] == "fp8"
        and row["model_path"].endswith(("DeepSeek-R1", "DeepSeek-V3"))
        and ranks not in ("", "1")
        and row[f"{prefix}moe_ep_size"] == ranks
        and bool(row[f"{prefix}batch_size"])
    )


def predicted(row: dict[str, str]) -> tuple[float, float]:
    """Return milliseconds per output token, and tokens per second and GPU."""
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    named: dict[str, Any] = {"mode": row["mode"], "backend_name": row["backend"]}
    named |= {name: int(row[name]) for name in ("isl", "osl")}
    if row["mode"] == "agg":
        named |= {name: int(row[name]) for name in SIZES}
    else:
        for stage in ("prefill", "decode"):
            named |= {f"{stage}_{name}": int(row[f"{stage}_{name}"]) for name in (*SIZES, "num_workers")}
    found = cli_estimate(row["model_path"], row["system"], **named)
    return found.tpot, found.tokens_per_second_per_gpu


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    logging.disable(logging.CRITICAL)
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row.update(dict.fromkeys(COLUMNS, ""))
        if is_wanted(row):
            try:
                row.update(zip(COLUMNS, map(str, predicted(row)), strict=True))
            except Exception as error:  # it has many for layouts that it does not know
                print(f"row {number}: {type(error).__name__}: {str(error)[:100]}")
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
