"""Sampling overrides of rows are cached in bounded memory."""

from __future__ import annotations

import json
import tracemalloc

from batchinfer.config import SamplingConfig
from batchinfer.data.overrides import KNOWN_BYTES, SamplingOverrides

SCHEMA = {
    "type": "object",
    "properties": {f"property_{number:03d}": {"type": "string", "title": "größer" * 40} for number in range(40)},
}


def test_many_rows_with_a_large_schema_and_seeds_of_their_own_are_remembered_in_bounded_memory():
    overrides = SamplingOverrides(SamplingConfig(max_tokens=4), "sampling", vocab_size=100)
    first, text = {"structured_outputs": {"json": SCHEMA}}, json.dumps(SCHEMA, ensure_ascii=False)
    sampling, as_json, _ = overrides.resolve(first)
    assert sampling.structured == ("json", text)
    tracemalloc.start()
    try:
        for seed in range(KNOWN_BYTES // len(text)):  # each holds its text three times
            found, found_json, _ = overrides.resolve({**first, "seed": seed})
            assert (found.seed, json.loads(found_json)["seed"]) == (seed, seed)
            assert found.structured == sampling.structured
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert KNOWN_BYTES / 3 < most_bytes < 1.1 * KNOWN_BYTES
    assert overrides.resolve(first) == (sampling, as_json, None)
