"""Held-out prompts of the sample model's tasks as Parquet shards, with duplicates and bad rows as real files have them.

    python sample_data/train/make_prompts.py --out sample_data/prompts
    python sample_data/train/make_prompts.py --out /scratch/prompts --rows 20000

The same number of rows gives the same files. `expected` is the right answer; it is null in rows that get none.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tasks import GENERATORS, Example, draw_example, system_text

SEED = 21
DEFAULT_ROWS = 324
# of four shards, and rows per row group in each; with more rows both grow alike
SHARD_ROWS = (130, 96, 64, 34)
GROUP_ROWS = (32, 48, 64, 16)
DUPLICATE_SHARE = 1 / 27
SECOND_TURN_SHARE = 0.1
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [("id", pa.string()), ("messages", pa.list_(_MESSAGE)), ("task", pa.string()), ("expected", pa.string())]
)

Row = dict[str, Any]


def make_rows(num_rows: int, rng: random.Random) -> list[Row]:
    """Rows of all tasks in mixed order, with exact duplicates and a few bad rows strewn in."""
    bad = bad_rows()
    num_duplicates = round(num_rows * DUPLICATE_SHARE)
    num_good = num_rows - num_duplicates - len(bad)
    if num_good < num_duplicates:
        raise SystemExit(f"--rows is {num_rows}, too few for {len(bad)} bad rows beside good ones; use 20 or more")
    names = list(GENERATORS)
    good = [good_row(names[place % len(names)], rng) for place in range(num_good)]
    rows = [*good, *rng.sample(good, num_duplicates)]
    rng.shuffle(rows)
    for row in bad:
        rows.insert(rng.randrange(len(rows)), row)
    width = max(4, len(str(num_rows)))
    table = [{"id": f"row-{place:0{width}d}", **row} for place, row in enumerate(rows)]
    table[num_rows // 8]["id"] = table[num_rows // 19]["id"]  # ids may repeat
    table[num_rows * 5 // 8]["id"] = None  # and may be missing
    return table


def good_row(task: str, rng: random.Random) -> Row:
    """One held-out question; sometimes after another one with its answer."""
    messages = [{"role": "system", "content": system_text(task)}]
    if rng.random() < SECOND_TURN_SHARE:
        earlier = draw_example(task, rng, held_out=True)
        messages += [_user(earlier), {"role": "assistant", "content": earlier.answer}]
    example = draw_example(task, rng, held_out=True)
    return {"messages": [*messages, _user(example)], "task": task, "expected": example.answer}


def bad_rows() -> list[Row]:
    """Rows that must become error rows."""
    bad: list[tuple[str, list[dict] | None]] = [
        ("triage", None),
        ("price", []),
        ("ledger", [{"role": None, "content": "Who is speaking?"}]),
        ("date", [{"role": "user", "content": None}]),
        ("triage", [{"role": "narrator", "content": "A role that the chat template refuses."}]),
        ("price", [{"role": "user", "content": "barley 12, leeks 47, herring 33, " * 600}]),  # longer than the window
    ]
    return [{"messages": messages, "task": task, "expected": None} for task, messages in bad]


def write_shards(rows: list[Row], out: Path) -> None:
    """Four shards of different sizes, with row groups of different sizes."""
    out.mkdir(parents=True, exist_ok=True)
    first = 0
    for shard, group_rows in enumerate(GROUP_ROWS):
        last = len(rows) * sum(SHARD_ROWS[: shard + 1]) // sum(SHARD_ROWS)
        table = pa.Table.from_pylist(rows[first:last], SCHEMA)
        scale = max(1, len(rows) // sum(SHARD_ROWS))
        pq.write_table(table, out / f"part-{shard:05d}.parquet", row_group_size=group_rows * scale, compression="zstd")
        first = last


def _user(example: Example) -> dict[str, str]:
    return {"role": "user", "content": example.question}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write held-out prompts of the sample model's tasks.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the four shards")
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS, help="rows in all, bad rows and duplicates included")
    options = parser.parse_args()
    write_shards(make_rows(options.rows, random.Random(SEED)), options.out)


if __name__ == "__main__":
    main()
