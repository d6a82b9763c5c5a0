"""Descriptions of the job file's keys and the run folder's tables, generated from their definitions."""

import textwrap
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

from batchinfer.config import JobConfig
from batchinfer.config.toml_text import toml_value
from batchinfer.data.schemas.internal import RESULTS
from batchinfer.data.schemas.outputs import OUTPUT_TABLES
from batchinfer.data.schemas.statistics import DECODE_STEPS, STATS_TABLES
from batchinfer.data.schemas.table import Table

WIDTH = 110
TYPE_NAMES = {str: "text", int: "integer", float: "number", bool: "true | false"}


def job_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file, for editors that check TOML."""
    return JobConfig.model_json_schema()


def job_schema_text() -> str:
    """Describe every part and key with type, default and meaning."""
    blocks = [
        "A job file is TOML. Relative paths count from its folder. Keys without a default are required;",
        "unknown keys are errors. `--set part.key=value` overrides a key.",
    ]
    for name, field in JobConfig.model_fields.items():
        part = field.annotation
        assert isinstance(part, type)
        assert issubclass(part, BaseModel)
        blocks.append(f"\n[{name}]  {(part.__doc__ or '').strip()}")
        for key, info in part.model_fields.items():
            blocks.append(_entry(key, type_and_default(info), info.description or ""))
    return "\n".join(blocks)


def type_and_default(info: FieldInfo) -> str:
    """Return a key's type and its default, "required" or "unset"."""
    if info.is_required():
        default = "required"
    else:
        default = "unset" if info.default is None else f"default {toml_value(info.default)}"
    return f"{_type_name(info.annotation)}, {default}"


def stats_schema_text() -> str:
    """Describe the views of `report --sql`: columns, types, meaning."""
    blocks = ["Views of `batchinfer report RUN --sql`, and the Parquet files behind them in outputs/ and stats/:"]
    blocks += [line for table in (*OUTPUT_TABLES, *STATS_TABLES, DECODE_STEPS) for line in _table_lines(table)]
    blocks += ["\nThe view of `batchinfer peek RUN --sql`, with the row's id in front:", *_table_lines(RESULTS)]
    return "\n".join(blocks)


def _table_lines(table: Table) -> list[str]:
    columns = [_entry(column.name, str(column.type), column.doc) for column in table.columns]
    return [f"\n{table.name}: {table.doc}", *columns]


def _entry(name: str, kind: str, doc: str) -> str:
    kind = "list of {token_id, logprob, top}" if len(kind) > 40 and "token_id" in kind else kind
    head = f"  {name:<24} {kind:<34} "
    indent = " " * 62
    text = textwrap.fill(doc, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return head + text[len(head) :] if len(head) <= len(indent) else f"{head.rstrip()}\n{text}"


def _type_name(annotation: Any) -> str:
    """Return a short name for a pydantic annotation: `list[str]`, `float`, `"a" | "b"`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(_type_name(argument) for argument in arguments if argument is not type(None))
    if origin is dict or is_typeddict(annotation):
        return "table"
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return TYPE_NAMES[annotation]
