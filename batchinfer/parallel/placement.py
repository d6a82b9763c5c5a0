"""Placement of experts in physical slots, and the shares of an expert's tokens among its slots; one table per layer.

Slots are numbered over all ranks, the same number on each: rank g has slots g * S … (g + 1) * S - 1. An expert may
have several slots (redundant experts). The choice of a row's slot moves work between ranks and never changes a result.
"""

# P slots of all ranks, S slots of one rank, E experts, M (token, expert) rows

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from batchinfer.records import ConfigError, slots_per_rank

# multiples of these, modulo 1, fill the interval evenly
_GOLDEN = 0.6180339887498949
_PLASTIC = 0.7548776662466927
_LEAST_PHASE = 1e-6


@dataclass(frozen=True)
class Placement:
    """The slots of one layer.

    Args:
        expert_of_slot: P expert ids; each expert at least once.
        share_of_slot: P shares; those of one expert add up to 1.
        num_experts: E.
        num_ranks: a divisor of P.

    Raises:
        ConfigError: the table breaks one of these rules; the message names the first slot or expert that does.
    """

    expert_of_slot: tuple[int, ...]
    share_of_slot: tuple[float, ...]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if len(self.expert_of_slot) % self.num_ranks or len(self.share_of_slot) != len(self.expert_of_slot):
            raise ConfigError(
                f"{len(self.expert_of_slot)} expert slots with {len(self.share_of_slot)} shares do not spread evenly "
                f"over {self.num_ranks} ranks"
            )
        total_of_expert = dict.fromkeys(range(self.num_experts), 0.0)
        for slot, (expert, share) in enumerate(zip(self.expert_of_slot, self.share_of_slot, strict=True)):
            if expert not in total_of_expert or not 0.0 <= share <= 1.0 + 1e-6:
                raise ConfigError(
                    f"slot {slot} holds expert {expert} with share {share}; experts are 0 to {self.num_experts - 1}, "
                    "shares 0 to 1"
                )
            total_of_expert[expert] += share
        for expert, total in total_of_expert.items():
            if abs(total - 1.0) > 1e-6:
                raise ConfigError(f"the shares of expert {expert} add up to {total}, not to 1")

    @classmethod
    def in_order(cls, num_experts: int, num_ranks: int, num_redundant: int = 0) -> Placement:
        """Return a placement with expert e in slot e; redundant slots repeat the experts from 0 on, with even shares.

        Raises:
            ConfigError: the slots do not spread evenly over the ranks; the message names a number that does.
        """
        num_slots = slots_per_rank(num_experts, num_redundant, num_ranks) * num_ranks
        expert_of_slot = tuple(slot % num_experts for slot in range(num_slots))
        shares = tuple(1.0 / expert_of_slot.count(expert) for expert in expert_of_slot)
        return cls(expert_of_slot, shares, num_experts, num_ranks)

    @classmethod
    def of_layers(
        cls, expert_of_slot: list[list[int]], share_of_slot: list[list[float]], num_experts: int, num_ranks: int
    ) -> list[Placement]:
        """Return one placement per layer, from tables [L, P].

        Raises:
            ConfigError: a table breaks a rule.
        """
        layers = zip(expert_of_slot, share_of_slot, strict=True)
        return [cls(tuple(experts), tuple(shares), num_experts, num_ranks) for experts, shares in layers]

    @property
    def num_slots(self) -> int:
        return len(self.expert_of_slot)

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def experts_of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the expert in each of a rank's slots."""
        return self.expert_of_slot[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    @property
    def has_replicas(self) -> bool:
        """Whether an expert has several slots."""
        return self.num_slots != self.num_experts

    def slots_for(self, expert_M: torch.Tensor, rank: int, turn: int | torch.Tensor = 0) -> torch.Tensor:
        """Return a slot for each row of `rank`, so that each slot gets its share of its expert's rows.

        The j-th of a rank's n rows for an expert lies at (j + phase) / n of the expert's shares laid end to end. The
        phase differs from rank to rank, so that also single rows spread; from one turn to the next it goes on by the
        golden ratio, and by another irrational number from expert to expert, so that also the single rows of many steps
        take their shares, and not all at once. Reads no value on the host.

        Args:
            expert_M: [M] int64.
            turn: how often this rank has been here with the placement; a tensor [] float64 is not read on the host.

        Returns:
            [M] int64 slot numbers.
        """
        if not self.has_replicas:
            return self._tables_on(expert_M.device)[0][expert_M]
        order_M = torch.argsort(expert_M, stable=True)
        sorted_M = expert_M[order_M]
        count_E = torch.zeros(self.num_experts, dtype=torch.int64, device=expert_M.device)
        count_E = count_E.scatter_add_(0, expert_M, torch.ones_like(expert_M))
        first_E = count_E.cumsum(0) - count_E
        place_M = torch.arange(len(expert_M), device=expert_M.device) - first_E[sorted_M]
        phase = (rank + 0.5) / self.num_ranks + turn * _GOLDEN
        # float32 would round the last of some thousand rows up to the next expert; so would a phase too near to 1
        phase_M = _LEAST_PHASE + (1 - 2 * _LEAST_PHASE) * ((sorted_M.double() * _PLASTIC + phase) % 1.0)
        point_M = (place_M.double() + phase_M) / count_E[sorted_M]
        # shares of expert e end at e + 0.., e + 1; the points of its rows lie strictly between e and e + 1
        _, ends_P, slot_P = self._tables_on(expert_M.device)
        chosen_M = slot_P[torch.searchsorted(ends_P, sorted_M + point_M, right=True).clamp_max(self.num_slots - 1)]
        slots_M = torch.empty_like(expert_M)
        slots_M[order_M] = chosen_M
        return slots_M

    def _tables_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `_tables` on this device; the first call copies them."""
        if device not in self._copies:
            self._copies[device] = tuple(table.to(device) for table in self._tables)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, Any]:
        return {}

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[E] a slot of each expert, and the slots sorted by expert.

        [P] where the share of each ends, counted as expert + share, and [P] its number.
        """
        expert_P = torch.tensor(self.expert_of_slot, dtype=torch.int64)
        slot_P = torch.argsort(expert_P, stable=True)
        share_P = torch.tensor(self.share_of_slot, dtype=torch.float64)[slot_P]
        expert_P = expert_P[slot_P]
        is_last_P = torch.cat([expert_P[1:] != expert_P[:-1], torch.ones(1, dtype=torch.bool)])
        before_E = torch.zeros(self.num_experts, dtype=torch.float64).scatter_add_(0, expert_P, share_P).cumsum(0)
        ends_P = expert_P + share_P.cumsum(0) - torch.cat([before_E.new_zeros(1), before_E])[expert_P]
        # the last slot of an expert ends exactly at the next expert, and none beyond, whatever rounding said
        next_P = (expert_P + 1).double()
        return slot_P[is_last_P], torch.where(is_last_P, next_P, torch.minimum(ends_P, next_P)), slot_P
