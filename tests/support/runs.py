"""Finished run folders for tests of the report: rows written by hand instead of by a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.schemas.outputs import output_schema
from batchinfer.data.schemas.statistics import STATS_TABLES

SCHEMAS = {table.name: table.schema for table in STATS_TABLES}


def write_table(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_run(
    root: Path,
    *,
    requests: Sequence[dict[str, Any]] = (),
    steps: Sequence[dict[str, Any]] = (),
    nodes: Sequence[dict[str, Any]] = (),
    outputs: dict[str, list[dict[str, Any]]] | None = None,
    shards: Sequence[dict[str, Any]] = (),
    kept: Sequence[pa.Field] = (),
    **run: Any,
) -> Path:
    """A finished run folder; steps and nodes in one file per session, as the sessions write them."""
    root.mkdir(parents=True)
    (root / "run.json").write_text(json.dumps({"state": "finished", "shards": list(shards)}))
    stats = root / "stats"
    row = {"run": root.name, "model": "/models/tiny", "dtype": "float32", "distinct_tokens": 0, "replicated_tokens": 0}
    write_table(stats / "run.parquet", [row | run], SCHEMAS["run"])
    write_table(stats / "requests.parquet", list(requests), SCHEMAS["requests"])
    for name, rows in (("steps", steps), ("nodes", nodes)):
        for session in dict.fromkeys(row["session"] for row in rows):
            mine = [row for row in rows if row["session"] == session]
            write_table(stats / name / f"{session}.parquet", mine, SCHEMAS[name])
    for name, rows in (outputs or {}).items():
        write_table(root / "outputs" / name, rows, output_schema(pa.string(), list(kept)))
    return root


def request(
    row: int, prompt: int, generated: int, first_s: float = 0, finished_s: float | None = 0, **more: Any
) -> dict[str, Any]:
    counts = {"cached_memory_tokens": 0, "cached_disk_tokens": 0, "cached_duplicate_tokens": 0, "recomputed_tokens": 0}
    found = {
        "shard": 0,
        "row": row,
        "sample": 0,
        "status": "ok",
        "finish_reason": "stop",
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "generated_tokens": generated,
        "first_token_s": first_s,
        "finished_s": finished_s,
        "replicated_tokens": 0,
        "kv_tokens_sum": 0,
        **counts,
        **more,
    }
    new = prompt - found["cached_memory_tokens"] - found["cached_disk_tokens"] if generated else 0
    return {"computed_tokens": new + found["replicated_tokens"] + found["recomputed_tokens"], **found}


def error_request(row: int) -> dict[str, Any]:
    return request(row, 0, 0, status="error", finish_reason="error", first_token_s=None, finished_s=None)


def step(
    session: str, kind: str, duration_s: float, *, new: int, cached: int, output: int, rank: int = 0, **more: Any
) -> dict[str, Any]:
    counts = {"new_tokens": new, "cached_tokens": cached, "output_tokens": output, "micro_batches": 1, "expert_rows": 0}
    times = {"start_s": 0.0, "duration_s": duration_s, "comm_s": 0.0, "wait_comm_s": 0.0, "hidden_comm_s": 0.0}
    times["exposed_comm_s"] = more.get("comm_s", 0.0) - (more.get("hidden_comm_s") or 0.0)
    return {"session": session, "rank": rank, "kind": kind, **counts, **times, **more}


def session(
    name: str, start_s: float, end_s: float, *, ranks: int = 1, prefill_s: float | None = None, **more: Any
) -> dict[str, Any]:
    """Return one session; `ranks` > 0: a separate colocated group on this node, unless `more` says otherwise."""
    group = {"num_ranks": ranks, "mode": "colocated" if ranks else None, "prefill_ranks": ranks, "decode_ranks": ranks}
    times = {"start_s": start_s, "first_prefill_s": prefill_s, "end_s": end_s}
    return {
        "session": name,
        "command": "work",
        "node": "n1",
        "state": "done",
        "restarts": 0,
        "moves": 0,
        **group,
        **times,
        **more,
    }


def output(row: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": 4, "cached_tokens": 1, "completion_tokens": 2}
    return {"id": f"id-{row}", "row": row, "sample": 0, "status": "ok", "text": f"text {row}", **counts, **more}


def error_output(row: int, error: str) -> dict[str, Any]:
    return output(row, status="error", text=None, error=error, prompt_tokens=0, cached_tokens=0, completion_tokens=0)
