"""The Arrow schemas of shards: found once, when the shards are listed, so that no later question opens a file."""

import base64
import re
from dataclasses import replace
from functools import lru_cache
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.columns import column_type
from batchinfer.records import Shard

_PARTITION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_PARQUET = base64.b64encode(b"PAR").decode()  # how a Parquet file begins
_NULL = "__HIVE_DEFAULT_PARTITION__"


def with_schema(shard: Shard, schema: pa.Schema) -> Shard:
    """Return the shard with the schema of its file, less metadata of a Parquet file (pandas' index, for example).

    A Parquet file's schema is kept as the metadata of a Parquet file without rows, other schemas as an Arrow message:
    through a message the entries of maps would lose their name, which is in the outputs.
    """
    sink = pa.BufferOutputStream()
    if shard.format == "parquet":
        pq.write_metadata(schema.remove_metadata(), sink, use_compliant_nested_type=False)
    else:
        sink.write(schema.serialize())
    return replace(shard, schema=base64.b64encode(sink.getvalue()).decode())


def file_schema(shard: Shard) -> pa.Schema:
    """Return the schema of the columns in the shard's file."""
    return _decoded(shard.schema)


def folder_values(shard: Shard) -> dict[str, str | None]:
    """Return the columns that the shard has by the `key=value` folders in its path (Hive's partitions) alone.

    Each has one value for all rows. A column in the file itself comes first.
    """
    folders = shard.path.partition("::")[0].split("/")[:-1]
    found = [match for folder in folders if (match := _PARTITION.fullmatch(folder)) is not None]
    if not found:
        return {}
    in_file = set(file_schema(shard).names)
    return {match[1]: None if match[2] == _NULL else unquote(match[2]) for match in found if match[1] not in in_file}


def shard_schema(shard: Shard) -> pa.Schema:
    """Return the schema of the shard's columns: the file's, then text columns for its `key=value` folders."""
    schema = file_schema(shard)
    for name in folder_values(shard):
        schema = schema.append(pa.field(name, pa.string()))
    return schema


def schemas_of_rows(shards: list[Shard]) -> list[tuple[Shard, pa.Schema]]:
    """Return the readable shards that have rows, each with its schema; all readable ones if none has rows.

    The types of a shard without rows describe nothing: pandas writes an empty frame with types of its own.
    """
    readable = [shard for shard in shards if shard.problem is None]
    with_rows = [shard for shard in readable if shard.num_rows] or readable
    return [(shard, shard_schema(shard)) for shard in with_rows]


def id_type(shards: list[Shard], id_column: str) -> pa.DataType:
    """Return the type of the outputs' id column: int64 if every shard with ids has integers that fit, else text.

    A shard may have doubles if others have integers: pandas makes doubles of integers with nulls.
    """
    found = [column_type(schema, id_column) for _, schema in schemas_of_rows(shards)]
    kinds = [kind for kind in found if kind is not None and not pa.types.is_null(kind)]
    integers = [kind for kind in kinds if pa.types.is_integer(kind)]
    fits = pa.uint64() not in kinds and all(kind == pa.float64() for kind in kinds if kind not in integers)
    return pa.int64() if integers and fits else pa.string()


@lru_cache(maxsize=256)
def _decoded(text: str) -> pa.Schema:
    source = pa.BufferReader(base64.b64decode(text))
    return pq.read_schema(source).remove_metadata() if text.startswith(_PARQUET) else pa.ipc.read_schema(source)
