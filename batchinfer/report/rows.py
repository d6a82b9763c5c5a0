"""Query results as text for a terminal, and as JSON."""

import base64
import datetime
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import islice
from typing import Any

from rich.console import RenderableType

from batchinfer.report.terminal import table, text
from batchinfer.sanitize import fit

CELL_WIDTH = 40
NUMERIC = int | float | Decimal


def table_of_rows(
    columns: list[str], rows: Iterable[tuple[Any, ...]], max_rows: int = 40, count_rows: int = 100_000
) -> Iterator[RenderableType]:
    """Yield a result as an aligned table: numbers right-aligned, long cells cut, control characters escaped.

    Args:
        columns: column names.
        rows: the rows; only max_rows + count_rows + 1 of them are read.
        max_rows: rows to show.
        count_rows: highest count of further rows; above, the last line says "more than".
    """
    rows = iter(rows)
    shown = list(islice(rows, max_rows))
    num_more = sum(1 for _ in islice(rows, count_rows + 1))
    sides = ["r" if all(value is None or _is_number(value) for value in cells) else "l"
             for cells in (zip(*shown, strict=True) if shown else [()] * len(columns))]  # fmt: skip
    header = [fit(name, CELL_WIDTH) for name in columns]
    yield table([[_cell(value) for value in row] for row in shown], "".join(sides), header)
    if num_more > count_rows:
        yield text(f"… more than {count_rows:,} more rows")
    elif num_more:
        yield text(f"… {num_more:,} more row{'s' if num_more > 1 else ''}")
    elif not shown:
        yield text("(no rows)")


def json_records(columns: list[str], rows: Iterable[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield rows as JSON objects; a repeated column name gets _2, _3 and so on."""
    names: list[str] = []
    for column in columns:
        name, count = column, 1
        while name in names:
            count += 1
            name = f"{column}_{count}"
        names.append(name)
    for row in rows:
        yield dict(zip(names, map(json_value, row), strict=True))


def json_value(value: Any) -> Any:
    """Convert a query's value to JSON: times to ISO 8601, bytes to base64, NaN to null, unknown types to text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return json_value(int(value) if value == value.to_integral_value() else float(value))
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [json_value(item) for item in value]
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}"
    return fit(value if isinstance(value, str) else str(value), CELL_WIDTH)


def _is_number(value: Any) -> bool:
    return isinstance(value, NUMERIC) and not isinstance(value, bool)
