"""The same values in any of Arrow's layouts, for tests of what reads them."""

import numpy as np
import pyarrow as pa


def in_random_layout(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    """Return an array of the same values whose parts are views, dictionaries, runs or lists out of order.

    Args:
        array: of integers, text, bytes, and of lists, structs and maps of these.
    """
    if rng.random() < 0.2:
        return _as_runs(array, rng)
    if rng.random() < 0.2:
        return _as_dictionary(array, rng)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _perhaps_views(array, rng)
    if pa.types.is_struct(kind):
        parts = [in_random_layout(array.field(index), rng) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, names=[part.name for part in kind], mask=array.is_null())
    if pa.types.is_map(kind):
        keys = in_random_layout(array.keys, rng)
        return pa.MapArray.from_arrays(array.offsets, keys, in_random_layout(array.items, rng), mask=array.is_null())
    return _list_of(array, rng) if pa.types.is_list(kind) else array


def _perhaps_views(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    if pa.types.is_string(array.type):
        return array.cast((pa.string(), pa.large_string(), pa.string_view())[rng.integers(3)])
    if pa.types.is_binary(array.type):
        return array.cast((pa.binary(), pa.large_binary(), pa.binary_view())[rng.integers(3)])
    return array  # Arrow itself ends the process at some dictionaries of dictionaries


def _as_runs(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    values = array.to_pylist()
    ends = [row + 1 for row in range(len(values)) if row + 1 == len(values) or values[row] != values[row + 1]]
    found = array.take(pa.array([end - 1 for end in ends], pa.int64()))
    return pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), _perhaps_views(found, rng))


def _as_dictionary(array: pa.Array, rng: np.random.Generator) -> pa.Array:
    """Return indices into all rows in another order, of which some are there twice or are nulls."""
    order = rng.permutation(len(array))
    indices = pa.array(np.argsort(order), pa.int32(), mask=array.is_null().to_numpy(zero_copy_only=False))
    return pa.DictionaryArray.from_arrays(indices, _perhaps_views(array.take(pa.array(order)), rng))


def _list_of(array: pa.ListArray, rng: np.random.Generator) -> pa.Array:
    lengths = array.value_lengths().fill_null(0).to_numpy()
    ends = np.cumsum(lengths)
    mask = array.is_null()
    if len(set(lengths)) == 1 and lengths[0] and not array.null_count:
        return pa.FixedSizeListArray.from_arrays(in_random_layout(array.flatten(), rng), int(lengths[0]))
    if rng.random() < 0.3:
        offsets = pa.array([0, *ends], pa.int64())
        return pa.LargeListArray.from_arrays(offsets, in_random_layout(array.flatten(), rng), mask=mask)
    # lists one after the other in a random order
    order = rng.permutation(len(array))
    offsets = np.zeros(len(array), np.int64)
    offsets[order] = np.cumsum([0, *lengths[order][:-1]])
    items = in_random_layout(array.take(pa.array(order)).flatten(), rng)
    of, integers = ((pa.ListViewArray, pa.int32()), (pa.LargeListViewArray, pa.int64()))[int(rng.integers(2))]
    return of.from_arrays(pa.array(offsets, integers), pa.array(lengths, integers), items, mask=mask)


def random_values(rng: np.random.Generator) -> pa.Array:
    """Return 8 rows of a random type of at most three levels, in the plain layout."""
    kind = _random_type(rng, 3)
    return pa.array([_random_value(kind, rng) for _ in range(8)], kind)


def _random_type(rng: np.random.Generator, depth: int) -> pa.DataType:
    choice = rng.integers(6 if depth else 3)
    if choice < 3:
        return (pa.string(), pa.int64(), pa.binary())[choice]
    inner = _random_type(rng, depth - 1)
    if choice == 3:
        return pa.struct([("a", inner), ("b", _random_type(rng, depth - 1))])
    return pa.list_(inner) if choice == 4 else pa.map_(pa.string(), inner)


def _random_value(kind: pa.DataType, rng: np.random.Generator) -> object:
    if rng.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {part.name: _random_value(part.type, rng) for part in kind}
    if pa.types.is_list(kind):
        return [_random_value(kind.value_type, rng) for _ in range(rng.integers(4))]
    if pa.types.is_map(kind):
        return [(f"k{key}", _random_value(kind.item_type, rng)) for key in range(rng.integers(3))]
    number = int(rng.integers(4))
    text = "a longer text that is not in a view of itself" * (number > 1) + str(number)
    return number if pa.types.is_integer(kind) else text if pa.types.is_string(kind) else text.encode()
