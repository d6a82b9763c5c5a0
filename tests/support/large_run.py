"""A finished run of many rows, written in seconds: for the report's memory and speed. Its numbers are plausible."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.schemas.outputs import output_schema
from batchinfer.data.schemas.statistics import STATS_TABLES
from support.runs import session, write_table

SCHEMAS = {table.name: table.schema for table in STATS_TABLES}
NUM_SHARDS = 10
NUM_RANKS = 16
NUM_STEPS = 20_000  # of each rank
DAY_S = 86_400.0
# the peak of this process alone; what its parent held before does not count
MEASURED = """
import sys
from batchinfer.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    with open("/proc/self/status") as status:
        print(next(line for line in status if line.startswith("VmHWM")), file=sys.stderr)
"""


def peak_bytes(*arguments: str | Path) -> tuple[int, str]:
    """Peak memory of the command and what it printed."""
    before = time.monotonic()
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    kib = int(ended.stderr.split()[-2])
    print(f"{' '.join(map(str, arguments[2:])) or 'panel'}: {time.monotonic() - before:.1f} s, {kib / 1024:,.0f} MiB")
    return kib * 1024, ended.stdout


def write_large_run(root: Path, num_rows: int) -> Path:
    """A day of `num_rows` rows in ten shards on two nodes of eight ranks; one row of a thousand failed."""
    draw = np.random.default_rng(0)
    root.mkdir(parents=True)
    names = [f"part-{shard:05d}.parquet" for shard in range(NUM_SHARDS)]
    shards = [{"index": index, "path": name, "name": name, "problem": None} for index, name in enumerate(names)]
    (root / "run.json").write_text(json.dumps({"state": "finished", "shards": shards}))
    per_shard = num_rows // NUM_SHARDS
    requests = pq.ParquetWriter(_made(root / "stats" / "requests.parquet"), SCHEMAS["requests"])
    for shard, name in enumerate(names):
        columns = _requests(draw, shard, per_shard)
        requests.write_table(pa.table(columns, schema=SCHEMAS["requests"]))
        _write_outputs(root / "outputs" / name, columns, shard)
    requests.close()
    nodes = [
        session(f"n{node}", 0.0, DAY_S, ranks=8, prefill_s=60.0, node=f"n{node}", prefill_ranks=16, decode_ranks=16)
        for node in range(2)
    ]
    write_table(root / "stats" / "nodes.parquet", nodes, SCHEMAS["nodes"])
    for node in range(2):
        _write_steps(root / "stats" / "steps" / f"n{node}.parquet", draw, node)
    _write_experts(root / "stats" / "experts.parquet", draw)
    row = {"run": root.name, "model": "/models/large", "dtype": "fp8", "distinct_tokens": 400 * num_rows}
    prices = {"gpu_hour": 2.0, "input_hit": 0.14, "input_miss": 0.55, "output": 2.19, "replicated_tokens": 0}
    write_table(root / "stats" / "run.parquet", [row | prices], SCHEMAS["run"])
    return root


def _requests(draw: np.random.Generator, shard: int, num: int) -> dict[str, object]:
    failed = np.arange(num) % 1000 == 999
    prompt = np.where(failed, 0, draw.integers(200, 1000, num))
    answer = np.where(failed, 0, draw.integers(10, 400, num))
    cached = prompt // 2
    admitted = 60 + draw.random(num) * (DAY_S - 1000)
    zeros = np.zeros(num, dtype=np.int32)
    return {
        "shard": np.full(num, shard, dtype=np.int32),
        "row": np.arange(num),
        "sample": zeros,
        "unit": np.arange(num, dtype=np.int32) // 1000,
        "is_reused": np.zeros(num, dtype=bool),
        "status": pa.array(np.where(failed, "error", "ok")),
        "finish_reason": pa.array(np.where(failed, "error", "stop")),
        "prompt_tokens": prompt.astype(np.int32),
        "cached_memory_tokens": cached.astype(np.int32),
        "cached_disk_tokens": zeros,
        "cached_duplicate_tokens": zeros,
        "replicated_tokens": zeros,
        "recomputed_tokens": zeros,
        "computed_tokens": (prompt - cached).astype(np.int32),
        "completion_tokens": answer.astype(np.int32),
        "reasoning_tokens": zeros,
        "structured_valid": pa.nulls(num, pa.bool_()),
        "mean_logprob": -draw.random(num),
        "choice": pa.nulls(num, pa.int32()),
        "generated_tokens": answer.astype(np.int32),
        "kv_tokens_sum": answer * (prompt + answer // 2),
        "admitted_s": admitted,
        "first_token_s": admitted + 2,
        "finished_s": admitted + 3 + answer * 0.05,
    }


def _write_outputs(path: Path, requests: dict[str, object], shard: int) -> None:
    schema = output_schema(pa.string(), [])
    num = len(requests["row"])  # type: ignore[arg-type]
    is_ok = np.asarray(requests["status"]) == "ok"
    texts = [f"answer {row} of shard {shard}: " + "some words that say little " * 6 for row in range(num)]
    errors = [f"row {row} could not be answered" for row in range(num)]
    columns = {
        "id": [f"{shard}-{row}" for row in range(num)],
        "row": requests["row"],
        "sample": requests["sample"],
        "status": requests["status"],
        "error": pa.array(errors, mask=is_ok),
        "text": pa.array(texts, mask=~is_ok),
        "token_ids": pa.nulls(num, schema.field("token_ids").type),
        "finish_reason": pa.array(np.where(is_ok, "stop", "error")),
        "stop_reason": pa.nulls(num, pa.string()),
        "prompt_tokens": requests["prompt_tokens"],
        "cached_tokens": requests["cached_memory_tokens"],
        "completion_tokens": requests["completion_tokens"],
        "logprobs": pa.nulls(num, schema.field("logprobs").type),
    }
    pq.write_table(pa.table(columns, schema=schema), _made(path), row_group_size=20_000)


def _write_steps(path: Path, draw: np.random.Generator, node: int) -> None:
    num = 8 * NUM_STEPS
    number = np.tile(np.arange(NUM_STEPS), 8)
    is_prefill = number % 4 == 0
    lasts = (DAY_S - 600) / NUM_STEPS
    columns = {
        "session": [f"n{node}"] * num,
        "rank": (np.repeat(np.arange(8), NUM_STEPS) + 8 * node).astype(np.int32),
        "step": number,
        "kind": pa.array(np.where(is_prefill, "prefill", "decode")),
        "start_s": 60 + number * lasts,
        "duration_s": np.full(num, lasts * 0.9),
        "num_requests": np.full(num, 64, dtype=np.int32),
        "new_tokens": np.where(is_prefill, 4096, 64).astype(np.int32),
        "cached_tokens": np.where(is_prefill, 4096, 0).astype(np.int32),
        "output_tokens": np.where(is_prefill, 8, 64).astype(np.int32),
        "kv_tokens": draw.integers(30_000, 50_000, num),
        "largest_kv_tokens": np.full(num, 4000),
        "pages_used": np.full(num, 900, dtype=np.int32),
        "micro_batches": np.full(num, 2, dtype=np.int32),
        "placement": np.zeros(num, dtype=np.int32),
        "expert_rows": draw.integers(9_000, 11_000, num),
        "comm_s": np.full(num, lasts * 0.3),
        "wait_comm_s": np.zeros(num),
        "exposed_comm_s": np.full(num, lasts * 0.05),
        "hidden_comm_s": np.full(num, lasts * 0.25),
        "fallback_calls": np.zeros(num, dtype=np.int32),
        "drafted_tokens": np.zeros(num, dtype=np.int32),
        "accepted_tokens": np.zeros(num, dtype=np.int32),
        "graph": pa.nulls(num, pa.string()),
        "graph_rows": np.zeros(num, dtype=np.int32),
        "attention_work": np.where(is_prefill, 1e6, 0.0),
        "streamed_bytes": np.zeros(num, dtype=np.int64),
        "weights_wait_s": np.zeros(num),
        "no_graph": pa.array(np.full(num, "the rank computes on a CPU"), mask=is_prefill),
    }
    pq.write_table(pa.table(columns, schema=SCHEMAS["steps"]), _made(path))


def _write_experts(path: Path, draw: np.random.Generator) -> None:
    """58 layers of 256 experts, counted by two ranks."""
    layer, expert = (grid.ravel() for grid in np.meshgrid(np.arange(3, 61), np.arange(256), indexing="ij"))
    for_ranks = [
        {
            "session": ["n0"] * len(layer),
            "rank": np.full(len(layer), rank, dtype=np.int32),
            "placement": np.zeros(len(layer), dtype=np.int32),
            "phase": ["decode"] * len(layer),
            "layer": layer.astype(np.int32),
            "expert": expert.astype(np.int32),
            "tokens": draw.lognormal(8, 0.5, len(layer)).astype(np.int64),
        }
        for rank in range(2)
    ]
    tables = [pa.table(columns, schema=SCHEMAS["experts"]) for columns in for_ranks]
    pq.write_table(pa.concat_tables(tables), _made(path))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
