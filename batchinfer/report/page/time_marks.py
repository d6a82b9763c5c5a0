"""Labels of a picture's time axis: names of its stretches, and marks below the picture."""

import math
from datetime import UTC, datetime

from batchinfer.report.page.charts import Axis
from batchinfer.report.time_axis import TimeAxis

MAX_MARKS = 6  # on the time axis
MARKS_S = (
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 14400, 21600, 43200),
    *(86400 * 2**power for power in range(12)),
)


def time_marks(axis: TimeAxis) -> Axis:
    """Return names and marks of the stretches: times of day (UTC) for stretches of a minute or more, else seconds."""
    starts = [axis.start_s + column * axis.width_s for column in range(axis.num_bins)]
    span_s = axis.width_s * axis.num_bins
    apart_s = next((step for step in MARKS_S if step >= span_s / MAX_MARKS and step >= axis.width_s), span_s)
    if axis.width_s < 60:
        marks = [index * apart_s for index in range(int(span_s / apart_s) + 1) if index * apart_s < span_s]
        names = [f"second {column * axis.width_s:g}" for column in range(axis.num_bins)]
        return Axis(names, [(mark / axis.width_s, f"{mark:g} s") for mark in marks])
    form = "%H:%M" if apart_s < 86400 else "%d %b"
    first = math.ceil(axis.start_s / apart_s)
    marks = [index * apart_s for index in range(first, int((axis.start_s + span_s) / apart_s) + 1)]
    return Axis(
        [f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M}" for start in starts],
        [
            ((mark - axis.start_s) / axis.width_s, datetime.fromtimestamp(mark, UTC).strftime(form))
            for mark in marks
            if mark < axis.start_s + span_s
        ],
    )


def stretch(axis: TimeAxis) -> str:
    """Return the length of a column in words: 'each 2 hours'."""
    for length_s, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if axis.width_s >= length_s:
            num = round(axis.width_s / length_s)
            return f"each {unit}" if num == 1 else f"each {num} {unit}s"
    return f"each {axis.width_s:g} s"
