"""Nodes over a day whose load rises and falls: groups of units are held and released by the rule that paces tasks.

Single requests would be too many for a day of a whole cluster. Work arrives evenly within each hour of a load curve and
is counted in seconds of one group; a group's speed comes from the rates of full units (search.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from batchinfer.balance.pace import Stretch, Terms, tasks_now
from batchinfer.records import ConfigError
from batchinfer.sim.search import Rated
from batchinfer.sim.workload import HOUR_S

LOOK_S = 900.0  # between two decisions: waiting work and new work are to be done by the next one


@dataclass(frozen=True, slots=True)
class Group:
    """The fewest whole units that feed each other: a decode unit and prefill units for it."""

    num_prefill_units: int
    prefill_nodes: int
    decode_nodes: int
    seconds: float  # that one group would need for the sample of requests

    @property
    def nodes(self) -> int:
        return self.prefill_nodes + self.decode_nodes


@dataclass(frozen=True, slots=True)
class Day:
    """The results of a simulated day."""

    nodes: tuple[int, ...]  # held from each decision to the next one
    busy_share: float  # of the groups' time
    longest_wait_s: float  # of work that found too few groups

    @property
    def node_seconds(self) -> float:
        return sum(self.nodes) * LOOK_S

    @property
    def by_hour(self) -> list[float]:
        """Mean nodes of each hour."""
        looks = int(HOUR_S / LOOK_S)
        return [sum(self.nodes[first : first + looks]) / looks for first in range(0, len(self.nodes), looks)]


def make_group(prefill: Rated, decode: Rated, gpus_per_node: int) -> Group:
    """Combine one decode unit with whole prefill units, rounded up, so that decode sets the pace."""
    decode_s = decode.gpu_seconds / decode.ep_size
    num_prefill_units = max(1, ceil(prefill.gpu_seconds / prefill.ep_size / decode_s)) if decode_s else 1
    return Group(
        num_prefill_units=num_prefill_units,
        prefill_nodes=ceil(num_prefill_units * prefill.ep_size / gpus_per_node),
        decode_nodes=ceil(decode.ep_size / gpus_per_node),
        seconds=max(decode_s, prefill.gpu_seconds / prefill.ep_size / num_prefill_units),
    )


def simulate_day(load_by_hour: Sequence[float], work_s: float, group: Group, num_nodes: int) -> Day:
    """Apply the rule at each decision of the day.

    Nodes that make no whole group are held all the time: they cannot be released as a group.

    Args:
        load_by_hour: of each hour, in any unit.
        work_s: seconds of one group for the whole day.
        num_nodes: nodes of the cluster.

    Raises:
        ConfigError: the nodes are fewer than a group needs.
    """
    most = num_nodes // group.nodes
    if not most:
        raise ConfigError(
            f"cluster.nodes is {num_nodes}, but a decode unit and its {group.num_prefill_units} prefill units take "
            f"{group.nodes}; give that or a smaller ep_size"
        )
    hours = [work_s * load / sum(load_by_hour) for load in load_by_hour]
    nodes, has, waiting_s, busy_s, longest_wait_s = [], 0, 0.0, 0.0, 0.0
    for look in range(int(len(hours) * HOUR_S / LOOK_S)):
        now_s = look * LOOK_S
        waiting_s += hours[int(now_s // HOUR_S)] * LOOK_S / HOUR_S
        has = tasks_now(waiting_s, [Stretch(now_s, now_s + LOOK_S, 0.0)], Terms(most), has)
        nodes.append(num_nodes - (most - has) * group.nodes)
        done_s = min(waiting_s, has * LOOK_S)
        waiting_s, busy_s = waiting_s - done_s, busy_s + done_s
        longest_wait_s = max(longest_wait_s, waiting_s / max(has, 1))
    held_s = sum((number - num_nodes % group.nodes) / group.nodes * LOOK_S for number in nodes)
    return Day(tuple(nodes), busy_s / held_s, longest_wait_s)
