"""Which expert is in which slot of which GPU, and what share of its tokens each copy gets: `place_experts`."""

from batchinfer.balance.experts.placement import ExpertPlacement, place_experts
from batchinfer.balance.experts.robust import place_robustly

__all__ = ["ExpertPlacement", "place_experts", "place_robustly"]
