"""The layout that an offline job may choose."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.records import ConfigError
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.search import Rater
from batchinfer.sim.steps import Unit
from batchinfer.sim.suggest import changes, changes_table, job_layouts, with_layout
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
    assert found[0].name == "as given"
    lines = changes_table(found)
    factors = [float(line[-1].rstrip("x")) for line in lines]
    assert factors[-1] == pytest.approx(np.prod(factors[:-1]), abs=0.03)
    assert hours[0] / hours[-1] == pytest.approx(factors[-1], abs=0.01)


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
