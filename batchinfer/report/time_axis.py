"""Division of a run's time into stretches of a round length."""

import math
from dataclasses import dataclass

# round lengths in seconds; a run of a day gets hours
WIDTHS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """A run's time, divided into stretches of equal length."""

    start_s: float  # Unix time; a multiple of width_s if that is a minute or longer
    width_s: float
    num_bins: int


def time_axis(start_s: float, end_s: float, most: int) -> TimeAxis:
    """Divide the time from `start_s` to `end_s` into at most `most` stretches of a round length.

    Args:
        start_s, end_s: Unix times.
    """
    for width_s in (*WIDTHS_S, *(86400.0 * 2**power for power in range(1, 30))):
        first_s = math.floor(start_s / width_s) * width_s if width_s >= 60 else start_s
        num_bins = max(1, math.ceil((end_s - first_s) / width_s - 1e-9))
        if num_bins <= most:
            return TimeAxis(first_s, float(width_s), num_bins)
    return TimeAxis(start_s, max(1.0, end_s - start_s), 1)
