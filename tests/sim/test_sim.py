"""The cluster on paper: kernel tables, schedules, memory, events, the command."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from batchinfer.balance.decode_series import EVEN
from batchinfer.model.config import load_model_config
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.page_format import BFLOAT16, PageFormat
from batchinfer.records import ConfigError
from batchinfer.sim.answer import answer
from batchinfer.sim.cluster import Cluster, simulate
from batchinfer.sim.dealing import Deals, Skews
from batchinfer.sim.exchange import (
    LOW_LATENCY_TOKENS,
    TABLES,
    ExchangeTimes,
    decode_exchange,
    nodes_per_token,
    prefill_exchange,
)
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.kernels import DENSE, GROUPED_MASKED, decode_attention_s, grouped_product_s, product_s
from batchinfer.sim.memory import kv_tokens_per_gpu, weight_bytes
from batchinfer.sim.overlap import Stages, decode_layer_s, prefill_layer_s
from batchinfer.sim.search import (
    EP_SIZES,
    MEASURED_DEVIATION,
    MEASURED_ROWS,
    MEASURED_SLOTS,
    Rater,
    largest_of_normals,
    placement_skew,
    routing_skew,
)
from batchinfer.sim.spec import WorkloadSpec, load_spec
from batchinfer.sim.steps import Batch, Unit, decode_step, prefill_batch, prefill_step
from batchinfer.sim.table import _by_hour
from batchinfer.sim.workload import Workload, make_workload
from support.jobs import batchinfer, question, write_job, write_questions, write_shard
from support.model_configs import with_attention, with_indexer

JOBS = Path(__file__).parents[2] / "jobs"
V3 = load_model_config(JOBS / "models" / "deepseek-v3")
V32 = with_indexer(V3, IndexerConfig(64, 128, 2048, rope_interleave=False, sharing_layers=frozenset()))
H800, H200, B200 = (ACCELERATORS[name] for name in ("H800", "H200", "B200"))


@pytest.mark.parametrize(("shape", "rows"), DENSE.items())
def test_a_measured_product_takes_what_the_table_says(shape, rows):
    n, k = shape
    for num_rows, tflops, _ in rows:
        assert 2 * num_rows * n * k / product_s(num_rows, n, k, H800) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(("shape", "rows"), GROUPED_MASKED.items())
def test_a_measured_grouped_product_takes_what_the_table_says(shape, rows):
    n, k = shape
    for num_rows, tflops, _ in rows:
        seconds = grouped_product_s(num_rows, 2, n, k, H800, masked=True)
        assert 2 * 2 * num_rows * n * k / seconds == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("shape", DENSE)
def test_more_rows_never_take_less_time(shape):
    times = [product_s(rows, *shape, H800) for rows in (1, 8, 32, 64, 96, 128, 512, 4096, 16384)]
    assert all(later >= earlier * 0.999 for earlier, later in pairwise(times))


def test_few_rows_wait_for_the_weights():
    # a quarter of the rows, the same weights: nearly the same time, and less of it on faster memory
    assert product_s(16, 7168, 16384, H800) > 0.9 * product_s(64, 7168, 16384, H800)
    assert product_s(16, 7168, 16384, H200) == pytest.approx(product_s(16, 7168, 16384, H800) * 3.35 / 4.8)
    assert product_s(16384, 7168, 16384, H200) == product_s(16384, 7168, 16384, H800)
    assert product_s(16384, 7168, 16384, B200) == pytest.approx(product_s(16384, 7168, 16384, H800) * 1979 / 4500)


def test_decode_attention_with_128_heads_is_bound_by_arithmetic_and_with_few_by_memory():
    per_head = [decode_attention_s(1e6, heads, 576, 512, H800) for heads in (16, 32, 128)]
    assert per_head[0] == per_head[1] == pytest.approx(1e6 * 576 * 2 / 3e12)
    assert per_head[2] == pytest.approx(1e6 * 128 * 2 * (576 + 512) / 660e12)


def test_kv_in_fp8_takes_its_bytes_of_memory_network_disk_and_attention():
    plain, narrow = (Unit(32, 32, pages=pages) for pages in (BFLOAT16, PageFormat("fp8")))
    fitting = [kv_tokens_per_gpu(V3, unit, H800, 0.1) for unit in (plain, narrow)]
    assert fitting[1] / fitting[0] == pytest.approx(1152 / 656)
    few_heads = with_attention(V3, num_attention_heads=16)  # bound by memory
    attention = "core attention and output"
    seconds = [decode_step(8.0, 8e6, few_heads, H800, unit).by_stage[attention] for unit in (plain, narrow)]
    per_token = few_heads.num_hidden_layers * (1152 - 656) / 3e12
    assert seconds[0] - seconds[1] == pytest.approx(8e6 * per_token, rel=0.01)


def test_nodes_of_a_token_against_drawing_its_experts():
    # 8 groups of 32 experts, a token takes 8 experts from 4 groups; 4 nodes with 2 groups each
    rng = np.random.default_rng(0)
    touched = []
    for _ in range(4000):
        groups = rng.choice(8, 4, replace=False)
        experts = rng.choice(4 * 32, 8, replace=False)
        touched.append(len({groups[expert // 32] // 2 for expert in experts}))
    assert nodes_per_token(V3, 4) == pytest.approx(np.mean(touched), rel=0.01)
    assert nodes_per_token(V3, 1) == 1


@pytest.mark.parametrize("release", TABLES)
@pytest.mark.parametrize("ep_size", [8, 16, 32, 64, 128, 256])
def test_the_exchange_of_128_tokens_takes_what_the_table_says(release, ep_size):
    in_table = TABLES[release].low_latency[ep_size]
    times = decode_exchange(LOW_LATENCY_TOKENS, V3, ep_size, H800, release=release)
    # where the table is quicker than the network, rows inside a node went over NVLink: then the network bounds it here
    network = [128 * 8 * (7168 + 224) / 50e9 * 1e6, 128 * 8 * 14336 / 50e9 * 1e6]
    for way in (0, 1):
        bound = network[way] if ep_size > 8 else 0.0
        assert times[way] * 1e6 == pytest.approx(max(in_table[way], bound))


def test_exchange_grows_with_tokens_and_stays_away_on_one_gpu():
    assert decode_exchange(64, V3, 1, H800) == prefill_exchange(64, V3, 1, H800) == (0, 0)
    assert decode_exchange(256, V3, 64, H800)[0] > decode_exchange(128, V3, 64, H800)[0]
    one, two = (prefill_exchange(tokens, V3, 32, H800) for tokens in (8192, 16384))
    assert two == pytest.approx((2 * one[0], 2 * one[1]))


# Two micro-batches, computing 6 = 1 + 2 + 1 + 2 each, exchange 1 + 1: all of it fits under computing.
#   compute   ATTN(1) SHARED(0) ATTN(0) MLP(1) MLP(0) SHARED(1)   = 3 + 1 + 3 + 2 + 2 + 1
SMALL_EXCHANGE = Stages(attn_0=1, attn_1=2, shared=1, mlp=2, exchange=ExchangeTimes(1, 1))


def test_prefill_hides_a_short_exchange_and_waits_for_a_long_one():
    assert prefill_layer_s(SMALL_EXCHANGE) == pytest.approx(12)
    long_exchange = replace(SMALL_EXCHANGE, exchange=ExchangeTimes(10, 20))
    assert prefill_layer_s(long_exchange) >= 2 * 30
    assert prefill_layer_s(long_exchange) <= 2 * (30 + 6)


def test_decode_stages_follow_the_published_order():
    # SHARED + ATTN-0 under DISPATCH: max(2, 1); MLP 2; ATTN-1 under COMBINE: max(2, 1)
    assert decode_layer_s(SMALL_EXCHANGE) == 2 * (2 + 2 + 2)
    assert decode_layer_s(replace(SMALL_EXCHANGE, exchange=ExchangeTimes(5, 7))) == 2 * (5 + 2 + 7)


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_beats_its_busier_lane_or_loses_to_no_overlap(seed):
    times = np.random.default_rng(seed).uniform(0.1, 5, 6)
    stages = Stages(*times[:4], exchange=ExchangeTimes(*times[4:]))
    for layer_s in (prefill_layer_s(stages), decode_layer_s(stages)):
        assert layer_s >= 2 * max(stages.compute_s, stages.communication_s) - 1e-9
        assert layer_s <= 2 * (stages.compute_s + stages.communication_s) + 1e-9


def test_weights_per_gpu():
    # 58 layers of (9 or 2 routed + 1 shared) experts of 44 MB, attention 11.4 GB, three dense layers, embedding, head
    assert weight_bytes(V3, Unit(32, 32)) == pytest.approx(58 * 10 * 44.04e6 + 11.4e9 + 1.2e9 + 3.7e9, rel=0.02)
    assert weight_bytes(V3, Unit(144, 32)) == pytest.approx(58 * 3 * 44.04e6 + 11.4e9 + 1.2e9 + 3.7e9, rel=0.02)
    assert kv_tokens_per_gpu(V3, Unit(144, 32), H200, 0.1) > 2 * kv_tokens_per_gpu(V3, Unit(144, 32), H800, 0.1)
    with pytest.raises(ConfigError, match="larger ep_size"):
        kv_tokens_per_gpu(V3, Unit(8, 0), H800, 0.1)


def small_cluster(**changes):
    cluster = Cluster(
        model=V3,
        gpu=H800,
        prefill=Unit(32, 32),
        decode=Unit(144, 32),
        num_prefill_units=2,
        num_decode_units=1,
        prefill_tokens_per_gpu=4096,
        decode_requests_per_gpu=64,
        kv_tokens_per_gpu=400_000,
        disk_bytes_per_s=5e9,
        max_wait_s=10,
        release_after_s=60,
    )
    return replace(cluster, **changes)


def described(**changes):
    values = {"requests": 4000, "prompt_tokens": 2000.0, "output_tokens": 200.0, "prompt_spread": 0.5}
    return make_workload(WorkloadSpec(**{**values, "output_spread": 0.5, **changes}))


def test_lengths_and_arrivals_are_as_described():
    work = described(requests=50_000, hit_share=0.5, arrival="day", peak_over_mean=1.5)
    assert work.prompt_tokens.mean() == pytest.approx(2000, rel=0.02)
    assert work.output_tokens.mean() == pytest.approx(200, rel=0.02)
    assert work.cached_tokens.sum() / work.prompt_tokens.sum() == pytest.approx(0.5, rel=0.01)
    assert (work.cached_tokens < work.prompt_tokens).all()
    by_hour = np.bincount((work.arrival_s // 3600).astype(int), minlength=24)
    assert by_hour.sum() == 50_000
    assert by_hour[12] / by_hour.mean() == pytest.approx(1.5, rel=0.02)
    assert by_hour[0] / by_hour.mean() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("arrival", [{}, {"arrival": "day", "peak_over_mean": 1.5}], ids=["at once", "day"])
def test_every_request_ends_after_it_came(seed, arrival):
    work = described(seed=seed, requests=1500, **arrival)
    history = simulate(work, small_cluster())
    assert (history.first_token_s > work.arrival_s).all()
    assert (history.finished_s >= history.first_token_s).all()
    assert history.end_s == history.finished_s.max()
    assert history.peak_nodes <= 2 * 4 + 18
    assert history.node_seconds >= history.prefill_busy_s * 4 + history.decode_busy_s * 18 - 1e-6


def test_a_request_alone_takes_one_prefill_step_and_one_decode_step_per_further_token():
    work = Workload(np.array([1000]), np.array([0]), np.array([11]), np.array([0.0]))
    history = simulate(work, small_cluster())
    share = 1 / 32
    unit = small_cluster().prefill
    prefill = prefill_step(1000 * share, 1000 * 1001 / 2 * share, 1000 * share, share, V3, H800, unit)
    assert history.first_token_s[0] == pytest.approx(prefill.seconds)
    decode = decode_step(1 / 144, 1005 / 144, V3, H800, small_cluster().decode)
    assert history.finished_s[0] - history.first_token_s[0] == pytest.approx(10 * decode.seconds, rel=0.01)


@pytest.mark.all  # make test: every request ends after it came
def test_less_kv_memory_means_more_time_and_never_more_than_fits():
    work = described()
    roomy = simulate(work, small_cluster())
    # room for some 2 requests per GPU
    tight = simulate(work, small_cluster(kv_tokens_per_gpu=5_000))
    assert tight.end_s > 1.5 * roomy.end_s


def test_a_slow_disk_becomes_the_bottleneck_of_prefill():
    work = described(hit_share=0.9)
    quick, slow = (simulate(work, small_cluster(disk_bytes_per_s=rate)) for rate in (1e12, 1e8))
    assert "disk" not in quick.prefill_limits
    assert set(slow.prefill_limits) == {"disk"}
    hit_bytes = work.cached_tokens.sum() * V3.kv_bytes_per_token(2)
    assert slow.prefill_busy_s == pytest.approx(hit_bytes / (1e8 * 4))


def test_steady_state_is_what_full_units_do():
    # one answer length, far more requests than slots: the events must agree with the rate of a full unit
    work = described(requests=60_000, prompt_tokens=500.0, prompt_spread=0.0, output_tokens=400.0, output_spread=0.0)
    history = simulate(work, small_cluster(num_prefill_units=20, decode_requests_per_gpu=64))
    step = decode_step(64.0, 64 * work.mean_kv_tokens, V3, H800, small_cluster().decode)
    full_s = 60_000 * 399 / (64 * 144) * step.seconds
    assert history.decode_busy_s == pytest.approx(full_s, rel=0.15)


@pytest.mark.all  # make test: every request ends after it came
@pytest.mark.parametrize("arrival", ["at once", "day"])
def test_events_grow_no_faster_than_requests(arrival):
    few, many = (
        simulate(described(requests=num, arrival=arrival, output_tokens=50.0), small_cluster()).num_events
        for num in (400, 3_200)
    )
    assert few < many <= 8 * few * 1.05


def test_nodes_are_given_back_when_idle():
    early, late = np.zeros(50), np.full(50, 10_000.0)
    lengths = np.full(100, 1000)
    work = Workload(lengths, 0 * lengths, lengths // 10, np.concatenate([early, late]))
    history = simulate(work, small_cluster())
    assert history.nodes_at(np.array([5_000.0]))[0] == 0
    # a step that is not full waits for ten seconds
    assert history.nodes_at(np.array([9.99, 10.01])).tolist() == [0, 4]
    assert history.node_seconds < 0.1 * history.end_s * history.peak_nodes


def rater(work, gpu=H800):
    return Rater(
        workload=work,
        deals=Deals(work),
        model=V3,
        gpu=gpu,
        memory_reserve=0.1,
        disk_bytes_per_s=5e9,
        expert_spread=0.0,
        seed=0,
    )


@pytest.mark.all  # make test: simulate as a table, with the cheapest size
def test_the_cheapest_is_at_least_as_cheap_as_any_size_named():
    work = described(prompt_spread=0.0)
    small = rater(work)
    for stage, batch in (("prefill", 8192), ("decode", 64)):
        best = small.cheapest(stage, Unit(1))
        for ep_size in EP_SIZES[2:]:  # smaller ones have no room for the weights
            unit = small.with_skew(Unit(ep_size, -V3.n_routed_experts % ep_size), batch)
            assert best.gpu_seconds <= small.rate(stage, unit, batch).gpu_seconds * (1 + 1e-9)
    assert rater(work, H200).cheapest("decode", Unit(1)).gpu_seconds <= best.gpu_seconds


# ---- routing


def test_the_routing_that_was_measured_comes_out_again():
    # 36 GPUs with 8 slots: published are the deviation of their rows and, on its own, the excess of the busiest one
    assert MEASURED_DEVIATION / MEASURED_ROWS * largest_of_normals(36) == pytest.approx(0.115, rel=0.05)
    assert routing_skew(MEASURED_ROWS, MEASURED_SLOTS, 36) == pytest.approx(1.115, rel=0.01)


@pytest.mark.parametrize("num", [8, 36, 144])
def test_the_largest_of_normal_variables_against_drawing_them(num):
    drawn = np.random.default_rng(0).standard_normal((20_000, num)).max(axis=1)
    assert largest_of_normals(num) == pytest.approx(drawn.mean(), rel=0.02)


def test_more_rows_and_more_slots_are_more_even():
    assert routing_skew(100, 8, 32) > routing_skew(1000, 8, 32) > routing_skew(1e6, 8, 32) > 1.05
    assert routing_skew(1000, 2, 144) > routing_skew(1000, 4, 144)
    assert routing_skew(1000, 8, 1) == routing_skew(0, 8, 32) == 1.0
    assert routing_skew(0.001, 2, 8) == 8.0  # never more than all rows on one GPU


def test_the_balancer_evens_out_loads_that_it_knows():
    sizes = {"num_experts": 256, "num_slots": 288, "num_gpus": 32, "seed": 0}
    assert placement_skew(0.0, **sizes) == 1.0
    assert 1.0 <= placement_skew(1.0, **sizes) < 1.05


# ---- prompts in parts, and the GPU that all others wait for


def test_a_long_prompt_is_prefilled_in_parts():
    #  prompt 0: 10 new          0-3 | 4-7 | 8-9        expands 4 + 8 + 10
    #  prompt 1: 3 new, 5 cached                        expands 8
    #  prompt 2: 4 new, 1 cached                        expands 5
    work = Workload(np.array([10, 8, 5]), np.array([0, 5, 1]), np.ones(3, int), np.zeros(3), part_tokens=4)
    assert work.expanded_tokens.tolist() == [22, 8, 5]
    assert work.attention_pairs.tolist() == [sum(range(1, 11)), 6 + 7 + 8, 2 + 3 + 4 + 5]


def test_hits_are_deep_in_some_prompts_when_asked_for():
    alike = described(requests=50_000, hit_share=0.5)
    some = described(requests=50_000, hit_share=0.5, hit_depth=0.8, longest_prompt=4000)
    assert some.prompt_tokens.max() == 4000
    assert some.cached_tokens.sum() / some.prompt_tokens.sum() == pytest.approx(0.5, rel=0.02)
    assert np.mean(some.cached_tokens > 0) == pytest.approx(0.5 / 0.8, rel=0.02)
    assert np.mean(alike.cached_tokens > 0) > 0.99


def test_the_gpu_with_most_attention_holds_up_its_unit():
    batch = Batch(100, 4e5, 3e5, 3e5 * 10_000, 4e5)
    even, uneven = (
        prefill_batch(batch, Skews(1.0, attention), V3, H800, Unit(32, 32), 5e9)[2] for attention in (1.0, 1.5)
    )
    assert even.bottleneck == "core attention and output"
    attention = even.by_stage["core attention and output"]
    assert uneven.by_stage["core attention and output"] == pytest.approx(1.5 * attention, rel=0.1)
    assert uneven.seconds > even.seconds + 0.4 * attention


def test_equal_prompts_are_dealt_out_evenly_and_giants_are_not():
    even = described(requests=4096, prompt_tokens=1024.0, prompt_spread=0.0)
    new_tokens, attention, expanded = Deals(even).prefill(32, 8192)
    assert (new_tokens, attention) == (1.0, 1.0)
    assert 1.0 <= expanded < 1.1  # few prompts are cut
    giants = described(requests=2000, prompt_tokens=1000.0, prompt_spread=2.0)
    found = Deals(giants)
    assert found.prefill(8, 8192).attention > 1.2 > found.prefill(8, 8192).new_tokens
    assert found.prefill(8, 8192) is found.prefill(8, 8192)  # made once
    assert Deals(described(requests=10)).prefill(32, 16384) == (1.0, 1.0, 1.0)  # too few for a sample
    assert Deals(described(requests=10)).decode(32, 64) == EVEN


REQUESTS = "requests = 3000\nprompt_tokens = 2000\noutput_tokens = 300"
SPEC = f"""
[model]
path = "{JOBS / "models" / "deepseek-v3"}"
[workload]
{REQUESTS}
[cluster]
nodes = 30
[pricing]
file = "{JOBS / "prices" / "deepseek-r1.toml"}"
"""


def test_simulate_as_a_table_and_as_json(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.replace("nodes = 30", "nodes = 30\nfinish_hours = 1.0"))
    text = batchinfer("simulate", path)
    assert text.code == 0
    for words in ("decode per node", "limited by", "cost per M output tokens", "nodes to finish in 1 h"):
        assert words in text.out
    figures = json.loads(batchinfer("simulate", path, "--json").out)
    assert figures["input_tokens"] == 3000 * 2000
    assert figures["prefill_nodes"] + figures["decode_nodes"] <= 30
    assert figures["nodes_to_finish"] == 22  # one unit of each is enough
    assert figures["cost_usd"] == pytest.approx(figures["gpu_hours"] * 2)
    assert figures["revenue_usd"] == pytest.approx((6e6 * 0.55 + 9e5 * 2.19) / 1e6)
    assert figures["cheapest"]["gpu_hours"] <= figures["cheapest"]["gpu_hours_as_specified"] * 1.001


def test_requests_that_do_not_fit_are_told(tmp_path):
    def ended(requests, *options):
        path = tmp_path / "spec.toml"
        path.write_text(f"{SPEC}[decode]\nrequests_per_gpu = {requests}\n")
        ended = batchinfer("simulate", path, "--json", *options)
        return json.loads(ended.out), ended.err

    figures, err = ended(5000)
    fitting = figures["decode"]["requests_per_gpu"]
    assert 0 < fitting < 5000
    (line,) = err.splitlines()
    assert line.endswith(
        f"warning: decode.requests_per_gpu is 5,000, but the KV memory of a GPU holds {fitting:,} requests of this "
        f"workload: figures of full units are for {fitting:,}"
    )
    given, err = ended(fitting, "--suggest")
    assert err == ""
    assert ended(5000, "--suggest")[0]["changes"] == given["changes"]


def test_a_planned_job_is_simulated(tmp_path):
    write_questions(tmp_path / "prompts")
    job = write_job(tmp_path)
    assert batchinfer("plan", job).code == 0
    spec = tmp_path / "spec.toml"
    body = SPEC.replace(REQUESTS, 'plan = "run"')
    spec.write_text(body)
    figures = json.loads(batchinfer("simulate", spec, "--json").out)
    assert figures["requests"] == 20
    assert figures["input_tokens"] > figures["cached_tokens"] > 0


def test_the_tokens_of_a_planned_job_are_those_that_its_report_will_count(tmp_path):
    """Rows that are only scored get no output token, and duplicates count with what their original gets."""
    kind = pa.struct([("max_tokens", pa.int64()), ("prompt_logprobs", pa.int64())])
    how = [{"max_tokens": 7}, {"max_tokens": 7}, {"max_tokens": 0, "prompt_logprobs": 0}, None]
    prompts = [question(0), question(0), question(1), question(2)]
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": prompts, "how": pa.array(how, kind)})
    job = write_job(tmp_path, input={"sampling": "how"}, sampling={"max_tokens": 5, "n": 3, "ignore_eos": True})
    assert batchinfer("run", job).code == 0
    report = json.loads(batchinfer("report", tmp_path / "run", "--json").out)
    assert report["duplicate_tokens"] > 0
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.replace(REQUESTS, 'plan = "run"'))
    figures = json.loads(batchinfer("simulate", spec, "--json").out)
    assert figures["requests"] == 3, "to compute"
    for name in ("input_tokens", "cached_tokens", "output_tokens"):
        assert figures[name] == report[name], name
    hits, misses = report["cached_tokens"], report["input_tokens"] - report["cached_tokens"]
    earned = hits * 0.14 + misses * 0.55 + report["output_tokens"] * 2.19
    assert figures["revenue_usd"] == pytest.approx(earned / 1e6)
    # answers of that run are no work of another, and in no count of its report
    again = ("plan", job, "--set", f"output.dir={tmp_path / 'again'}", "--reuse", tmp_path / "run")
    assert batchinfer(*again).code == 0
    spec.write_text(SPEC.replace(REQUESTS, 'plan = "again"'))
    ended = batchinfer("simulate", spec)
    assert (ended.code, "takes over answers of an earlier run" in ended.err) == (2, True)
    ended = batchinfer(*again, "--suggest")
    assert (ended.code, "leave --reuse out" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nodes = 30", "nodez = 30", ["cluster.nodez", "not a known key", "nodes"]),
        ("nodes = 30", "", ["cluster", "nodes is missing"]),
        ("nodes = 30", "nodes = 3", ["cluster.nodes is 3", "take 22"]),
        ("nodes = 30", 'nodes = 30\ngpu = "A100"', ["A100", "H800"]),
        ("nodes = 30", "nodes = 0", ["cluster.nodes is 0"]),
        ("requests = 3000", "", ["requests is missing"]),
        ("requests = 3000", 'requests = 3000\nplan = "x"', ["both given"]),
        ("prompt_tokens = 2000", "prompt_tokens = -1", ["prompt_tokens is -1"]),
        ("prompt_tokens = 2000", "prompt_tokens = 10_000_000", ["decode.ep_size", "less than one request"]),
        ("[cluster]", "[decode]\nep_size = 100\n[cluster]", ["redundant_experts is 32", "use 44"]),
        ("[cluster]", "[decode]\nep_size = 8\nredundant_experts = 0\n[cluster]", ["do not fit", "larger ep_size"]),
        ("[model]", "[model]\nmodel = 1", ["model.model", "not a known key"]),
        ("[model]", "[model", ["cannot read the spec"]),
        ("deepseek-r1.toml", "nowhere.toml", ["no price list", "nowhere.toml"]),
        ("requests = 3000", "requests = 3000\nhit_share = 0.5\nhit_depth = 0.4", ["hit_depth is 0.4", "hit_share 0.5"]),
        ("requests = 3000", "requests = 3000\nhit_depth = 0.0", ["hit_depth is 0.0", "greater than 0"]),
        ("requests = 3000", "requests = 3000\npeak_over_mean = 1.5", ["peak_over_mean", 'arrival = "day"']),
        (
            REQUESTS,
            f"{REQUESTS}\npeak_over_mean = 1.5\n[day]\ninput_tokens = 1e9\nload_by_hour = {[1] * 24}",
            ["day.load_by_hour says when the work arrives; leave workload.peak_over_mean out"],
        ),
        (REQUESTS, 'plan = "x"\narrival = "day"', ["workload.plan and arrival are both given"]),
        (REQUESTS, 'plan = "x"\nprompt_spread = 0.0', ["workload.plan and prompt_spread are both given"]),
        (
            REQUESTS,
            f"{REQUESTS}\narrival = 'day'\n[day]\ninput_tokens = 1e9\nload_by_hour = {[1] * 24}",
            ["arrival out"],
        ),
        ("nodes = 30", "nodes = 30\nfinish_hours = 1e-6", ["finish_hours", "give more time"]),
    ],
)
def test_a_bad_spec_is_one_sentence_and_exit_code_2(tmp_path, old, new, words):
    path = tmp_path / "spec.toml"
    assert old in SPEC
    path.write_text(SPEC.replace(old, new, 1))
    ended = batchinfer("simulate", path)
    assert ended.code == 2
    assert ended.out == ""
    assert len(ended.err.strip().splitlines()) == 1
    for word in words:
        assert word in ended.err


def test_a_spec_that_is_not_there_is_said(tmp_path):
    ended = batchinfer("simulate", tmp_path / "nowhere.toml")
    assert ended.code == 2
    assert "no spec" in ended.err


@pytest.mark.slow
def test_a_day_of_a_million_requests_on_278_nodes():
    figures = answer(load_spec(JOBS / "simulate_day.toml"))
    print(f"\n1,000,000 requests on 278 nodes, simulated in {figures['simulated_in_s']:.1f} s")
    assert figures["requests"] == 1_000_000
    assert 24 <= figures["hours"] < 24.2
    assert figures["peak_nodes"] <= 278
    assert len(figures["nodes_by_hour"]) == 25  # the last requests end after midnight
    assert 0 < figures["busy_share"] <= 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_chosen_keys_bound_attention_and_scores_grow_with_the_context(phase):
    unit = Unit(32, 32)

    def seconds(model, context):
        if phase == "decode":
            return decode_step(64.0, 64.0 * context, model, H800, unit).by_stage
        return prefill_step(4096.0, 4096.0 * context, 4096.0, 1.0, model, H800, unit).by_stage

    attention, projections = "core attention and output", "attention projections"
    # where there is nothing to choose, only the indexer's projections are added
    assert seconds(V32, 2048)[attention] == seconds(V3, 2048)[attention]
    assert 1.0 < seconds(V32, 2048)[projections] / seconds(V3, 2048)[projections] < 1.5
    # beyond, attention stays, and each key that is scored costs a part of what attending to it would
    assert seconds(V32, 131072)[attention] == seconds(V32, 16384)[attention]
    scored = seconds(V32, 131072)[projections] - seconds(V32, 16384)[projections]
    attended = seconds(V3, 131072)[attention] - seconds(V3, 16384)[attention]
    assert 0.02 < scored / attended < 0.3


def test_index_keys_take_memory_and_layers_that_share_compute_none():
    assert V32.kv_bytes_per_token(2) / V3.kv_bytes_per_token(2) == pytest.approx(704 / 576)
    assert weight_bytes(V32, Unit(32)) - weight_bytes(V3, Unit(32)) == pytest.approx(
        61 * (1536 * 64 * 128 + 7168 * (128 + 64))
    )
    half = with_indexer(V32, replace(V32.attention.indexer, sharing_layers=frozenset(range(1, 61, 2))))
    assert half.attention.num_indexers(61) == 31
    indexers, fewer = (weight_bytes(model, Unit(32)) - weight_bytes(V3, Unit(32)) for model in (V32, half))
    assert fewer == pytest.approx(indexers * 31 / 61, rel=1e-6)
    assert half.attention.row_width == V32.attention.row_width


def test_hours_with_the_same_number_of_nodes_are_one_line():
    console = Console(width=100, file=io.StringIO())
    for part in _by_hour([21.6, *[22.0] * 23, 3.0]):
        console.print(part)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert [" ".join(line[:-1]) for line in lines] == ["hour 0 21.6", "hours 1 to 23 22.0", "hour 24 3.0"]
    assert [len(line[-1]) for line in lines] == [39, 40, 5]
