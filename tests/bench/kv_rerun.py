"""The gain by the KV store on disk: a job with long shared prefixes, and the same prefixes with new questions.

Documents of some 1,500 tokens, four questions to each; a second job asks four other questions about the same documents.
The second job runs without a store, with an empty one and with the one that the first job filled, in turn, several
times; medians are compared, of the seconds between the first step and the last and of the whole command.

    python tests/bench/kv_rerun.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import duckdb

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.report.read import read_report  # noqa: E402
from support.jobs import batchinfer, write_job, write_shard  # noqa: E402

MODEL = TESTS.parent / "sample_data" / "model"
NUM_DOCUMENTS, NUM_QUESTIONS, NUM_NEW = 40, 4, 8


def write_prompts(folder: Path, documents: list[list[int]], rng: random.Random) -> None:
    prompts = [
        document + [rng.randrange(10, 250) for _ in range(rng.randint(20, 60))]
        for document in documents
        for _ in range(NUM_QUESTIONS)
    ]
    rng.shuffle(prompts)
    write_shard(folder / "part-0.parquet", {"id": list(range(len(prompts))), "token_ids": prompts})


def run_once(folder: Path, prompts: str, store: Path | None) -> tuple[float, float, int, int]:
    """(seconds from the first step to the last, of the command; prompt tokens computed, and read from disk)."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    job = write_job(
        folder,
        input={"files": [f"{prompts}/*.parquet"], "id": "id", "prompt": None, "token_ids": "token_ids"},
        model={"path": str(MODEL), "dtype": "float32"},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True},
        output={"dir": "run"},
        kv={} if store is None else {"dir": str(store)},
    )
    ended = batchinfer("run", job)
    if ended.code:
        sys.exit(ended.err)
    sql = f"SELECT max(start_s + duration_s) - min(start_s) FROM read_parquet('{run}/stats/steps/*.parquet')"
    ((seconds,),) = duckdb.execute(sql).fetchall()
    values = read_report(run).values
    return float(seconds), float(values["wall_s"] or 0), int(values["computed_tokens"]), int(values["disk_tokens"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rng = random.Random(0)
    found: dict[str, list[tuple[float, float, int, int]]] = {"no store": [], "empty store": [], "filled store": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        documents = [[rng.randrange(10, 250) for _ in range(1500)] for _ in range(NUM_DOCUMENTS)]
        for prompts in ("first", "second"):
            write_prompts(folder / prompts, documents, rng)
        run_once(folder, "first", folder / "filled")
        for turn in range(options.rounds):
            found["no store"].append(run_once(folder, "second", None))
            found["empty store"].append(run_once(folder, "second", folder / f"empty-{turn}"))
            found["filled store"].append(run_once(folder, "second", folder / "filled"))
            shutil.rmtree(folder / f"empty-{turn}")
    print(f"{NUM_DOCUMENTS * NUM_QUESTIONS} prompts on {NUM_DOCUMENTS} documents of 1,500 tokens")
    for name, runs in found.items():
        steps_s, wall_s = (statistics.median(run[place] for run in runs) for place in range(2))
        print(
            f"  {name:<14}{steps_s:>8.2f} s in steps {wall_s:>8.2f} s in all  {runs[0][2]:>8,} prompt tokens computed,",
            end="",
        )
        print(f" {runs[0][3]:>8,} from disk")
    for name in ("no store", "empty store"):
        ratios = [slow[0] / fast[0] for fast, slow in zip(found["filled store"], found[name], strict=True)]
        print(f"  {name} takes {statistics.median(ratios):.2f} times as long as the filled one", end="")
        print(f" ({', '.join(f'{ratio:.2f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
