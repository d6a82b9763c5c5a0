"""The settings of a call: their types, and their conversion to the parts of a job file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from pydantic import BaseModel

from batchinfer.api.display import Progress
from batchinfer.api.job_keys import (
    ClusterKeys,
    InputKeys,
    KvKeys,
    OutputKeys,
    PricingKeys,
    S3Keys,
    SamplingKeys,
    SlurmKeys,
)
from batchinfer.api.plain_values import plain, with_schema
from batchinfer.config import JobConfig, did_you_mean
from batchinfer.config.other_names import OTHER_NAMES
from batchinfer.config.sampling import JobSampling
from batchinfer.records import ConfigError

KINDS = ("user", "prompt", "messages", "token_ids")  # keys of [input] for columns of prompts
Function = TypeVar("Function", bound=Callable[..., Any])
_SHORTHANDS = {"model": "path", "output": "dir"}
_ARGUMENTS = ("dtype", "raw", "stream", "progress", *KINDS)  # by their bare names, besides the keys of [sampling]


class ModelSettings(TypedDict, total=False):
    """Settings of a Model."""

    dtype: Literal["float32", "bfloat16", "fp8", "int4", "fp4"]
    cluster: ClusterKeys
    kv: KvKeys


class CallSettings(SamplingKeys, total=False):
    """Settings of a call of Model.generate."""

    user: str | None
    """name of the column of user's messages (text)"""
    messages: str | None
    """name of the column of chats"""
    prompt: str | None
    """name of the column of raw texts"""
    token_ids: str | None
    """name of the column of token ids"""
    raw: bool
    """texts of the data go to the model as they are, also if the model has a chat template"""
    progress: Progress
    """True: bars or lines; False: nothing; "tqdm": bars also outside of terminals; or a function"""
    input: InputKeys
    output: str | Path | OutputKeys
    """the run folder, or the keys of [output]"""
    sampling: SamplingKeys
    pricing: PricingKeys
    s3: S3Keys
    slurm: SlurmKeys


class Settings(CallSettings, ModelSettings, total=False):
    """Settings of a call of generate."""


def with_keys_of(settings: type) -> Callable[[Function], Function]:
    """Add the keys of a TypedDict to a function's signature, for help() and for completion in notebooks."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        *named, rest = signature.parameters.values()
        keys = {key: kind for key, kind in get_type_hints(settings).items() if key not in signature.parameters}
        more = [inspect.Parameter(key, rest.KEYWORD_ONLY, default=..., annotation=kind) for key, kind in keys.items()]
        vars(function)["__signature__"] = signature.replace(parameters=[*named, *more, rest])
        return function

    return decorate


def parts_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert the settings of a call to the parts of a job file.

    Raises:
        ConfigError: a setting is not known.
    """
    parts: dict[str, dict[str, Any]] = {"input": {}, "output": {}, "sampling": {}}
    for key, value in settings.items():
        if key == "dtype":
            parts.setdefault("model", {})["dtype"] = plain(value)
        elif key in JobSampling.model_fields:
            parts["sampling"][key] = plain(value)
        elif key not in JobConfig.model_fields:
            raise ConfigError(f"{key} is no setting of generate(); {instead_of(key)}")
        elif isinstance(value, Mapping):
            parts[key] = parts.get(key, {}) | plain(value)
        elif key in _SHORTHANDS and isinstance(value, str | Path):
            parts.setdefault(key, {})[_SHORTHANDS[key]] = str(value)
        else:
            raise ConfigError(f"{key} is {value!r}, not a dict; give the keys of [{key}], as {key}={{...}}")
    if "files" in parts["input"]:
        raise ConfigError("input.files is set, but the rows of generate() are its data; use Job for files")
    return parts | {"sampling": with_schema(parts["sampling"])}


def working_folder() -> Path:
    """Return the working folder, which relative paths count from.

    Raises:
        ConfigError: it was deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:  # ranks need one, also if all paths are absolute
        raise ConfigError("the working folder was deleted; call os.chdir with one that exists") from None


def instead_of(key: str) -> str:
    """Return the remedy for a setting that generate() does not know."""
    if key in OTHER_NAMES:
        return OTHER_NAMES[key]
    homes = [part for part in JobConfig.model_fields if key in _keys_of(part)]
    if homes:
        return "give " + " or ".join(f'{part}={{"{key}": …}}' for part in homes)
    return did_you_mean(
        key,
        [*_ARGUMENTS, *JobSampling.model_fields, *JobConfig.model_fields],
        "use dtype, a key of [sampling] such as max_tokens, or one of "
        f"{', '.join(JobConfig.model_fields)} with a dict of its keys (see `batchinfer schema`)",
    )


def _keys_of(part: str) -> set[str]:
    schema = JobConfig.model_fields[part].annotation
    return set(schema.model_fields) if isinstance(schema, type) and issubclass(schema, BaseModel) else set()
