"""Steps on a GPU, counted without one: that the host waits for nothing inside them."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingConfig
from batchinfer.model import sampling, transformer
from batchinfer.model.fused.graphs import DecodeGraphs
from batchinfer.model.ops import Ops
from batchinfer.model.sampling import SamplingRows
from batchinfer.model.schedules import Schedule
from batchinfer.model.step import AttentionStep, PrefillSpan, StepInput, StepTensors
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.overlap import run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.rank.logit_rules import LogitRules
from support.changed_logits import apply_rules
from support.checkpoints import make_checkpoint
from support.compile_triton import RECORDED
from support.step_inputs import decode_input, prefill_input
from support.triton_device import needs_triton

pytestmark = needs_triton

device_calls = pytest.importorskip("support.device_calls", reason="kernels are counted where Triton is installed")
META = device_calls.META
# whole tiles of Hopper's libraries, and the widths of DeepSeek-V3's latents
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "v3", **SIZES)
    return folder


@pytest.fixture(scope="module", params=["hopper", "triton"])
def with_hopper(request):
    return request.param == "hopper"


@pytest.mark.parametrize("eight_bit", [False, True], ids=["bfloat16", "fp8"])
def test_the_host_waits_for_nothing_inside_a_step(folder, with_hopper, eight_bit):
    scored = {"scored": torch.tensor([1]), "num_alternatives": 2}
    with device_calls.counted_calls(with_hopper=with_hopper) as calls:
        model = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=eight_bit, device=META)
        pages = model.new_pages(12)
        long_ones = decode_input(most_pages=200)  # as where one is so long that it is cut
        for step in (decode_input(), long_ones, prefill_input(), prefill_input(**scored)):
            calls.clear()
            output = model.forward(step, pages)
            assert calls.waits == []
            assert calls.kernels["_product"], "kernels for GPUs have not been counted"
            made = "_merge_pieces" if step is long_ones else "searchsorted"
            assert bool(calls.kernels[made]) == with_hopper, "parts of a Hopper GPU get whole requests, or their pieces"
            assert output.logits.device == META
        assert calls.in_triton <= watched_kernels()


def watched_kernels():
    """Kernels whose compiled form is recorded."""
    tables = json.loads(RECORDED.read_text()).values()
    return {key.partition("(")[0] for table in tables for key in table}


# kernels of a MoE layer of decode; the router's parts are summed by one more where the model is wider than 1,024
BUDGET = {("hopper", True): 29, ("hopper", False): 26, ("triton", True): 26, ("triton", False): 25}


def kernels_by_layer(calls, folder, given, eight_bit):
    """Return the kernels of a step's first layer, which cuts its work, and of the next layer."""
    model = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=eight_bit, device=META)
    tensors = StepTensors.fixed(given, torch.ones(3, dtype=torch.int64), META, given.position_range())
    step = AttentionStep.with_angles(tensors, *model.angles.at(tensors.positions))
    counts = torch.zeros(model.config.n_routed_experts, dtype=torch.int64, device=META)
    hidden = torch.zeros(3, model.config.hidden_size, dtype=torch.bfloat16, device=META)
    pages = model.new_pages(12)[-1]
    for _ in range(2):
        calls.clear()
        run_to_end(model.layers[-1].points(hidden, step, pages, counts, MicroBatchSpans(SpanLog())))
        yield calls.kernels.copy()


@pytest.mark.parametrize("eight_bit", [False, True], ids=["bfloat16", "fp8"])
def test_a_layer_of_decode_starts_few_kernels(folder, with_hopper, eight_bit):
    with device_calls.counted_calls(with_hopper=with_hopper) as calls:
        _, kernels = kernels_by_layer(calls, folder, decode_input(), eight_bit)
        assert kernels.total() <= BUDGET["hopper" if with_hopper else "triton", eight_bit], kernels


@pytest.mark.parametrize(("most_pages", "most_kernels"), [(2, 25), (400, 60)])
def test_own_cuts_of_a_step_start_few_kernels(folder, most_pages, most_kernels):
    with device_calls.counted_calls(with_hopper=True) as calls:
        first, second = kernels_by_layer(calls, folder, decode_input(most_pages=most_pages), eight_bit=True)
        assert (first - second).total() <= most_kernels, first - second


def test_the_host_waits_for_nothing_when_a_step_starts_again_in_fixed_memory(folder, with_hopper):
    with device_calls.counted_calls(with_hopper=with_hopper) as calls:
        model = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=True, device=META)
        pages, graphs = model.new_pages(12), Schedule(decode=DecodeGraphs(11, lambda work: work))
        model.forward(decode_input(), pages, graphs)
        calls.clear()
        model.forward(decode_input(), pages, graphs)
        assert calls.waits == []


def test_rules_of_an_answer_wait_for_nothing():
    settings = SamplingConfig(
        max_tokens=9,
        min_tokens=3,
        logit_bias={3: 1.5, 4: -2.0},
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        stop_token_ids=[7],
    ).to_sampling()
    rules = LogitRules(settings, [1, 2, 3], frozenset({5}), [[6]], None)
    rules.accept(8)
    mask = torch.full((2,), -1, dtype=torch.int32).numpy().view("uint32")
    with device_calls.counted_calls(with_hopper=False) as calls:
        apply_rules(rules, torch.zeros(40, device=META), mask)
        assert calls.waits == []


def test_greedy_and_drawn_tokens_are_read_together(monkeypatch):
    values = [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}]
    rows = SamplingRows.of([SamplingConfig(max_tokens=1, **value).to_sampling() for value in values], [1, 2, 3])
    reads = []

    def to_host(*tensors):
        reads.append(len(tensors))
        return [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    monkeypatch.setattr(sampling, "to_host", to_host)
    with device_calls.counted_calls(with_hopper=False) as calls:
        ops = Ops.select("auto", torch.bfloat16, device=META)
        logit_ops = sampling.LogitOps(ops.argmax, ops.draw, ops.log_sum_exp, ops.most_likely, ops.apply_token_bitmask)
        sampling.sample(torch.zeros(3, 40, device=META), rows, np.arange(3), logit_ops)
        assert (calls.waits, reads) == ([], [3])
        assert "sort" not in calls.kernels
        # log-probabilities are read once more
        rows.num_logprobs[1] = 4
        sampling.sample(torch.zeros(3, 40, device=META), rows, np.arange(3), logit_ops)
        assert (calls.waits, reads) == ([], [3, 3, 3])


def test_all_counts_of_a_step_are_read_together(folder, monkeypatch):
    reads = []

    def to_host(*tensors):
        reads.append(len(tensors))
        return [torch.full(tensor.shape, 3, dtype=tensor.dtype) for tensor in tensors]

    monkeypatch.setattr(transformer, "to_host", to_host)
    with device_calls.counted_calls(with_hopper=True) as calls:
        model = Transformer.load(folder, dtype=torch.bfloat16, eight_bit=True, device=META)
        model.moe_mlps[0].num_local_rows = 4
        calls.clear()
        rows_L, counts_LE = model.read_rows(torch.zeros(model.num_moe_layers, 5, dtype=torch.int64, device=META))
        assert (calls.waits, reads) == ([], [2])
    assert rows_L.tolist() == [7, *[3] * (model.num_moe_layers - 1)]
    assert counts_LE.tolist() == [[3] * 5] * model.num_moe_layers


WAITS = {
    "a value": lambda x: x.max().item(),
    "a condition": lambda x: (x > 0).any() and x,
    "all values": lambda x: x.tolist(),
    "a copy back": lambda x: x.cpu(),
    "where": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "a mask to write to": lambda x: x.__setitem__(x > 0, 1.0),
    "a list of places": lambda x: x[[0, 1]],
    "places on the host": lambda x: x[torch.tensor([0, 1])],
    "a list": lambda x: torch.tensor([1, 2], device=META),
    "a list like it": lambda x: x.new_tensor([1, 2]),
    "a tensor of the host": lambda x: torch.arange(3).to(META),
    "one copied into it": lambda x: x.copy_(torch.ones(4)),
    "so many copies": lambda x: torch.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_makes_the_host_wait_is_noticed(what):
    """Check the premise of the tests above."""
    with device_calls.counted_calls(with_hopper=False) as calls:
        x = torch.empty(4, device=META)
        with suppress(NotImplementedError, RuntimeError):  # there is nothing to be read
            WAITS[what](x)
        assert len(calls.waits) == 1
        calls.clear()
        x[x.long()] = 1.0
        x.index_select(0, torch.arange(2).to(META, non_blocking=True))
        torch.repeat_interleave(x.long(), output_size=4)
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert calls.waits == []


def test_a_prefill_step_knows_the_first_pages_that_neighbours_have_in_common():
    pages = [[5, 6, 7], [5, 6, 9, 0], [5, 6, 9], [8], [8, 0]]
    spans = tuple(PrefillSpan(row, 1, 64 * len(ids), torch.tensor(ids)) for row, ids in enumerate(pages))
    rows = torch.arange(len(pages))
    step = StepTensors.of(StepInput(rows, rows, rows, rows[:0], prefill=spans), torch.device("cpu"))
    assert step.shared_pages.tolist() == [0, 2, 3, 0, 1]  # and not the zeros that fill the table up
    empty = StepTensors.of(StepInput(rows[:0], rows[:0], rows[:0], rows[:0]), torch.device("cpu"))
    assert empty.shared_pages.tolist() == []
