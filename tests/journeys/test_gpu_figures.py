"""Figures next to measured times: lower bounds from shapes, stages from events, kernels from a profiler."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from batchinfer.model.ops import Ops
from batchinfer_kernels import reference
from batchinfer_kernels.reference import rows as reference_rows
from support.cuda_stand_ins import CpuAsCard, events_on_the_cpu, needs_interpreter

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import share as shares
import slice as slice_script
import steps
import trace_step
from figures import Figures, describe
from roofline import Card, Operation, decode_stages, floors_s, linear, prefill_stages
from share import DECODE, DEEPSEEK_V3, PREFILL, TINY, Share, config_of

# ---- floors


def test_an_operation_takes_the_larger_of_computing_and_moving():
    card = Card(fp8_tflops=2000, bf16_tflops=1000, memory_gb_s=4000)
    assert Operation(fp8_flops=4e12).seconds(card) == 2e-3
    assert Operation(fp8_flops=4e12, bf16_flops=1e12).seconds(card) == 3e-3
    assert Operation(bf16_flops=1e12, num_bytes=8e9).seconds(card) == 2e-3
    # 2 rows of 4 x 8: 2 * 2 * 4 * 8 operations; 32 weights, 16 values in, 8 out
    assert linear(2, 4, 8, fp8=False) == Operation(0, 128, 2 * (32 + 16 + 8))


def test_decode_reads_every_weight_once_and_every_latent_of_its_requests():
    config = config_of(TINY)
    weights = sum(one.num_bytes for work in decode_stages(config, DECODE.num_slots, 0, 100).values() for one in work)
    share = Share(DECODE, config, torch.device("cpu"))
    held = 1e9 * sum(share.gigabytes().values())
    # not read: most rows of the embedding, and the up-projections as prefill takes them
    held -= share.weights.embedding.nbytes + sum(layer.attention.kv_up_HZC.nbytes for layer in share.weights.layers)
    assert weights == pytest.approx(held, rel=0.01)
    work = [decode_stages(config, 2, 10, tokens)["ATTN-1"] for tokens in (100, 200)]
    more = sum(one.num_bytes for one in work[1]) - sum(one.num_bytes for one in work[0])
    assert more == config.num_moe_layers * 10 * 100 * 2 * config.attention.latent_dim


def test_floors_of_v3_on_both_cards():
    config = config_of(DEEPSEEK_V3)
    decode, prefill = decode_stages(config, 2, 64, 4989), prefill_stages(config, 9, 2, 4096)
    h100, h200 = (floors_s(decode, name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    assert floors_s(decode, "NVIDIA A100") == {}
    assert set(h200) == {"ATTN-0", "ATTN-1", "SHARED", "DISPATCH", "MLP", "COMBINE", "DENSE", "LOGITS"}
    assert all(h200[stage] <= h100[stage] for stage in h200)
    # 64 requests x 4,989 latents of 1,152 bytes and 128 heads: 58 layers of at least 368 MB at 4.8 TB/s
    assert 58 * 64 * 4989 * 1152 / 4.8e12 < h200["ATTN-1"] < 0.01
    # the published 4,030 computed tokens/s per GPU are below what the card allows
    assert 8192 / sum(floors_s(prefill, "NVIDIA H200").values()) > 4030


# ---- stages


@pytest.fixture
def card(monkeypatch):
    """Plain operations, on stand-ins for CUDA."""
    events_on_the_cpu(monkeypatch)
    ops = Ops.select("reference", torch.bfloat16, eight_bit=True)
    plain = {"quantize_fp8_block": reference.quantize_fp8_block, "sum_per_token": reference_rows.sum_per_token}
    monkeypatch.setattr(shares, "usable_ops", lambda names: (ops, "all from the reference"))
    monkeypatch.setattr(shares, "function", lambda name, op: plain[op])
    return CpuAsCard(torch.device("cpu"), runs=1)


def test_a_step_that_is_timed_has_no_events_inside(card):
    share = Share(PREFILL, config_of(TINY), card.device)
    pages = share.model.new_pages(1)
    for with_stages in (False, True):
        stepper = steps.Stepper(share, steps.prefill_step(share, 1, 20), pages, card, with_stages=with_stages)
        assert stepper.stages.names()["MLP"] == 2
        assert {start is not None for _, start, _ in stepper.stages.events} == {with_stages}
        assert bool(stepper.seconds()[1]) == with_stages


def test_what_a_graph_reads_stays_as_long_as_it_may_be_replayed(card):
    given = []

    def points(tensors, pages, stages):
        given.append(weakref.ref(tensors.tokens))
        return SimpleNamespace(logits=torch.zeros(2, 3))
        yield

    share = SimpleNamespace(config=SimpleNamespace(vocab_size=9), model=SimpleNamespace(points=points))
    stepper = steps.Stepper(share, steps.decode_step(share, torch.arange(4).view(2, 2), 70), torch.zeros(0), card)
    assert len(given) == 3, "twice as it is, and once for the graph"
    assert all(read() is not None for read in given)
    stepper.run()


def test_logits_of_the_whole_batch_are_looked_at(card):
    share = Share(DECODE, config_of(TINY), card.device)
    pages = share.model.new_pages(8)
    table = torch.arange(8).view(4, 2)
    assert slice_script.run_decode(share, pages, table, 70, card).is_finite
    pages[:, 4:] = torch.nan  # of the second half's requests
    figures = slice_script.run_decode(share, pages, table, 70, card)
    assert not figures.is_finite
    assert figures.difference < 1e-2


def test_stages_are_parts_of_the_step_without_events():
    figures = Figures(DECODE.name, 128, {}, True, whole_s=0.03, half_s=0.02, exchange_s=0.01)
    figures.take_stages(0.025, {"ATTN-1": 0.015, "MLP": 0.005})
    assert figures.stage_s == pytest.approx({"ATTN-1": 0.012, "MLP": 0.004})
    figures = replace(figures, overlapped_s=0.035, exposed_s=0.005, floor_s={"ATTN-1": 0.006}, difference=0.0)
    lines = {line.strip().split("  ")[0]: line for line in describe(figures).splitlines()}
    assert "25.00 ms" in lines["with events around its stages"]
    assert lines["ATTN-1"].endswith("12.00 ms  at the limits 6.00 ms (50%)")
    assert lines["the rest"].endswith("4.00 ms")


# ---- kernels


def event(name, start, end, device=DeviceType.CUDA):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, device_type=device, time_range=span)


def test_kernels_are_summed_up_with_what_lies_between_them():
    # us       0    10    20    30    40    50
    # kernels  aaaaaaaa
    #               bbbbbbbb      aaaaaaaaaaa
    events = [
        event("a", 0, 15),
        event("b", 10, 25),
        event("a", 30, 50),
        event("cudaLaunchKernel", 0, 1, DeviceType.CPU),
        event("cudaStreamSynchronize", 1, 9, DeviceType.CPU),
        event("aten::add", 1, 2, DeviceType.CPU),
    ]
    trace = trace_step.trace_of("decode", 2, events, is_rehearsal=False)
    assert (trace.starts, trace.micros) == ({"a": 2, "b": 1}, {"a": 35, "b": 15})
    assert (trace.busy_us, trace.whole_us) == (45, 50)
    lines = trace_step.table(trace).splitlines()
    assert lines[0] == "decode, 2 layers: 3 kernels, 2 a layer"
    assert "none runs for 0.01 ms (10%)" in lines[1]
    assert lines[2] == "  on the host: cudaLaunchKernel 1, cudaStreamSynchronize 1"
    assert lines[4].split() == ["35", "70.0%", "2", "17.5", "a"]


@needs_interpreter
def test_the_attention_that_counters_are_read_of_runs_by_turns(capsys):
    assert trace_step.main(["--rehearse", "--attention"]) == trace_step.OK
    assert [line.split(": ")[1].split(", ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["mla_prefill", "triton"],
        ["mla_prefill", "triton-descriptors"],
        ["mla_prefill", "triton-ahead"],
        ["mla_decode", "triton"],
    ] * 2


def test_a_profile_without_a_gpu_or_without_experts_is_refused(capsys):
    assert trace_step.main(["--layers", "3"]) == trace_step.UNUSABLE
    assert "--layers 3: below 4 there are no experts" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert trace_step.main([]) == trace_step.UNUSABLE
        assert "needs a Hopper GPU" in capsys.readouterr().err
