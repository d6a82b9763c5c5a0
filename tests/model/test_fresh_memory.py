"""Memory touched ahead of the loader: whoever takes a part has it whole, and what nobody takes goes back."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from batchinfer.config import JobConfig
from batchinfer.config.rank_layout import rank_places
from batchinfer.launch.rank_loader import open_ranks
from batchinfer.launch.rank_process import RankEnvironment
from batchinfer.model.config import load_model_config
from batchinfer.model.fresh_memory import FreshMemory, zeroed
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weights import ModelWeights, MoeWeights
from batchinfer.protocol.messages import Start
from batchinfer.rank import kv_budget, rank_task
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.rank.rank_task import read_task
from batchinfer.records import ConfigError
from batchinfer.stop import StopSignal
from batchinfer_kernels.cpu.packed import Packed
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.group_scaled import GroupScaled
from support.checkpoints import make_checkpoint
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL

MB = 1 << 20


def resident_bytes(memory: mmap.mmap | memoryview) -> int:
    """Bytes of the pages of some memory that are there (mincore)."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    first, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + len(memory)
    found = (ctypes.c_ubyte * -(-(end - first) // mmap.PAGESIZE))()
    size = ctypes.c_size_t(end - first)
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), size, found) == 0
    return sum(byte & 1 for byte in found) * mmap.PAGESIZE


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_parts_are_whole_zero_and_side_by_side(num_threads):
    memory = FreshMemory(70 * MB + 5, num_threads)
    sizes = [1, 40 * MB + 3, 64, 20 * MB]
    parts = [memory.take(size) for size in sizes]
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True), 1):
        assert len(part) == size
        assert resident_bytes(part) >= size
        assert not any(part[:: max(1, size // 1000)])
        part[:] = bytes([number]) * size
    for number, part in enumerate(parts, 1):
        assert set(part[:: max(1, len(part) // 1000)]) == {number}
    assert memory.take(11 * MB) is None  # not so much is left
    assert len(memory.take(2 * MB)) == 2 * MB


def test_what_nobody_took_goes_back():
    memory = FreshMemory(64 * MB, 0)
    memory.take(40 * MB)[-1] = 7
    assert resident_bytes(memory._memory) >= 40 * MB
    memory.take(8)
    memory.close()
    # the last window was touched whole
    assert 40 * MB <= resident_bytes(memory._memory) <= 40 * MB + 2 * mmap.PAGESIZE
    assert memory._memory[40 * MB - 1] == 7


def test_zeros_take_no_memory_until_they_are_touched():
    memory = zeroed(64 * MB)
    assert resident_bytes(memory) == 0
    memory[30 * MB] = 1
    assert 0 < resident_bytes(memory) <= 2 * MB
    assert memory[30 * MB - 1] == 0


def first_logits(model: Transformer) -> torch.Tensor:
    requests = PagedRequests(model, [torch.arange(70)], max_new_tokens=1)
    requests.prefill([0], (1000,))
    return requests.all_logits(0)


def tensors_of(weights: ModelWeights) -> list[torch.Tensor]:
    """The large ones: embedding, head, projections and experts."""
    found: list[object] = [weights.embedding, weights.lm_head]
    for layer in weights.layers:
        attention, mlp = layer.attention, layer.mlp
        found += [attention.q.weight, attention.kv_down.weight, attention.out.weight]
        found += [attention.kv_up_HZC, attention.key_up_HCN, attention.value_up_HVC]
        experts = (mlp.gate_up_EFD, mlp.down_EDF) if isinstance(mlp, MoeWeights) else (mlp.down.weight,)
        found += experts
    blocks = [one.values if isinstance(one, BlockScaled | GroupScaled) else one for one in found]
    return [one.data if isinstance(one, Packed) else one for one in blocks]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *(("cpu", dtype) for dtype in ("bfloat16", "fp8", "int4")),
        *(("reference", dtype) for dtype in ("float32", "bfloat16", "fp8", "int4")),
    ],
)
def test_a_model_is_the_same_in_touched_memory(dtype, backend, tmp_path, request):
    if backend == "cpu":
        request.getfixturevalue("cpp")
    make_checkpoint(tmp_path, hidden_size=128, moe_intermediate_size=128)
    options = {"dtype": DTYPES[dtype], **BITS.get(dtype, {}), "backend": backend}
    num_bytes = weight_bytes(load_model_config(tmp_path), dtype)
    memory = FreshMemory(num_bytes, 1)
    model = Transformer.load(tmp_path, **options, memory=memory)
    assert torch.equal(first_logits(model), first_logits(Transformer.load(tmp_path, **options)))

    start = ctypes.addressof(ctypes.c_char.from_buffer(memory._memory))
    inside = [start <= tensor.data_ptr() < start + num_bytes for tensor in tensors_of(model.weights)]
    if backend == "reference" and dtype in BITS:  # values and scales apart
        assert not any(inside)
        return
    # as the starter of the rank had reckoned; a plain model has a share of its attention once only
    assert all(inside)
    assert (0.98 if backend == "cpu" else 0.9) * (num_bytes - MB) <= memory._num_taken <= num_bytes


def test_a_lone_rank_is_told_how_much_its_weights_take(tmp_path):
    def told(path: Path, **cluster: int) -> list[int]:
        ranks = open_ranks(job_of(path, tmp_path, **cluster), range(1), StopSignal())
        ranks.close()
        return [environment.weight_bytes for environment in ranks.group.local._environments]

    assert told(RANDOM_MODEL) == [weight_bytes(load_model_config(RANDOM_MODEL), "float32")]
    assert told(RANDOM_MODEL, prefill_ranks=2) == [0]
    assert told(tmp_path / "none") == [0]


def test_memory_that_is_not_there_is_left_to_the_loader(monkeypatch):
    for variable, value in RankEnvironment(0, weight_bytes=30 * MB).variables([0]).items():
        monkeypatch.setenv(variable, value)
    _, memory = read_task().result()
    assert len(memory.take(30 * MB)) == 30 * MB
    monkeypatch.setattr(rank_task, "free_memory_bytes", lambda: 20 * MB)
    assert read_task().result()[1] is None


def job_of(model: Path, folder: Path, **cluster: int) -> JobConfig:
    return JobConfig.model_validate(
        {
            "input": {"files": ["a.parquet"], "prompt": "question"},
            "output": {"dir": str(folder)},
            "model": {"path": str(model), "dtype": "float32"},
            "cluster": cluster,
            "sampling": {"max_tokens": 8},
        }
    )


def test_weights_that_find_no_room_go_elsewhere(tmp_path):
    make_checkpoint(tmp_path)
    memory = FreshMemory(10_000, 1)
    model = Transformer.load(tmp_path, dtype=torch.float32, memory=memory)
    assert torch.equal(first_logits(model), first_logits(Transformer.load(tmp_path, dtype=torch.float32)))


def test_pages_that_do_not_fit_into_memory_are_refused_at_the_start(tmp_path, monkeypatch):
    job = job_of(RANDOM_MODEL, tmp_path, page_bytes=10**8)
    model, place = Transformer.load(RANDOM_MODEL, dtype=torch.float32), rank_places(job.cluster)[0]
    start = Start(job="", most_tokens=10**9, largest_tokens=100, transfer_folder="", traced=False, model_digests={})
    assert kv_budget.kv_budget(job, model, place, start, 1).num_pages > 0
    monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: 50_000_000)
    with pytest.raises(
        ConfigError, match=r"\(0\.1 GB\) do not fit into its free memory \(0\.1 GB\); lower cluster\.page"
    ):
        kv_budget.kv_budget(job, model, place, start, 1)
