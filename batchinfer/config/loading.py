"""Loading of a job file: read, changed by `--set`, checked, with absolute paths; and writing of a job."""

import glob
import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from batchinfer.config.exact_json import exact_float
from batchinfer.config.job import JobConfig
from batchinfer.config.model_folder import model_folder
from batchinfer.config.other_names import remedy_in_a_file
from batchinfer.config.sampling import KINDS, with_model_defaults
from batchinfer.config.spelling import closest, did_you_mean
from batchinfer.config.toml_text import dump_parts, read_toml
from batchinfer.config.uris import expand_path, is_uri, local_path, refuse_credentials
from batchinfer.records import ConfigError, ConfigErrors
from batchinfer.sanitize import clip

Schema = TypeVar("Schema", bound=BaseModel)


def load_job(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> JobConfig:
    """Load a job file: apply `--set` overrides, check all values, make all paths absolute.

    Args:
        path: the TOML file; paths in the file and in overrides are relative to its folder.
        overrides: `part.key=value` with a TOML value, or a bare word for a string.

    Raises:
        ConfigError: a sentence per problem, with file, key, value and remedy (see `checked`).
    """
    path = Path(path)
    try:
        table = read_toml(path, "job file")
    except ConfigError:
        if path.suffix == ".toml" or not path.is_file():
            raise
        make_one = f"for a file of prompts, `batchinfer init {shlex.quote(str(path))} --model DIR` writes one"
        raise ConfigError(f"{path} is not a job file, which is TOML and named *.toml; {make_one}") from None
    for text in overrides:
        _apply_override(table, text)
    return job_of_table(table, path, path.absolute().parent.resolve())


def job_of_table(table: dict[str, Any], source: Path, folder: Path) -> JobConfig:
    """Convert the table of a job file to a job, with all paths absolute.

    Args:
        source: the table's file, for messages.
        folder: folder for relative paths.

    Raises:
        ConfigError: a sentence per problem, with source, key, value and remedy.
    """
    job = _with_absolute_paths(checked(JobConfig, table, source), folder)
    return job.model_copy(update={"sampling": with_model_defaults(job.sampling, Path(job.model.path))})


def checked(schema: type[Schema], table: dict[str, Any], path: Path) -> Schema:
    """Convert the table of the file at `path` to its schema.

    Raises:
        ConfigErrors: a sentence per problem, with file, key, value and remedy.
    """
    try:
        return schema.model_validate(table)
    except ValidationError as error:
        raise ConfigErrors(sentences(error, schema, path)) from None


def dump_job(job: JobConfig) -> str:
    """Return the job as TOML, without unset keys; `load_job` gives the same job again."""
    # an id column that the job does not name may be missing in the input, so it must stay unset
    unset_id = {} if "id" in job.input.model_fields_set else {"input": {"id"}}
    return dump_parts(job.model_dump(exclude_none=True, exclude=unset_id))


def _with_absolute_paths(job: JobConfig, folder: Path) -> JobConfig:
    for what, value in _paths(job):
        if "\0" in value:
            raise ConfigError(f"{what} holds a NUL character, which no path can; remove it")
    job = _expanded(job, folder)
    for pattern in job.input.files:
        refuse_credentials("input.files", pattern)
    refuse_credentials("output.publish", job.output.publish or "")
    refuse_credentials("output.dir", job.output.dir)
    refuse_credentials("kv.second_tier", job.kv.second_tier or "")
    for what, value in [("model.path", job.model.path), ("kv.dir", job.kv.dir or "")]:
        if is_uri(value):
            raise ConfigError(f"{what} is a URI, but must be a folder on a file system; copy what is there to one")
    files = [_absolute_pattern(folder, pattern) for pattern in job.input.files]
    output: dict[str, str] = {}
    if not job.output.dir.startswith("s3:"):
        output["dir"] = os.path.normpath(folder / local_path("output.dir", job.output.dir))
    if job.output.work_dir is not None:
        output["work_dir"] = os.path.normpath(folder / job.output.work_dir)
    update = {
        "input": job.input.model_copy(update={"files": files}),
        "output": job.output.model_copy(update=output),
        "model": job.model.model_copy(update={"path": model_folder(folder, job.model.path)}),
    }
    if job.kv.dir is not None:
        update["kv"] = job.kv.model_copy(update={"dir": os.path.normpath(folder / job.kv.dir)})
    job = job.model_copy(update=update)
    # a job file is valid UTF-8, but the path of its folder may not be
    for what, value in _paths(job):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{what} is below {str(folder)!r}, which is not valid UTF-8; rename the folder") from None
    return job


def _expanded(job: JobConfig, folder: Path) -> JobConfig:
    """Return the job with `~` and environment variables of its paths replaced."""

    def expand(part: BaseModel, *keys: str) -> dict[str, Any]:
        given = {key: getattr(part, key) for key in keys if getattr(part, key) is not None}
        return {key: expand_path(f"{name}.{key}", value, folder) for key, value in given.items()}

    update: dict[str, BaseModel] = {}
    for name, keys in (("output", ("dir", "work_dir")), ("model", ("path",)), ("kv", ("dir",))):
        part: BaseModel = getattr(job, name)
        update[name] = part.model_copy(update=expand(part, *keys))
    files = [expand_path("input.files", pattern, folder) for pattern in job.input.files]
    update["input"] = job.input.model_copy(update={"files": files})
    return job.model_copy(update=update)


def _paths(job: JobConfig) -> list[tuple[str, str]]:
    """Return (key, value) of all keys with paths."""
    return [
        *(("input.files", pattern) for pattern in job.input.files),
        ("output.dir", job.output.dir),
        ("output.work_dir", job.output.work_dir or ""),
        ("model.path", job.model.path),
        ("kv.dir", job.kv.dir or ""),
    ]


def _absolute_pattern(folder: Path, pattern: str) -> str:
    """Return an absolute pattern; the folder's name, and the name of a file that exists, contain no wildcards."""
    pattern = local_path("input.files", pattern)
    if is_uri(pattern):
        return pattern
    as_file = os.path.normpath(folder / pattern)
    if os.path.lexists(as_file):
        return glob.escape(as_file)
    return os.path.normpath(os.path.join(glob.escape(str(folder)), pattern))


def _apply_override(table: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) != 2 or not all(names):
        raise ConfigError(f"--set {text!r} is not of the form part.key=value, for example sampling.max_tokens=64")
    part = table.setdefault(names[0], {})
    if not isinstance(part, dict):
        raise ConfigError(f"--set {text!r}: {names[0]} is not a table in the job file; write it as [{names[0]}]")
    part[names[1]] = _override_value(raw.strip(), text)


def _override_value(raw: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}", parse_float=exact_float)
    except (ValueError, RecursionError):
        # ValueError: not TOML, or a number of thousands of digits
        if raw[:1] in ("[", "{", '"', "'") or "\n" in raw:
            raise ConfigError(f"--set {text!r}: the value is not valid TOML; quote it, or write a bare word") from None
        return raw
    if list(parsed) != ["value"]:
        raise ConfigError(f"--set {text!r} sets more than one key; write a --set for each key")
    return parsed["value"]


def sentences(error: ValidationError, schema: type[BaseModel], path: Path) -> list[str]:
    """Return a sentence per key with a problem in the file at `path`, in the order of the schema."""
    first: dict[tuple[Any, ...], ErrorDetails] = {}
    for problem in error.errors(include_url=False):
        # a value that has none of several types has a problem for each type
        key = problem["loc"] if problem["type"] == "extra_forbidden" else problem["loc"][:2]
        known = first.setdefault(key, problem)
        if known["type"] == "literal_error" and problem["type"] == "bool_type":
            known["msg"] += ", true or false"
    return [clip(f"{path}: {_sentence(problem, schema)}") for problem in first.values()]


def _sentence(problem: ErrorDetails, schema: type[BaseModel]) -> str:
    # a key with a line break in it must not break the message
    names = [str(name) if str(name).isprintable() else repr(name) for name in problem["loc"]]
    # after a key come positions in lists, keys of tables, and pydantic's names of types
    deeper = [f"[{name}]" if name.isdigit() else f".{name}" for name in names[2:] if name.isdigit() or name in KINDS]
    where = ".".join(names[:2]) + "".join(deeper)
    kind, value = problem["type"], problem.get("input")
    has_parts = any(_keys(schema, name) for name in schema.model_fields)
    what = "part" if has_parts and len(names) == 1 else "key"
    if kind == "extra_forbidden":
        return f"{where if len(names) < 3 else f'{where}.{names[-1]}'} is not a known {what}; {_instead(names, schema)}"
    if kind == "missing":
        needed = " and ".join(_keys(schema, names[0], required=True)) if len(names) == 1 else ""
        return f"the {what} {where} is missing; add it{f' as [{where}] with {needed}' if needed else ''}"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        # a check of a whole part begins its message with the key, one of several parts with part and key
        return f"{where}{('', '.', ' ')[min(len(names), 2)]}{message}"
    if kind in ("too_short", "string_too_short"):
        return f"{where} is empty; write at least one {'item' if kind == 'too_short' else 'character'}"
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    hint = ""
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, re.findall("'([^']*)'", problem["ctx"]["expected"]))
    elif kind == "list_type" and isinstance(value, str):
        hint = f"write [{json.dumps(value, ensure_ascii=False)}]"
    elif kind in ("int_type", "float_type") and isinstance(value, str):
        hint = "write it without quotes" if re.fullmatch(r"-?\d+(\.\d+)?", value) else ""
    elif value is None and names[-1] not in _keys(schema, names[0], required=True):
        hint = "leave it out for the default"
    message = message.replace("Input should", "it should")
    return f"{where} is {shown}, but {message}{f'; {hint}' if hint else ''}"


def _instead(names: list[str], schema: type[BaseModel]) -> str:
    """Return the remedy for an unknown key."""
    if len(names) > 2:
        return did_you_mean(names[-1], KINDS, f"use one of {', '.join(KINDS)}")
    known = list(schema.model_fields) if len(names) == 1 else _keys(schema, names[0])
    homes = [part for part in schema.model_fields if names[-1] in _keys(schema, part)]
    if homes and names[-1] not in known:
        return f"it belongs into [{homes[0]}]"
    remedy = remedy_in_a_file(names[-1]) if schema is JobConfig else None
    if remedy is not None and not remedy.startswith(f"write {closest(names[-1], known)}="):
        return remedy
    return did_you_mean(names[-1], known, "remove it" + (f" or use one of {', '.join(known)}" if known else ""))


def _keys(schema: type[BaseModel], part: str, *, required: bool = False) -> list[str]:
    """Return the keys of a part, or only the required ones."""
    annotation = schema.model_fields[part].annotation if part in schema.model_fields else None
    fields = getattr(annotation, "model_fields", {})
    return [name for name, field in fields.items() if field.is_required() or not required]
