"""What a work unit holds on disk: its requests as planned, its results as rows. Called by the controller."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.config import PAGE_TOKENS
from batchinfer.data.parquet import own_file
from batchinfer.data.schemas import RESULTS
from batchinfer.records import Completion, Request, RequestKey, Sampling, sampling_from_json
from batchinfer.rundir import RunDir


def read_unit(run: RunDir, row: dict[str, Any], default: Sampling, *, after_tokens: int = 0) -> list[Request]:
    """The requests of one unit in the plan's order (reads its row groups only).

    Args:
        after_tokens: what the last request shares with the first of the next unit.
    """
    groups = range(row["first_row_group"], row["first_row_group"] + row["num_row_groups"])
    with own_file(run.requests):
        table = pq.ParquetFile(run.requests).read_row_groups(list(groups))
    samplings: dict[str | None, Sampling] = {None: default}
    requests = []
    items = table.to_pylist()
    shared_with_next = [*(item["cached_tokens"] for item in items[1:]), after_tokens]
    for item, next_tokens in zip(items, shared_with_next, strict=True):
        text = item["sampling"]
        if text not in samplings:
            samplings[text] = sampling_from_json(text)
        requests.append(
            Request(
                key=RequestKey(item["shard"], item["row"], item["sample"]),
                unit=item["unit"],
                token_ids=item["token_ids"],
                sampling=replace(samplings[text], max_tokens=item["max_tokens"]),
                sampling_key=item["sampling_key"],
                cached_tokens=item["cached_tokens"],
                kept_tokens=max(item["cached_tokens"], next_tokens),
                last_units=tuple(item["last_units"] or ()),
                prompt_group=item["prompt_group"],
                expected_tokens=item["expected_tokens"],
            )
        )
    return requests


def kv_tokens(run: RunDir, units: list[dict[str, Any]]) -> tuple[int, int]:
    """KV tokens of all requests of these units, in whole pages, together and of the largest."""
    groups = [
        group
        for row in units
        for group in range(row["first_row_group"], row["first_row_group"] + row["num_row_groups"])
    ]
    most = largest = 0
    with own_file(run.requests):
        file = pq.ParquetFile(run.requests)
        for group in groups:
            table = file.read_row_group(group, columns=["max_tokens", "token_ids"])
            tokens = pc.list_value_length(table["token_ids"]).to_numpy() + table["max_tokens"].to_numpy() - 1
            most += int((-(-tokens // PAGE_TOKENS)).sum()) * PAGE_TOKENS
            largest = max(largest, int(tokens.max()))
    return most, largest


def result_keys(path: Path) -> list[RequestKey]:
    """The requests whose results stand in a result file."""
    with own_file(path):
        table = pq.read_table(path, columns=["shard", "row", "sample"])
    return [RequestKey(item["shard"], item["row"], item["sample"]) for item in table.to_pylist()]


def result_table(completions: list[Completion]) -> pa.Table:
    """Finished requests as rows of a result file (schemas.RESULTS)."""
    rows = []
    for completion in completions:
        failed = completion.error is not None
        logprobs = completion.logprobs
        rows.append(
            {
                **asdict(completion.key),
                **asdict(completion.times),
                "unit": completion.unit,
                "status": "error" if failed else "ok",
                "error": completion.error,
                "text": None if failed else completion.text,
                "token_ids": None if failed else completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "prompt_tokens": 0 if failed else completion.prompt_tokens,
                "cached_memory_tokens": 0 if failed else completion.cached_memory_tokens,
                "cached_disk_tokens": 0 if failed else completion.cached_disk_tokens,
                "replicated_tokens": 0 if failed else completion.replicated_tokens,
                "completion_tokens": 0 if failed else len(completion.token_ids),
                "kv_tokens_sum": 0 if failed else completion.kv_tokens_sum,
                "logprobs": None
                if failed or logprobs is None
                else [
                    {
                        "token_id": item.token_id,
                        "logprob": item.logprob,
                        "top": [{"token_id": token, "logprob": value} for token, value in item.top],
                    }
                    for item in logprobs
                ],
            }
        )
    return pa.Table.from_pylist(rows, schema=RESULTS.schema)
