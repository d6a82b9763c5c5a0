"""Requests of a work unit read from the plan, and its results as rows."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.data.parquet import own_parquet
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.manifest import Manifest
from batchinfer.records import Completion, Request, RequestKey, Sampling, TokenLogprob, sampling_from_json
from batchinfer.rundir import RunDir

# attributes of a completion that are columns of a result file
COUNTS = (
    "prompt_tokens", "cached_memory_tokens", "cached_disk_tokens", "replicated_tokens", "recomputed_tokens",
    "computed_tokens", "reasoning_tokens", "kv_tokens_sum",
)  # fmt: skip
SCORED_TOKEN = {"token_id": np.int32, "logprob": np.float32}


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


def _logprob_lists(of_each: list[tuple[TokenLogprob, ...] | None]) -> pa.Array:
    """Convert log-probabilities to schemas.LOGPROBS via flat arrays, since alternatives may be millions."""
    items = [item for scored in of_each for item in scored or ()]
    num_top = [len(item.top) for item in items]
    chosen = _scored_tokens(((item.token_id, item.logprob) for item in items), len(items))
    alternatives = _scored_tokens(chain.from_iterable(item.top for item in items), sum(num_top))
    top = pa.ListArray.from_arrays(
        _offsets(num_top), pa.StructArray.from_arrays([*alternatives.values()], [*alternatives])
    )
    columns = {**chosen, "top": top}
    return pa.ListArray.from_arrays(
        _offsets([len(scored or ()) for scored in of_each]),
        pa.StructArray.from_arrays([*columns.values()], [*columns]),
        mask=pa.array([scored is None for scored in of_each]),
    )


def _scored_tokens(pairs: Iterable[tuple[int, float]], count: int) -> dict[str, pa.Array]:
    """Convert (token, log-probability) pairs to two columns."""
    found = np.fromiter(pairs, np.dtype([*SCORED_TOKEN.items()]), count)
    return {name: pa.array(found[name]) for name in SCORED_TOKEN}


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())
