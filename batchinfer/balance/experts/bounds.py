"""Lower bounds on the load of the fullest GPU, for any placement of experts.

However tokens are split, the fullest GPU has at least the mean load, and an expert of load w needs ceil(w / t) slots
when no slot may carry more than t. The third bound sharpens this count: a nearly full slot leaves no room on its GPU
for even the lightest expert, so that its expert needs one slot more (see `_is_impossible`).
"""

# E experts, G GPUs, S slots per GPU, R = G x S slots

import math

import numpy as np

from batchinfer.balance.compiled import compiled

NUM_HALVINGS = 30  # of the interval that is searched for the count bound
WIDEST = 1.5  # its upper end, in simple bounds
ROUNDING = 1e-12


def simple_bound(load_E: np.ndarray, num_slots: int, num_gpus: int) -> float:
    """Return the mean load per GPU, or the smallest t with sum(max(1, ceil(load / t))) <= num_slots if larger."""
    return max(float(load_E.sum()) / num_gpus, float((load_E / replica_counts(load_E, num_slots, num_slots)).max()))


@compiled
def replica_counts(load_E: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """Return [E] slots of each expert when every next slot goes to the expert with the largest load per slot.

    Up to `most` slots for an expert, unless all have so many. Without that limit no other counts have a smaller largest
    load per slot (step 2 of github.com/deepseek-ai/EPLB).
    """
    num_slots_E = np.ones(len(load_E), np.int64)
    for _ in range(num_slots - len(load_E)):
        next_one = -1
        for expert in range(len(load_E)):
            if num_slots_E[expert] < most and (
                next_one < 0 or load_E[expert] / num_slots_E[expert] > load_E[next_one] / num_slots_E[next_one]
            ):
                next_one = expert
        num_slots_E[max(next_one, 0)] += 1
    return num_slots_E


def lower_bound(load_E: np.ndarray, num_slots: int, num_gpus: int) -> float:
    """Return the tightest bound known: the simple one, or the sharpened count if that proves more."""
    bound = simple_bound(load_E, num_slots, num_gpus)
    slots_per_gpu = num_slots // num_gpus
    lightest = float(load_E.min())
    # One pool reaches the mean, and with one slot per GPU the count is exact (search.py).
    if slots_per_gpu == 1 or len(load_E) <= (slots_per_gpu - 1) * num_gpus + 1 or lightest <= 0.0:
        return bound
    descending_E = np.sort(load_E)[::-1].copy()
    return float(_count_bound(descending_E, bound, num_gpus, slots_per_gpu))


@compiled
def _count_bound(descending_E: np.ndarray, simple: float, num_gpus: int, slots_per_gpu: int) -> float:
    """Return the largest load that is proved impossible, found by halving; `simple` if nothing more is proved."""
    low, high = simple, WIDEST * simple
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2.0
        if _is_impossible(descending_E, middle, num_gpus, slots_per_gpu):
            low = middle
        else:
            high = middle
    return low


@compiled
def _is_impossible(descending_E: np.ndarray, limit: float, num_gpus: int, slots_per_gpu: int) -> bool:
    """Return whether this certificate proves that some GPU must carry more than `limit`.

    Give each expert a number of slots n (`_claim_slots`), together one more than there are. If no pool of m GPUs could
    hold experts with more than S * m of them, then no placement exists (add up the pools). A pool of k experts has
    m = (k - 1) / (S - 1) GPUs, so that in such a pool

        sum of (S - (S - 1) * n) <= 1   although   sum of (limit / (S - 1) - load) >= limit / (S - 1):

    a knapsack. Experts with one slot count 1 in the first sum, and of them the lightest are the best; the others count
    0 or less and are few, and `spare_D` holds the largest second sum of some of them for each value -D of the first.
    """
    num_experts = len(descending_E)
    share = limit / (slots_per_gpu - 1)
    num_slots_E = _claim_slots(descending_E, limit, num_gpus * slots_per_gpu + 1)
    if num_slots_E.sum() <= num_gpus * slots_per_gpu:
        return False
    depth = 0
    for expert in range(num_experts):
        if num_slots_E[expert] > 1:
            depth += (slots_per_gpu - 1) * num_slots_E[expert] - slots_per_gpu
    spare_D = np.full(depth + 1, -np.inf)
    spare_D[0] = 0.0
    for expert in range(num_experts):
        if num_slots_E[expert] > 1:
            step = (slots_per_gpu - 1) * num_slots_E[expert] - slots_per_gpu
            for d in range(depth, step - 1, -1):
                spare_D[d] = max(spare_D[d], spare_D[d - step] + share - descending_E[expert])

    spare_of_light, best_of_light = 0.0, 0.0  # of the lightest d + 1 experts with one slot, or fewer of them
    expert = num_experts - 1
    for d in range(depth + 1):
        while expert >= 0 and num_slots_E[expert] > 1:
            expert -= 1
        if expert >= 0:
            spare_of_light += share - descending_E[expert]
            best_of_light = max(best_of_light, spare_of_light)
            expert -= 1
        if spare_D[d] + best_of_light >= share * (1.0 - ROUNDING):
            return False
    return True


@compiled
def _claim_slots(descending_E: np.ndarray, limit: float, num_slots: int) -> np.ndarray:
    """Return slots per expert, [E]: ceil(load / limit), then one more for those with least room; `num_slots` in all."""
    num_slots_E = np.ones(len(descending_E), np.int64)
    room_E = np.empty(len(descending_E))
    num_missing = num_slots
    for expert in range(len(descending_E)):
        num_slots_E[expert] = max(1, math.ceil(descending_E[expert] / limit - ROUNDING))
        room_E[expert] = limit - descending_E[expert] / num_slots_E[expert]
        num_missing -= num_slots_E[expert]
    for _ in range(min(num_missing, len(descending_E))):
        expert = int(np.argmin(room_E))
        num_slots_E[expert] += 1
        room_E[expert] = np.inf
    return num_slots_E
