"""Input columns copied to the outputs: one type per column that holds the values of all shards, and the casts.

int32, int64 → int64   int64, decimal(5, 2) → decimal(21, 2)   int64, double → double, if that holds every integer
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.columns import is_json, is_text, plain_type
from batchinfer.data.schemas.outputs import OUTPUTS, OUTPUTS_WITH_REASONING
from batchinfer.data.shard_schemas import schemas_of_rows
from batchinfer.records import ConfigError, Shard
from batchinfer.sanitize import first_line

_DIGITS = {8: 3, 16: 5, 32: 10}  # of integers by their bits
_DIGITS_64 = {pa.int64(): 19, pa.uint64(): 20}
_MOST_DIGITS = 76  # of a decimal


def kept_fields(shards: list[Shard], keep_columns: list[str], *, may_be_missing: bool = False) -> list[pa.Field]:
    """Return the kept columns as fields of the outputs: each with a nullable type that holds every shard's values.

    Args:
        may_be_missing: whether a column that is in no shard has the type null; else it is refused.

    Raises:
        ConfigError: a column is in no shard, has the name of an output column, or has types that have no common type
            or cannot be copied.
    """
    for name in keep_columns:
        if name in (*OUTPUTS.schema.names, *OUTPUTS_WITH_REASONING.schema.names):
            raise ConfigError(f"output.keep_columns names {name!r}, which outputs have already; rename it in the input")
    if not keep_columns:
        return []
    schemas = schemas_of_rows(shards)
    if not schemas:
        return [pa.field(name, pa.null()) for name in keep_columns]
    fields = {name: _kept_field(schemas, name) for name in keep_columns}
    missing = [name for name, field in fields.items() if field is None]
    if missing and not may_be_missing:
        raise ConfigError(
            f"output.keep_columns names {missing[0]!r}, which no shard has; remove it or correct the name"
        )
    return [field or pa.field(name, pa.null()) for name, field in fields.items()]


def cast_kept_columns(batch: pa.RecordBatch, kept: Sequence[pa.Field], shard: Shard) -> pa.RecordBatch:
    """Return the kept columns of a batch, cast to their types in the outputs; a missing column becomes nulls.

    Raises:
        ConfigError: a value does not fit into the column's type in the outputs.
    """
    return pa.RecordBatch.from_arrays([_conformed(batch, field, shard) for field in kept], schema=pa.schema(kept))


def _conformed(batch: pa.RecordBatch, field: pa.Field, shard: Shard) -> pa.Array:
    if field.name not in batch.schema.names or not len(batch):
        return pa.nulls(len(batch), field.type)
    column = batch[field.name]
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise ConfigError(
            f"output.keep_columns names {field.name!r}, which is {column.type} in {shard.path} and {field.type} in "
            f"outputs, to hold what other shards have: {first_line(error)}; give the column one type in all shards"
        ) from None


def _kept_field(schemas: list[tuple[Shard, pa.Schema]], name: str) -> pa.Field | None:
    """Return a kept column as a field of the outputs, None if no shard has the column."""
    kept, kept_from = None, None
    for shard, schema in schemas:
        if len(schema.get_all_field_indices(name)) > 1:
            raise ConfigError(f"output.keep_columns names {name!r}, which {shard.path} has more than once; rename one")
        if name not in schema.names:
            continue
        kind = plain_type(schema.field(name).type, keeps_json=True)
        if not can_be_copied(name, kind):
            raise ConfigError(
                f"output.keep_columns names {name!r}, which is {kind}, a type that Parquet has not or that cannot be "
                f"copied, in {shard.path}; convert it"
            )
        wider = kind if kept is None else _common_type(kept, kind)
        if wider is None:
            raise ConfigError(
                f"output.keep_columns names {name!r}, which is {kept} in {kept_from} but {kind} in {shard.path}; "
                "convert one of them"
            )
        if wider != kept:
            kept, kept_from = wider, shard.path
    return None if kept is None else pa.field(name, kept)


def can_be_copied(name: str, kind: pa.DataType) -> bool:
    """Return whether columns of a type can be written to Parquet, and Arrow can select rows of such columns."""
    try:
        pa.nulls(1, kind).take(pa.array([0]))
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([pa.field(name, kind)])).close()
    except (pa.ArrowException, OSError):
        return False
    return True


def _common_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return a type to which a cast of both types keeps every value or fails; None if there is no such type."""
    if first == second:
        return first
    if is_json(first) or is_json(second):
        return _common_type(*(kind.storage_type if is_json(kind) else kind for kind in (first, second)))
    wider = _decimal_of(first, second) or _decimal_of(second, first) or _unified(first, second)
    return wider if wider is not None and _keeps(first, wider) and _keeps(second, wider) else None


def _decimal_of(integer: pa.DataType, decimal: pa.DataType) -> pa.DataType | None:
    """Return the decimal type that holds all values of an integer and a decimal type; None if there is none.

    The common type that Arrow chooses is too narrow for some values.
    """
    if not pa.types.is_integer(integer) or not pa.types.is_decimal(decimal):
        return None
    digits = _DIGITS_64.get(integer) or _DIGITS[integer.bit_width]
    precision = max(digits, decimal.precision - decimal.scale) + decimal.scale
    if precision > _MOST_DIGITS:
        return None
    return (pa.decimal128 if precision <= 38 else pa.decimal256)(precision, decimal.scale)


def _unified(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    try:
        schemas = [pa.schema([("value", kind)]) for kind in (first, second)]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _keeps(kind: pa.DataType, wider: pa.DataType) -> bool:
    """Return whether a cast keeps every value or fails. Arrow casts text to bytes, and decimals to floats with loss."""
    if pa.types.is_struct(kind):
        return all(_keeps(part.type, wider.field(part.name).type) for part in kind)
    if pa.types.is_map(kind):
        return _keeps(kind.key_type, wider.key_type) and _keeps(kind.item_type, wider.item_type)
    if hasattr(kind, "value_type"):
        return _keeps(kind.value_type, wider.value_type)
    if pa.types.is_decimal(kind):
        return bool(pa.types.is_decimal(wider))
    if is_text(kind):
        return is_text(wider)
    return kind != pa.uint64() or wider != pa.int64()
