"""Conversion of columns of any layout to their plain type (columns.plain_type).

Columns are rebuilt from their parts: Arrow casts neither dictionaries of views nor views inside of a list, and its cast
of a list view loses values ([[3], [0, 1]] became [[], [0, 1]]).
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.data.columns import is_json, list_lengths, plain_type


def plain_array(array: pa.Array) -> pa.Array:
    """Return the column converted to its plain type; a column of a plain type is returned without a copy."""
    return _in_place(array.storage if is_json(array.type) else array)


def with_plain_dictionary(array: pa.Array) -> pa.Array:
    """Return a dictionary column with the values of its dictionary made plain; other columns unchanged."""
    if not pa.types.is_dictionary(array.type):
        return array
    values = _in_place(array.dictionary)
    return array if values is array.dictionary else pa.DictionaryArray.from_arrays(array.indices, values)


def runs_of(array: pa.RunEndEncodedArray) -> np.ndarray:
    """Return [R] int64, for each row the index of its value in `array.values`."""
    return np.searchsorted(array.run_ends.to_numpy(), array.offset + np.arange(len(array)), side="right")


def list_bounds(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end of each list in `array.values`, [R] int64 each; equal for a null."""
    lengths = list_lengths(array)
    if pa.types.is_fixed_size_list(array.type):
        starts = (array.offset + np.arange(len(array))) * array.type.list_size
    else:
        starts = array.offsets.to_numpy()[: len(array)].astype(np.int64)
    return starts, starts + lengths


def _in_place(array: pa.Array) -> pa.Array:
    kind = array.type
    plain = plain_type(kind, keeps_json=True)
    if plain == kind:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        storage = _in_place(array.storage)
        return pa.ExtensionArray.from_storage(plain, storage) if is_json(kind) else storage
    if pa.types.is_dictionary(kind):
        return _looked_up(array)
    if pa.types.is_run_end_encoded(kind):
        return _in_place(array.values).take(pa.array(runs_of(array)))
    if pa.types.is_struct(kind):
        parts = [_in_place(array.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(plain), mask=array.is_null())
    if pa.types.is_map(kind):
        first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        keys, items = (_in_place(part.slice(first, end - first)) for part in (array.keys, array.items))
        return pa.MapArray.from_arrays(pc.subtract(array.offsets, first), keys, items, type=plain, mask=array.is_null())
    if pa.types.is_fixed_size_list(kind) and kind.list_size:
        items = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(_in_place(items), type=plain, mask=array.is_null())
    if pa.types.is_list(plain) or pa.types.is_large_list(plain):
        return _list_in_place(array, plain)
    return array.cast(plain)


def _list_in_place(array: pa.Array, plain: pa.DataType) -> pa.Array:
    """Return the lists converted to the type `plain`, with items in contiguous order."""
    starts, ends = list_bounds(array)
    lengths = ends - starts
    is_filled = lengths > 0
    first, end = (
        (int(starts[is_filled].min()), int(ends.max(where=is_filled, initial=0))) if is_filled.any() else (0, 0)
    )
    items = _in_place(array.values.slice(first, end - first))
    # by hand because list_flatten does not accept all dictionaries
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    items = items.take(pa.array(within + np.repeat(starts - first, lengths)))
    integers = pa.int64() if pa.types.is_large_list(plain) else pa.int32()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), integers)
    lists = pa.LargeListArray if pa.types.is_large_list(plain) else pa.ListArray
    return lists.from_arrays(offsets, items, type=plain, mask=array.is_null())


def _looked_up(array: pa.DictionaryArray) -> pa.Array:
    if len(array) == 1 and array.is_valid()[0].as_py():  # however large, nothing is copied
        return _in_place(array.dictionary.slice(array.indices[0].as_py(), 1))
    return with_plain_dictionary(array).dictionary_decode()
