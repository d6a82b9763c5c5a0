"""The time that is recorded of steps, requests and sessions: Unix time that never jumps.

It is the machine's clock when the first process of a command loaded this module, and the seconds since then, suspended
ones too, by a clock that nobody sets. Ranks inherit the difference of the two clocks from the process that starts them.
So if the machine's clock is set while a command runs, no length and no order of the command's times changes.
"""

import os
import time

VARIABLE = "BATCHINFER_RANK_CLOCK_NS"
DIFFERENCE_NS = int(os.environ.get(VARIABLE) or time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def unix_ns() -> int:
    """Return the time in Unix nanoseconds."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + DIFFERENCE_NS


def unix_s() -> float:
    """Return the time in Unix seconds."""
    return unix_ns() / 1e9
