"""Seconds that expert rows travel between GPUs, from DeepEP's tables and one trace; or that experts travel instead.

Prefill uses the kernels that send a token once to each node and spread it there; decode uses those that send a row for
each expert straight to its GPU. A prefill unit may also gather the experts of each layer on every GPU.
"""

from math import ceil, comb, log
from typing import Literal, NamedTuple

import numpy as np

from batchinfer.model.config import ModelConfig
from batchinfer.sim.hardware import REFERENCE, Accelerator

Release = Literal["2025-02", "2025-06"]


class Tables(NamedTuple):
    """The figures of one release of DeepEP (H800, ConnectX-7 400 Gbit/s, hidden 7168, top-8), by EP size."""

    normal: dict[int, tuple[float, float]]  # GB/s between nodes of dispatch (FP8), of combine (BF16); 4,096 tokens
    low_latency: dict[int, tuple[float, float]]  # microseconds of dispatch, of combine; 128 tokens per GPU


# github.com/deepseek-ai/DeepEP, README at the first commit (24 February 2025) and at d8dd185 (5 June 2025)
TABLES: dict[Release, Tables] = {
    "2025-02": Tables(
        normal={16: (43, 43), 32: (44, 47), 64: (46, 45)},
        low_latency={8: (163, 318), 16: (173, 329), 32: (182, 350), 64: (186, 353), 128: (192, 369), 256: (194, 360)},
    ),
    "2025-06": Tables(
        normal={16: (43, 43), 32: (58, 57), 64: (51, 50)},
        low_latency={8: (77, 114), 16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)},
    ),
}
LATEST: Release = "2025-06"
NORMAL_NVLINK_GB_PER_S = (153, 158)  # inside a node, both releases
LOW_LATENCY_TOKENS, LOW_LATENCY_TOPK, LOW_LATENCY_HIDDEN = 128, 8, 7168
# github.com/deepseek-ai/profile-data, train.json (EP64 on 8 nodes, 4,096 tokens, 20 SMs, products on the others): while
# the GPU computes, dispatch takes 4.15-4.60 ms and combine 5.85-6.55 ms
TRACE_TOKENS, TRACE_EP = 4096, 64
TRACE_RELEASE: Release = "2025-02"  # the kernels of that time
TRACE_DISPATCH_S, TRACE_COMBINE_S = 4.375e-3, 6.2e-3
SCALE_BLOCK = 128  # values under one float32 scale of FP8


class ExchangeTimes(NamedTuple):
    """Seconds of dispatch and combine of one micro-batch in one layer."""

    dispatch_s: float
    combine_s: float


def nodes_per_token(model: ModelConfig, num_nodes: int) -> float:
    """Return the expected number of nodes with a token's experts.

    Router groups are spread evenly over nodes, and every choice is equally likely.
    """
    if num_nodes == 1 or model.n_routed_experts == 0:
        return 1.0
    if model.n_group % num_nodes and num_nodes % model.n_group:
        return _touched(num_nodes, model.num_experts_per_tok, model.n_routed_experts / num_nodes)
    per_group = model.n_routed_experts // model.n_group
    if num_nodes >= model.n_group:
        # a group is spread over several nodes; its chosen experts over these
        nodes_of_choice = num_nodes * model.topk_group // model.n_group
        return _touched(nodes_of_choice, model.num_experts_per_tok, model.topk_group * per_group / nodes_of_choice)
    # a node has several groups: it is missed when none of them is chosen, or no expert of the chosen ones is
    groups_per_node = model.n_group // num_nodes
    hit = 0.0
    for chosen_here in range(1, min(groups_per_node, model.topk_group) + 1):
        elsewhere = model.topk_group - chosen_here
        if elsewhere > model.n_group - groups_per_node:
            continue
        ways = comb(groups_per_node, chosen_here) * comb(model.n_group - groups_per_node, elsewhere)
        probability = ways / comb(model.n_group, model.topk_group)
        missed = _missed(chosen_here * per_group, model.topk_group * per_group, model.num_experts_per_tok)
        hit += probability * (1 - missed)
    return num_nodes * hit


def prefill_exchange(
    tokens: float,
    model: ModelConfig,
    ep_size: int,
    gpu: Accelerator,
    *,
    receive_skew: float = 1.0,
    release: Release = LATEST,
) -> ExchangeTimes:
    """Return the seconds of dispatch (FP8) and combine (BF16) of one prefill micro-batch, while the GPU computes.

    Args:
        tokens: per GPU.
        ep_size: GPUs that share the experts; 1 takes no time.
        receive_skew: rows of the busiest GPU by the mean.
        release: of DeepEP.
    """
    if ep_size == 1:
        return ExchangeTimes(0.0, 0.0)
    num_nodes = ceil(ep_size / gpu.nvlink_gpus)
    if num_nodes == 1:
        rates = np.array(NORMAL_NVLINK_GB_PER_S) * 1e9 * gpu.nvlink_bytes_per_s / REFERENCE.nvlink_bytes_per_s
        copies = min(float(ep_size), _touched(ep_size, model.num_experts_per_tok, model.n_routed_experts / ep_size))
    else:
        rates = _normal_rates(ep_size, release) * gpu.network_bytes_per_s / REFERENCE.network_bytes_per_s
        copies = nodes_per_token(model, num_nodes)
    seconds = tokens * copies * _row_bytes(model.hidden_size) / (rates * _rate_under_overlap()) * receive_skew
    return ExchangeTimes(*map(float, seconds))


def gather_s(num_bytes: float, ep_size: int, gpu: Accelerator, *, release: Release = LATEST) -> float:
    """Return the seconds of an all-gather of weights: each GPU of a unit holds a share and gets a copy of all.

    Each node reads what it lacks once, every GPU through its own card, and spreads it over NVLink. Both run at the same
    time, at the rates that DeepEP's dispatch reaches.

    Args:
        num_bytes: of the whole copy.
    """
    if ep_size == 1:
        return 0.0
    num_nodes = ceil(ep_size / gpu.nvlink_gpus)
    in_node = min(ep_size, gpu.nvlink_gpus)
    nvlink = NORMAL_NVLINK_GB_PER_S[0] * 1e9 * gpu.nvlink_bytes_per_s / REFERENCE.nvlink_bytes_per_s
    seconds = num_bytes * (1 - 1 / in_node) / nvlink
    if num_nodes > 1:
        network = float(_normal_rates(ep_size, release)[0]) * gpu.network_bytes_per_s / REFERENCE.network_bytes_per_s
        seconds = max(seconds, num_bytes * (1 - 1 / num_nodes) / in_node / network)
    return seconds


def decode_exchange(
    tokens: float,
    model: ModelConfig,
    ep_size: int,
    gpu: Accelerator,
    *,
    receive_skew: float = 1.0,
    release: Release = LATEST,
) -> ExchangeTimes:
    """Return the seconds of dispatch and combine of one micro-batch of decode.

    The published table's time for 128 tokens is split into bytes at the rate of the link and a constant part.
    """
    if ep_size == 1:
        return ExchangeTimes(0.0, 0.0)
    if gpu.rates is not None:
        shape = model.hidden_size, model.num_experts_per_tok, model.n_routed_experts
        measured = gpu.rates.exchange_s(tokens * receive_skew, *shape, ep_size)
        if measured is not None:
            return ExchangeTimes(*measured)
    # all GPUs of one NVLink are as far as those of a node
    is_one_node = ep_size <= gpu.nvlink_gpus
    table_s = _by_ways(TABLES[release].low_latency, min(ep_size, 8) if is_one_node else ep_size) * 1e-6
    table_bytes = LOW_LATENCY_TOKENS * LOW_LATENCY_TOPK * _row_bytes(LOW_LATENCY_HIDDEN)
    own_bytes = tokens * model.num_experts_per_tok * _row_bytes(model.hidden_size)
    # up to one node the rows go over NVLink, beyond it most go over the network
    table_rate = table_bytes / table_s if is_one_node else REFERENCE.network_bytes_per_s
    rate = table_rate * (1.0 if is_one_node else gpu.network_bytes_per_s / REFERENCE.network_bytes_per_s)
    fixed_s = np.maximum(0.0, table_s - table_bytes / table_rate)
    return ExchangeTimes(*map(float, fixed_s + own_bytes * receive_skew / rate))


def _row_bytes(hidden: int) -> np.ndarray:
    """Return the bytes of a token's row, [2]: dispatched in FP8 with its scales, combined in BF16."""
    return np.array([hidden + 4.0 * hidden / SCALE_BLOCK, 2.0 * hidden])


def _normal_rates(ep_size: int, release: Release) -> np.ndarray:
    """Return the bytes/s between nodes, [2]."""
    return _by_ways(TABLES[release].normal, ep_size) * 1e9


def _by_ways(table: dict[int, tuple[float, float]], ep_size: int) -> np.ndarray:
    """Return entries of a table, [2], interpolated over the logarithm of its EP sizes, constant outside."""
    sizes = sorted(table)
    return np.array([np.interp(log(ep_size), np.log(sizes), [table[size][way] for size in sizes]) for way in (0, 1)])


def _rate_under_overlap() -> np.ndarray:
    """Return the share of the table's rate left under products, [2], by the trace.

    DeepSeek-V3 sends a token to at most 4 of 8 nodes.
    """
    copies = _touched(4, LOW_LATENCY_TOPK, 32)
    sent = TRACE_TOKENS * copies * _row_bytes(LOW_LATENCY_HIDDEN)
    return sent / np.array([TRACE_DISPATCH_S, TRACE_COMBINE_S]) / _normal_rates(TRACE_EP, TRACE_RELEASE)


def _touched(targets: int, choices: int, experts_per_target: float) -> float:
    """Return the expected number of targets that have at least one of the chosen experts."""
    return targets * (1 - _missed(experts_per_target, targets * experts_per_target, choices))


def _missed(experts_here: float, experts: float, choices: int) -> float:
    """Return the probability that none of `choices` different experts is here."""
    missed = 1.0
    for drawn in range(choices):
        missed *= max(0.0, experts - experts_here - drawn) / (experts - drawn)
    return missed
