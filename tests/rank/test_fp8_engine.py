"""Whole jobs and exchanges with weights in FP8 on the plain PyTorch operations, which run on any processor."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batchinfer.config import load_job
from batchinfer.model.ops import Ops
from batchinfer.parallel.all_to_all import AllToAllDispatcher
from batchinfer.parallel.dispatch import LocalDispatcher
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.rank import load
from batchinfer_kernels import reference, registry
from batchinfer_kernels.cpu import build
from batchinfer_kernels.reference.block_scaled import BlockScaled, to_blocks
from support.checkpoints import edit_config, read_tensors, write_tensors
from support.exchanges import ThreadedMesh
from support.jobs import answers, batchinfer, write_job, write_questions
from support.paths import DEMO_JOB, RANDOM_MODEL
from support.tiers import first_in_make_test

POINT = 0.01
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def right_answers(folder, dtype):
    """Count the right answers and the prompts of the sample job in plain PyTorch."""
    settings = {"output.dir": folder / dtype, "model.dtype": dtype, "cluster.backend": "reference"}
    settings["cluster.prefill_ranks"] = 1
    options = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
    assert batchinfer("run", DEMO_JOB, *options).code == 3  # its bad rows
    report = batchinfer("report", folder / dtype, "--json", "--sql", f"@{DEMO_JOB.parent / 'accuracy.sql'}")
    (every,) = [row for row in json.loads(report.out) if row["task"] == "all tasks"]
    return every["right_answers"], every["prompts"]


@pytest.mark.all  # make test: an fp8 checkpoint, below
def test_the_sample_model_in_fp8_is_within_a_point_of_bfloat16(tmp_path):
    fp8, num_prompts = right_answers(tmp_path, "fp8")
    bfloat16, _ = right_answers(tmp_path, "bfloat16")
    print(f"right answers of {num_prompts}: {fp8} in fp8, {bfloat16} in bfloat16")
    assert fp8 >= bfloat16 - POINT * num_prompts
    assert bfloat16 >= 0.99 * num_prompts


def in_fp8(folder):
    """The model with random weights, its projections rounded to FP8 as a checkpoint holds them."""
    shutil.copytree(RANDOM_MODEL, folder)
    tensors = read_tensors(folder)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight") or name.endswith("kv_a_proj_with_mqa.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = reference.quantize_fp8_block(tensor)
    write_tensors(folder, tensors)
    edit_config(folder, quantization_config=FP8_CONFIG)
    return folder


def test_an_fp8_checkpoint_runs_on_one_rank_and_on_two_that_send_fp8(tmp_path):
    model = in_fp8(tmp_path / "model")
    write_questions(tmp_path / "prompts", (5, 4))
    found = {}
    for num_ranks, overlap in ((1, "auto"), (2, False)):
        job = write_job(
            tmp_path,
            name=f"{num_ranks}.toml",
            output={"dir": f"run-{num_ranks}"},
            model={"path": str(model), "dtype": "fp8"},
            cluster={"backend": "reference", "prefill_ranks": num_ranks, "overlap": overlap, "redundant_experts": 0},
            sampling={"max_tokens": 4, "ignore_eos": True},
        )
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
        found[num_ranks] = answers(tmp_path / f"run-{num_ranks}")
    assert [len(row["token_ids"]) for row in found[1]] == [4] * 9
    # on some processors rows of bfloat16 products (attention, head) depend on the other rows
    equal = sum(one["token_ids"] == two["token_ids"] for one, two in zip(found[1], found[2], strict=True))
    assert equal >= 8


def test_integers_are_not_asked_for_where_the_processor_has_none(monkeypatch):
    with_cpp = [candidate for candidate in registry._CANDIDATES["pack"] if candidate.name != "cpu"]
    monkeypatch.setitem(registry._CANDIDATES, "pack", tuple(with_cpp))
    ops = Ops.select("auto", torch.bfloat16, eight_bit=True)
    assert ops.holds_fp8("cpu")
    assert not Ops.select("auto", torch.bfloat16).holds_fp8("cpu")


def row_format(tmp_path, answers_of_ranks, **parts):
    write_questions(tmp_path / "prompts", (1,))
    job = load_job(write_job(tmp_path, **parts))
    asked = []
    mesh = SimpleNamespace(agree=lambda values: asked.append(list(values)) or answers_of_ranks)
    return load._row_format(job, mesh, torch.device("cpu")).dtype, asked


def test_rows_travel_in_fp8_where_all_ranks_hold_their_experts_in_fp8(tmp_path):
    fp8 = {"model": {"path": str(RANDOM_MODEL), "dtype": "fp8"}, "cluster": {"backend": "reference"}}
    assert row_format(tmp_path, [[1], [1]], **fp8) == ("fp8", [[True]])
    assert row_format(tmp_path, [[1], [0]], **fp8) == ("bfloat16", [[True]])
    plain = {"model": {"path": str(RANDOM_MODEL), "dtype": "bfloat16"}}
    assert row_format(tmp_path, None, **plain) == ("bfloat16", [])
    assert row_format(tmp_path, None, model={"path": str(RANDOM_MODEL)}) == ("float32", [])
    if build.why_not() is None:  # integers are rounded otherwise
        fp8["cluster"] = {"backend": "cpu"}
        assert row_format(tmp_path, [[0], [0]], **fp8) == ("bfloat16", [[False]])


@pytest.mark.parametrize("hidden", first_in_make_test([130, 256]))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_experts_of_many_ranks_give_the_bits_of_one(num_ranks, hidden):
    generator, random = torch.Generator().manual_seed(0), np.random.default_rng(0)
    gate_up = to_blocks(torch.randn(6, 256, hidden, generator=generator).bfloat16() / hidden**0.5)
    down = to_blocks(torch.randn(6, hidden, 128, generator=generator).bfloat16() / 11)
    placement = Placement.in_order(6, num_ranks)
    tokens = []
    for num_tokens in (7, 0, 12)[:num_ranks]:
        ids = torch.tensor(np.array([random.choice(6, 3, replace=False) for _ in range(num_tokens)]).reshape(-1, 3))
        x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        tokens.append((x, ids.long(), torch.rand(num_tokens, 3, generator=generator)))

    def mlp(received, experts):
        # one after the other, so that an expert's rows do not depend on where it stands
        weights = tuple(BlockScaled.empty(len(experts), *weight.values.shape[1:]) for weight in (gate_up, down))
        for place, expert in enumerate(experts):
            for room, weight in zip(weights, (gate_up, down), strict=True):
                room.put(place, weight[expert])
        return reference.grouped_mlp(
            received.x, received.num_rows_E, *weights, received.tokens_M, scales=received.scales
        )

    def exchanged(dispatcher, tokens, experts):
        handle = dispatcher.dispatch(*tokens)
        return dispatcher.combine(mlp(handle.wait(), experts), handle).wait()

    def work(exchange):
        dispatcher = AllToAllDispatcher(exchange, placement, RowFormat("fp8"))
        return exchanged(dispatcher, tokens[exchange.rank], placement.experts_of_rank(exchange.rank))

    for sums, mine in zip(ThreadedMesh(num_ranks).run(work), tokens, strict=True):
        for alone in (LocalDispatcher(6), LocalDispatcher(6, RowFormat("fp8"), gathers=False)):
            assert torch.equal(sums, exchanged(alone, mine, range(6)))
