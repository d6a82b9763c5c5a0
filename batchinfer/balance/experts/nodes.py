"""Assignment of router groups to nodes, when all copies of a group's experts must stay on one node.

Every node gets the same number of groups (and so of experts). First the load of the fullest node is made as small as
possible, exactly where a search through all packings ends soon, and then groups are exchanged as long as the simple
bound of the worst node falls: with few slots per GPU that bound is more than the node's load.
"""

# E experts, N nodes, K groups

import itertools

import numpy as np

from batchinfer.balance.compiled import compiled
from batchinfer.balance.experts.bounds import simple_bound
from batchinfer.balance.experts.search import EFFORTS, search_pools

MAX_STEPS = 200_000  # of the search through all packings
MAX_EXCHANGES_TRIED = 1000


def published_packing(load_K: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the node of each group, [K], as DeepSeek's EPLB packs: heaviest first, to the lightest node with room."""
    node_of_K = np.empty(len(load_K), np.int64)
    load_N, room_N = np.zeros(num_nodes), np.full(num_nodes, len(load_K) // num_nodes)
    for group in np.argsort(-load_K, kind="stable"):
        node = np.argmin(np.where(room_N > 0, load_N, np.inf))
        node_of_K[group] = node
        load_N[node] += load_K[group]
        room_N[node] -= 1
    return node_of_K


def lightest_packing(load_K: np.ndarray, num_nodes: int) -> tuple[np.ndarray, float]:
    """Return the packing with the lightest fullest node found, and a lower bound of that load for any packing."""
    groups_per_node = len(load_K) // num_nodes
    bound = load_K.sum() / num_nodes
    bound = max(bound, load_K.max() + np.sort(load_K)[: groups_per_node - 1].sum())
    best = published_packing(load_K, num_nodes)
    if groups_per_node == 1:
        return best, float(bound)
    # With as many groups as slots a pool is a node (search.py).
    pools = search_pools(load_K, num_nodes, groups_per_node, EFFORTS["default"], bound)
    if pools.load < np.bincount(best, load_K).max():
        best = pools.pool_of_expert
    node_of_K, is_proved = _try_all_packings(
        load_K, np.argsort(-load_K, kind="stable"), num_nodes, np.bincount(best, load_K).max(), bound
    )
    if node_of_K[0] >= 0:
        best = node_of_K
    return best, float(np.bincount(best, load_K).max() if is_proved else bound)


def exchange_groups(load_KE: np.ndarray, node_of_K: np.ndarray, num_slots: int, num_gpus: int) -> np.ndarray:
    """Return a packing whose worst node has a lower simple bound, if exchanging two groups at a time leads to one.

    Args:
        load_KE: [K, experts per group] float64.
        num_slots: of one node; num_gpus: of one node.
    """

    def bound_of(node_of_K: np.ndarray, node: int) -> float:
        return simple_bound(load_KE[node_of_K == node].ravel(), num_slots, num_gpus)

    bound_N = np.array([bound_of(node_of_K, node) for node in range(int(node_of_K.max()) + 1)])
    num_tried, is_better = 0, True
    while is_better and num_tried < MAX_EXCHANGES_TRIED:
        worst, is_better = int(bound_N.argmax()), False
        for one, other in itertools.product(np.flatnonzero(node_of_K == worst), np.flatnonzero(node_of_K != worst)):
            tried, node = node_of_K.copy(), int(node_of_K[other])
            tried[[one, other]] = node, worst
            pair = bound_of(tried, worst), bound_of(tried, node)
            num_tried += 1
            if max(pair) < bound_N[worst]:
                node_of_K, bound_N[[worst, node]], is_better = tried, pair, True
                break
    return node_of_K


@compiled
def _try_all_packings(
    load_K: np.ndarray, descending: np.ndarray, num_nodes: int, best: float, bound: float
) -> tuple[np.ndarray, bool]:
    """Search depth first through the packings, heavy groups first, pruning those that cannot be below `best`.

    Returns the best packing below `best` (-1 if there is none), and whether the search came to its end.
    """
    num_groups = len(load_K)
    found_K = np.full(num_groups, -1)
    node_of_depth = np.full(num_groups, -1)
    load_N, room_N = np.zeros(num_nodes), np.full(num_nodes, num_groups // num_nodes)
    depth = 0
    for _ in range(MAX_STEPS):
        if depth < 0 or best <= bound:
            return found_K, True
        weight = load_K[descending[depth]]
        node = node_of_depth[depth]
        if node >= 0:
            load_N[node] -= weight
            room_N[node] += 1
        # The next node with room, but only the first of the empty nodes: all of these are alike.
        node += 1
        while node < num_nodes:
            is_alike = node > 0 and room_N[node] == room_N[node - 1] == num_groups // num_nodes
            if room_N[node] > 0 and not is_alike and load_N[node] + weight < best:
                break
            node += 1
        if node == num_nodes:
            node_of_depth[depth] = -1
            depth -= 1
            continue
        node_of_depth[depth] = node
        load_N[node] += weight
        room_N[node] -= 1
        if depth + 1 < num_groups:
            depth += 1
            continue
        best = load_N.max()
        for i in range(num_groups):
            found_K[descending[i]] = node_of_depth[i]
    return found_K, False
