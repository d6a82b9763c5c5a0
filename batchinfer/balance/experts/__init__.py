"""Placement of experts: an expert for each slot of each GPU, and each copy's share of tokens (`place_experts`)."""

from batchinfer.balance.experts.placement import ExpertPlacement, place_experts
from batchinfer.balance.experts.robust import place_robustly

__all__ = ["ExpertPlacement", "place_experts", "place_robustly"]
