"""A placement that stays good when loads change: redundant slots hold the heaviest experts, and all copies are used.

Loads are never exactly as measured. An expert's unexpected tokens fall on one GPU if one slot has all its tokens, and
on several GPUs that share them. `place_experts` fills GPUs with as few shared experts as possible. This module shares
as much as possible without giving any GPU more load:

    loads 4 4 3 1 of experts a b c d     place_experts   [a - c]  4 + 0 + 2     [b c d]  4 + 1 + 1
    on 2 GPUs of 3 slots                 here            [a b c]  1.5 + 1.5 + 3 [a b d]  2.5 + 2.5 + 1
"""

# L layers, E experts, G GPUs, S slots per GPU, R = G x S slots

from collections import Counter
from dataclasses import replace

import numpy as np

from batchinfer.balance.compiled import compiled
from batchinfer.balance.experts.bounds import replica_counts
from batchinfer.balance.experts.moves import match
from batchinfer.balance.experts.placement import ExpertPlacement, place_experts

MAX_ROUNDS = 2000
CLOSE = 1e-6  # of the mean load: tolerance of a GPU's load above its target


def place_robustly(
    load: np.ndarray,
    *,
    num_slots: int,
    num_gpus: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    effort: str = "default",
    previous: ExpertPlacement | None = None,
) -> ExpertPlacement:
    """Place experts as `place_experts` does, then spread tokens over as many GPUs as possible.

    The largest loads stay the same to a millionth of the mean.

    Raises:
        ConfigError: as for `place_experts`.
    """
    placement = place_experts(
        load,
        num_slots=num_slots,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        num_groups=num_groups,
        effort=effort,
        previous=previous,
    )
    load_LE = np.asarray(load, dtype=np.float64)
    expert_LR, share_LR = placement.expert_of_slot.copy(), placement.share_of_slot.copy()
    for layer, load_E in enumerate(load_LE):
        if not load_E.any():
            continue
        held_GS = expert_LR[layer].reshape(num_gpus, -1)
        before_GS = None if previous is None else np.asarray(previous.expert_of_slot)[layer].reshape(held_GS.shape)
        tried = [(held_GS, placement.gpu_load[layer])]
        mean = load_E.sum() / num_gpus
        if num_nodes == 1 and placement.max_load[layer] <= mean * (1.0 + CLOSE):
            fresh_GS = _heaviest_copied(load_E, num_gpus, held_GS.shape[1])
            fresh_GS = _near(fresh_GS, held_GS if before_GS is None else before_GS)
            tried.insert(0, (fresh_GS, np.full(num_gpus, mean)))
            if previous is not None and before_GS is not None and previous.gpu_load[layer].any():
                tried.insert(0, (before_GS, np.full(num_gpus, mean)))  # other shares alone: nothing moves
        for expert_GS, full_G in tried:
            share_GS = _even_shares(load_E, expert_GS, full_G, CLOSE * mean)
            if share_GS[0, 0] >= 0.0:
                expert_LR[layer], share_LR[layer] = expert_GS.ravel(), share_GS.ravel()
                break
    gpu_load = np.take_along_axis(load_LE, expert_LR, axis=1) * share_LR
    gpu_load = gpu_load.reshape(len(load_LE), num_gpus, -1).sum(axis=2)
    bound = np.minimum(placement.bound, gpu_load.max(axis=1))
    return replace(placement, expert_of_slot=expert_LR, share_of_slot=share_LR, gpu_load=gpu_load, bound=bound)


def _heaviest_copied(load_E: np.ndarray, num_gpus: int, slots_per_gpu: int) -> np.ndarray:
    """Return experts per slot, [G, S], with further slots for the experts with most load per slot.

    Each slot of an expert is on another GPU if possible.
    """
    num_slots_E = replica_counts(load_E, num_gpus * slots_per_gpu, num_gpus)
    descending = np.argsort(-load_E / num_slots_E, kind="stable")
    return _spread_copies(load_E, num_slots_E, descending, num_gpus, slots_per_gpu)


@compiled
def _spread_copies(
    load_E: np.ndarray, num_slots_E: np.ndarray, descending: np.ndarray, num_gpus: int, slots_per_gpu: int
) -> np.ndarray:
    """Return experts per slot, [G, S]: each slot on the lightest GPU that lacks its expert, else on the lightest."""
    expert_GS, used_G = np.empty((num_gpus, slots_per_gpu), np.int64), np.zeros(num_gpus, np.int64)
    load_G, newest_G = np.zeros(num_gpus), np.full(num_gpus, -1, np.int64)  # its latest expert
    for expert in descending:
        for _ in range(num_slots_E[expert]):
            best = -1
            for must_be_new in (True, False):
                for gpu in range(num_gpus):
                    if used_G[gpu] == slots_per_gpu or (must_be_new and newest_G[gpu] == expert):
                        continue
                    if best < 0 or load_G[gpu] < load_G[best]:
                        best = gpu
                if best >= 0:
                    break
            expert_GS[best, used_G[best]] = expert
            load_G[best] += load_E[expert] / num_slots_E[expert]
            used_G[best] += 1
            newest_G[best] = expert
    return expert_GS


def _near(expert_GS: np.ndarray, before_GS: np.ndarray) -> np.ndarray:
    """Return the same sets of experts on other GPUs and in other slots, so that few slots change."""
    num_experts = int(max(expert_GS.max(), before_GS.max())) + 1
    new_GE, old_GE = (np.zeros((len(table), num_experts)) for table in (expert_GS, before_GS))
    for counts_GE, table in ((new_GE, expert_GS), (old_GE, before_GS)):
        np.add.at(counts_GE, (np.arange(len(table))[:, None], table), 1.0)
    near_GS = expert_GS[match(np.minimum(old_GE[:, None], new_GE[None]).sum(axis=2))]
    for gpu, (new, old) in enumerate(zip(near_GS, before_GS, strict=True)):
        kept = [expert if expert in new and expert not in old[:slot] else -1 for slot, expert in enumerate(old)]
        left = Counter(new.tolist()) - Counter(kept)
        others = left.elements()
        near_GS[gpu] = [expert if expert >= 0 else next(others) for expert in kept]
    return near_GS


@compiled
def _even_shares(load_E: np.ndarray, expert_GS: np.ndarray, full_G: np.ndarray, close: float) -> np.ndarray:
    """Return shares that give each GPU its load, [G, S], as even as that allows; the first is -1 if impossible.

    Of all amounts that add up to each expert's load and each GPU's, the ones nearest to even amounts, by projecting on
    one of the conditions after the other (Dykstra 1983).
    """
    num_gpus, slots_per_gpu = expert_GS.shape
    copies_E = np.zeros(len(load_E))
    for expert in expert_GS.ravel():
        copies_E[expert] += 1.0
    amount_GS, below_GS = np.empty(expert_GS.shape), np.zeros(expert_GS.shape)
    for gpu in range(num_gpus):
        for slot, expert in enumerate(expert_GS[gpu]):
            amount_GS[gpu, slot] = load_E[expert] / copies_E[expert]
    off_G = np.empty(num_gpus)
    for _ in range(MAX_ROUNDS):
        are_there = True
        for gpu in range(num_gpus):
            total = 0.0
            for slot in range(slots_per_gpu):
                total += amount_GS[gpu, slot]
                are_there = are_there and amount_GS[gpu, slot] >= 0.0
            off_G[gpu] = total - full_G[gpu]
            are_there = are_there and abs(off_G[gpu]) <= close
        if are_there:
            share_GS = np.empty(expert_GS.shape)
            for gpu in range(num_gpus):
                for slot, expert in enumerate(expert_GS[gpu]):
                    load = load_E[expert]
                    share_GS[gpu, slot] = amount_GS[gpu, slot] / load if load > 0.0 else 1.0 / copies_E[expert]
            return share_GS
        for gpu in range(num_gpus):
            for slot in range(slots_per_gpu):
                amount = amount_GS[gpu, slot] - off_G[gpu] / slots_per_gpu + below_GS[gpu, slot]
                below_GS[gpu, slot] = min(amount, 0.0)
                amount_GS[gpu, slot] = max(amount, 0.0)
        off_E = -load_E
        for gpu in range(num_gpus):
            for slot, expert in enumerate(expert_GS[gpu]):
                off_E[expert] += amount_GS[gpu, slot]
        for gpu in range(num_gpus):
            for slot, expert in enumerate(expert_GS[gpu]):
                amount_GS[gpu, slot] -= off_E[expert] / copies_E[expert]
    return np.full(expert_GS.shape, -1.0)
