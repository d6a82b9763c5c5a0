"""Placement of experts: an expert for each slot of each GPU, and each copy's share of tokens.

In: measured loads per layer and expert. Out: a placement whose fullest GPU is as light as possible, with a lower bound
for comparison. Each step has its own file:

    nodes.py    router groups to nodes, where copies may not leave a node
    search.py   experts and GPUs to pools, the part that is hard
    shares.py   pools to slots and shares
    moves.py    the same close to an existing placement
    bounds.py   lower bounds for any placement
"""

# L layers, E experts, G GPUs, S slots per GPU, R = G x S slots, N nodes, K groups

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from batchinfer.balance.experts.bounds import lower_bound
from batchinfer.balance.experts.moves import match, pools_near
from batchinfer.balance.experts.nodes import exchange_groups, lightest_packing, published_packing
from batchinfer.balance.experts.pools import EMPTY
from batchinfer.balance.experts.search import EFFORTS, Effort
from batchinfer.balance.experts.shares import fill_slots
from batchinfer.host_info import num_cores
from batchinfer.records import ConfigError


@dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """The slots of all layers; the slots of GPU g are g * S ... (g + 1) * S - 1.

    Args:
        expert_of_slot: [L, R] int64; every expert has at least one slot.
        share_of_slot: [L, R] float64, the part of the expert's tokens that goes here; those of one expert add up to 1.
            A slot without share is a copy that balance does not need.
        gpu_load: [L, G] float64, the load that results, in the units of the loads given.
        bound: [L] float64, a load that the fullest GPU of no placement can be below; at most gpu_load's maximum.
    """

    expert_of_slot: np.ndarray
    share_of_slot: np.ndarray
    gpu_load: np.ndarray
    bound: np.ndarray

    @property
    def max_load(self) -> np.ndarray:
        """The load of the fullest GPU, [L] float64."""
        return np.asarray(self.gpu_load.max(axis=1))

    @property
    def max_over_mean(self) -> np.ndarray:
        """The fullest GPU's time by that of a perfect split, [L] float64; 1 where there is no load."""
        mean_load = self.gpu_load.mean(axis=1)
        return np.divide(self.max_load, mean_load, out=np.ones_like(mean_load), where=mean_load > 0.0)


@dataclass(frozen=True)
class _Shape:
    """The sizes of one call."""

    num_gpus: int
    slots_per_gpu: int
    num_nodes: int  # 1: copies may be anywhere
    num_groups: int

    @property
    def gpus_per_node(self) -> int:
        return self.num_gpus // self.num_nodes


def place_experts(
    load: np.ndarray,
    *,
    num_slots: int,
    num_gpus: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    effort: str = "default",
    previous: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Place experts and copies of them so that the fullest GPU of each layer has the smallest possible load.

    Copies may be on any GPU; with num_nodes > 1 and num_groups a multiple of it, each node gets num_groups /
    num_nodes router groups, with all copies of their experts. The same input always gives the same plan.

    Args:
        load: [L, E] tokens per layer and expert, or anything in proportion to it, at least 0.
        num_slots: R of all GPUs together, at least E; the slots beyond E hold redundant experts.
        effort: "default" (58 layers of 256 experts on 144 GPUs: a second of processor time), "high" (20).
        previous: an existing placement, of the same shape. Few weights move, and the load is no higher than without;
            with two slots per GPU that leaves few choices, and about half of the slots change.

    Raises:
        ConfigError: sizes that do not divide, fewer slots than experts, or a load that is not a token count.
    """
    load_LE = _checked_load(load)
    num_layers, num_experts = load_LE.shape
    shape = _checked_shape(num_experts, num_slots, num_gpus, num_nodes, num_groups)
    if effort not in EFFORTS:
        raise ConfigError(f"effort is {effort!r}; it can be {' or '.join(map(repr, EFFORTS))}")
    held_LR, used_LR = _checked_previous(previous, num_layers, num_experts, num_slots)
    _compile()

    def place(layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        table = (shape.num_gpus, shape.slots_per_gpu)
        return _place_layer(
            load_LE[layer], shape, EFFORTS[effort], held_LR[layer].reshape(table), used_LR[layer].reshape(table)
        )

    with ThreadPoolExecutor(num_cores()) as threads:
        layers = list(threads.map(place, range(num_layers)))
    return ExpertPlacement(
        expert_of_slot=np.array([layer[0].ravel() for layer in layers], np.int64).reshape(num_layers, num_slots),
        share_of_slot=np.array([layer[1].ravel() for layer in layers], np.float64).reshape(num_layers, num_slots),
        gpu_load=np.array([layer[2] for layer in layers], np.float64).reshape(num_layers, num_gpus),
        bound=np.array([layer[3] for layer in layers], np.float64),
    )


@functools.cache
def _compile() -> None:
    """Call everything once on tiny inputs, so that only a process's first call is slow, whatever its arguments."""
    load_E, held_GS, used_GS = np.arange(1.0, 11.0), np.full((6, 2), EMPTY), np.ones((6, 2), np.bool_)
    shape = _Shape(num_gpus=6, slots_per_gpu=2, num_nodes=1, num_groups=1)
    expert_GS, _, _, _ = _place_layer(load_E, shape, EFFORTS["default"], held_GS, used_GS)
    shape = _Shape(num_gpus=6, slots_per_gpu=2, num_nodes=2, num_groups=10)
    _place_layer(load_E[::-1].copy(), shape, EFFORTS["default"], expert_GS, used_GS)


def _place_layer(
    load_E: np.ndarray, shape: _Shape, effort: Effort, held_GS: np.ndarray, used_GS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Return expert and share of each slot, load of each GPU, and bound, for the best of the node packings."""
    scale = float(load_E.max()) or 1.0
    load_E = load_E / scale
    num_slots = held_GS.size
    bound = lower_bound(load_E, num_slots, shape.num_gpus)
    best = None
    for node_of_E, packing_bound in _node_packings(load_E, shape, held_GS):
        bound = max(bound, packing_bound / shape.gpus_per_node)
        if best is None or best[2].max() > bound:
            placed = _place_on_nodes(load_E, node_of_E, shape, effort, held_GS, used_GS)
            if best is None or placed[2].max() < best[2].max():
                best = placed
    assert best is not None
    expert_GS, share_GS, load_G = best
    return expert_GS, share_GS, load_G * scale, min(bound, float(load_G.max())) * scale


def _node_packings(load_E: np.ndarray, shape: _Shape, held_GS: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Yield the node of each expert, [E], for each packing worth trying, with a lower bound for any fullest node."""
    if shape.num_nodes == 1:
        yield np.zeros(len(load_E), np.int64), 0.0
        return
    load_KE = load_E.reshape(shape.num_groups, -1)
    load_K = load_KE.sum(axis=1)
    lightest, bound = lightest_packing(load_K, shape.num_nodes)
    packings = [lightest]
    if load_KE.size > shape.num_nodes * ((shape.slots_per_gpu - 1) * shape.gpus_per_node + 1):
        # Several pools per node: its load alone does not decide.
        node_slots = held_GS.size // shape.num_nodes
        packings = [exchange_groups(load_KE, node_of_K, node_slots, shape.gpus_per_node) for node_of_K in packings]
        packings += [lightest, published_packing(load_K, shape.num_nodes)]
    current = _current_packing(shape, load_KE.shape[1], held_GS)
    if current is not None:
        packings.insert(0, current)
    for i, node_of_K in enumerate(packings):
        if not any(np.array_equal(node_of_K, other) for other in packings[:i]):
            yield np.repeat(node_of_K, load_KE.shape[1]), bound


def _current_packing(shape: _Shape, experts_per_group: int, held_GS: np.ndarray) -> np.ndarray | None:
    """Return the node of each group in an existing placement, [K]; None with empty slots or groups on several nodes."""
    held_NR = held_GS.reshape(shape.num_nodes, -1)
    if (held_NR == EMPTY).any():
        return None
    node_of_K = np.full(shape.num_groups, EMPTY)
    for node, held in enumerate(held_NR):
        groups = np.unique(held // experts_per_group)
        if len(groups) != shape.num_groups // shape.num_nodes or (node_of_K[groups] != EMPTY).any():
            return None
        node_of_K[groups] = node
    return node_of_K


def _place_on_nodes(
    load_E: np.ndarray, node_of_E: np.ndarray, shape: _Shape, effort: Effort, held_GS: np.ndarray, used_GS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return expert and share of each slot and load of each GPU, placing every node for itself."""
    held_NR = held_GS.reshape(shape.num_nodes, -1)
    overlap_NN = np.array([np.bincount(node_of_E[held[held != EMPTY]], minlength=shape.num_nodes) for held in held_NR])
    expert_GS, share_GS = np.empty_like(held_GS), np.empty(held_GS.shape)
    for place, node in enumerate(match(overlap_NN.astype(np.float64))):
        gpus = slice(place * shape.gpus_per_node, (place + 1) * shape.gpus_per_node)
        experts = np.flatnonzero(node_of_E == node)
        # Numbers within the node; the last one is for experts held elsewhere now, and for none.
        local_E = np.full(len(load_E) + 1, EMPTY)
        local_E[experts] = np.arange(len(experts))
        held = local_E[held_GS[gpus]]
        bound = lower_bound(load_E[experts], held.size, shape.gpus_per_node)
        pools, pool_of_G = pools_near(load_E[experts], held, used_GS[gpus], effort, bound)
        local, share_GS[gpus] = fill_slots(load_E[experts], pools, pool_of_G, held)
        expert_GS[gpus] = experts[local]
    return expert_GS, share_GS, (load_E[expert_GS] * share_GS).sum(axis=1)


def _checked_load(load: np.ndarray) -> np.ndarray:
    try:
        load_LE = np.asarray(load, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError("load is not a table of numbers; give one row per layer and one column per expert") from None
    if load_LE.ndim != 2 or load_LE.shape[1] == 0:
        raise ConfigError(f"load has the shape {load_LE.shape}; give one row per layer and one column per expert")
    wrong = np.argwhere(~(np.isfinite(load_LE) & (load_LE >= 0.0)))
    if len(wrong):
        layer, expert = wrong[0]
        raise ConfigError(
            f"load[{layer}, {expert}] is {load_LE[layer, expert]}, below 0 or no finite number; give token counts"
        )
    return load_LE


def _checked_shape(num_experts: int, num_slots: int, num_gpus: int, num_nodes: int, num_groups: int) -> _Shape:
    for name, value in (("num_gpus", num_gpus), ("num_nodes", num_nodes), ("num_groups", num_groups)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if num_slots % num_gpus or num_slots < num_experts:
        fitting = -(-max(num_slots, num_experts) // num_gpus) * num_gpus
        reason = (
            f"fewer than {num_experts} experts" if num_slots < num_experts else f"not a multiple of {num_gpus} GPUs"
        )
        raise ConfigError(f"num_slots is {num_slots}, {reason}; use {fitting}")
    if num_gpus % num_nodes:
        fitting = -(-num_gpus // num_nodes) * num_nodes
        raise ConfigError(
            f"num_gpus is {num_gpus}, not a multiple of {num_nodes} nodes; use {fitting} or other num_nodes"
        )
    if num_nodes == 1 or num_groups % num_nodes:
        return _Shape(num_gpus, num_slots // num_gpus, 1, 1)
    if num_experts % num_groups:
        raise ConfigError(
            f"num_groups is {num_groups}, not a divisor of {num_experts} experts; use one, or 1 for no groups"
        )
    return _Shape(num_gpus, num_slots // num_gpus, num_nodes, num_groups)


def _checked_previous(
    previous: ExpertPlacement | None, num_layers: int, num_experts: int, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts held now, [L, R], EMPTY without an existing placement, and whether tokens are sent there."""
    if previous is None:
        return np.full((num_layers, num_slots), EMPTY, np.int64), np.zeros((num_layers, num_slots), np.bool_)
    held_LR = np.asarray(previous.expert_of_slot, np.int64)
    if held_LR.shape != (num_layers, num_slots):
        raise ConfigError(f"previous has {held_LR.shape} layers and slots, not {(num_layers, num_slots)}; leave it out")
    if held_LR.size and not 0 <= held_LR.min() <= held_LR.max() < num_experts:
        raise ConfigError(f"previous holds experts {held_LR.min()} to {held_LR.max()} of {num_experts}; leave it out")
    return held_LR, np.asarray(previous.share_of_slot) > 0.0
