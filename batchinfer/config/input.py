"""[input] of a job file: files of prompts, their format, and the use of columns."""

from __future__ import annotations

import json
from datetime import date, time
from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from batchinfer.config.part import Part, Text
from batchinfer.sanitize import first_line

# keys of [input] for the columns into which data/formats/openai_batch.py converts a line
OPENAI_COLUMNS = {"id": "custom_id", "messages": "request", "sampling": "sampling"}

_KINDS: tuple[Literal["user", "prompt", "messages", "token_ids", "template"], ...] = (
    "user",
    "prompt",
    "messages",
    "token_ids",
    "template",
)


class InputConfig(Part):
    """Files of prompts, their format, and the use of columns."""

    files: list[Text] = Field(
        min_length=1,
        description="shards: paths, folders or URIs (s3://bucket/a.parquet), globs too (`*`, `**`), in sorted order",
    )
    format: Literal["parquet", "jsonl", "csv", "arrow", "sharegpt", "openai"] | None = Field(
        None,
        description="of the files; unset: by extension, as jsonl.gz or tsv, else Parquet; sharegpt: by extension, and "
        "messages (unset: conversations) holds {from: human | gpt | system, value}; openai: lines of its batch files",
    )
    id: Text = Field(
        "id",
        description="column with the row's id (text or integer), which may repeat or be null; none: rows have no ids",
    )
    user: Text | None = Field(
        None, description="column with text that goes through the chat template as the user's message"
    )
    prompt: Text | None = Field(
        None,
        description="column with raw text that goes to the model as it is (or user, messages, template, token_ids)",
    )
    messages: Text | None = Field(
        None, description="column with a list of {role, content}, or JSON text of it, put through the chat template"
    )
    template: Text | None = Field(
        None,
        description="Jinja over the row's columns that writes the raw prompt text; with system: the user's message",
    )
    system: str | None = Field(
        None,
        description="system message of chats that have none: a text, or Jinja over the row's columns; empty: none "
        "(with template, a chat without one)",
    )
    chat_template_kwargs: dict[str, JsonValue] | Text | None = Field(
        None,
        description="variables for the chat template, such as enable_thinking, or JSON text of them ({...}); or a "
        "column: structs or JSON text",
    )
    tools: list[dict[str, JsonValue]] | dict[str, JsonValue] | Text | None = Field(
        None,
        description="tools for the chat template, or JSON text of them ([...]), or a column with them: structs or JSON "
        "text; outputs get tool_calls",
    )
    continue_final_message: bool = Field(
        False, description="the answer continues the last message, as with transformers"
    )
    token_ids: Text | None = Field(None, description="column with ready token ids")
    control_tokens: Literal["parse", "text", "error"] = Field(
        "parse",
        description="text in prompts that equals a control token such as <|User|>: parse: is this token, as with "
        "transformers; text: is ordinary text; error: makes the row bad",
    )
    choices: Text | None = Field(
        None,
        description="column with a list of texts (or of lists of token ids), each scored as the prompt's continuation; "
        "sampling.max_tokens must be 0",
    )
    sampling: Text | None = Field(
        None, description="column with a struct, or JSON text of one, that overrides [sampling] row by row"
    )

    @model_validator(mode="before")
    @classmethod
    def _with_columns_of_format(cls, table: Any) -> Any:
        form = table.get("format") if isinstance(table, dict) else None
        if form != "openai":
            return {"messages": "conversations", **table} if form == "sharegpt" else table
        for name in ("id", "user", "prompt", "messages", "template", "token_ids", "tools", "choices", "sampling"):
            if table.get(name, OPENAI_COLUMNS.get(name)) != OPENAI_COLUMNS.get(name):
                raise ValueError(f"{name} does not go with format = 'openai', whose lines have it; leave it out")
        kwargs = table.get("chat_template_kwargs")
        if isinstance(kwargs, str) and not _is_json(kwargs):
            raise ValueError("chat_template_kwargs names a column, which format = 'openai' has not; write a table")
        return {**table, **OPENAI_COLUMNS}

    @field_validator("chat_template_kwargs", "tools", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Parse values written as JSON text, which can have null, unlike TOML."""
        if not isinstance(value, str) or not _is_json(value):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"begins as JSON does, but is not valid JSON: {first_line(error)}") from None

    @field_validator("chat_template_kwargs", mode="before")
    @classmethod
    def _with_dates_as_text(cls, value: Any) -> Any:
        """Convert dates of TOML, at any depth, to their ISO text."""
        return _dates_as_text(value)

    @field_validator("tools")
    @classmethod
    def _none_of_an_empty_list(cls, value: Any) -> Any:
        return value or None  # as in a row: nothing can be called

    @model_validator(mode="after")
    def _one_prompt_column(self) -> InputConfig:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            have = " and ".join(given) or "none"
            raise ValueError(f"{', '.join(_KINDS)}: exactly one must be set, but the job sets {have}")
        for name in ("system", "chat_template_kwargs", "tools"):
            if getattr(self, name) is not None and not self.makes_chats:
                raise ValueError(
                    f"{name} is for chats, but {given[0]} alone makes none; use user, messages, or template with system"
                )
        if self.continue_final_message and self.messages is None:
            raise ValueError(f"continue_final_message is for chats of input.messages, but the job sets {given[0]}")
        return self

    @property
    def makes_chats(self) -> bool:
        """Whether prompts go through the chat template; with format = 'openai' each line decides."""
        has_chats = self.user is not None or self.messages is not None
        return has_chats or (self.template is not None and self.system is not None)

    @property
    def prompt_column(self) -> str:
        """The column of prompts; "" if `template` makes prompts from other columns."""
        return self.user or self.prompt or self.messages or self.token_ids or ""

    @property
    def prompt_kind(self) -> Literal["user", "prompt", "messages", "token_ids", "template"]:
        """The key that says how prompts are made."""
        (kind,) = (name for name in _KINDS if getattr(self, name) is not None)
        return kind


def _is_json(text: str) -> bool:
    """Return whether a value is JSON of a list or object, and not the name of a column."""
    return text.lstrip()[:1] in ("[", "{")


def _dates_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _dates_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_dates_as_text(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value
