"""One GPU's share of a deployment unit, rehearsed on the CPU: all of it but the times and the card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer_kernels import reference
from batchinfer_kernels.hopper import ops as hopper
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.reference.fp8 import ROW_BLOCK, dequantize_fp8_rows
from support.cuda_stand_ins import CpuAsCard, events_on_the_cpu, hopper_on_the_cpu, needs_interpreter
from support.paths import ROOT

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import exact
import share as shares
import slice as slice_script
from copies import CopyDispatcher
from schedule import decode_tasks, finish_s, prefill_tasks
from share import DECODE, DEEPSEEK_V3, PREFILL, TINY, Share, config_of
from summary import summary
from supervised import read_record, supervise, write_line

DECODE_STAGES = {"ATTN-0": 1.0, "ATTN-1": 2.0, "SHARED": 1.0, "MLP": 2.0}
PREFILL_STAGES = {"ATTN": 2.0, "SHARED": 1.0, "MLP": 2.0}


# ---- schedules


def test_a_layer_of_decode_under_the_published_schedule():
    # seconds    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15  16  17      21
    # computing  A0(0) A1(0)---  S0  A0(1)   MLP(0)- A1(1)-- S1                  MLP(1)-
    # rows                       DISPATCH(0)         COMBINE(0)----- DISPATCH(1)         COMBINE(1)
    assert finish_s(decode_tasks(1, DECODE_STAGES, dispatch_s=3.0, combine_s=4.0)) == 21


def test_a_layer_of_prefill_under_the_published_schedule():
    # seconds    0   1   2   3   4   5   6   7   8   9   10      12
    # computing  ATTN(1) ATTN(0) MLP(1)- MLP(0)- SH(1) SH(0)
    # rows               D(1)    D(0)    COMBINE(1)-- COMBINE(0)--
    assert finish_s(prefill_tasks(1, PREFILL_STAGES, dispatch_s=1.0, combine_s=3.0)) == 12


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize(("tasks", "stages"), [(decode_tasks, DECODE_STAGES), (prefill_tasks, PREFILL_STAGES)])
def test_schedules_lie_between_their_bounds(tasks, stages, num_layers):
    computing = 2 * num_layers * sum(stages.values())
    assert finish_s(tasks(num_layers, stages, 0.0, 0.0)) == computing
    for dispatch_s, combine_s in ((0.1, 0.1), (1.0, 2.0), (50.0, 70.0)):
        exchange = 2 * num_layers * (dispatch_s + combine_s)
        finish = finish_s(tasks(num_layers, stages, dispatch_s, combine_s))
        assert max(computing, exchange) <= finish <= computing + exchange
        assert finish > exchange, "the first dispatch waits for the first attention"
        assert len({task.name for task in tasks(num_layers, stages, dispatch_s, combine_s)}) == num_layers * (
            2 * (len(stages) + 2)
        )


def test_short_exchanges_are_hidden_but_for_the_last_one():
    finish = finish_s(decode_tasks(10, DECODE_STAGES, dispatch_s=0.5, combine_s=0.5))
    # nothing is left to compute under the last dispatch but SHARED, and nothing under the last combine
    assert finish == 2 * 10 * 6 + 0.5


def test_without_an_exchange_two_micro_batches_take_twice_the_time_of_one():
    for is_decode, names, stretch in ((True, DECODE_STAGES, 1.0), (False, PREFILL_STAGES, 132 / 108)):
        stages = {**names, "DISPATCH": 0.5, "COMBINE": 0.25}
        figures = slice_script.Figures("decode", 8, {}, True, dict(stages), half_s=sum(stages.values()) + 3)
        slice_script.overlapped(figures, 4, 0.0, 0.0, is_decode=is_decode)
        assert figures.overlapped_s == pytest.approx(stretch * 2 * figures.half_s)
        assert figures.exposed_s == pytest.approx(0)


def test_published_exchanges_follow_the_bytes():
    assert slice_script.decode_exchange_s(128) == pytest.approx((192e-6, 369e-6))
    assert slice_script.decode_exchange_s(32) == pytest.approx((48e-6, 92.25e-6))
    # 8,192 tokens to four nodes: 7,168 bytes and 56 scales there, 14,336 bytes back
    dispatch_s, combine_s = slice_script.prefill_exchange_s(8192, 7168)
    assert dispatch_s == pytest.approx(8192 * 4 * (7168 + 4 * 56) / 58e9)
    assert combine_s == pytest.approx(8192 * 4 * 14336 / 57e9)


# ---- copies


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 30])
@pytest.mark.parametrize(("num_ranks", "num_slots", "is_masked"), [(8, 2, True), (4, 9, False), (5, 3, True)])
def test_experts_get_as_many_rows_as_are_sent_and_tokens_their_sums(num_tokens, num_ranks, num_slots, is_masked):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 256, generator=generator).bfloat16()
    weights = torch.rand(num_tokens, 4, generator=generator)
    dispatcher = CopyDispatcher(
        num_ranks,
        num_slots,
        is_masked=is_masked,
        quantize=reference.quantize_fp8_block,
        sum_per_token=reference_rows.sum_per_token,
    )
    handle = dispatcher.dispatch(x, torch.zeros(num_tokens, 4, dtype=torch.int64), weights)
    received = handle.wait()
    assert int(received.num_rows_E.sum()) == 4 * num_tokens
    assert int(received.num_rows_E.max() - received.num_rows_E.min()) <= 1
    if is_masked:
        assert received.layout == "masked"
        assert received.x.shape == (num_slots, num_ranks * num_tokens, 256)
        assert received.scales.stride(-2) == 1, "as DeepEP gives them"
    else:
        assert received.layout == "contiguous"
        assert received.scales.stride(0) == 1, "as DeepEP gives them"
        assert received.tile_rows == 128
        assert len(received.x) == sum(-(-count // 128) * 128 for count in received.num_rows_E.tolist())
    y = dequantize_fp8_rows(received.x, received.scales, torch.bfloat16)
    if is_masked:
        y[torch.arange(y.shape[1]) >= received.num_rows_E[:, None]] = torch.nan
    else:
        for tile, count in zip(y.split(128), received.num_rows_E.tolist(), strict=False):
            tile[count:] = torch.nan
    rounded = dequantize_fp8_rows(*reference.quantize_fp8_block(x, ROW_BLOCK), torch.bfloat16)
    expected = rounded.float() * weights.sum(1, keepdim=True)
    assert torch.allclose(dispatcher.combine(y, handle).wait(), expected, rtol=1e-5, atol=1e-6)


# ---- the script


@pytest.mark.all  # make test: figures of a card, above
@needs_interpreter
def test_the_command_for_all_of_it_rehearses_both_units_and_sums_them_up(tmp_path):
    command = ["bash", str(ROOT / "tests/gpu/run.sh"), "--rehearse", "--only", "slice", str(tmp_path / "results")]
    results = tmp_path / "results" / "rehearsal"
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == slice_script.OK, done.stderr + done.stdout
    assert "a tiny model in Triton's interpreter" in (results / "slice.txt").read_text()
    assert not (results / "check.txt").exists()
    summed_up = (results / "summary.md").read_text()
    assert "| decode EP144 | 4 |" in summed_up
    assert "| prefill EP32 | 80 |" in summed_up
    record = read_record(results / "slice.jsonl")
    decode, prefill = (record.done[key]["figures"] for key in ("decode 4", "prefill"))
    assert (decode["unit"], prefill["unit"]) == (DECODE.name, PREFILL.name)
    # 3 layers, 2 of them with experts; the exchange counts when it starts and when it is taken in
    assert decode["stages"] == {
        "DENSE": 1,
        "ATTN-0": 2,
        "ATTN-1": 2,
        "DISPATCH": 4,
        "SHARED": 2,
        "MLP": 2,
        "COMBINE": 4,
        "LOGITS": 1,
    }
    assert prefill["stages"]["ATTN"] == prefill["stages"]["MLP"] == 2
    assert decode["difference"] == 0, "a request has the same bits in a batch of another size"
    for figures in (decode, prefill):
        assert figures["is_finite"]
        assert figures["whole_s"] is figures["half_s"] is figures["overlapped_s"] is None
    assert any("3 layers, all distinct" in note for note in record.notes)
    # what is done is not done again
    assert slice_script.main(["--rehearse", "--out", str(results / "slice.jsonl"), "--json"]) == slice_script.OK
    assert read_record(results / "slice.jsonl") == record


@pytest.mark.all  # make test: figures of a card, above
@needs_interpreter
def test_what_dies_is_tried_once_more_without_the_libraries(tmp_path, monkeypatch):
    """A library whose kernel fails when it is called must not cost the figures."""

    def dies_first(command, keys, path, **options):
        if "--triton-alone" in command:
            return supervise(command, keys, path, **options)
        write_line(path, machine=slice_script.Accelerator(torch.device("cpu")).describe())
        return write_line(path, done=keys[0], died="killed by SIGSEGV")

    monkeypatch.setattr(slice_script, "supervise", dies_first)
    arguments = ["--rehearse", "--decode", "--out", str(tmp_path / "slice.jsonl")]
    assert slice_script.main(arguments) == slice_script.FAILED
    done = read_record(tmp_path / "slice.jsonl").done
    assert list(done) == ["decode 4", "decode 4, Triton alone"]
    assert done["decode 4, Triton alone"]["figures"]["unit"] == "decode EP144, Triton alone"
    assert "| decode EP144, Triton alone | 4 |" in summary(tmp_path)


@needs_interpreter
def test_a_decode_step_gives_deep_gemm_the_layouts_that_it_takes(monkeypatch):
    """The same model with and without deep_gemm's products (stand-ins that check operands)."""
    results = []
    for with_libraries in (False, True):
        if with_libraries:
            hopper_on_the_cpu(monkeypatch)
        share = Share(DECODE, config_of(TINY), torch.device("cpu"))
        assert (share.ops.masked_mlp.implementation is hopper.masked_mlp) == with_libraries
        assert ("masked_mlp" in share.origin) == with_libraries
        step = slice_script.decode_step(share, torch.arange(4).view(2, 2), 70)
        results.append(share.model.forward(step, share.model.new_pages(4)).logits)
    assert exact.error("diff", results[1], results[0].double()) < 1e-2


def test_all_figures_of_a_card_come_together(monkeypatch):
    """The parts that a rehearsal skips (capture, events, figures), on a fake CUDA and plain operations."""
    events_on_the_cpu(monkeypatch)
    ops = Ops.select("reference", torch.bfloat16, eight_bit=True)
    monkeypatch.setattr(shares, "usable_ops", lambda names: (ops, "all from the reference"))
    plain = {"quantize_fp8_block": reference.quantize_fp8_block, "sum_per_token": reference_rows.sum_per_token}
    monkeypatch.setattr(shares, "function", lambda name, op: plain[op])
    card = CpuAsCard(torch.device("cpu"), runs=2)
    share = Share(DECODE, config_of(TINY), card.device)
    pages = share.model.new_pages(8)
    decode = slice_script.run_decode(share, pages, torch.arange(8).view(4, 2), 70, card)
    prefill = slice_script.run_prefill(Share(PREFILL, config_of(TINY), card.device), 4, 20, card)
    for figures, names in (
        (decode, {"DENSE", "ATTN-0", "ATTN-1", "DISPATCH", "SHARED", "MLP", "COMBINE", "LOGITS"}),
        (prefill, {"DENSE", "ATTN", "DISPATCH", "SHARED", "MLP", "COMBINE", "LOGITS"}),
    ):
        assert figures.is_finite
        assert set(figures.stage_s) == names
        assert sum(figures.stage_s.values()) <= figures.half_s
        assert figures.overlapped_s >= 2 * figures.half_s - 1e-9
        assert 0 <= figures.exposed_s <= figures.exchange_s
        lines = slice_script.describe(figures).splitlines()
        assert lines[1].split()[:4] == ["micro-batch", "of", "half", f"{1e3 * figures.half_s:.2f}"]
        assert sum("tokens/s per GPU" in line for line in lines) == 3
    assert decode.exchange_s == pytest.approx(2 * 561e-6 * 4 / 128)


@needs_interpreter
def test_a_share_holds_the_published_number_of_experts_once():
    for unit in (DECODE, PREFILL):
        share = Share(unit, config_of(TINY), torch.device("cpu"))
        held, config = share.gigabytes(), share.config
        expert = 3 * config.hidden_size * config.moe_intermediate_size
        scales = 4 * (2 * config.moe_intermediate_size // 128 + 1) * (config.hidden_size // 128)
        assert held["shared experts"] == pytest.approx(config.num_moe_layers * (expert + scales) / 1e9, rel=0.01)
        assert held["routed experts"] == pytest.approx(unit.num_slots * held["shared experts"])
        assert held["embedding and head"] == pytest.approx((2 * 200 + 1) * 256 * 2 / 1e9)


def test_the_model_can_be_imported_where_nothing_is_installed():
    code = (
        "import importlib.metadata as metadata, sys\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "import batchinfer\n"
        "print(batchinfer.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "0+source\n"


def test_the_model_is_deepseek_v3():
    config = config_of(DEEPSEEK_V3)
    assert config.num_moe_layers == 58
    assert config.kv_bytes_per_token(2) == 70272
    assert config.attention.softmax_scale == pytest.approx(0.1352, abs=1e-4)
    for unit in (DECODE, PREFILL):
        assert unit.num_ranks * unit.num_slots == config.n_routed_experts + 32  # redundant ones


def test_figures_are_put_into_words():
    figures = slice_script.Figures(PREFILL.name, 16384, {}, True, {"ATTN": 1.0}, 2.0, 1.5, 1.0, 2.5, 0.25)
    lines = slice_script.describe(figures).splitlines()
    assert "8,192 tokens/s per GPU, 18,746 with 56.3% hits" in lines[-3]
    assert "5,461 tokens/s per GPU" in lines[-2]
    assert "75% hidden" in lines[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(capsys):
    assert slice_script.main([]) == slice_script.UNUSABLE
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "needs a Hopper GPU" in error


def test_an_odd_number_of_requests_is_named(capsys):
    assert slice_script.main(["--rehearse", "--requests", "64", "65"]) == slice_script.UNUSABLE
    assert "--requests 65 is no even number" in capsys.readouterr().err
