"""Expert rows of the busiest GPU by the mean: the rest that the balancer leaves, and the part that it cannot know.

The balancer uses the experts' mean loads. A step's own tokens differ from these: they are a random sample (chance), and
the texts of a moment use other experts than texts on average (drift). Both are as good as random from slot to slot, so
that the busiest of n GPUs is as far above the mean as the largest of n normal variables.
"""

from functools import cache
from math import sqrt
from statistics import NormalDist

import numpy as np

from batchinfer.balance.experts import place_experts

SAMPLED_LAYERS = 4
# github.com/NVIDIA/TensorRT-LLM, examples/wide_ep/ep_load_balancer/README.md at 2a595f8 (DeepSeek-R1 on a data set,
# experts placed by statistics of the same data set; 288 slots on 36 GPUs; per step, averaged over steps and layers):
# rows of a GPU have the mean 1024.0 and the standard deviation 53.98; the busiest one has 0.115 times the mean more
MEASURED_ROWS, MEASURED_DEVIATION, MEASURED_SLOTS = 1024.0, 53.976442, 8
# variance of one slot's load by its mean squared, without the variance of counting (rows are Poisson)
DRIFT_VARIANCE = MEASURED_SLOTS * ((MEASURED_DEVIATION / MEASURED_ROWS) ** 2 - 1 / MEASURED_ROWS)


def routing_skew(rows_per_gpu: float, slots_per_gpu: int, num_gpus: int) -> float:
    """Return the rows of the busiest GPU by the mean, from drift and counting.

    Args:
        rows_per_gpu: that one micro-batch sends to a GPU on average; 0: nothing to spread.
        slots_per_gpu: experts on a GPU; the drift of many evens out.
    """
    if num_gpus == 1 or rows_per_gpu <= 0:
        return 1.0
    deviation = sqrt(DRIFT_VARIANCE / slots_per_gpu + 1 / rows_per_gpu)
    return min(float(num_gpus), 1.0 + deviation * largest_of_normals(num_gpus))


def largest_of_normals(num: int) -> float:
    """Return the expected largest of `num` standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((num - 0.375) / (num + 0.25))


@cache
def placement_skew(spread: float, *, num_experts: int, num_slots: int, num_gpus: int, seed: int) -> float:
    """Return the busiest GPU's load by the mean after expert placement, for lognormal loads; 1.0 if all are equal."""
    if spread == 0 or num_gpus == 1 or num_experts == 0:
        return 1.0
    load = np.random.default_rng(seed).lognormal(0.0, spread, (SAMPLED_LAYERS, num_experts))
    return float(place_experts(load, num_slots=num_slots, num_gpus=num_gpus).max_over_mean.mean())
