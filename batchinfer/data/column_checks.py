"""The types that the columns named by a job must have, and the error sentences for columns of other types."""

from dataclasses import dataclass

import pyarrow as pa

from batchinfer.config import JobConfig
from batchinfer.data.columns import PROMPT_TYPES, ColumnType, column_type, is_id_type

NO_IDS = "none"  # as input.id


@dataclass(frozen=True, slots=True)
class WantedColumn:
    """A column that the job names, with the type that it must have."""

    key: str  # of [input], which names the column
    name: str
    type: ColumnType

    def problem(self, schema: pa.Schema) -> str | None:
        """Return why every row of a shard with this schema is bad, None if the column is as it must be."""
        if schema.names.count(self.name) > 1:
            return f"the shard has more than one column {self.name!r}"
        kind = column_type(schema, self.name)
        if kind is None:
            return f"the shard has no column {self.name!r}"
        is_right, words = self.type
        if pa.types.is_null(kind) or is_right(kind):
            return None
        return f"column {self.name!r} is {kind}, but must be {words}"


def wanted_columns(job: JobConfig, of_prompts: list[str]) -> list[WantedColumn]:
    """Return the columns that a job reads, without the id column, which may be missing.

    Args:
        of_prompts: the input columns that prompts are made of.
    """
    named = {}
    for key in ("tools", "chat_template_kwargs", "token_ids", "messages", "prompt", "user"):
        name = getattr(job.input, key)
        if isinstance(name, str):
            kind = "sharegpt" if key == "messages" and job.input.format == "sharegpt" else key
            named[name] = WantedColumn(key, name, PROMPT_TYPES[kind])
    wanted = [
        named.get(name)
        or WantedColumn("template" if name in (job.input.template or "") else "system", name, PROMPT_TYPES["template"])
        for name in of_prompts
    ]
    if job.input.sampling is not None:
        wanted.append(WantedColumn("sampling", job.input.sampling, PROMPT_TYPES["sampling"]))
    if job.input.choices is not None:
        wanted.append(WantedColumn("choices", job.input.choices, PROMPT_TYPES["choices"]))
    return wanted


def id_column(job: JobConfig) -> WantedColumn:
    """Return the column of ids."""
    return WantedColumn("id", job.input.id, (is_id_type, "text or integer"))


def prompt_settings(kind: pa.DataType) -> tuple[str, dict[str, str]] | None:
    """Return what a column of this type holds, in words, and the keys of [input] that read prompts from it.

    The value "" of a key stands for the column's name. Text counts as prompts, although it may be chats as JSON.
    Return None if no key reads prompts of this type.
    """
    for form, words, keys in (
        ("prompt", "text", {"prompt": ""}),
        ("token_ids", "a list of integers", {"token_ids": ""}),
        ("messages", "a list of structs with role and content", {"messages": ""}),
        ("sharegpt", "a list of structs with from and value", {"format": "sharegpt", "messages": ""}),
    ):
        is_right, _ = PROMPT_TYPES[form]
        if is_right(kind):
            return words, keys
    return None
