"""Columns of any layout as the plain ones that Parquet holds."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.columns import plain_type
from batchinfer.data.plain_arrays import plain_array
from batchinfer.data.wide_rows import bytes_of_rows, decoded
from support.layouts import in_random_layout, random_values

VIEWS = ["a", None, "longer than the twelve bytes of a view"]


def through_parquet(array):
    file = io.BytesIO()
    pq.write_table(pa.table({"c": array}), file)
    return pq.read_table(file)["c"].to_pylist()


@pytest.mark.parametrize("seed", range(200))
def test_the_values_of_any_layout_stay_and_parquet_holds_them(seed):
    rng = np.random.default_rng(seed)
    plain = random_values(rng)
    odd = in_random_layout(plain, rng)
    assert odd.to_pylist() == plain.to_pylist()
    first = int(rng.integers(4))
    part = odd.slice(first, int(rng.integers(5)))
    found = plain_array(part)
    assert found.type == plain_type(odd.type)
    assert plain_type(found.type) == found.type
    assert found.to_pylist() == plain.slice(first, len(part)).to_pylist() == through_parquet(found)
    found.validate(full=True)


@pytest.mark.parametrize("seed", range(50))
def test_slices_of_a_batch_are_the_batch(seed):
    rng = np.random.default_rng(seed)
    plain = random_values(rng)
    batch = pa.record_batch([in_random_layout(plain, rng), in_random_layout(plain, rng)], names=["a", "b"])
    parts = list(decoded(batch.slice(2), 2))
    assert [value for part in parts for value in part["b"].to_pylist()] == plain.slice(2).to_pylist()
    assert (bytes_of_rows(batch["a"]) >= 0).all()


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array([["a"], [], None], pa.list_view(pa.string_view())), pa.list_(pa.string())),
        (pa.array([["a"], [], None], pa.large_list_view(pa.string())), pa.large_list(pa.string())),
        (pa.array([[], [], None], pa.list_(pa.int64(), 0)), pa.list_(pa.int64())),
        (pa.array([["a"], None, ["b"]], pa.list_(pa.string_view(), 1)), pa.list_(pa.string(), 1)),
        (pa.array(VIEWS, pa.string_view()).cast(pa.binary_view()), pa.binary()),
        (pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int16()), pa.array(["a", None])), pa.string()),
        (pa.array([b"0" * 16, None], pa.uuid()), pa.uuid()),
        (pa.ExtensionArray.from_storage(pa.json_(pa.string_view()), pa.array(["1"], pa.string_view())), pa.string()),
        (pa.array([1, 2, None]), pa.int64()),
    ],
)  # fmt: skip
def test_types_have_a_plain_one(array, kind):
    assert plain_array(array).type == plain_type(array.type) == kind
    assert plain_array(array).to_pylist() == array.to_pylist()


def test_repeated_texts_are_put_in_place_a_few_megabytes_at_a_time():
    text = "x" * (1 << 20)
    indices = pa.array([0, 1] * 20, pa.int8())
    values = pa.array([text, "y"], pa.string_view())
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([39, 40], pa.int32()), values)
    for column in (pa.DictionaryArray.from_arrays(indices, values), runs):
        parts = list(decoded(pa.record_batch([column], names=["c"]), 0))
        assert max(part.nbytes for part in parts) <= 9 << 20
        assert [value for part in parts for value in part["c"].to_pylist()] == column.to_pylist()
