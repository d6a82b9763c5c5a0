"""Measured rates of aiconfigurator-core, from a small package of the same form, and the simulator against its rows."""

import csv
import json
import shutil
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.model.config import load_model_config
from batchinfer.records import ConfigError
from batchinfer.sim import against, aiconfigurator
from batchinfer.sim.aiconfigurator import PACKAGE, measured_rates
from batchinfer.sim.hardware import ACCELERATORS, accelerator
from batchinfer.sim.kernels import product_s
from batchinfer.sim.steps import Unit, decode_step
from support.jobs import batchinfer

V3_FOLDER = Path(__file__).parents[2] / "jobs" / "models" / "deepseek-v3"
V3 = load_model_config(V3_FOLDER)
RATES = {"fp8_block": 1e12, "bfloat16": 1e12, "nvfp4": 4e12}  # per millisecond
ROWS, WIDTHS = (1, 16, 256, 4096), (256, 2048, 16384)


def table(folder: Path, name: str, rows: list[dict], version: str = "1.0") -> None:
    path = folder / version / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A GPU that multiplies at 1 PFLOP/s, at least 3 microseconds a product."""
    systems = tmp_path / PACKAGE / "systems"
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text("")
    data = systems / "data" / "h200_sxm"
    products = [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": 3e-3 + 2 * m * n * k / rate}
        for (dtype, rate), m, n, k in product(RATES.items(), ROWS, WIDTHS, WIDTHS)
    ]
    shape = {"hidden_size": 7168, "inter_size": 2048, "num_experts": 256, "topk": 8, "moe_tp_size": 1}
    experts = [
        shape
        | {
            "moe_dtype": dtype,
            "moe_ep_size": ep,
            "num_tokens": m,
            "distribution": loads,
            "latency": busiest * m / ep * RATES["fp8_block"] / RATES[dtype],
        }
        for dtype, ep, m, (loads, busiest) in product(
            ("fp8_block", "nvfp4"), (1, 8), (8, 4096), (("balanced", 0.001), ("power_law_1.01", 0.002))
        )
    ]
    latent = [
        {"num_heads": 128, "kv_cache_dtype": kv, "batch_size": batch, "isl": 1, "step": tokens - 1, "latency": 0.05}
        for kv, batch, tokens in product(("fp8", "bfloat16"), (1, 256), (1024, 8192))
    ]
    absorb = [
        {"num_heads": 128, "op_name": f"mla_gen_{name}", "bmm_dtype": "bfloat16", "num_tokens": m, "latency": 0.01}
        for name, m in product(("pre", "post"), (1, 1024))
    ]
    collectives = [
        {"nccl_dtype": "half", "op_name": name, "num_gpus": 8, "message_size": size, "latency": 0.02}
        for name, size in product(("all_gather", "reduce_scatter"), (1024, 2**28))
    ]
    for engine in ("sglang", "trtllm"):
        table(data / "gemm" / engine, "gemm_perf", [{**row, "latency": 99.0} for row in products], "0.9.post1")
        table(data / "gemm" / engine, "gemm_perf", products, "0.10.rc2")
        table(data / "moe" / engine, "moe_perf", experts)
        table(data / "mla" / engine, "generation_mla_perf", latent)
        table(data / "mla" / engine, "context_mla_perf", latent)
        table(data / "mla_bmm" / engine, "mla_bmm_perf", absorb)
    table(data / "comm" / "nccl", "nccl_perf", collectives)
    shutil.copytree(data, data.with_name("b200_sxm"))
    monkeypatch.syspath_prepend(tmp_path)
    measured_rates.cache_clear()
    yield systems
    measured_rates.cache_clear()


def test_a_measured_product_takes_what_the_newest_table_says(package):
    rates = measured_rates("H200")
    assert rates.product_s(256, 2048, 16384) == pytest.approx(3e-6 + 2 * 256 * 2048 * 16384 / 1e15)
    assert rates.kernel_s == pytest.approx(3e-6 + 2 * 256 * 256 / 1e15)


def test_between_two_measurements_time_is_a_power_of_rows_and_beyond_the_last_in_proportion_at_most(package):
    rates = measured_rates("H200")
    low, high = rates.product_s(16, 2048, 2048), rates.product_s(256, 2048, 2048)
    assert rates.product_s(64, 2048, 2048) == pytest.approx((low * high) ** 0.5)
    assert 1.9 < rates.product_s(8192, 16384, 16384) / rates.product_s(4096, 16384, 16384) <= 2.0
    assert rates.product_s(0.5, 2048, 2048) == rates.product_s(1, 2048, 2048)


def test_experts_are_found_by_rows_and_slots_and_by_how_even_their_loads_are(package):
    shape = {"experts": 256, "topk": 8, "masked": True}
    even = measured_rates("H200").experts_s(128.0, 32, 7168, 2048, **shape)
    assert even == pytest.approx(1e-6 * 4096 / 8)
    assert measured_rates("H200", is_balanced=False).experts_s(128.0, 32, 7168, 2048, **shape) == pytest.approx(
        2 * even
    )
    assert measured_rates("H200").experts_s(128.0, 32, 7168, 1536, **shape) is None


def test_measured_rates_replace_the_published_ones_where_there_are_some(package):
    gpu = accelerator("H200", None)
    assert product_s(256, 2048, 2048, gpu) == gpu.rates.product_s(256, 2048, 2048)
    assert "aiconfigurator-core, h200_sxm" in gpu.rates_source
    assert accelerator("H200") == ACCELERATORS["H200"]
    assert accelerator("H800", None) == ACCELERATORS["H800"]
    with pytest.raises(ConfigError, match="leave rates out"):
        accelerator("H800", "measured")
    step = decode_step(64.0, 64 * 2048.0, V3, gpu, Unit(8, overlap=False))
    # three dense layers and 58 with experts: attention in the table 0.05 ms, absorbing 0.02 ms
    assert step.by_stage["core attention and output"] > 61 * 0.05e-3
    assert step.by_stage["routed experts"] == pytest.approx(58 * 1e-6 * 64, rel=0.3)


def test_without_the_package_rates_are_published_ones_and_asking_for_others_says_what_to_install(monkeypatch):
    monkeypatch.setattr(aiconfigurator, "find_spec", lambda name: None)
    measured_rates.cache_clear()
    assert accelerator("H200", None) == ACCELERATORS["H200"]
    assert "published tables of the H800, as shares" in accelerator("H200", None).rates_source
    with pytest.raises(ConfigError, match=r"pip install 'batchinfer\[tables\]'"):
        accelerator("H200", "measured")
    measured_rates.cache_clear()


@pytest.mark.parametrize("name", ["GB200", "GB300"])
def test_experts_in_one_rack_of_nvlink_use_no_network(name):
    gpu = ACCELERATORS[name]
    step = decode_step(64.0, 64 * 2048.0, V3, gpu, Unit(32, overlap=False))
    on_network = decode_step(64.0, 64 * 2048.0, V3, ACCELERATORS["B200"], Unit(32, overlap=False))
    assert step.by_stage["combine"] < on_network.by_stage["combine"] / 2


def sample(path: Path, *changes: dict) -> Path:
    """A file of measurements: one row of a layout that is known, changed."""
    sizes = {"workers": "num_workers", "batch": "batch_size"}
    row = {
        "id": "one",
        "silicon_data_source": "silicon_concurrency=512; measured",
        "backend": "trtllm",
        "model_path": "deepseek-ai/DeepSeek-R1",
        "system": "h200_sxm",
        "precision": "fp8",
        "mode": "disagg",
        "isl": 1024,
        "osl": 1024,
        "silicon_ttft_ms": 1000.0,
        "silicon_tpot_ms": 50.0,
    }
    layout = {
        "dp": "attention_dp_size",
        "tp": "tp_size",
        "pp": "pp_size",
        "mtp": "moe_tp_size",
        "ep": "moe_ep_size",
    } | sizes
    for prefix, values in {
        "": {"dp": None, "tp": None, "pp": None, "mtp": None, "ep": None, "batch": None},
        "prefill_": {"dp": 8, "tp": 1, "pp": 1, "mtp": 1, "ep": 8, "workers": 2, "batch": 1},
        "decode_": {"dp": 8, "tp": 1, "pp": 1, "mtp": 1, "ep": 8, "workers": 1, "batch": 64},
    }.items():
        row |= {prefix + layout[name]: value for name, value in values.items()}
    with path.open("w") as file:
        writer = csv.DictWriter(file, [*row, *({*changes[0]} - {*row} if changes else ())])
        writer.writeheader()
        writer.writerows([row | change for change in changes or ({},)])
    return path


def test_rows_in_fp4_take_its_rates_where_such_checkpoints_have_it(package, tmp_path):
    path = sample(tmp_path / "sample.csv", {"system": "b200_sxm"}, {"system": "b200_sxm", "precision": "fp4"})
    (fp8, fp4), left_out = against.read_rows(path, V3)
    assert not left_out
    gpus = [against.measured_gpu(row) for row in (fp8, fp4)]
    shape = 4096.0, 16384, 16384
    assert product_s(*shape, gpus[1], has_fp4=True) < 0.3 * product_s(*shape, gpus[0], has_fp4=True)
    assert product_s(*shape, gpus[1]) == pytest.approx(product_s(*shape, gpus[0]))  # in BF16, at the same rate here
    experts = {"experts": 256, "topk": 8, "masked": True}
    times = [gpu.rates.experts_s(16.0, 32, 7168, 2048, **experts) for gpu in gpus]
    assert times[1] == pytest.approx(times[0] / 4)
    assert against.predict(fp4, V3, gpus[1]).token_s < against.predict(fp8, V3, gpus[0]).token_s
    assert sorted(against.compared(path, V3, "all")["groups"]) == [
        "DeepSeek-R1 B200 trtllm", "DeepSeek-R1 B200 trtllm in FP4", "all", "all in FP4"
    ]  # fmt: skip


def test_layouts_that_are_not_known_are_left_out_with_the_reason(tmp_path):
    path = sample(
        tmp_path / "sample.csv",
        {},
        {"model_path": "zai/GLM-5"},
        {"precision": "fp4"},
        {"decode_tp_size": 8, "decode_attention_dp_size": 1},
        {"decode_moe_ep_size": 1, "decode_moe_tp_size": 8},
        {"decode_batch_size": None},
        {"id": "last", "decode_batch_size": 16},
    )
    rows, left_out = against.read_rows(path, V3)
    assert [(row.index, row.name, row.decode.requests_per_gpu) for row in rows] == [(0, "one", 64), (6, "last", 16)]
    assert sorted(left_out) == [
        "another model",
        "attention is tensor-parallel",
        "experts are not split over the GPUs of attention",
        "sizes or batch are missing",
        "weights in FP4, which Hopper lacks",
    ]
    assert [row.index for row in against.read_rows(path, V3, "even")[0]] == [0, 6]
    assert against.read_rows(path, V3, "odd")[0] == []


def test_measured_throughput_follows_from_requests_under_way_and_their_time(tmp_path):
    (row,), _ = against.read_rows(sample(tmp_path / "sample.csv"), V3)
    # 512 requests of 1 s + 1,023 x 50 ms each give 1,024 tokens on 8 + 16 GPUs
    assert row.measured.tokens_per_s == pytest.approx(512 * 1024 / (1.0 + 1023 * 0.05) / 24)


def test_one_request_never_queues_and_many_are_served_at_the_rate_of_the_server():
    assert against._closed_loop(1, 0.5, 2.0) == pytest.approx(1 / 2.5)
    assert against._closed_loop(1000, 0.5, 2.0) == pytest.approx(2.0)
    # two requests: 0.4 of the time one is there already, R = 0.5 (1 + 0.2)
    assert against._closed_loop(2, 0.5, 2.0) == pytest.approx(2 / (2.0 + 0.5 * (1 + 0.5 / 2.5)))


def test_simulate_against_prints_errors_by_group_next_to_those_of_aiconfigurator(tmp_path, package):
    peer = {"aiconfigurator_tpot_ms": 55.0, "aiconfigurator_tokens_per_s_per_gpu": 400.0}
    path = sample(tmp_path / "sample.csv", peer, {"precision": "fp4"})
    ended = batchinfer("simulate", "--against", path, "--model", V3_FOLDER, "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    (pair,) = found["predicted"]
    errors = found["groups"]["DeepSeek-R1 H200 trtllm"]["own"]
    assert errors["rows"] == 1
    assert errors["tpot"]["median"] == pytest.approx(pair["tpot_s_predicted"] / 0.05 - 1)
    assert found["groups"]["all"]["aiconfigurator"]["tpot"]["median"] == pytest.approx(0.1)
    assert found["left_out"] == {"weights in FP4, which Hopper lacks": 1}
    shown = batchinfer("simulate", "--against", path, "--model", V3_FOLDER)
    assert "DeepSeek-R1 H200 trtllm" in shown.out
    assert "weights in FP4, which Hopper lacks" in shown.out


def test_simulate_takes_a_spec_or_measurements(tmp_path):
    assert batchinfer("simulate").code == 2
    assert batchinfer("simulate", "--against", "x.csv").code == 2
    assert batchinfer("simulate", "spec.toml", "--against", "x.csv", "--model", "y").code == 2
    ended = batchinfer("simulate", "--against", tmp_path / "none.csv", "--model", V3_FOLDER)
    assert ended.code == 2
    wanted = "give the path of silicon_sample.csv, a file of the package aiconfigurator-core"
    assert f"none.csv cannot be read: No such file or directory; {wanted}" in ended.err
