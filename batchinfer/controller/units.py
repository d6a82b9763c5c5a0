"""Requests of a work unit read from the plan, and its results as rows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.parquet import own_parquet
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.manifest import Manifest
from batchinfer.records import Completion, Request, RequestKey, Sampling, TokenLogprobs, sampling_from_json
from batchinfer.rundir import RunDir

# attributes of a completion that are columns of a result file
COUNTS = (
    "prompt_tokens", "cached_memory_tokens", "cached_disk_tokens", "replicated_tokens", "recomputed_tokens",
    "computed_tokens", "reasoning_tokens", "kv_tokens_sum",
)  # fmt: skip


def read_unit(
    run: RunDir, manifest: Manifest, row: dict[str, Any], default: Sampling, *, after_tokens: int = 0
) -> list[Request]:
    """Return the requests of one unit in the plan's order. Only the unit's row groups are read.

    Args:
        manifest: manifest of the plan.
        after_tokens: tokens that the last request shares with the first of the next unit.

    Raises:
        DamagedFileError: the plan is damaged.
    """
    groups = range(row["first_row_group"], row["first_row_group"] + row["num_row_groups"])
    with own_parquet(run.requests, manifest) as file:
        table = file.read_row_groups(list(groups))
    samplings: dict[tuple[str | None, int], Sampling] = {}
    requests = []
    items = table.to_pylist()
    shared_with_next = [*(item["cached_tokens"] for item in items[1:]), after_tokens]
    for item, next_tokens in zip(items, shared_with_next, strict=True):
        how = item["sampling"], item["max_tokens"]
        if how not in samplings:
            sampling = default if how[0] is None else sampling_from_json(how[0])
            samplings[how] = replace(sampling, max_tokens=how[1])
        requests.append(
            Request(
                key=RequestKey(item["shard"], item["row"], item["sample"]),
                unit=item["unit"],
                token_ids=item["token_ids"],
                sampling=samplings[how],
                sampling_key=item["sampling_key"],
                cached_tokens=item["cached_tokens"],
                score_from=item["score_from"],
                kept_tokens=max(item["cached_tokens"], next_tokens),
                last_units=tuple(item["last_units"] or ()),
                prompt_group=item["prompt_group"],
                expected_tokens=item["expected_tokens"],
            )
        )
    return requests


def kv_tokens(units: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the KV tokens of all requests of these units, in whole pages, and those of the largest request."""
    return sum(row["kv_tokens"] for row in units), max((row["largest_kv_tokens"] for row in units), default=0)


def result_table(completions: list[Completion]) -> pa.Table:
    """Convert finished requests to rows of a result file (schemas.RESULTS), column by column."""
    failed = [completion.error is not None for completion in completions]
    # an error row has null texts and zero counts
    good = [None if completion.error is not None else completion for completion in completions]
    columns: dict[str, list[Any] | pa.Array] = {
        "status": ["error" if is_failed else "ok" for is_failed in failed],
        "text": [item and item.text for item in good],
        "token_ids": [item and item.token_ids for item in good],
        "completion_tokens": [len(item.token_ids) if item else 0 for item in good],
        "reasoning": [item and item.reasoning for item in good],
        "logprobs": _logprob_lists([item.logprobs if item else None for item in good]),
        "prompt_logprobs": _logprob_lists([item.prompt_logprobs if item else None for item in good]),
    }
    for name in ("unit", "error", "finish_reason", "stop_reason", "structured_valid"):
        columns[name] = [getattr(completion, name) for completion in completions]
    for name in COUNTS:
        columns[name] = [getattr(item, name) if item else 0 for item in good]
    for name in ("shard", "row", "sample"):
        columns[name] = [getattr(completion.key, name) for completion in completions]
    for name in ("admitted_s", "first_token_s", "finished_s"):
        columns[name] = [getattr(completion.times, name) for completion in completions]
    return pa.table(columns, schema=RESULTS.schema)


def _logprob_lists(of_each: list[TokenLogprobs | None]) -> pa.Array:
    """Convert log-probabilities to schemas.LOGPROBS."""
    scored = [item for item in of_each if item is not None]
    num_top = np.repeat([item.num_top for item in scored], [len(item) for item in scored]).astype(np.int32)
    chosen = _scored_tokens([item.token_ids for item in scored], [item.logprobs for item in scored])
    others = _scored_tokens([item.top_token_ids for item in scored], [item.top_logprobs for item in scored])
    top = pa.ListArray.from_arrays(_offsets(num_top), pa.StructArray.from_arrays([*others.values()], [*others]))
    columns = {**chosen, "top": top}
    return pa.ListArray.from_arrays(
        _offsets(np.array([len(item or ()) for item in of_each])),
        pa.StructArray.from_arrays([*columns.values()], [*columns]),
        mask=pa.array([item is None for item in of_each]),
    )


def _scored_tokens(token_ids: list[bytearray], logprobs: list[bytearray]) -> dict[str, pa.Array]:
    """Convert columns of TokenLogprobs to the columns of a struct."""
    found = {
        "token_id": np.frombuffer(b"".join(token_ids), dtype=np.int32),
        "logprob": np.frombuffer(b"".join(logprobs), dtype=np.float64).astype(np.float32),
    }
    return {name: pa.array(values) for name, values in found.items()}


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
