"""Plans that predict time and cost for GPUs that are not here, with the simulator."""

import json
import shutil
import subprocess
import sys
import typing
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.config import ClusterConfig, load_job
from batchinfer.model.config import load_model_config
from batchinfer.plan.earlier_run import Speeds
from batchinfer.plan.forecast import PlannedWork, nodes_to_finish, work_seconds
from batchinfer.records import ConfigError
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.spec import WorkloadSpec
from batchinfer.sim.speeds import Ranks, paper_speeds
from batchinfer.sim.workload import make_workload
from support.hollow_weights import write_hollow_weights
from support.jobs import batchinfer, write_job, write_questions
from support.paths import RANDOM_MODEL, ROOT

V3_CONFIG = ROOT / "jobs" / "models" / "deepseek-v3" / "config.json"
V3 = load_model_config(V3_CONFIG.parent)
UNITS = {"mode": "disaggregated", "prefill_ranks": 32, "decode_ranks": 144, "redundant_experts": 32, "gpu": "H800"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts, and a model folder that says it is DeepSeek-V3; planning looks at no more of weights than headers."""
    folder = tmp_path_factory.mktemp("paper")
    write_questions(folder / "prompts")
    shutil.copytree(RANDOM_MODEL, folder / "v3")
    shutil.copy(V3_CONFIG, folder / "v3" / "config.json")
    write_hollow_weights(folder / "v3")
    return folder


def planned(folder, name, *, cluster, dtype="fp8"):
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(folder / "v3"), "dtype": dtype},
        sampling={"max_tokens": 30},
        cluster=cluster,
        pricing={"gpu_hour": 2.0},
    )
    ended = batchinfer("plan", job)
    if ended.code:
        return ended, {}
    (summary,) = pq.read_table(folder / name / "plan" / "summary.parquet").to_pylist()
    return ended, summary


def test_a_job_that_names_a_gpu_is_predicted_without_an_earlier_run(folder):
    ended, summary = planned(folder, "units", cluster={**UNITS, "finish_hours": 1.0})
    assert ended.code == 0, ended.err
    assert summary["is_simulated"] is True
    assert summary["work_s"] > 29 * 0.01  # thirty tokens one after the other
    assert summary["gpu_hours"] == pytest.approx(176 * summary["work_s"] / 3600)
    assert summary["cost_usd"] == pytest.approx(2 * summary["gpu_hours"])
    assert summary["nodes_to_finish"] == 22
    assert "by tables of cluster.gpu" in ended.out
    assert "22 finish within cluster.finish_hours" in ended.out


def test_the_plan_and_the_simulate_command_rate_the_same_units(folder):
    planned(folder, "both", cluster=UNITS)
    spec = folder / "spec.toml"
    spec.write_text(
        f'[model]\npath = "{folder / "v3"}"\n[workload]\nplan = "both"\n[cluster]\nnodes = 22\n'
        "[prefill]\ntokens_per_gpu = 4096\n[decode]\nrequests_per_gpu = 1\n"
    )
    figures = json.loads(batchinfer("simulate", spec, "--json").out)
    work = make_workload(WorkloadSpec(plan=str(folder / "both")))
    ranks = Ranks("H800", 32, 144, 32, None, 4096, 256, None)
    found = paper_speeds(work.prompt_tokens, work.cached_tokens, work.output_tokens, V3, ranks)
    gpu_seconds = work.new_tokens.sum() / found.prefill_tokens_per_s
    gpu_seconds += (work.output_tokens - 1).sum() / found.decode_tokens_per_s
    assert gpu_seconds / 3600 == pytest.approx(figures["cheapest"]["gpu_hours_as_specified"])


def test_work_on_paper_grows_with_its_tokens_and_shrinks_with_better_gpus():
    def seconds(gpu, num):
        ranks = Ranks(gpu, 32, 32, 32, True, 4096, 64, None)
        prompts, answers = np.full(num, 2000), np.full(num, 100)
        found = paper_speeds(prompts, 0 * prompts, answers, V3, ranks)
        speeds = Speeds(found.prefill_tokens_per_s, found.decode_tokens_per_s, 1.0, 0.0, found.longest_answer_s, True)
        work = PlannedWork(np.array([0, num]), prompts, 0 * prompts, answers, np.full(num, np.nan))
        return work_seconds(work, ClusterConfig(prefill_ranks=32, gpu=gpu), speeds)

    assert seconds("H800", 40_000) == pytest.approx(10 * seconds("H800", 4_000), rel=0.1)
    assert seconds("B200", 40_000) < seconds("H200", 40_000) < seconds("H800", 40_000)


def test_nodes_are_those_of_whole_groups_that_have_units():
    sizes = {"num_units": 10, "num_ranks": 12, "gpus_per_node": 8}
    assert nodes_to_finish(100.0, 100.0, least_s=5.0, **sizes) == 2  # one group of 12 ranks
    assert nodes_to_finish(100.0, 30.0, least_s=5.0, **sizes) == 6  # four of them
    assert nodes_to_finish(100.0, 9.0, least_s=5.0, **sizes) is None  # twelve, but ten units
    assert nodes_to_finish(100.0, 30.0, least_s=31.0, **sizes) is None


@pytest.mark.parametrize(
    ("cluster", "dtype", "words"),
    [
        (UNITS, "bfloat16", "only dtype fp8 can be simulated"),
        ({**UNITS, "prefill_ranks": 8}, "fp8", "do not fit"),
    ],
)
def test_what_cannot_be_simulated_is_planned_without_a_time(folder, tmp_path, cluster, dtype, words):
    ended, summary = planned(folder, tmp_path.name, cluster=cluster, dtype=dtype)
    assert ended.code == 0, ended.err
    assert "no time is predicted for H800" in ended.err
    assert words in ended.err
    assert summary["work_s"] is summary["is_simulated"] is summary["nodes_to_finish"] is None


def test_a_request_without_room_is_refused():
    prompts, ranks = np.array([1000]), Ranks("H800", 32, 32, 32, True, 4096, 64, 70_272 * 500)
    with pytest.raises(ConfigError, match="room for 500 KV tokens"):
        paper_speeds(prompts, 0 * prompts, 0 * prompts + 9, V3, ranks)


def test_a_model_of_dense_layers_is_predicted_without_an_exchange():
    few = {"num_hidden_layers": 3, "first_k_dense_replace": 3, "n_routed_experts": 0, "num_experts_per_tok": 0}
    dense = replace(V3, n_shared_experts=0, moe_intermediate_size=0, **few)
    mixed = replace(V3, num_hidden_layers=4, first_k_dense_replace=3)
    prompts = np.full(64, 1000)
    ranks = Ranks("H800", 8, 8, 0, True, 4096, 64, None)
    alone = replace(ranks, overlap=False)
    speeds, fewer = (paper_speeds(prompts, 0 * prompts, 0 * prompts + 9, model, ranks) for model in (dense, mixed))
    assert speeds == paper_speeds(prompts, 0 * prompts, 0 * prompts + 9, dense, alone)
    assert speeds.prefill_tokens_per_s > fewer.prefill_tokens_per_s  # a layer less, and no rows that travel
    assert speeds.longest_answer_s < fewer.longest_answer_s


def test_a_time_that_no_number_of_nodes_keeps_is_said(folder):
    ended, summary = planned(folder, "hurry", cluster={**UNITS, "finish_hours": 1e-6})
    assert ended.code == 0
    assert "no number of nodes finishes within 1e-06 h" in ended.err
    assert summary["nodes_to_finish"] is None


def test_finish_hours_without_a_gpu_and_unknown_gpus_are_refused(folder):
    without, _ = planned(folder, "no", cluster={"prefill_ranks": 1, "finish_hours": 2.0})
    assert without.code == 2
    assert "finish_hours is set, but not gpu" in without.err
    unknown, _ = planned(folder, "no", cluster={"prefill_ranks": 1, "gpu": "A100"})
    assert unknown.code == 2
    assert "cluster.gpu is 'A100'" in unknown.err


def test_a_job_may_name_each_accelerator_of_the_simulator():
    (names, _none) = typing.get_args(ClusterConfig.model_fields["gpu"].annotation)
    assert set(typing.get_args(names)) == set(ACCELERATORS)


def test_planning_loads_the_simulator_only_when_asked():
    code = (
        "import sys, batchinfer.plan.planner; sys.exit(any(name.startswith('batchinfer.sim') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_suggested_layout_is_a_job_that_plan_takes(folder):
    job = write_job(
        folder,
        name="suggest.toml",
        output={"dir": "suggest"},
        model={"path": str(folder / "v3"), "dtype": "fp8"},
        sampling={"max_tokens": 30},
        cluster={"gpu": "H200", "nodes": 4},
    )
    ended = batchinfer("plan", job, "--suggest")
    assert ended.code == 0, ended.err
    assert "decode_requests = " in ended.out
    assert "  as in this job: does not fit\n" in ended.out
    again = batchinfer("plan", folder / "suggest-suggested.toml")
    assert again.code == 0, again.err
    hours = [
        pq.read_table(folder / name / "plan" / "summary.parquet").to_pylist()[0]["gpu_hours"]
        for name in ("suggest", "suggest-suggested")
    ]
    assert hours[0] is None or hours[1] < hours[0]


def test_a_suggestion_for_a_job_of_another_dtype_is_in_fp8_on_the_published_gpu(folder):
    job = write_job(folder, name="none.toml", output={"dir": "none"}, model={"path": str(folder / "v3")})
    for name in ("none-suggested.toml", "none-suggested-2.toml"):
        ended = batchinfer("plan", job, "--suggest")
        assert ended.code == 0, ended.err
        assert "Fewest GPU-hours on H800, simulated: " in ended.out
        assert '[model]\ndtype = "fp8"\n[cluster]' in ended.out
        assert (load_job(folder / name).model.dtype, load_job(folder / name).cluster.gpu) == ("fp8", "H800")
