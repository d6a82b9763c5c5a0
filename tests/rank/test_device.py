"""A rank's device, steps on it, and copies between the device and the host.

Torch's "meta" device has shapes and no values: a step that runs there reads nothing on the host, and takes nothing from
the host that was not put on the device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from batchinfer.kv.memory import KvMemory
from batchinfer.launch.local_ranks import LocalRanks
from batchinfer.launch.rank_process import RankEnvironment
from batchinfer.model.step import AttentionStep, StepTensors
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.mesh import Mesh, Seat
from batchinfer.rank.batch import prefill_step
from batchinfer.rank.device import device_name, rank_device, ranks_per_gpu
from batchinfer.rank.load import _numerics as numerics
from batchinfer.records import ConfigError
from batchinfer_kernels import registry
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.transfer import in_one_copy, put_pages, take_pages
from support.checkpoints import make_checkpoint
from support.paths import RANDOM_MODEL
from support.step_inputs import decode_input, prefill_input

META = torch.device("meta")


def mlp_that_reads_nothing(x, num_rows_E, gate_up, down, tokens_M=None, scales=None, tile_rows=1):
    """The shape of a grouped MLP's result; the reference looks at the counts, the versions for GPUs do not."""
    return x.new_empty(len(x) if tokens_M is None else len(tokens_M), x.shape[-1])


@pytest.fixture(scope="module", params=[False, True], ids=["bfloat16", "fp8"])
def meta_model(request):
    model = Transformer.load(RANDOM_MODEL, dtype=torch.bfloat16, eight_bit=request.param, device=META)
    return Transformer(
        model.config,
        model.weights,
        [layer.mlp.dispatcher for layer in model.layers if hasattr(layer.mlp, "dispatcher")],
        replace(model.ops, grouped_mlp=mlp_that_reads_nothing),
    )


@pytest.mark.parametrize("step", [decode_input(), prefill_input()], ids=["decode", "prefill"])
def test_a_step_runs_on_its_device_from_tokens_to_logits(meta_model, step):
    pages = meta_model.new_pages(12)
    output = meta_model.forward(step, pages)
    assert output.logits.device == output.expert_counts.device == pages.device == META
    assert output.logits.shape == (len(step.logit_rows), meta_model.config.vocab_size)


@pytest.mark.parametrize("step", [decode_input(), prefill_input()], ids=["decode", "prefill"])
@pytest.mark.parametrize("topk", [16, 64, 70, 200])
def test_sparse_attention_reads_nothing_on_the_host(tmp_path, topk, step):
    def keys_that_are_never_chosen(queries, keys, *, topk, scale):
        assert (keys.kv_tokens_B is None) == step.is_decode, "the host knows the lengths of prompts alone"
        return torch.empty(len(queries.q_THI), topk, dtype=torch.int32, device=META)

    make_checkpoint(tmp_path, "glm-dsa-shared", index_topk=topk)
    model = Transformer.load(tmp_path, dtype=torch.bfloat16, device=META)
    ops = replace(model.ops, grouped_mlp=mlp_that_reads_nothing, choose_keys=keys_that_are_never_chosen)
    dispatchers = [layer.mlp.dispatcher for layer in model.layers if hasattr(layer.mlp, "dispatcher")]
    model = Transformer(model.config, model.weights, dispatchers, ops)
    lowest, highest = (69, 71) if step.is_decode else (0, 69)
    assert step.position_range() == (lowest, highest)
    assert model.reaches(lowest, highest) == (lowest < topk, highest >= topk)
    output = model.forward(step, model.new_pages(12))
    assert output.logits.device == META
    assert output.logits.shape == (len(step.logit_rows), model.config.vocab_size)


def test_rows_that_see_all_keys_come_with_pages_of_so_many_keys_alone():
    """Also if other rows have far more pages, for which attention would have to make room."""
    step = decode_input()
    step = replace(step, page_table=step.page_table.repeat(1, 100))
    nothing = torch.empty(0)
    whole = AttentionStep.with_angles(StepTensors.of(step, torch.device("cpu")), nothing, nothing, None)
    near = whole.of_rows_before(70)
    assert near.kv_tokens.tolist() == [70, 0, 0]
    assert torch.equal(near.page_table, step.page_table[:, :2])
    assert near.page_table.is_contiguous()


def test_the_plain_reference_would_read_on_the_host():
    """Check the premise of the test above: reading a value of this device is an error."""
    model = Transformer.load(RANDOM_MODEL, dtype=torch.bfloat16, device=META)
    assert model.ops.reads_on_host
    with pytest.raises(RuntimeError, match="meta"):
        model.forward(decode_input(), model.new_pages(12))


def test_a_step_s_tensors_are_moved_but_for_the_lengths_of_chunks():
    step = prefill_input()
    moved, here = StepTensors.of(step, META), StepTensors.of(step, torch.device("cpu"))
    for name in StepTensors.__slots__:
        there, value = getattr(moved, name), getattr(here, name)
        assert (there is None) == (value is None), name
        if isinstance(value, torch.Tensor):
            assert there.shape == value.shape, name
            is_here = name in ("kv_tokens", "chunk_tokens", "shared_pages")
            assert there.device.type == ("cpu" if is_here else "meta"), name
    assert here.tokens is step.tokens, "on the CPU nothing is copied"
    assert here.page_table.tolist() == [[0, 1], [2, 0]]
    assert here.chunk_of_row.tolist() == [0, 1]
    assert StepTensors.of(decode_input(), META).kv_tokens.device == META


def test_a_step_without_tokens_can_be_moved():
    moved = StepTensors.of(prefill_step([], {}), META)
    assert (len(moved.tokens), len(moved.page_table)) == (0, 0)


def test_what_goes_in_one_copy_comes_apart_as_it_was():
    parts = [torch.arange(6).view(2, 3), torch.zeros(0, dtype=torch.int64), torch.tensor(7), torch.arange(4)[::2]]
    for moved, part in zip(in_one_copy(parts, torch.device("cpu")), parts, strict=True):
        assert torch.equal(moved, part)
        assert moved.shape == part.shape


def test_pages_come_back_from_the_host_as_they_were():
    pages = torch.randn(3, 10, 64, 8, generator=torch.Generator().manual_seed(0))
    taken, other = take_pages(pages, [7, 2, 5]), torch.zeros_like(pages)
    assert torch.equal(taken[1], pages[:, 2])
    put_pages(other, [1, 0, 9], taken)
    assert torch.equal(other[:, [1, 0, 9]], pages[:, [7, 2, 5]])
    assert not other[:, 2:9].any()
    blocks = KvMemory(pages).take_blocks([7, 2, 5], 3)
    KvMemory(other).put_blocks(blocks, [4, 3], skip_pages=1)
    assert torch.equal(other[:, [4, 3]], pages[:, [2, 5]])


def test_rows_that_fill_a_batch_up_are_not_counted():
    logits, counts = torch.tensor([[3.0, 0, 2, 0], [0, 3, 2, 0], [3, 2, 0, 0]]), torch.zeros(4, dtype=torch.int64)
    gate, rule = registry.select("gate"), GateRule("greedy", 2, 1, 1, normalize=True, scale=1.0)
    gate(logits, None, rule, counts, torch.tensor([1, 1, 0]))
    assert counts.tolist() == [1, 1, 2, 0]
    gate(logits, None, rule, counts)
    assert counts.tolist() == [3, 3, 4, 0]


def test_a_rank_gets_a_gpu_of_its_own_where_the_backend_wants_one(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for backend in ("auto", "hopper", "triton"):
        assert rank_device(backend, 1) == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)] * 3
    for backend in ("cpu", "reference"):
        assert rank_device(backend, 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="rank 2 of this host has no GPU for itself: the host has 2"):
        rank_device("auto", 2)
    with pytest.raises(ConfigError, match=r"NCCL and DeepEP connect no two ranks of one GPU; .*exchange to 'shared'"):
        rank_device("auto", 2, "nccl")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert rank_device("triton", 0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rank_device("auto", 0) == rank_device("hopper", 0) == torch.device("cpu")


def test_ranks_share_gpus_where_rows_travel_through_the_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert [rank_device("auto", rank, "shared").index for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [ranks_per_gpu("shared", num_ranks) for num_ranks in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert ranks_per_gpu("nccl", 2) == 1


def test_products_in_float32_are_whole_whatever_a_container_sets():
    ask = "print(torch.backends.cuda.matmul.allow_tf32)"
    code = f"import torch; from batchinfer.rank.device import rank_device; {ask}; rank_device('auto', 0); {ask}"
    variables = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=variables).split() == [b"True", b"False"]


def test_ranks_of_a_host_are_numbered_for_their_gpus(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "7")  # of another launcher

    def places():
        return [one.index for one in LocalRanks(range(4, 6))._environments]

    assert places() == [0, 1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert places()[0] == 3
    environment = RankEnvironment(5, 3, "host", 1, "secret")
    for name, value in environment.variables([0]).items():
        monkeypatch.setenv(name, value)
    assert RankEnvironment.read() == environment


def test_stored_kv_names_the_gpu_that_computed_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU X {device.index}")
    model = SimpleNamespace(device=torch.device("cuda", 1), kernels="kernels of some version")
    assert numerics(model).startswith(f"GPU X 1, CUDA {torch.version.cuda}, torch ")
    assert numerics(model).endswith("kernels of some version")
    assert device_name(model.device) == "GPU X 1"
    assert device_name(torch.device("cpu")) == "cpu"


def test_exchanges_between_cpus_are_refused_for_ranks_on_gpus():
    with pytest.raises(ConfigError, match=r"cluster\.exchange is 'gloo', which moves rows between CPUs"):
        Mesh.join(Seat(0, 2, "gloo", one_host=True, timeout_s=1.0), None, torch.device("cuda", 0))
