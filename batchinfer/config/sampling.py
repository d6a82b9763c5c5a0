"""[sampling] of a job file, or of one row: names and meanings as in vLLM and OpenAI's API."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator, with_config
from typing_extensions import TypedDict

from batchinfer.config.exact_json import dumps
from batchinfer.config.part import INT64_MAX, Part, Text
from batchinfer.records import SAMPLING_LISTS, ConfigError, Sampling

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
MOST_BIAS = 100.0
_OF_MODELS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NOTHING_SCORED = "is 0, but nothing is scored; set it to 1 or more, or set prompt_logprobs or input.choices"
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@with_config(ConfigDict(extra="forbid", strict=True))
class StructuredOutputs(TypedDict, total=False):
    """Constraint on the answer; exactly one key is set."""

    json: str | dict[str, Any]  # a JSON schema, as text or as a table
    regex: Text
    choice: Annotated[list[Text], Field(min_length=1)]
    grammar: Text  # Lark's or GBNF's notation
    json_object: bool


class SamplingConfig(Part):
    """Choice of tokens, which a row may override key by key."""

    max_tokens: int = Field(
        ge=0,
        lt=2**31,
        description="most new tokens per sample (required: no silent default); 0: prompts are only scored",
    )
    temperature: float = Field(0.0, ge=0, le=100, description="0: greedy, the default")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set of tokens with this probability; 1: all")
    top_k: int = Field(0, ge=-1, lt=2**31, description="keep the k most likely tokens; 0 or -1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="then drop tokens below this share of the top probability")
    n: int = Field(1, ge=1, le=16384, description="samples per row")
    seed: int = Field(0, ge=-INT64_MAX, le=INT64_MAX, description="same seed and row: same tokens in every run")
    stop: list[Text] = Field(
        default=[], description="strings (or one) that end the text: the first that is complete; not part of it"
    )
    stop_token_ids: list[TokenId] = Field(
        default=[], description="token ids that end the output, in addition to the model's own"
    )
    include_stop_str_in_output: bool = Field(False, description="the text includes the stop string or token at its end")
    ignore_eos: bool = Field(False, description="go on after the model's end token")
    min_tokens: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="least new tokens, except for a structured output that is complete",
    )
    bad_words: list[Text] = Field(default=[], description="words that are not generated")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken off the logit of each generated token")
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="taken off for each time that a token has been generated"
    )
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="divides (below 0: multiplies) logits of tokens in the prompt or the output"
    )
    logit_bias: dict[str, float] = Field(
        default={}, description="by token id (as text) a number added to its logit, -100 to 100"
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="constraint on the answer: one of json (a schema), regex, choice (a list), grammar, json_object",
    )
    thinking_budget: int | None = Field(
        None, ge=0, lt=2**31, description="most tokens of thinking; thinking is then ended by force"
    )
    logprobs: int | None = Field(None, ge=0, le=100, description="alternatives reported per token; unset: no logprobs")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=100, description="the same for each token of the prompt; unset: no log-probabilities of it"
    )

    @field_validator("top_k")
    @classmethod
    def _all_is_zero(cls, value: int) -> int:
        """Convert -1, which vLLM has for all tokens."""
        return max(value, 0)

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        """Convert a single string to a list, as vLLM and OpenAI's API do."""
        return [value] if isinstance(value, str) else value

    @field_validator("bad_words")
    @classmethod
    def _are_words(cls, value: list[str]) -> list[str]:
        blank = next((word for word in value if not word.strip()), None)
        if blank is not None:
            raise ValueError(
                f"holds {blank!r}, white space alone, which is part of many tokens; forbid single tokens by logit_bias"
            )
        return value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _from_pairs(cls, value: Any) -> Any:
        """Convert pairs, the form of a map in a Parquet column, to a dict, and integer keys to text."""
        if isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
            pairs, value = value, dict(value)
            if len(value) < len(pairs):
                raise ValueError("names a token twice")
        if not isinstance(value, dict):
            return value
        return {str(key) if type(key) is int else key: bias for key, bias in value.items()}

    @field_validator("logit_bias")
    @classmethod
    def _are_token_ids(cls, value: dict[str, float]) -> dict[str, float]:
        for token, bias in value.items():
            if not (token.isascii() and token.isdecimal() and len(token) <= 10):
                raise ValueError(f"{token!r} is not a token id")
            if abs(bias) > MOST_BIAS:
                raise ValueError(f"the bias of token {token} is {bias:g}; it may be -100 to 100")
        if len({int(token) for token in value}) < len(value):
            raise ValueError("names a token twice")
        return value

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Remove nulls: a row's struct has all fields, most of them null."""
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value

    @field_validator("structured_outputs")
    @classmethod
    def _compiles(cls, value: StructuredOutputs | None) -> StructuredOutputs | None:
        if value is None:
            return None
        kind, text = _kind_and_text(value)
        if kind == "json":
            value = {"json": text}
        from batchinfer.config.structured_outputs import problem_of

        problem = problem_of(kind, text)
        if problem is not None:
            raise ValueError(f"{kind} cannot be used: {problem}")
        return value

    @model_validator(mode="after")
    def _can_end(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens = {self.max_tokens}")
        return self

    def to_sampling(self) -> Sampling:
        """Return the values as a `Sampling` record."""
        values = self.model_dump(include=set(SamplingConfig.model_fields))
        structured, bias = values.pop("structured_outputs"), values.pop("logit_bias")
        values |= {name: tuple(values[name]) for name in SAMPLING_LISTS}
        return Sampling(
            **values,
            logit_bias=tuple(sorted((int(token), value) for token, value in bias.items())),
            structured=None if structured is None else _kind_and_text(structured),
        )


class JobSampling(SamplingConfig):
    """Choice of tokens by a job; a row may override every key except `defaults`."""

    defaults: Literal["generation_config"] | None = Field(
        None,
        description="generation_config: temperature, top_p, top_k, min_p and repetition_penalty that are not set here "
        "are those of the model's generation_config.json, as with vLLM",
    )


def with_model_defaults(sampling: JobSampling, model: Path) -> JobSampling:
    """Return the sampling with unset keys filled from the model's generation_config.json, if `defaults` says so.

    Raises:
        ConfigError: the model's file is missing or has impossible values.
    """
    if sampling.defaults is None:
        return sampling
    path = model / "generation_config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"sampling.defaults wants {path}, which cannot be read: {error}; leave it out") from None
    found = found if isinstance(found, dict) else {}
    given = {name: found[name] for name in _OF_MODELS if found.get(name) is not None}
    if found.get("do_sample") is True:
        given.setdefault("temperature", 1.0)
    for name in {"temperature", "top_p", "min_p", "repetition_penalty"} & given.keys():
        given[name] = float(given[name]) if type(given[name]) is int else given[name]
    values = given | sampling.model_dump(exclude_unset=True) | {"defaults": None}
    try:
        return JobSampling.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"])) or "a value"
        raise ConfigError(f"sampling.defaults: {name} in {path} cannot be used: {problem['msg']}") from None


def _kind_and_text(value: StructuredOutputs) -> tuple[str, str]:
    """Return the kind of constraint that is set, and its value as text."""
    given = [kind for kind in KINDS if kind in value]
    if len(given) != 1:
        raise ValueError(f"one of {', '.join(KINDS)} must be set, not {' and '.join(given) or 'none'}")
    (kind,) = given
    content: Any = value[kind]  # type: ignore[literal-required]
    if kind == "json_object" and content is not True:
        raise ValueError("json_object may only be true; leave it out otherwise")
    try:
        return kind, content if isinstance(content, str) else dumps(content)
    except RecursionError:
        raise ValueError(f"{kind} is nested too deeply") from None
