"""The ranks that draft tokens, and the reasons of ranks that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchinfer.config import JobConfig
from batchinfer.config.job import KvConfig
from batchinfer.config.rank_layout import RankPlace, rank_places
from batchinfer.model.packed_folder import LAYOUT, MTP, PackedFolder
from batchinfer.rank import may_draft
from support.paths import SAMPLE_MODEL

CPU = torch.device("cpu")


def job(**cluster: Any) -> JobConfig:
    parts = {
        "input": {"files": ["a"], "prompt": "p"},
        "output": {"dir": "r"},
        "model": {"path": str(SAMPLE_MODEL)},
        "sampling": {"max_tokens": 8},
    }
    return JobConfig.model_validate(parts | {"cluster": {"speculate": "auto"} | cluster})


def reason(**cluster: Any) -> list[str | None]:
    """Return each rank's reason; "not asked" if it should not draft."""
    made = job(**cluster)
    return [
        may_draft.why_not(made, place, CPU) if may_draft.should_draft(made, place) else "not asked"
        for place in rank_places(made.cluster)
    ]


def test_ranks_that_hold_all_experts_and_decode_on_a_cpu_draft(monkeypatch):
    assert reason() == [None]
    assert reason(speculate="off") == ["not asked"]
    assert JobConfig.model_fields["cluster"].get_default(call_default_factory=True).speculate is None
    assert reason(speculate=None) == ["not asked"]
    in_fp8 = job().model_copy(update={"kv": KvConfig(dtype="fp8")})
    (place,) = rank_places(in_fp8.cluster)
    assert may_draft.why_not(in_fp8, place, CPU) == "KV is in fp8, which the steps that check drafts cannot read"
    assert reason(prefill_ranks=2) == ["experts are spread over 2 ranks"] * 2
    apart = {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 1}
    assert reason(**apart) == ["not asked", "not asked", None]
    place = RankPlace(rank=0, role="both", group_rank=0, group_size=1)
    assert "GPU" in (may_draft.why_not(job(), place, torch.device("cuda")) or "")
    monkeypatch.setattr(may_draft, "free_memory_bytes", lambda: 1 << 20)
    (no_memory,) = reason()
    assert no_memory is not None
    assert "GB are free" in no_memory


@pytest.mark.parametrize(
    ("cluster", "mtp_bytes", "words"),
    [
        ({"weights": "stream"}, 125, None),
        ({"weights": "stream"}, 126, "too much of the memory for KV"),
        ({"weights": "stream"}, None, "does not have the layer"),
        ({"weights": "stream", "speculate": "off"}, 1, "not asked"),
        ({"weights": "resident"}, 1, "not asked"),
    ],
)
def test_a_rank_that_streams_its_weights_drafts_unasked_if_the_layer_is_small(monkeypatch, cluster, mtp_bytes, words):
    sizes = {} if mtp_bytes is None else {MTP: mtp_bytes}
    packed = PackedFolder(SAMPLE_MODEL, "bfloat16", LAYOUT, "source", sizes)
    monkeypatch.setattr(may_draft, "read_packed", lambda folder: packed)
    (found,) = reason(**{"speculate": None, "memory_bytes": 1000} | cluster)
    assert found is None if words is None else words in found
