"""The type of ids and of kept columns over several shards."""

from __future__ import annotations

import datetime
from contextlib import suppress
from decimal import Decimal

import pyarrow as pa
import pytest

from batchinfer.data.inputs import read_batches
from batchinfer.data.kept_fields import cast_kept_columns, kept_fields
from batchinfer.data.shard_schemas import id_type
from batchinfer.data.shards import find_shards
from batchinfer.records import ConfigError, Shard
from support.prompt_tables import (
    map_of,
    write,
)


def shards_of(tmp_path, *tables: dict) -> list[Shard]:
    for place, columns in enumerate(tables):
        write(tmp_path / f"{place}.parquet", columns)
    (tmp_path / "unreadable.parquet").write_bytes(b"PAR1")
    return find_shards([f"{tmp_path}/*.parquet"])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([pa.array([1], pa.int8()), pa.array([2], pa.uint32())], pa.int64()),
        ([pa.array([1], pa.int64()), pa.array([None], pa.null())], pa.int64()),
        ([pa.array([1], pa.int64()), None], pa.int64()),
        ([pa.array([1], pa.int64()), pa.array(["a"])], pa.string()),
        ([pa.array([1], pa.uint64())], pa.string()),
        ([pa.array([1.0]), pa.array([2], pa.int32())], pa.int64()),
        ([pa.array([1.0]), pa.array([2], pa.uint64())], pa.string()),
        ([pa.array([1.0], pa.float32()), pa.array([2])], pa.string()),
        ([pa.array([1.0]), pa.array(["a"])], pa.string()),
        ([pa.array([1.0])], pa.string()),
        ([pa.array(["a"], pa.large_string())], pa.string()),
        ([None], pa.string()),
    ],
)
def test_ids_are_integers_only_when_every_shard_has_integers(tmp_path, ids, expected):
    tables = [{"prompt": ["x"]} if column is None else {"id": column} for column in ids]
    assert id_type(shards_of(tmp_path, *tables), "id") == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.timestamp("us"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.int64(), pa.decimal128(5, 2), pa.decimal128(21, 2)),
        (pa.decimal128(5, 2), pa.uint32(), pa.decimal128(12, 2)),
        (pa.int64(), pa.decimal128(38, 30), pa.decimal256(49, 30)),
        (pa.int8(), pa.decimal128(38, 10), pa.decimal128(38, 10)),
        (pa.uint32(), pa.uint64(), pa.uint64()),
        (pa.json_(), pa.json_(), pa.json_()),
        (pa.json_(), pa.string(), pa.string()),
        (pa.list_(pa.string_view()), pa.list_(pa.string()), pa.list_(pa.string())),
        (pa.struct([("a", pa.string_view())]), pa.struct([("a", pa.string())]), pa.struct([("a", pa.string())])),
        (pa.list_view(pa.string_view()), pa.list_(pa.field("element", pa.string())), pa.list_(pa.string())),
        (map_of(pa.string_view()), map_of(pa.string()), map_of(pa.string())),
    ],
)
def test_kept_columns_get_one_type_that_holds_all(tmp_path, first, second, expected):
    tables = [{"task": pa.array([None], first)}, {"task": pa.array([None], second)}, {"other": [1]}]
    fields = kept_fields(shards_of(tmp_path, *tables), ["task"])
    assert fields == [pa.field("task", expected, nullable=True)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((pa.string(), pa.int64()), (pa.binary(), pa.string()), (pa.uint64(), pa.int64()), (pa.bool_(), pa.int8())),
        *((pa.decimal128(5, 2), pa.float64()), (pa.int64(), pa.decimal256(76, 60)), (pa.json_(), pa.int64())),
        (pa.list_(pa.field("element", pa.string())), pa.list_(pa.field("element", pa.binary()))),
        (pa.struct([("a", pa.float32())]), pa.struct([("a", pa.decimal128(5, 2))])),
        (map_of(pa.float64()), map_of(pa.decimal128(5, 2))),
        (map_of(pa.string()), map_of(pa.binary())),
    ],
)
def test_kept_columns_of_types_that_do_not_go_together_are_refused(tmp_path, first, second):
    tables = [{"task": pa.array([None], first)}, {"task": pa.array([None], second)}]
    with pytest.raises(ConfigError) as failure:
        kept_fields(shards_of(tmp_path, *tables), ["task"])
    for part in ("'task'", str(first), str(second), "0.parquet", "1.parquet"):
        assert part in str(failure.value)


EXTREMES = {
    pa.int8(): [-128, 127],
    pa.int64(): [-(1 << 63), (1 << 63) - 1],
    pa.uint32(): [0, (1 << 32) - 1],
    pa.uint64(): [0, (1 << 64) - 1],
    pa.float32(): [0.1, 2.0**100],
    pa.float64(): [0.1, 2.0**1000],
    pa.decimal128(5, 2): [Decimal("-999.99"), Decimal("0.01")],
    pa.decimal128(38, 37): [Decimal("9." + "9" * 37), None],
    pa.string(): ["text", ""],
    pa.binary(): [b"bytes", None],
    pa.date32(): [datetime.date(1900, 1, 1), datetime.date(2100, 1, 1)],
    pa.timestamp("s"): [datetime.datetime(1, 1, 1), datetime.datetime(9999, 1, 1)],
    pa.timestamp("ns"): [datetime.datetime(1970, 1, 1), None],
}


@pytest.mark.parametrize("kind", [*EXTREMES, pa.json_()], ids=str)
def test_a_kept_value_is_the_same_in_the_outputs_or_refused(tmp_path, kind):
    tables = {kind: pa.array(values, kind) for kind, values in EXTREMES.items()}
    tables[pa.json_()] = pa.array(['{"a": 1}', None]).cast(pa.json_())
    num_kept = 0
    for other in tables.values():
        shards = shards_of(tmp_path, {"task": tables[kind]}, {"task": other})
        for shard in shards[:2]:
            (batch,) = read_batches(shard, ["task"])
            with suppress(ConfigError):
                found = cast_kept_columns(batch, kept_fields(shards, ["task"]), shard)["task"]
                assert found.to_pylist() == batch["task"].to_pylist()
                num_kept += 1
    assert num_kept >= 2  # at least with another one of its kind


def test_integers_that_a_double_does_not_hold_are_refused_by_their_value(tmp_path):
    shards = shards_of(tmp_path, {"task": [1, 1 << 53]}, {"task": [1.0, None]}, {"task": [1, (1 << 53) + 1]})
    fields = kept_fields(shards, ["task"])
    fits, _, too_large = [next(read_batches(shard, ["task"])) for shard in shards[:3]]
    assert cast_kept_columns(fits, fields, shards[0])["task"].to_pylist() == [1.0, 2.0**53]
    with pytest.raises(ConfigError, match=r"is int64 in .*2\.parquet and double in outputs.* 9007199254740993 "):
        cast_kept_columns(too_large, fields, shards[2])


@pytest.mark.parametrize(
    "column",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([[{}]], pa.list_(pa.struct([]))),
        pa.array([[]], pa.struct([])),
        pa.array([Decimal(1200)], pa.decimal128(5, -2)),
    ],
    ids=lambda column: str(column.type),
)
def test_kept_columns_of_types_that_cannot_be_copied_are_refused(tmp_path, column):
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("task", column.type)])) as file:
        file.write_table(pa.table({"task": column}))
    with pytest.raises(ConfigError, match=r"names 'task', which is .*, a type .* in .*a\.arrow; convert it"):
        kept_fields(find_shards([f"{tmp_path}/a.arrow"]), ["task"])


@pytest.mark.parametrize(("name", "told"), [("nowhere", "no shard has"), ("text", "outputs have already")])
def test_kept_columns_that_cannot_be_kept_are_refused(tmp_path, name, told):
    with pytest.raises(ConfigError, match=told):
        kept_fields(shards_of(tmp_path, {"text": ["x"]}), [name])
