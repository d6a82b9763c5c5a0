"""The cost of requests in a decode step: their KV in a dense model, at most topk keys in one with an indexer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchinfer.balance.decode import admit
from batchinfer.balance.request_load import ONE_PER_TOKEN, RequestLoad
from batchinfer.model.config import load_model_config
from batchinfer.model.indexer_config import IndexerConfig
from support.model_configs import with_indexer

V3 = load_model_config(Path(__file__).parents[2] / "jobs" / "models" / "deepseek-v3")
INDEXER = IndexerConfig(64, 128, 2048, rope_interleave=False, sharing_layers=frozenset())


def test_a_dense_model_pays_for_each_kv_token_and_for_the_row():
    assert ONE_PER_TOKEN.of(np.array([1, 5000])).tolist() == [1.0, 5000.0]
    assert RequestLoad(*V3.decode_loads).of(np.array([1, 5000])).tolist() == pytest.approx(
        [V3.row_cost_in_kv_tokens + 1, V3.row_cost_in_kv_tokens + 5000]
    )


def test_a_model_with_an_indexer_pays_for_the_keys_that_it_chooses_and_a_little_for_those_that_it_scores():
    load = RequestLoad(*with_indexer(V3, INDEXER).decode_loads)
    # 64 heads of 128 score a key that 128 heads over 576 + 512 would attend to
    scored = 64 * 128 / (128 * (576 + 512))
    assert load.scored_key == pytest.approx(scored)
    loads = load.of(np.array([2048, 2049, 16384])) - load.row
    assert loads.tolist() == pytest.approx([2048, 2048 + 2049 * scored, 2048 + 16384 * scored])
    # layers that share what others chose score nothing
    half = replace(INDEXER, sharing_layers=frozenset(range(1, 61, 2)))
    assert RequestLoad(*with_indexer(V3, half).decode_loads).scored_key == pytest.approx(scored * 31 / 61)


def test_long_requests_are_spread_by_what_they_cost():
    # a query attends to 2,048 keys at most: by KV the longest request would share its rank with only the shortest ones
    kv_tokens = np.array([90_000, *range(100, 4_000, 100)])
    load = RequestLoad(0.0, 2048, 0.001)
    zeros_R, zeros_W = np.zeros(4, dtype=np.int64), np.zeros(40)
    options = {"load_of_rank": zeros_R, "requests_of_rank": zeros_R, "free_slots_of_rank": np.full(4, 99)}
    by_kv, by_cost = (
        np.bincount(admit(zeros_W, kv_tokens, zeros_W, **options, request_load=used), load.of(kv_tokens))
        for used in (RequestLoad(), load)
    )
    assert by_kv.max() > 1.15 * by_kv.mean()
    assert by_cost.max() <= 1.01 * by_cost.mean()
