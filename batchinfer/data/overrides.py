"""Per-row sampling: the values of the column input.sampling (structs or JSON texts) replace keys of [sampling]."""

import re
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace
from pydantic import ValidationError

from batchinfer.config import SamplingConfig
from batchinfer.config.exact_json import exact_float
from batchinfer.config.other_names import remedy_in_a_row
from batchinfer.config.sampling import NOTHING_SCORED
from batchinfer.records import ConfigError, Sampling, sampling_to_json
from batchinfer.sanitize import error_text

KNOWN_BYTES = 32 << 20  # for cached overrides: few distinct ones, or one per row (seeds)
ENTRY_BYTES = 1000  # of a cached override, in addition to its texts
_DECODER = msgspec.json.Decoder(float_hook=exact_float)


class RowSampling(NamedTuple):
    """A row's sampling, or why the row's override is bad.

    sampling: the row's sampling; for a bad override the job's sampling with the number of samples that the row wants.
    as_json: the sampling as JSON; None if it is the job's own.
    problem: the error sentence of a bad override, else None.
    """

    sampling: Sampling
    as_json: str | None = None
    problem: str | None = None


class SamplingOverrides:
    """Resolves rows' overrides of the job's sampling; equal overrides are checked once.

    Args:
        nulls_count: whether a key with null removes the job's value; else such a key counts as missing.
        ends_thinking: whether the tokenizer has a token that ends thinking.
    """

    def __init__(
        self,
        job: SamplingConfig,
        column: str,
        *,
        vocab_size: int,
        with_choices: bool = False,
        nulls_count: bool = False,
        ends_thinking: bool = True,
    ) -> None:
        self._nulls_count, self._ends_thinking = nulls_count, ends_thinking
        self._job_values = job.model_dump(include=set(SamplingConfig.model_fields))
        self._job_sampling = job.to_sampling()
        self._column, self._vocab_size, self._has_choices = column, vocab_size, with_choices
        self._known: dict[str, RowSampling] = {}
        self._known_bytes = 0

    def resolve(self, override: dict[str, Any] | None) -> RowSampling:
        """Return the sampling of a row with this override."""
        given = override or {}
        if not self._nulls_count:
            given = {key: value for key, value in given.items() if value is not None}
        # repr keeps apart what Python calls equal: 1, 1.0 and True
        text = repr(given)
        if text not in self._known:
            self._remember(text, self._check(given))
        return self._known[text]

    def resolve_json(self, text: str) -> RowSampling:
        """Return the sampling of a row whose override is a JSON text."""
        try:
            override = _DECODER.decode(text)
            if override is not None and not isinstance(override, dict):
                return self._refused({}, f"{self._column} is not an object of sampling keys")
            return self.resolve(override)
        except (msgspec.DecodeError, RecursionError) as error:
            return self._refused({}, f"{self._column} is not valid JSON: {error_text(error)}")

    def _remember(self, text: str, found: RowSampling) -> None:
        said = found.problem or found.as_json or text
        num_bytes = getsizeof(text) + 2 * getsizeof(said) + ENTRY_BYTES  # a sampling's own texts are in its JSON, too
        if self._known_bytes + num_bytes > KNOWN_BYTES:
            self._known.clear()
            self._known_bytes = 0
        self._known[text] = found
        self._known_bytes += num_bytes

    def _check(self, given: dict[str, Any]) -> RowSampling:
        try:
            sampling = SamplingConfig.model_validate({**self._job_values, **given}).to_sampling()
            check_token_ids(sampling, self._vocab_size)
            check_thinking(sampling, self._ends_thinking)
            if not sampling.max_tokens and sampling.prompt_logprobs is None and not self._has_choices:
                return self._refused(given, f"{self._column}.max_tokens {NOTHING_SCORED}")
        except ValidationError as error:
            return self._refused(given, self._sentence(error))
        except ConfigError as error:
            return self._refused(given, f"{self._column}.{error}")
        return RowSampling(sampling, None if sampling == self._job_sampling else sampling_to_json(sampling))

    def _refused(self, given: dict[str, Any], problem: str) -> RowSampling:
        """Return the result for a bad override; a bad row, too, has `n` output rows if its `n` is valid."""
        try:
            asked = SamplingConfig.model_validate({"max_tokens": 1, "n": given.get("n", self._job_sampling.n)})
        except ValidationError:
            return RowSampling(self._job_sampling, problem=problem)
        return RowSampling(replace(self._job_sampling, n=asked.n), problem=problem)

    def _sentence(self, error: ValidationError) -> str:
        problem = error.errors(include_url=False)[0]
        names = [str(name) for name in problem["loc"]]
        if names[:2] == ["structured_outputs", "json"]:
            del names[2:]  # pydantic's names of the types that a schema may have
            problem["msg"] = "it should be a JSON schema, as an object or as JSON text"
        where = ".".join((self._column, *names))
        if problem["type"] == "extra_forbidden":
            remedy = remedy_in_a_row(str(problem["loc"][-1]))
            return f"{where} is not a sampling key{f'; {remedy}' if remedy else ' (`batchinfer schema` lists them)'}"
        message = re.sub("^(Value error, |(Input|String|List|Dictionary)(?= should))", "", problem["msg"])
        message = f"it{message}" if message.startswith(" should") else message
        if not problem["loc"]:  # a problem of several keys: the message begins with one
            return f"{where}.{message}"
        return f"{where} is {repr(problem['input'])[:80]}, but {message}"


def warnings_of(sampling: Sampling) -> tuple[str, ...]:
    """Return sentences about parts of the structured output that have no effect."""
    if sampling.structured is None:
        return ()
    # imported here because most jobs need no grammar library
    from batchinfer.config import structured_outputs

    return structured_outputs.warnings_of(*sampling.structured)


def check_thinking(sampling: Sampling, ends_thinking: bool) -> None:
    """Refuse a thinking budget if no token ends thinking.

    Raises:
        ConfigError: the tokenizer has no token that ends thinking.
    """
    if sampling.thinking_budget is not None and not ends_thinking:
        raise ConfigError(
            f"thinking_budget is {sampling.thinking_budget}, but the model's tokenizer has no token </think> or "
            "[/THINK]; leave it out"
        )


def check_token_ids(sampling: Sampling, vocab_size: int) -> None:
    """Refuse a token id that the model does not have, in logit_bias and stop_token_ids.

    Args:
        vocab_size: number of the model's logits; the tokenizer may have fewer ids.

    Raises:
        ConfigError: names the key and the token.
    """
    biased = [token for token, _ in sampling.logit_bias]
    for key, tokens in (("logit_bias", biased), ("stop_token_ids", sampling.stop_token_ids)):
        for token in tokens:
            if token >= vocab_size:
                raise ConfigError(
                    f"{key} names token {token}, but the model has ids 0 to {vocab_size - 1} only; leave it out"
                )
