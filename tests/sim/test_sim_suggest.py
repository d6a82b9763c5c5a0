"""The layout that an offline job may choose."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.model.page_format import BFLOAT16
from batchinfer.records import ConfigError
from batchinfer.sim.dealing import Deals
from batchinfer.sim.exchange import gather_s
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.memory import kv_tokens_per_gpu
from batchinfer.sim.search import Rater
from batchinfer.sim.steps import Unit, prefill_step
from batchinfer.sim.suggest import changes, changes_table, job_layouts, shares, with_layout
from batchinfer.sim.workload import Workload
from support.jobs import batchinfer, write_job

V3_FOLDER = Path(__file__).parents[2] / "jobs" / "models" / "deepseek-v3"
V3 = load_model_config(V3_FOLDER)


@pytest.fixture(scope="module")
def rater():
    """Few requests, so that dealing them takes no time."""
    prompts = np.full(2000, 4000)
    work = Workload(prompts, prompts // 2, np.full(2000, 1000), np.zeros(2000))
    return Rater(
        workload=work,
        deals=Deals(work, 1),
        model=V3,
        gpu=ACCELERATORS["H800"],
        memory_reserve=0.1,
        disk_bytes_per_s=5e9,
        expert_spread=0.0,
        seed=0,
    )


def test_each_change_of_the_layout_saves_gpu_hours_and_the_factors_multiply_to_the_whole(rater):
    found = changes(rater, Unit(32, 32), 16384, Unit(144, 32), 88)
    hours = [change.gpu_hours for change in found]
    assert hours == sorted(hours, reverse=True)
    assert found[0].name == "as given, for a server"
    lines = changes_table(found)
    factors = [float(line[-1].rstrip("x")) for line in lines]
    assert factors[-1] == pytest.approx(np.prod(factors[:-1]), abs=0.03)
    assert hours[0] / hours[-1] == pytest.approx(factors[-1], abs=0.01)


def test_the_published_days_hours_are_a_change_of_their_own_that_is_no_layout(rater):
    found = changes(rater, Unit(32, 32), 16384, Unit(144, 32), 88, held_gpu_hours=500.0)
    assert [change.name for change in found[:2]] == ["as held by a server", "all units are full"]
    assert found[0].gpu_hours == 500.0
    (name, _, _, alone), (whole, *_, all_together) = changes_table(found)[-1], changes_table(found)[-2]
    assert (name, whole) == ("layout alone", "all")
    assert float(alone.rstrip("x")) == pytest.approx(found[1].gpu_hours / found[-1].gpu_hours, abs=0.01)
    assert float(all_together.rstrip("x")) == pytest.approx(500.0 / found[-1].gpu_hours, abs=0.01)


def test_gathered_experts_take_memory_and_links_but_no_sms_and_no_row_travels(rater):
    gathered = Unit(64, gathered=True)
    step = prefill_step(131_072.0, 4e8, 2e5, 10.0, V3, rater.gpu, gathered)
    rows_travel = prefill_step(131_072.0, 4e8, 2e5, 10.0, V3, rater.gpu, Unit(64))
    assert step.by_stage["dispatch"] == step.by_stage["combine"] == 0
    assert step.seconds < rows_travel.seconds
    experts = 3 * 7168 * 2048 * 256
    # 8 GPUs of a node share a copy: each needs 7/8 of it over NVLink, at 153 GB/s
    assert step.by_stage["gathering experts"] == pytest.approx(58 * experts * 7 / 8 / 153e9)
    few = prefill_step(2048.0, 4e6, 2048.0, 1.0, V3, rater.gpu, gathered)
    assert few.bottleneck == "gathering experts"
    assert few.seconds > few.by_stage["gathering experts"]  # dense layers are computed, too
    room = [kv_tokens_per_gpu(V3, unit, rater.gpu, 0.1) for unit in (Unit(64), gathered)]
    assert (room[0] - room[1]) * BFLOAT16.bytes_per_token(V3) == pytest.approx(2 * experts)
    with pytest.raises(ConfigError, match="do not fit"):
        kv_tokens_per_gpu(V3, Unit(16, gathered=True), rater.gpu, 0.1)


def test_experts_come_from_other_nodes_through_all_cards_of_a_node_at_once():
    gpu = ACCELERATORS["H800"]
    assert gather_s(8e9, 1, gpu) == 0
    assert gather_s(8e9, 8, gpu) == pytest.approx(7e9 / 153e9)
    slow = replace(gpu, network_bytes_per_s=gpu.network_bytes_per_s / 10)
    # half of the copy is on the other node; of that each card reads an eighth, at a tenth of 43 GB/s
    assert gather_s(8e9, 16, slow) == pytest.approx(0.5e9 / 4.3e9)


def test_small_batches_run_in_one_micro_batch_where_that_is_faster(rater):
    few = rater.better("decode", Unit(16), 4)
    assert not few.overlap
    assert few.gpu_seconds < rater.rate("decode", rater.with_skew(Unit(16), 4), 4).gpu_seconds
    assert rater.better("decode", Unit(64), 128).overlap


def test_a_job_gets_the_cheapest_of_all_layouts_that_fit(rater, tmp_path):
    found = job_layouts(rater, most_gpus=64)
    hours = [layout.gpu_hours for layout in found]
    assert hours == sorted(hours)
    assert all(
        max(layout.prefill.ep_size, layout.decode.ep_size) <= 64
        and (layout.mode == "colocated" or layout.prefill.ep_size + layout.decode.ep_size <= 64)
        for layout in found
    )
    # apart, the phase with less work waits
    apart = next(layout for layout in found if layout.mode == "disaggregated")
    seconds = [stage.gpu_seconds / stage.ep_size for stage in (apart.prefill, apart.decode)]
    assert apart.gpu_hours == pytest.approx(max(seconds) * (apart.prefill.ep_size + apart.decode.ep_size) / 3600)
    job = load_job(write_job(tmp_path))
    # one rank does not hold the model; the last change ends at the layout
    steps = shares(rater, job, found[0])
    assert steps[0] == ("as in this job", None)
    assert [name for name, _ in steps[1:]] == ["ranks", "kv.dtype", "prefill_tokens", "decode_requests"]
    assert steps[-1][1] == pytest.approx(found[0].gpu_hours)
    plain = next(layout for layout in found if not layout.pages.is_fp8)
    assert with_layout(job, plain, output="x").cluster.decode_requests == plain.decode.batch
    with pytest.raises(ConfigError, match="leaves room"):
        job_layouts(replace(rater, gpu=replace(rater.gpu, hbm_bytes=8e9)), most_gpus=64)


def test_simulate_suggests_a_layout_for_a_spec(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'model.path = "{V3_FOLDER}"\nworkload = {{requests = 500, prompt_tokens = 4000, output_tokens = 1000}}\n'
        'cluster = {gpu = "H800", nodes = 22, exchange = "2025-02"}\ndecode = {requests_per_gpu = 88}\n'
    )
    ended = batchinfer("simulate", spec, "--suggest", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    hours = [change["gpu_hours_per_million_requests"] for change in found["changes"]]
    assert hours == sorted(hours, reverse=True)
    assert found["changes"][-1]["change"] == "DeepEP of 2025-06"
    assert found["rates"].startswith("published tables")
