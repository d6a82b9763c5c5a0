"""A first job file for given data and model: columns are chosen by type and name, other keys get usual values."""

from __future__ import annotations

import glob
import json
import os
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchinfer import config
from batchinfer.config import DEFAULT_S3, JobConfig, checked, dump_job, is_uri
from batchinfer.config.model_folder import model_folder
from batchinfer.config.toml_text import toml_value
from batchinfer.data.column_checks import NO_IDS, prompt_settings
from batchinfer.data.columns import column_type, is_id_type, python_values
from batchinfer.data.folders import without_run_folders
from batchinfer.data.formats.line_rows import why_no_row
from batchinfer.data.formats.names import extension_of, format_of, is_data_file, is_of_lines, is_overlooked
from batchinfer.data.formats.openai_batch import are_requests
from batchinfer.data.inputs import read_batches
from batchinfer.data.parquet import table_writer
from batchinfer.data.patterns import matching_paths
from batchinfer.data.schemas.outputs import OUTPUTS
from batchinfer.data.shard_schemas import id_type, schemas_of_rows, shard_schema
from batchinfer.data.shards import find_shards, warn_overlooked, with_types
from batchinfer.data.tokenizer import has_chat_template
from batchinfer.model.config import load_model_config
from batchinfer.plan.first_dtype import choose_dtype, this_machine
from batchinfer.plan.input_columns import doubles_hint, other_delimiter, why_no_rows
from batchinfer.records import ConfigError, InputError, Shard
from batchinfer.sanitize import count_text
from batchinfer.whole_files import publish_text

SCHEMA = Path(config.__file__).with_name("job.schema.json")  # by which editors check and complete a job file
MAX_TOKENS = 512
MAX_KEPT = 8  # columns that the file suggests to keep
MAX_NAMED = 5  # left-out files that are named
LOOK_ROWS = 100  # read to see whether text is a chat as JSON, and which text is the longest
# usual names of columns by the kind of their prompts, the likeliest first
USUAL_NAMES = {
    "messages": ("messages", "conversations", "conversation", "chat", "dialogue"),
    "prompt": ("prompt", "question", "instruction", "query", "problem", "input", "text", "content"),
    "token_ids": ("token_ids", "input_ids", "prompt_token_ids", "tokens"),
}
BESIDE_NAMES = (
    "input",
    "context",
    "passage",
    "document",
    "article",
    "text",
)  # of columns whose text goes with a question
SYSTEM_NAMES = ("system", "system_prompt", "system_message")
CHATS_AS_JSON = {"messages": ""}  # of chat_keys
ID_NAMES = ("id", "uuid", "custom_id", "key", "prompt_id", "question_id", "row_id", "idx", "index")


@dataclass(frozen=True, slots=True)
class FirstJob:
    """The text of a job file, with the choices that were made as (subject, choice)."""

    text: str
    choices: list[tuple[str, str]]


def first_job(data: str, model: Path, target: Path, system: str | None = None) -> FirstJob:
    """Return the job file for `target`, checked by the schema.

    Args:
        data: a file of any format, a folder, a glob, or a URI of these.
        model: the model folder.
        system: the system message of every row.

    Raises:
        ConfigError: no file matches, no column holds prompts, or `system` does not go with the prompts found.
        InputError: no shard can be read.
        ModelError: the model cannot be used.
    """
    folder = Path(_normal(target)).parent
    named, model = model, Path(model_folder(Path.cwd(), str(model)))
    window = load_model_config(model).max_positions
    files, left_out = _patterns(data)
    shards = _typed_shards(files)
    readable = [shard for shard in shards if shard.problem is None]
    if not readable:
        if len(shards) == 1:
            raise InputError(f"{shards[0].path} cannot be read: {shards[0].problem}")
        raise InputError(f"none of the {len(shards)} files of {data} can be read; the first: {shards[0].problem}")
    schema = shard_schema(readable[0])
    if not schema.names or why_no_row(schema) is not None:
        raise ConfigError(why_no_rows(readable[0], schema))
    is_batch = readable[0].format == "jsonl" and are_requests(schema)
    if readable[0].format == "csv" and (advice := other_delimiter(schema)):
        raise ConfigError(f"{readable[0].path} has one column, {schema.names[0]!r}; {advice}")
    if is_batch and system is not None:
        raise ConfigError(
            f"--system goes with a column of texts, but {data} has lines of an OpenAI batch; leave it out"
        )
    inputs, of_inputs, others = (*_OF_BATCH, []) if is_batch else _of_columns(_Columns(readable), model, system)
    run = _free_folder(folder, target.stem)
    (dtype, why), max_tokens = choose_dtype(model, this_machine()), min(MAX_TOKENS, max(1, window // 2))
    text = _TEMPLATE.format(
        schema=SCHEMA.as_uri(),
        files=", ".join(toml_value(name if is_uri(name) else _from(folder, name)) for name in files),
        inputs=inputs,
        run=toml_value(run),
        outputs=_BATCH_OUTPUTS if is_batch else f"\n# keep_columns = {toml_value(others)}{_KEPT}",
        model=toml_value(_from(folder, _normal(named)) if named.exists() else str(named)),
        dtype=dtype,
        why=why,
        max_tokens=max_tokens,
        window=window,
    )
    checked(JobConfig, tomllib.loads(text), target)
    num_rows = sum(shard.num_rows for shard in readable)
    choices = [
        (
            "data",
            f"{count_text(num_rows, 'row')} in {len(readable):,} of {count_text(len(shards), 'file')} that can be read",
        ),
        *([("left out", _named_files(left_out))] if left_out else []),
        *of_inputs,
        ("model", f"{named}, {dtype}: {why}"),
        ("answers", f"at most {max_tokens} tokens, greedy"),
        ("run folder", run),
    ]
    return FirstJob(text, choices)


def _of_columns(columns: _Columns, model: Path, system: str | None) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the lines of [input] for prompts and ids, the choices that were made, and columns that can be kept.

    Raises:
        ConfigError: no column holds prompts, or they are no user's messages, with which `system` goes.
    """
    keys, name, words = columns.prompts()
    if "prompt" in keys and has_chat_template(model):
        keys, words = {"user": name}, f"{words}, put through the chat template as the user's message"
    if system is not None and "user" not in keys:
        raise ConfigError(
            f"--system goes with texts for a model with a chat template; column {name!r} holds {words}; leave it out"
        )
    ids = columns.ids(name)
    lines = [f"{key} = {toml_value(value)}" for key, value in keys.items()]
    lines[-1] += f"    # {words}"
    chosen = [("prompts", f"column {name!r}, {words}")]
    if system is None and "user" in keys and (column := columns.of_names(SYSTEM_NAMES, name)) is not None:
        system = f"{{{{ {column} or '' }}}}"
        chosen.append(("system", f"column {column!r}: each row's own system message"))
    if system is not None:
        lines.append(f"system = {toml_value(system)}")
    if "user" in keys and (beside := columns.of_names(BESIDE_NAMES, name)) is not None:
        template = toml_value(f"{{{{ {name} }}}}\n\n{{{{ {beside} }}}}")
        instead = "user" if system is not None else 'user, with system = ""'
        lines.append(f"# template = {template}    # instead of {instead}: text of several columns")
    lines.append(f'id = {toml_value(ids or NO_IDS)}    # a column of text or integers; "none": rows have no ids')
    chosen.append(("ids", f"column {ids!r}" if ids else f"none: {columns.why_no_ids(name)}"))
    return "\n".join(lines), chosen, columns.others(name, ids)


def write_question(folder: Path, question: str, model: Path, max_tokens: int, day: date) -> Path:
    """Write a job with one question to a folder, and return its job file; the run folder is `run`.

    The question is a chat if the model has a chat template, else a raw prompt.

    Args:
        day: the date for chat templates that write one.

    Raises:
        ModelError: the model cannot be used.
        ConfigError: the folder cannot be written.
    """
    model = Path(model_folder(Path.cwd(), str(model)))
    load_model_config(model)
    is_chat = has_chat_template(model)
    key = "user" if is_chat else "prompt"
    variables = {"chat_template_kwargs": {"strftime_now": f"{day:%Y-%m-%d}"}} if is_chat else {}
    with table_writer(folder / "question.parquet", (table := pa.table({key: [question]})).schema) as writer:
        writer.write_table(table)
    parts = {
        "input": {"files": ["question.parquet"], key: key, "id": NO_IDS, **variables},
        "output": {"dir": "run"},
        "model": {"path": str(model), "dtype": choose_dtype(model, this_machine())[0]},
        "sampling": {"max_tokens": max_tokens},
    }
    job = folder / "job.toml"
    publish_text(job, dump_job(checked(JobConfig, parts, job)))
    return job


def _typed_shards(files: list[str]) -> list[Shard]:
    """Return the shards. Files of lines are read twice: first for the columns' names, then for all types."""
    shards = find_shards(files, key="DATA")
    of_lines = [shard for shard in shards if shard.problem is None and is_of_lines(shard.format)]
    names = {name for shard in of_lines for name in shard_schema(shard).names}
    return with_types(shards, dict.fromkeys(names, "kept")) if names else shards


class _Columns:
    """Candidate columns: for prompts those of the first shard, for ids those of all shards."""

    def __init__(self, shards: list[Shard]) -> None:
        shard = shards[0]
        schema = shard_schema(shard)
        kinds = {name: column_type(schema, name) for name in schema.names}
        self._kinds: dict[str, pa.DataType] = {name: kind for name, kind in kinds.items() if kind is not None}
        found = {name: prompt_settings(kind) for name, kind in self._kinds.items()}
        self._unfit_ids = _unfit_ids(shards)
        self._settings = {name: settings for name, settings in found.items() if settings is not None}
        texts = [name for name in self._settings if "prompt" in self._settings[name][1]]
        rows = next(read_batches(shard, texts, LOOK_ROWS, s3=DEFAULT_S3), None) if texts else None
        self._texts = {name: [] if rows is None else python_values(rows[name]) for name in texts}
        for name in texts:
            if (keys := chat_keys(self._texts[name])) is not None:
                self._settings[name] = ("a chat as JSON text", keys)

    def prompts(self) -> tuple[dict[str, str], str, str]:
        """Return the keys of [input] that read the prompts, the column, and its content in words.

        Raises:
            ConfigError: no column has prompts.
        """
        chats = [name for name, (_, keys) in self._settings.items() if "messages" in keys]
        texts = [name for name, (_, keys) in self._settings.items() if "prompt" in keys]
        tokens = [name for name, (_, keys) in self._settings.items() if "token_ids" in keys]
        texts.sort(key=lambda name: -sum(len(text) for text in self._texts[name] if isinstance(text, str)))
        kinds = dict.fromkeys(texts, "prompt") | dict.fromkeys(tokens, "token_ids") | dict.fromkeys(chats, "messages")
        order = usual_columns(kinds)
        order += [name for name in texts if name.lower() not in (*ID_NAMES, *SYSTEM_NAMES)] + tokens
        if not order:
            have = ", ".join(f"{name} ({kind})" for name, kind in list(self._kinds.items())[:20])
            raise ConfigError(
                f"no column holds prompts: text, a chat (a list of structs with role and content) or token ids; "
                f"there are {have or 'no columns'}"
            )
        name = order[0]
        words, keys = self._settings[name]
        return {key: value or name for key, value in keys.items()}, name, words

    def ids(self, prompts: str) -> str | None:
        """Return the column of ids by its name and its types in all shards, None if there is none."""
        able = [name for name, unfit in self._unfit_ids.items() if name != prompts and unfit is None]
        likely = [*_named(able, ID_NAMES), *able]
        return likely[0] if likely else None

    def why_no_ids(self, prompts: str) -> str:
        """Return why no column can hold ids: a type of the column that has the name of one, if there is such."""
        named = _named([name for name in self._unfit_ids if name != prompts], ID_NAMES)
        unfit = self._unfit_ids[named[0]] if named else None
        if unfit is None:
            return "no column looks like one"
        return f"column {named[0]!r} is {unfit[1]}{unfit[0]}, not text or integer{doubles_hint(unfit[1])}"

    def of_names(self, known: tuple[str, ...], prompts: str) -> str | None:
        """Return a column of text with one of these names, other than the prompts; None if Jinja cannot name both."""
        texts = [name for name in self._texts if name != prompts] if prompts.isidentifier() else []
        return next(iter(_named(texts, known)), None)

    def others(self, prompts: str, ids: str | None) -> list[str]:
        """Return columns that may be kept next to the answers: all but prompts and ids, or else the prompts."""
        taken = {*OUTPUTS.schema.names, ids}
        free = [name for name in self._kinds if name not in taken]
        return [name for name in free if name != prompts][:MAX_KEPT] or [name for name in free if name == prompts]


def _unfit_ids(shards: list[Shard]) -> dict[str, tuple[str, pa.DataType] | None]:
    """Return, by column with a name of ids, None if it can hold ids in all shards, else where not, and its type there.

    The place is " in FILE", or "" if it is all shards.
    """
    found = schemas_of_rows(shards)
    names = dict.fromkeys(name for _, schema in found for name in schema.names)
    unfit = {}
    for name in (name for name in names if name.lower() in ID_NAMES or name.lower().endswith("_id")):
        able = (pa.float64(),) if id_type(shards, name) == pa.int64() else ()  # beside integers
        kinds = [(shard.path, column_type(schema, name)) for shard, schema in found]
        wrong = [(path, kind) for path, kind in kinds if kind is not None and kind not in able and not is_id_type(kind)]
        unfit[name] = (f" in {wrong[0][0]}" if len(wrong) < len(found) else "", wrong[0][1]) if wrong else None
    return unfit


def usual_columns(kinds: Mapping[str, str]) -> list[str]:
    """Return the columns that prompts are usually in, the likeliest first: chats, then those with usual names.

    Args:
        kinds: "messages", "prompt" or "token_ids" by column.
    """
    of_kind = {usual: [name for name, kind in kinds.items() if kind == usual] for usual in USUAL_NAMES}
    named = {usual: _named(of_kind[usual], names) for usual, names in USUAL_NAMES.items()}
    order = [*named["messages"], *of_kind["messages"], *named["prompt"], *named["token_ids"]]
    return list(dict.fromkeys(order))


def _named(names: list[str], known: tuple[str, ...]) -> list[str]:
    """Return the names that are in `known`, in the order of `known`; case does not matter."""
    return sorted((name for name in names if name.lower() in known), key=lambda name: known.index(name.lower()))


def chat_keys(texts: list[Any]) -> dict[str, str] | None:
    """Return the keys of [input] for texts that are all chats as JSON; None if a text is no chat."""
    given = [text for text in texts if text is not None]
    try:
        chats = [json.loads(text) for text in given]
        turns = [turn for chat in chats for turn in chat]
        if turns and all("role" in turn and "content" in turn for turn in turns):
            return CHATS_AS_JSON
        if turns and all("from" in turn and "value" in turn for turn in turns):
            return {"format": "sharegpt", "messages": ""}
    except (ValueError, TypeError, RecursionError):
        return None  # ordinary text
    return None


def _patterns(data: str) -> tuple[list[str], list[str]]:
    """Return the value of input.files for a file, folder, glob or URI, and the folder's data files that are left out.

    A job reads one format: of a folder the Parquet files, else those of the most frequent format.
    """
    if is_uri(data):
        return [data], []
    path = Path(_normal(data))
    if not path.is_dir():
        return [str(path)], []
    shown = glob.escape(str(path))

    def below(pattern: str) -> list[str]:
        """Return the files that a pattern finds in the folder, relative to it and without those of run folders."""
        found = without_run_folders(f"{shown}/{pattern}", matching_paths(f"{shown}/{pattern}"), set())
        return [os.path.relpath(name, path) for name in found if os.path.isfile(name)]

    all_names = below("**/*")
    names = [name for name in all_names if is_data_file(os.path.basename(name))]
    formats = Counter(format_of(name, None) for name in names)
    chosen = "parquet" if "parquet" in formats else formats.most_common(1)[0][0] if formats else None
    if chosen != "parquet" and len(formats) <= 1:
        return [shown], []  # find_shards reads the folder, as a saved dataset if it is one
    found = [name for name in names if format_of(name, None) == chosen]
    on_top = [name for name in found if chosen == "parquet" and os.sep not in name]
    endings = sorted({extension_of(name) for name in on_top or found})
    inside = [f"{'' if on_top else '**/'}*{ending}" for ending in endings]
    warn_overlooked({str(path): [name for name in all_names if is_overlooked(os.path.basename(name))]})
    taken = {name for pattern in inside for name in below(pattern)}
    return [f"{shown}/{pattern}" for pattern in inside], [name for name in names if name not in taken]


def _named_files(names: list[str]) -> str:
    """Return the number of files that a job does not read, with the first names and what to do."""
    first = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
    return f"{count_text(len(names), 'file')} ({first}): run init on these for another job"


def _normal(path: str | Path) -> str:
    """Return an absolute path without `..`; links are resolved only if they change what `..` means."""
    plain = os.path.abspath(path)
    return plain if os.path.realpath(plain) == os.path.realpath(path) else os.path.realpath(path)


def _from(folder: Path, path: str) -> str:
    """Return a path for the job file: relative if it is below the job file's folder."""
    found = os.path.relpath(path, folder)
    return path if found.startswith("..") else found


def _free_folder(folder: Path, stem: str) -> str:
    """Return the relative path of a run folder that does not exist yet."""
    name, number = f"runs/{stem}", 2
    while (folder / name).exists():
        name, number = f"runs/{stem}-{number}", number + 1
    return name


_OF_BATCH = (
    'format = "openai"    # lines of an OpenAI batch: they hold prompts, ids and sampling',
    [("prompts", "lines of an OpenAI batch"), ("ids", "their custom_id")],
)
_BATCH_OUTPUTS = """
format = "openai"    # outputs/*.jsonl too, as OpenAI answers a batch, and *.errors.jsonl"""
_KEPT = "    # input columns to copy next to each answer"
_TEMPLATE = """\
#:schema {schema}
# Relative paths count from this file's folder. `batchinfer schema` lists every key.

[input]
files = [{files}]
{inputs}

[output]
dir = {run}    # the run folder: outputs/*.parquet and stats/ come here{outputs}

[model]
path = {model}
# float32, bfloat16, fp8 or int4. Why {dtype}: {why}
dtype = "{dtype}"

[sampling]
max_tokens = {max_tokens}    # most new tokens per answer; the model's window is {window}, prompt included
# temperature = 0.7    # without it answers are greedy

# [cluster]
# prefill_ranks = 2    # processes that share the experts, one per GPU
"""
