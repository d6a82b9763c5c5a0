"""The speed of reading lists of token ids from JSON lines: both passes of a plan, per processor second.

python tests/bench/token_lines.py
"""

import json
import random
import tempfile
import time
from pathlib import Path

import pandas  # noqa: F401 -- Arrow imports it on its first conversion

from batchinfer.data.inputs import read_batches
from batchinfer.data.shards import find_shards

VOCABULARY, TURNS = 129_280, 3
SIZES = {"20-80": 100_000, "300-700": 15_000, "12000-18000": 500}  # tokens of a row, and rows


def write_rows(path: Path, span: str, num_rows: int) -> None:
    """Rows of random token ids with ids of their own."""
    low, high = map(int, span.split("-"))
    draw = random.Random(1)
    with path.open("w") as file:
        for row in range(num_rows):
            ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(low, high))]
            file.write(json.dumps({"id": f"row {row}", "ids": ids}) + "\n")


def main() -> None:
    """Prints the best of the turns for each size."""
    for span, num_rows in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows.jsonl")
            write_rows(path, span, num_rows)
            num_mb, passes = path.stat().st_size / 1e6, [float("inf")] * 2
            for _ in range(TURNS):
                start = time.process_time()
                (shard,) = find_shards([str(path)], roles={"id": "id", "ids": "token_ids"})
                middle = time.process_time()
                assert sum(len(batch) for batch in read_batches(shard, ["id", "ids"])) == num_rows
                passes = [min(passes[0], middle - start), min(passes[1], time.process_time() - middle)]
        speeds = [num_mb / passes[0], num_mb / passes[1], num_mb / sum(passes)]
        print(f"{span} tokens: {', '.join(f'{speed:.0f}' for speed in speeds)} MB/s (first pass, second, both)")


if __name__ == "__main__":
    main()
