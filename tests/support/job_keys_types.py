"""batchinfer/api/job_keys.py: the keys of a job file as types, from the definitions that `batchinfer schema` prints.

Run `PYTHONPATH=tests python -m support.job_keys_types` to write the file again after a key or its description changed.
"""

import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from typing_extensions import is_typeddict

from batchinfer.config import JobConfig
from batchinfer.config.sampling import StructuredOutputs

FILE = Path(__file__).parents[2] / "batchinfer" / "api" / "job_keys.py"
HEAD = '''\
"""Types of the keys of a job file, for editors and type checkers; written by tests/support/job_keys_types.py."""

# fmt: off
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict
'''
# what Python callers may also give, by key
WIDER = {
    "output.dir": "str | Path",
    "output.work_dir": "str | Path | None",
    "model.path": "str | Path",
    "kv.dir": "str | Path | None",
    "sampling.stop": "str | list[str] | tuple[str, ...]",
    "sampling.logit_bias": "Mapping[int, float] | Mapping[str, float]",
    "structured_outputs.json": "str | Mapping[str, Any] | type[Any]",
}
WIDTH = 110


def file_text() -> str:
    """Return the file: a TypedDict of structured_outputs, of each part, and of the whole job."""
    kinds = get_type_hints(StructuredOutputs, include_extras=True)
    keys = {key: (written("structured_outputs", key, kind), "") for key, kind in kinds.items()}
    blocks = [HEAD, class_of("StructuredOutputs", StructuredOutputs.__doc__, keys)]
    for part, field in JobConfig.model_fields.items():
        fields = model_of(field.annotation).model_fields
        keys = {key: (written(part, key, info.annotation), info.description or "") for key, info in fields.items()}
        blocks.append(class_of(name_of(part), f"[{part}] of a job file: {model_of(field.annotation).__doc__}", keys))
    parts = {part: (name_of(part), "") for part in JobConfig.model_fields}
    blocks.append(class_of("JobKeys", "The parts of a job file.", parts))
    return "\n\n".join(blocks)


def name_of(part: str) -> str:
    return f"{part.capitalize()}Keys"


def model_of(annotation: Any) -> type[BaseModel]:
    assert issubclass(annotation, BaseModel)
    return annotation


def class_of(name: str, doc: str | None, keys: dict[str, tuple[str, str]]) -> str:
    """Return a TypedDict; a description becomes a docstring below its key, which editors show."""
    lines = [f"class {name}(TypedDict, total=False):", f'    """{(doc or "").strip()}"""', ""]
    for key, (kind, description) in keys.items():
        lines.append(f"    {key}: {kind}")
        if description:
            # a backslash or a quote at the end would change the docstring
            assert '"' not in description
            assert "\\" not in description
            lines.append(textwrap.indent(f'"""{textwrap.fill(description, WIDTH)}"""', "    "))
    return "\n".join(lines) + "\n"


def written(part: str, key: str, annotation: Any) -> str:
    """Return a key's type as Python source."""
    return WIDER.get(f"{part}.{key}") or source_of(annotation)


def source_of(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return source_of(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(map(source_of, arguments)))
    if origin is Literal:
        values = ", ".join(f'"{value}"' for value in arguments)
        return f"Literal[{values}]"
    if origin is dict:
        return f"Mapping[str, {source_of(arguments[1])}]"
    if origin is list:
        # a text is a Sequence of texts, too, but never meant as one
        item = source_of(arguments[0])
        return "list[str] | tuple[str, ...]" if item == "str" else f"Sequence[{item}]"
    if annotation is NoneType:
        return "None"
    if is_typeddict(annotation) or annotation in (str, int, float, bool):
        return str(annotation.__name__)
    return "Any"  # JSON


if __name__ == "__main__":
    FILE.write_text(file_text())
