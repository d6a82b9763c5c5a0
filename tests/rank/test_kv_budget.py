"""Memory of a rank's KV pages: none until pages are used, and refused at the start if it does not suffice."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from batchinfer.config import PAGE_TOKENS, JobConfig
from batchinfer.config.rank_layout import rank_places
from batchinfer.model.fused.screened_head import ScreenedHead
from batchinfer.model.page_memory import zeroed
from batchinfer.model.transformer import Transformer
from batchinfer.protocol.messages import Start
from batchinfer.rank import kv_budget
from batchinfer.records import ConfigError
from support.paths import RANDOM_MODEL

MB = 1 << 20


def resident_bytes(memory: mmap.mmap) -> int:
    """Return the number of bytes of the pages of some memory that are resident (mincore)."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    found = (ctypes.c_ubyte * -(-len(memory) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)), found) == 0
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


def test_zeros_take_no_memory_until_they_are_touched():
    memory = zeroed(64 * MB)
    assert resident_bytes(memory) == 0
    memory[30 * MB] = 1
    assert 0 < resident_bytes(memory) <= 2 * MB
    assert memory[30 * MB - 1] == 0


def job_of(model: Path, folder: Path, **cluster: int | None) -> JobConfig:
    return JobConfig.model_validate(
        {
            "input": {"files": ["a.parquet"], "prompt": "question"},
            "output": {"dir": str(folder)},
            "model": {"path": str(model), "dtype": "float32"},
            "cluster": cluster,
            "sampling": {"max_tokens": 8},
        }
    )


def test_pages_that_do_not_fit_into_memory_are_refused_at_the_start(tmp_path, monkeypatch):
    job = job_of(RANDOM_MODEL, tmp_path, page_bytes=10**8)
    model, place = Transformer.load(RANDOM_MODEL, dtype=torch.float32), rank_places(job.cluster)[0]
    start = Start(job="", most_tokens=10**9, largest_tokens=100, transfer_folder="", traced=False, model_digests={})
    assert kv_budget.kv_budget(job, model, place, start, 1).num_pages > 0
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: 50_000_000)
    with pytest.raises(ConfigError, match=r"MB\) do not fit into its free memory \(50\.0 MB\); lower cluster\.page"):
        kv_budget.kv_budget(job, model, place, start, 1)


@pytest.mark.parametrize(("memory_bytes", "share"), [(None, kv_budget.MEMORY_SHARE), (600 * MB, 1)])
def test_memory_of_the_head_in_8_bits_is_left_by_pages(tmp_path, monkeypatch, memory_bytes, share):
    job = job_of(RANDOM_MODEL, tmp_path, memory_bytes=memory_bytes, decode_requests=10**4)
    model, place = Transformer.load(RANDOM_MODEL, dtype=torch.float32), rank_places(job.cluster)[0]
    start = Start(job="", most_tokens=10**9, largest_tokens=100, transfer_folder="", traced=False, model_digests={})
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: 2000 * MB)
    bytes_of_pages = []
    for head in (0, 64 * MB):
        monkeypatch.setattr(ScreenedHead, "num_bytes", lambda model, head=head: head)
        page_bytes = PAGE_TOKENS * model.ops.page_format(model.dtype).bytes_per_token(model.config)
        bytes_of_pages.append(kv_budget.kv_budget(job, model, place, start, 1).num_pages * page_bytes)
    assert bytes_of_pages[0] - bytes_of_pages[1] == pytest.approx(share * 64 * MB, abs=page_bytes)


def test_two_batches_of_short_requests_have_a_page_each(tmp_path):
    job = job_of(RANDOM_MODEL, tmp_path, decode_requests=100)
    model, place = Transformer.load(RANDOM_MODEL, dtype=torch.float32), rank_places(job.cluster)[0]
    start = Start(job="", most_tokens=10**9, largest_tokens=19, transfer_folder="", traced=False, model_digests={})
    assert kv_budget.kv_budget(job, model, place, start, 1).num_pages == 2 * 100
