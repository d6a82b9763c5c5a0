"""The figures of `batchinfer simulate` for a spec."""

import time
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.balance.request_load import RequestLoad
from batchinfer.model.config import ModelConfig, load_model_config
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.report.price import margin
from batchinfer.report.price.price_list import PriceList, read_prices
from batchinfer.sim.cluster import Cluster, History, nodes_for, simulate
from batchinfer.sim.day import make_group, simulate_day
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import Accelerator, accelerator
from batchinfer.sim.memory import kv_tokens_per_gpu
from batchinfer.sim.search import LARGEST_BATCH, Rated, Rater
from batchinfer.sim.spec import DaySpec, Spec
from batchinfer.sim.steps import Unit, decode_step
from batchinfer.sim.suggest import MILLION, changes, changes_table
from batchinfer.sim.workload import HOUR_S, Workload, make_workload

MAX_TRIES = 8  # to find the nodes that finish in time


@dataclass(frozen=True, slots=True)
class _Job:
    """A spec, resolved."""

    spec: Spec
    model: ModelConfig
    gpu: Accelerator
    workload: Workload
    rater: Rater
    prices: PriceList
    prefill: Unit
    decode: Unit
    requests_per_gpu: int
    kv_tokens: float  # per GPU of a decode unit
    prefill_rated: Rated
    decode_rated: Rated


def answer(spec: Spec) -> dict[str, Any]:
    """Return all figures of a spec as one JSON-ready document.

    Raises:
        ConfigError: the model, the price list or the plan cannot be used, or something does not fit.
    """
    started = time.perf_counter()
    job = _resolve(spec)
    happened = _requests_one_by_one(job) if spec.day is None else _whole_day(job, spec.day)
    figures = {"gpu": job.gpu.name, "rates": job.gpu.rates_source, **happened, "cheapest": _cheapest(job)}
    return figures | {"simulated_in_s": time.perf_counter() - started}


def suggestion(spec: Spec) -> dict[str, Any]:
    """Return the changes that lead from a spec's layout to the cheapest one without a latency target.

    Raises:
        ConfigError: as for `answer`.
    """
    started = time.perf_counter()
    job = _resolve(spec)
    held = None
    if spec.day is not None:
        day = _whole_day(job, spec.day)
        held = day["gpu_hours"] / day["requests"] * MILLION
    sizes = job.prefill, spec.prefill.tokens_per_gpu, job.decode, job.decode_rated.batch
    found = changes(job.rater, *sizes, held_gpu_hours=held)
    return {
        "gpu": job.gpu.name,
        "rates": job.gpu.rates_source,
        "changes": [
            {"change": change.name, "reason": change.reason, "gpu_hours_per_million_requests": change.gpu_hours}
            for change in found
        ],
        "lines": changes_table(found),
        "simulated_in_s": time.perf_counter() - started,
    }


def _requests_one_by_one(job: _Job) -> dict[str, Any]:
    cluster_spec, needed = job.spec.cluster, None
    if cluster_spec.finish_hours is not None:
        needed, history, cluster = _nodes_to_finish(job, cluster_spec.finish_hours * HOUR_S)
    if cluster_spec.nodes is not None:
        cluster = _cluster(job, cluster_spec.nodes)
        history = simulate(job.workload, cluster, job.rater.deals)
    return {
        **_tokens(job, 1.0),
        **_what_happened(job, cluster, history),
        **_money(job, history.node_seconds, 1.0),
        "nodes_per_group": None,
        "longest_wait_s": None,
        "nodes_to_finish": needed,
        "finish_hours": cluster_spec.finish_hours,
        "prefill": _stage(job.prefill_rated, history.prefill_limits, "tokens_per_gpu"),
        "decode": _stage(job.decode_rated, history.decode_limits, "requests_per_gpu"),
    }


def _whole_day(job: _Job, day: DaySpec) -> dict[str, Any]:
    """Simulate full units at their rates, as many as each hour's load needs."""
    work, prefill, decode, per_node = job.workload, job.prefill_rated, job.decode_rated, job.gpu.gpus_per_node
    times = day.input_tokens / float(work.delivered.input_tokens)
    group = make_group(prefill, decode, per_node)
    found = simulate_day(day.load_by_hour, times * group.seconds, group, job.spec.cluster.nodes or 0)
    share_of_prefill = group.prefill_nodes / group.nodes
    return {
        **_tokens(job, times),
        "hours": len(day.load_by_hour),
        "prefill_nodes": round(max(found.nodes) * share_of_prefill),
        "decode_nodes": round(max(found.nodes) * (1 - share_of_prefill)),
        "nodes_per_group": group.nodes,
        "peak_nodes": max(found.nodes),
        "mean_nodes": sum(found.nodes) / len(found.nodes),
        "nodes_by_hour": found.by_hour,
        "longest_wait_s": found.longest_wait_s,
        "prefill_tokens_per_s_per_node": float(work.prompt_tokens.sum()) / prefill.gpu_seconds * per_node,
        "decode_tokens_per_s_per_node": float((work.output_tokens - 1).sum()) / decode.gpu_seconds * per_node,
        "output_tokens_per_s_per_request": 1 / decode.step.seconds,
        "mean_kv_tokens_per_output_token": work.mean_kv_tokens,
        **_balances(job),
        "busy_share": found.busy_share,
        **_money(job, found.node_seconds, times),
        "nodes_to_finish": None,
        "finish_hours": None,
        "prefill": _stage(prefill, {prefill.step.bottleneck: 1.0}, "tokens_per_gpu"),
        "decode": _stage(decode, {decode.step.bottleneck: 1.0}, "requests_per_gpu"),
    }


def _tokens(job: _Job, times: float) -> dict[str, int]:
    """Return the sums over the requests, times the number of repetitions."""
    work = job.workload
    return {
        "requests": round(len(work) * times),
        "input_tokens": round(work.delivered.input_tokens * times),
        "cached_tokens": round(work.delivered.cached_tokens * times),
        "output_tokens": round(work.delivered.output_tokens * times),
    }


def _resolve(spec: Spec) -> _Job:
    model, gpu = load_model_config(Path(spec.model.path)), accelerator(spec.cluster.gpu, spec.cluster.rates)
    prices = PriceList() if spec.pricing is None else read_prices(Path(spec.pricing.file))
    workload = make_workload(spec.workload, part_tokens=spec.prefill.part_tokens)
    rater = Rater(
        workload=workload,
        deals=Deals(workload, request_load=RequestLoad(*model.decode_loads)),
        model=model,
        gpu=gpu,
        memory_reserve=spec.cluster.memory_reserve,
        disk_bytes_per_s=spec.cluster.disk_bytes_per_s,
        expert_spread=spec.workload.expert_spread,
        seed=spec.workload.seed,
    )
    release, reserve = spec.cluster.exchange, spec.cluster.memory_reserve
    prefill, decode = (
        # without experts every GPU holds the whole model, and there is nothing to repeat
        Unit(stage.ep_size, stage.redundant_experts if model.n_routed_experts else 0, release=release)
        for stage in (spec.prefill, spec.decode)
    )
    kv_tokens_per_gpu(model, prefill, gpu, reserve)  # only whether the weights fit
    kv_tokens = kv_tokens_per_gpu(model, decode, gpu, reserve)
    fitting = rater.requests_that_fit(kv_tokens)
    if fitting < 1:
        raise ConfigError(
            f"decode.ep_size is {decode.ep_size}: its GPUs have room for {kv_tokens:,.0f} KV tokens, less than one "
            "request needs; use a larger ep_size or a GPU with more memory"
        )
    requests = spec.decode.requests_per_gpu or min(fitting, LARGEST_BATCH)
    if requests > fitting:
        note(
            f"warning: decode.requests_per_gpu is {requests:,}, but the KV memory of a GPU holds {fitting:,} requests "
            f"of this workload: figures of full units are for {fitting:,}"
        )
    prefill_rated = rater.better("prefill", prefill, spec.prefill.tokens_per_gpu)
    decode_rated = rater.better("decode", decode, min(requests, fitting))
    prefill = rater.with_skew(replace(prefill, overlap=prefill_rated.overlap), spec.prefill.tokens_per_gpu)
    decode = rater.with_skew(replace(decode, overlap=decode_rated.overlap), requests)
    return _Job(
        spec=spec,
        model=model,
        gpu=gpu,
        workload=workload,
        rater=rater,
        prices=prices,
        prefill=prefill,
        decode=decode,
        requests_per_gpu=requests,
        kv_tokens=kv_tokens,
        prefill_rated=prefill_rated,
        decode_rated=decode_rated,
    )


def _cluster(job: _Job, nodes: int) -> Cluster:
    """Deal nodes to prefill and decode in whole units so that the slower of both is as fast as possible."""
    gpus = nodes * job.gpu.gpus_per_node
    best: tuple[float, int, int] | None = None
    for num_prefill in range(1, gpus // job.prefill.ep_size + 1):
        num_decode = (gpus - num_prefill * job.prefill.ep_size) // job.decode.ep_size
        if num_decode < 1:
            break
        seconds = max(
            job.prefill_rated.gpu_seconds / (num_prefill * job.prefill.ep_size),
            job.decode_rated.gpu_seconds / (num_decode * job.decode.ep_size),
        )
        if best is None or seconds < best[0]:
            best = seconds, num_prefill, num_decode
    if best is None:
        least = sum(nodes_for(unit, job.gpu.gpus_per_node) for unit in (job.prefill, job.decode))
        raise ConfigError(
            f"cluster.nodes is {nodes}, but a prefill and a decode unit take {least}; give that or a smaller ep_size"
        )
    return Cluster(
        model=job.model,
        gpu=job.gpu,
        prefill=job.prefill,
        decode=job.decode,
        num_prefill_units=best[1],
        num_decode_units=best[2],
        prefill_tokens_per_gpu=job.spec.prefill.tokens_per_gpu,
        decode_requests_per_gpu=job.requests_per_gpu,
        kv_tokens_per_gpu=job.kv_tokens,
        disk_bytes_per_s=job.spec.cluster.disk_bytes_per_s,
        max_wait_s=job.spec.cluster.max_wait_s,
        release_after_s=job.spec.cluster.release_after_s,
    )


def _nodes_to_finish(job: _Job, deadline_s: float) -> tuple[int, History, Cluster]:
    """Return the smallest number of nodes found whose simulated run ends in time, its history and cluster.

    The search begins with the nodes that full units would need and grows by the excess of the simulated time. Nodes
    that make no further unit are not counted.

    Raises:
        ConfigError: more nodes do not help.
    """
    # no answer ends before its tokens have come one after the other
    longest = float(job.workload.output_tokens.max() - 1)
    least_s = longest * decode_step(1.0 / job.decode.ep_size, 1.0, job.model, job.gpu, job.decode).seconds
    if deadline_s < least_s:
        raise ConfigError(
            f"cluster.finish_hours is {deadline_s / HOUR_S:g}, but the longest answer alone takes "
            f"{least_s / HOUR_S:.4g} h on any number of nodes: give more time"
        )
    gpu_seconds = job.prefill_rated.gpu_seconds + job.decode_rated.gpu_seconds
    unit_gpus = job.prefill.ep_size + job.decode.ep_size
    per_node = job.gpu.gpus_per_node
    nodes = ceil(max(unit_gpus, gpu_seconds / deadline_s) / per_node)
    for _ in range(MAX_TRIES):
        cluster = _cluster(job, nodes)
        history = simulate(job.workload, cluster, job.rater.deals)
        if history.end_s <= deadline_s:
            used = cluster.num_prefill_units * job.prefill.ep_size + cluster.num_decode_units * job.decode.ep_size
            return ceil(used / per_node), history, cluster
        step = ceil(min(job.prefill.ep_size, job.decode.ep_size) / per_node)
        nodes = max(nodes + step, ceil(nodes * sqrt(history.end_s / deadline_s)))
    raise ConfigError(
        f"cluster.finish_hours is {deadline_s / HOUR_S:g}, but {nodes:,} nodes do not finish by then either; the last "
        f"request ends after {history.end_s / HOUR_S:.2f} h: give more time"
    )


def _what_happened(job: _Job, cluster: Cluster, history: History) -> dict[str, Any]:
    workload = job.workload
    prefill_node_s = history.prefill_busy_s * cluster.nodes_of(cluster.prefill)
    decode_node_s = history.decode_busy_s * cluster.nodes_of(cluster.decode)
    decoded = float((workload.output_tokens - 1).sum())
    answering = history.finished_s - history.first_token_s
    is_decoded = workload.output_tokens > 1
    return {
        "hours": history.end_s / HOUR_S,
        "prefill_nodes": cluster.num_prefill_units * cluster.nodes_of(cluster.prefill),
        "decode_nodes": cluster.num_decode_units * cluster.nodes_of(cluster.decode),
        "peak_nodes": history.peak_nodes,
        "mean_nodes": history.node_seconds / history.end_s,
        "nodes_by_hour": _nodes_by_hour(history),
        "prefill_tokens_per_s_per_node": float(workload.prompt_tokens.sum()) / prefill_node_s,
        "decode_tokens_per_s_per_node": decoded / decode_node_s if decode_node_s else None,
        "output_tokens_per_s_per_request": (
            float(np.median((workload.output_tokens[is_decoded] - 1) / answering[is_decoded]))
            if is_decoded.any()
            else None
        ),
        "mean_kv_tokens_per_output_token": workload.mean_kv_tokens,
        **_balances(job),
        "busy_share": (prefill_node_s + decode_node_s) / history.node_seconds,
    }


def _balances(job: _Job) -> dict[str, float]:
    """Return how even prefill steps and the KV on the ranks of a full decode unit are."""
    prefill = job.rater.deals.prefill(job.prefill.ep_size, job.spec.prefill.tokens_per_gpu)
    decode = job.rater.deals.decode(job.decode.ep_size, job.requests_per_gpu)
    return {
        "prefill_tokens_max_over_mean": prefill.new_tokens,
        "prefill_attention_max_over_mean": prefill.attention,
        "decode_kv_max_over_mean": decode.max_over_mean,
        "decode_kv_bound": decode.bound,
    }


def _nodes_by_hour(history: History) -> list[float]:
    """Return the mean nodes of each hour; of the last hour only its used part."""
    minutes = (np.arange(max(1, int(history.end_s // 60))) + 0.5) * 60
    nodes = history.nodes_at(minutes)
    return [round(float(nodes[start : start + 60].mean()), 2) for start in range(0, len(nodes), 60)]


def _money(job: _Job, node_seconds: float, times: float) -> dict[str, float | None]:
    prices, delivered = job.prices, job.workload.delivered
    gpu_hours = node_seconds / HOUR_S * job.gpu.gpus_per_node
    counts = (delivered.cached_tokens, delivered.new_tokens, delivered.output_tokens)
    tokens = [times * float(count) for count in counts]
    revenue = margin.revenue(*tokens, input_hit=prices.input_hit, input_miss=prices.input_miss, output=prices.output)
    return {"gpu_hours": gpu_hours, **margin.money(margin.cost(gpu_hours, prices.gpu_hour), revenue, tokens[2])}


def _stage(rated: Rated, limits: dict[str, float], batch_name: str) -> dict[str, Any]:
    """Return the figures of a stage with full units, and its bottlenecks over the whole simulation."""
    total = sum(limits.values())
    return {
        "ep_size": rated.ep_size,
        "redundant_experts": rated.redundant_experts,
        batch_name: rated.batch,
        "step_s": rated.step.seconds,
        "bottleneck": max(limits, key=limits.__getitem__) if limits else None,
        "share_of_time_by_bottleneck": {name: seconds / total for name, seconds in sorted(limits.items())},
        "step_s_by_stage": rated.step.by_stage,
        "waiting_for_exchange_s": rated.step.exposed_s,
    }


def _cheapest(job: _Job) -> dict[str, Any]:
    """Return the best EP sizes and batch of full units, ignoring latency."""
    base = Unit(1, release=job.spec.cluster.exchange)
    prefill, decode = job.rater.cheapest("prefill", base), job.rater.cheapest("decode", base)
    gpu_hours = (prefill.gpu_seconds + decode.gpu_seconds) / HOUR_S
    cost = margin.cost(gpu_hours, job.prices.gpu_hour)
    return {
        "prefill_ep_size": prefill.ep_size,
        "prefill_tokens_per_gpu": prefill.batch,
        "decode_ep_size": decode.ep_size,
        "decode_requests_per_gpu": decode.batch,
        "usd_per_million_output_tokens": margin.per_million(cost, float(job.workload.delivered.output_tokens)),
        "gpu_hours": gpu_hours,
        "gpu_hours_as_specified": (job.prefill_rated.gpu_seconds + job.decode_rated.gpu_seconds) / HOUR_S,
    }
