"""Search for nulls in a column of tools or of sampling that may be values.

Prompts leave nulls out, because Arrow has a null in each field that a row's struct does not have.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from batchinfer.data.columns import list_lengths

# keys of JSON Schema for which null is a value like any other
VALUES = ("default", "const")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # whose keys are names of parameters and the like


def first_lost_null(column: pa.Array, keys: Sequence[str] = VALUES) -> tuple[int, str] | None:
    """Return the first row with a null that may be a value, and its key; None if there is none.

    A struct with other fields, all of them null, does not count: the row probably does not have this struct.

    Args:
        column: structs, lists of structs, or texts, which cannot have such a null.
        keys: the keys of VALUES that count.
    """
    found = [lost for lost in _lost_nulls(column, np.arange(len(column)), "") if lost[1] in keys]
    return min(found, default=None)


def _lost_nulls(values: pa.Array, rows: np.ndarray, name: str) -> Iterator[tuple[int, str]]:
    """Yield the first row, for each key of each struct in `values`, that has null there.

    Args:
        rows: [len(values)] the row of the column that each value is in.
        name: the key of the values.
    """
    kind = values.type
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        yield from _lost_nulls(values.flatten(), np.repeat(rows, list_lengths(values)), name)
    if not pa.types.is_struct(kind):
        return
    is_there = values.is_valid()
    rows, values = rows[is_there.to_numpy(zero_copy_only=False)], values.filter(is_there)
    parts = {part.name: values.field(index) for index, part in enumerate(kind)}
    has_value = {key: part.is_valid().to_numpy(zero_copy_only=False) for key, part in parts.items()}
    others = [mask for key, mask in has_value.items() if key not in VALUES]
    is_own = np.any(others, axis=0) if others else np.ones(len(rows), bool)
    for key in VALUES if name not in _NAMES else ():
        if key in parts and len(lost := rows[is_own & ~has_value[key]]):
            yield int(lost[0]), key
    for key, part in parts.items():
        yield from _lost_nulls(part, rows, key)
