"""Slots and shares for pools of experts and GPUs, every GPU of a pool equally full.

GPU after GPU takes S experts: S - 1 are finished there, one is cut when the GPU is full, and the rest of it continues
as a separate expert. With (S - 1) * m + 1 experts for m GPUs this always works out. S experts fit a GPU when they fill
it together and all but one of them do not overfill it; sort the experts by load and slide a window of S over them: the
first window that fills the GPU fits, because the one before, which does not fill it, holds all its experts but one.
With fewer experts, slots stay empty and get a copy that no token has to use.

    loads 5 4 3 of experts a b c, 2 GPUs of 2 slots     GPU 0 [c b]: 3 + 4 fill its 6, so b is cut to 3
                                                        GPU 1 [b a]: 1 + 5

GPUs that hold experts already (a re-plan) first keep theirs; if these do not fit, single experts are exchanged, by the
same window over the others.
"""

# E experts, G GPUs, S slots per GPU, I items of one pool: its experts, and empty ones up to (S - 1) * m + 1

import numpy as np

from batchinfer.balance.compiled import compiled
from batchinfer.balance.experts.pools import EMPTY, Pools

ROUNDING = 1e-12


def fill_slots(
    load_E: np.ndarray, pools: Pools, pool_of_G: np.ndarray, held_GS: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Give every slot an expert and a share of it.

    Args:
        load_E: [E] float64.
        pools: of these experts; every GPU of a pool gets the same load.
        pool_of_G: [G] int64, as many GPUs of each pool as it has.
        held_GS: [G, S] int64, the experts the GPUs hold now, EMPTY for none; they stay where possible.

    Returns:
        [G, S] int64 expert and [G, S] float64 share; the shares of one expert add up to 1.
    """
    expert_GS = np.full(held_GS.shape, EMPTY, np.int64)
    amount_GS = np.zeros(held_GS.shape)
    experts = np.lexsort((load_E, pools.pool_of_expert))
    gpus = np.argsort(pool_of_G, kind="stable")
    num_experts = np.bincount(pools.pool_of_expert)
    _fill_pools(load_E, experts, num_experts, gpus, pools.num_gpus, held_GS, expert_GS, amount_GS)
    _copy_into_empty_slots(load_E, held_GS, expert_GS)
    _keep_slots(held_GS, expert_GS, amount_GS)

    total_E = np.bincount(expert_GS.ravel(), amount_GS.ravel(), minlength=len(load_E))
    copies_E = np.bincount(expert_GS.ravel(), minlength=len(load_E))
    no_load_GS = total_E[expert_GS] <= 0.0
    return expert_GS, np.where(
        no_load_GS, 1.0 / copies_E[expert_GS], amount_GS / np.where(no_load_GS, 1.0, total_E[expert_GS])
    )


@compiled
def _fill_pools(
    load_E: np.ndarray,
    experts: np.ndarray,
    num_experts_P: np.ndarray,
    gpus: np.ndarray,
    num_gpus_P: np.ndarray,
    held_GS: np.ndarray,
    expert_GS: np.ndarray,
    amount_GS: np.ndarray,
) -> None:
    """Write experts, and the load that each slot takes, into the slots that are needed.

    Experts come pool by pool, within a pool in ascending order of load, and GPUs pool by pool.
    """
    expert, gpu = 0, 0
    for pool in range(len(num_gpus_P)):
        next_expert, next_gpu = expert + num_experts_P[pool], gpu + num_gpus_P[pool]
        _fill_pool(load_E, experts[expert:next_expert], gpus[gpu:next_gpu], held_GS, expert_GS, amount_GS)
        expert, gpu = next_expert, next_gpu


@compiled
def _fill_pool(
    load_E: np.ndarray,
    experts: np.ndarray,
    gpus: np.ndarray,
    held_GS: np.ndarray,
    expert_GS: np.ndarray,
    amount_GS: np.ndarray,
) -> None:
    """Write experts and loads into the slots of one pool, as `_fill_pools` does for all."""
    num_items = (held_GS.shape[1] - 1) * len(gpus) + 1
    num_empty = num_items - len(experts)
    left_I, total = np.zeros(num_items), 0.0
    expert_of_I, item_of_E = np.full(num_items, EMPTY), np.full(len(load_E), EMPTY)
    for i, expert in enumerate(experts):
        left_I[num_empty + i] = load_E[expert]
        total += load_E[expert]
        expert_of_I[num_empty + i], item_of_E[expert] = expert, num_empty + i
    level = total / len(gpus)
    order = np.arange(num_items)  # ascending by remaining load
    is_open_I = np.ones(num_items, np.bool_)
    waits_G = np.ones(len(gpus), np.bool_)
    holds_GI = np.zeros((len(gpus), num_items), np.bool_)
    for place, gpu in enumerate(gpus):
        for expert in held_GS[gpu]:
            if expert != EMPTY and item_of_E[expert] != EMPTY:
                holds_GI[place, item_of_E[expert]] = True

    for _ in range(len(gpus)):
        place = _next_gpu(holds_GI, waits_G, is_open_I, held_GS.shape[1])
        waits_G[place] = False
        num_holders_I = _count_holders(holds_GI, waits_G)
        chosen = _choose_items(holds_GI[place], order, left_I, is_open_I, num_holders_I, held_GS.shape[1], level)
        cut, room = _item_to_cut(chosen, left_I, num_holders_I, level)
        for slot, item in enumerate(chosen):
            amount = left_I[item]
            if item == cut and amount - room > ROUNDING * level:
                amount = max(room, 0.0)
            expert_GS[gpus[place], slot] = expert_of_I[item]
            amount_GS[gpus[place], slot] = amount
            if item != cut:
                is_open_I[item] = False
                continue
            if amount == left_I[item]:  # finished; the item stays, without an expert
                expert_of_I[item] = EMPTY
                for other in range(len(gpus)):
                    holds_GI[other, item] = False
            left_I[item] -= amount
            _sort_again(order, item, left_I)


@compiled
def _count_holders(holds_GI: np.ndarray, waits_G: np.ndarray) -> np.ndarray:
    """Count the waiting GPUs that hold each item, [I]."""
    num_holders_I = np.zeros(holds_GI.shape[1], np.int64)
    for place in range(len(waits_G)):
        if waits_G[place]:
            for item in range(holds_GI.shape[1]):
                num_holders_I[item] += holds_GI[place, item]
    return num_holders_I


@compiled
def _next_gpu(holds_GI: np.ndarray, waits_G: np.ndarray, is_open_I: np.ndarray, slots_per_gpu: int) -> int:
    """Return the waiting GPU that holds most of the items it needs; of several the one that shares fewest of them.

    So the cut expert is one that a later GPU holds too, as long as there is such a GPU.
    """
    num_holders_I = _count_holders(holds_GI, waits_G)
    best, best_cost = -1, 0
    for place in range(len(waits_G)):
        if waits_G[place]:
            num_held, num_shared = 0, 0
            for item in range(len(is_open_I)):
                if holds_GI[place, item] and is_open_I[item]:
                    num_held += 1
                    num_shared += num_holders_I[item] > 1
            cost = (slots_per_gpu - num_held) * (slots_per_gpu + 1) + num_shared
            if best < 0 or cost < best_cost:
                best, best_cost = place, cost
    return best


@compiled
def _choose_items(
    keeps_I: np.ndarray,  # changed
    order: np.ndarray,
    left_I: np.ndarray,
    is_open_I: np.ndarray,
    num_holders_I: np.ndarray,
    slots_per_gpu: int,
    level: float,
) -> np.ndarray:
    """Choose S open items that fit the GPU: as many kept items as possible, then items that no GPU holds.

    While no choice fits, the lightest or the heaviest kept item is dropped.
    """
    chosen, others = np.empty(slots_per_gpu, np.int64), np.empty(len(order), np.int64)
    while True:
        num_kept = 0
        for item in order:
            if keeps_I[item] and is_open_I[item]:
                chosen[num_kept] = item
                num_kept += 1
        for may_be_held in (False, True):
            num_others = 0
            for item in order:
                if is_open_I[item] and not keeps_I[item] and (may_be_held or num_holders_I[item] == 0):
                    others[num_others] = item
                    num_others += 1
            excess = _add_window(chosen, num_kept, others[:num_others], left_I, level)
            if excess == 0 or (may_be_held and num_kept == 0):
                return chosen
        keeps_I[chosen[0] if excess < 0 else chosen[num_kept - 1]] = False


@compiled
def _add_window(chosen: np.ndarray, num_kept: int, others: np.ndarray, left_I: np.ndarray, level: float) -> int:
    """Complete the chosen items by the lightest run of others that fills the GPU, or by the heaviest run.

    Returns 0 if they fit, -1 if they do not fill the GPU, 1 if all but the heaviest overfill it.
    """
    num_added = len(chosen) - num_kept
    if len(others) < num_added:
        return -1
    total, heaviest = 0.0, 0.0
    for item in chosen[:num_kept]:
        total += left_I[item]
        heaviest = max(heaviest, left_I[item])
    for item in others[:num_added]:
        total += left_I[item]
    first = 0
    while num_added > 0 and total < level * (1.0 - ROUNDING) and first + num_added < len(others):
        total += left_I[others[first + num_added]] - left_I[others[first]]
        first += 1
    for i in range(num_added):
        chosen[num_kept + i] = others[first + i]
        heaviest = max(heaviest, left_I[others[first + i]])
    if total < level * (1.0 - ROUNDING):
        return -1
    return 1 if total - heaviest > level * (1.0 + ROUNDING) else 0


@compiled
def _item_to_cut(chosen: np.ndarray, left_I: np.ndarray, num_holders_I: np.ndarray, level: float) -> tuple[int, float]:
    """Return an item without which the GPU is not overfull, and the room that the others leave for it.

    Of several such items it is one that waiting GPUs hold, then the heaviest.
    """
    total = 0.0
    for item in chosen:
        total += left_I[item]
    best = chosen[0]
    for item in chosen[1:]:
        more = num_holders_I[item] - num_holders_I[best]
        is_heavier = left_I[item] > left_I[best]
        fits, best_fits = (
            total - left_I[item] <= level * (1.0 + ROUNDING),
            total - left_I[best] <= level * (1.0 + ROUNDING),
        )
        if (fits and (not best_fits or more > 0 or (more == 0 and is_heavier))) or (not best_fits and is_heavier):
            best = item
    return best, level - (total - left_I[best])


@compiled
def _sort_again(order: np.ndarray, item: int, left_I: np.ndarray) -> None:
    """Restore the order after an item has become lighter."""
    i = 0
    while order[i] != item:
        i += 1
    while i > 0 and left_I[order[i - 1]] > left_I[item]:
        order[i] = order[i - 1]
        i -= 1
    order[i] = item


@compiled
def _copy_into_empty_slots(load_E: np.ndarray, held_GS: np.ndarray, expert_GS: np.ndarray) -> None:
    """Fill unneeded slots with an expert that the GPU holds now, else with the most loaded one that it lacks."""
    copies_E = np.zeros(len(load_E), np.int64)
    for expert in expert_GS.ravel():
        if expert != EMPTY:
            copies_E[expert] += 1
    for gpu in range(len(expert_GS)):
        for slot in range(expert_GS.shape[1]):
            if expert_GS[gpu, slot] != EMPTY:
                continue
            best = -1
            for expert in held_GS[gpu]:
                if expert != EMPTY and best < 0 and not _holds(expert_GS[gpu], expert):
                    best = expert
            if best < 0:
                best = _most_per_copy(load_E, copies_E, expert_GS[gpu])
            expert_GS[gpu, slot] = best
            copies_E[best] += 1


@compiled
def _most_per_copy(load_E: np.ndarray, copies_E: np.ndarray, on_gpu: np.ndarray) -> int:
    """Return the expert with the largest load per copy, of those not on the GPU if there are any."""
    best, best_load = 0, -2.0
    for expert in range(len(load_E)):
        load = -1.0 if _holds(on_gpu, expert) else load_E[expert] / copies_E[expert]
        if load > best_load:
            best, best_load = expert, load
    return best


@compiled
def _holds(on_gpu: np.ndarray, wanted: int) -> bool:
    for expert in on_gpu:  # noqa: SIM110 - numba takes a tenth of a second longer for any()
        if expert == wanted:
            return True
    return False


@compiled
def _keep_slots(held_GS: np.ndarray, expert_GS: np.ndarray, amount_GS: np.ndarray) -> None:
    """Move experts that a GPU holds already back to their slots."""
    for gpu in range(len(expert_GS)):
        for slot, expert in enumerate(held_GS[gpu]):
            if expert == EMPTY or expert_GS[gpu, slot] == expert:
                continue
            for other in range(expert_GS.shape[1]):
                if expert_GS[gpu, other] == expert and held_GS[gpu, other] != expert:
                    expert_GS[gpu, other], expert_GS[gpu, slot] = expert_GS[gpu, slot], expert
                    amount_GS[gpu, other], amount_GS[gpu, slot] = amount_GS[gpu, slot], amount_GS[gpu, other]
                    break
