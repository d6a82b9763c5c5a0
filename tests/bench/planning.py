"""The time of a plan, in turn with another checkout: few-shot prompts, distinct ones, or a Parquet file of yours.

python tests/bench/planning.py OTHER [--turns 5] [--rows 8000] [--model FOLDER] [--prompts FILE.parquet]

OTHER: a checkout of another commit. The model folder needs a tokenizer.json; the tokens of all plans are compared.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
NUM_HEADS, NUM_SHOTS = 30, 5
JOB = """
[input]
files = ["{prompts}"]
prompt = "prompt"
[output]
dir = "{run}"
[model]
path = "{model}"
dtype = "float32"
[sampling]
max_tokens = 8
"""


def sentences(chance: random.Random) -> Iterator[str]:
    """Words by Zipf's law, as in texts: common ones come back, rare ones hardly ever do."""
    letters = "etaoinshrdlu"
    while True:
        ranks = [int(chance.paretovariate(0.8)) % 300_000 for _ in range(chance.randint(5, 25))]
        words = ["".join(random.Random(rank).choices(letters, k=2 + len(str(rank)))) for rank in ranks]
        words[-1] += f" {chance.randint(1, 9999)}"
        yield f"{' '.join(words).capitalize()}."


def few_shot(num_rows: int) -> list[str]:
    chance = random.Random(0)
    text = sentences(chance)
    shots = [
        [f"Q: {next(text)} {next(text)}\nA: {' '.join(next(text) for _ in range(5))}\n\n" for _ in range(NUM_SHOTS)]
        for _ in range(NUM_HEADS)
    ]
    return [f"{''.join(chance.choice(shots))}Q: {next(text)} {next(text)}\nA:" for _ in range(num_rows)]


def distinct(num_rows: int) -> list[str]:
    text = sentences(random.Random(1))
    return [f"Question: {next(text)} {next(text)} {next(text)}\nAnswer:" for _ in range(num_rows)]


def plan(root: Path, folder: Path, prompts: Path, model: Path) -> tuple[float, pa.Table]:
    """(seconds of `batchinfer plan` from the shell to its end, the tokens)."""
    run = folder / "run"
    (folder / "job.toml").write_text(JOB.format(prompts=prompts, run=run, model=model))
    command = [sys.executable, "-c", "from batchinfer.program import program; program()", "plan", folder / "job.toml"]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'kernels'}"}
    started = time.monotonic()
    subprocess.run(command, env=environment, check=True, capture_output=True, cwd=folder)
    seconds = time.monotonic() - started
    tokens = pq.read_table(run / "tokens", columns=["shard", "row", "token_ids"])
    shutil.rmtree(run)
    return seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--model", type=Path, default=ROOT / "sample_data" / "model")
    parser.add_argument("--prompts", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = (
            [arguments.prompts.absolute()]
            if arguments.prompts
            else [folder / "few-shot.parquet", folder / "distinct.parquet"]
        )
        if not arguments.prompts:
            for file, make in zip(files, (few_shot, distinct), strict=True):
                pq.write_table(pa.table({"prompt": make(arguments.rows)}), file, row_group_size=2000)
        for file in files:
            seconds: dict[str, list[float]] = {"other": [], "this": []}
            for _ in range(arguments.turns):
                tokens = []
                for kind, root in (("other", arguments.other.absolute()), ("this", ROOT)):
                    taken, found = plan(root, folder, file, arguments.model.absolute())
                    seconds[kind].append(taken)
                    tokens.append(found)
                assert tokens[0].equals(tokens[1]), "the tokens differ"
            num_tokens = tokens[0]["token_ids"].combine_chunks().flatten()
            medians = {kind: statistics.median(taken) for kind, taken in seconds.items()}
            ratio = medians["other"] / medians["this"]
            print(
                f"{file.stem}: {tokens[0].num_rows:,} rows, {len(num_tokens):,} tokens: "
                f"other {medians['other']:.2f} s, this {medians['this']:.2f} s, {ratio:.2f} times as fast",
                flush=True,
            )


if __name__ == "__main__":
    main()
