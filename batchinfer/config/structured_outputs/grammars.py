"""Structured outputs: from what a job or row asks for to a grammar of llguidance, or to the reason against it."""

import functools
import json
import re
from typing import Any, NamedTuple

from llguidance import LLMatcher, grammar_from

from batchinfer.config.exact_json import dumps, parse
from batchinfer.config.structured_outputs.byte_matcher import byte_matcher, is_dead_end, is_stuck
from batchinfer.config.structured_outputs.endless import Token, exclude_endless, is_endless, lark_tokens
from batchinfer.config.structured_outputs.exact_grammar import CannotBeWrittenError, lark_of
from batchinfer.config.structured_outputs.merged_multiples import misjudged_number
from batchinfer.config.structured_outputs.schema_numbers import (
    drop_large_annotations,
    grammar_json,
    has_slow_multiples,
    impossible_count,
    make_exact,
    refusal_of,
)
from batchinfer.config.structured_outputs.schema_tree import keyword_warnings, switched_at, write_references_as_paths
from batchinfer.sanitize import error_text

# between any two parts of JSON: enough to indent, and no model can go on with blanks for ever
_BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"
MOST_CHARS = 1 << 20
# keys of %llguidance with which every answer is still a text that the grammar describes
_HARMLESS = ("no_forcing", "allow_initial_skip", "ignore_once")
_NO_TEXT = "no text satisfies it"
_NAMES_TOKENS = (
    "the grammar names tokens of the tokenizer, as <name>, which are looked up when the model is loaded; one that is "
    "missing makes its rows error rows"
)

# an option of llguidance that no schema here may set
_ONE_OF = (". Enable 'coerce_one_of' option to approximate oneOf with anyOf", "; write anyOf")
_IN_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*)")


def grammar_of(kind: str, text: str) -> str:
    """Return a grammar as llguidance takes it.

    Args:
        kind: json, regex, choice, grammar or json_object.
        text: the schema or list as JSON, the pattern, or the grammar in Lark's or GBNF's notation.

    Raises:
        ValueError: the text cannot be used; the message says why.
    """
    return _compiled(kind, text).grammar


def problem_of(kind: str, text: str) -> str | None:
    """Return why a grammar cannot be used, None if it can."""
    return _checked(kind, text)[0]


def warnings_of(kind: str, text: str) -> tuple[str, ...]:
    """Return sentences about parts of a usable grammar that have no effect, or that only a run can check."""
    return _checked(kind, text)[1]


def reason_of(error: str) -> str:
    """Return the reason in an error of llguidance, without its dump of the parser's state, which holds times."""
    if is_dead_end(error):
        return "no text goes on from here: the grammar has a dead end, such as a name that no property may have"
    reason = error.partition("<state>")[0]
    # of a schema in a grammar: the place and the lines behind the reason are those of the grammar
    in_schema = _IN_SCHEMA.match(reason)
    return " ".join((in_schema[1] if in_schema else reason).split()).replace(*_ONE_OF)


@functools.lru_cache(256)  # texts of a million characters are held, too
def _checked(kind: str, text: str) -> tuple[str | None, tuple[str, ...]]:
    if len(text) > MOST_CHARS:
        return f"it has {len(text):,} characters, more than {MOST_CHARS:,}", ()
    try:
        compiled = _compiled(kind, text)
    except (ValueError, RecursionError) as error:
        return " ".join(error_text(error).split()), ()
    if not compiled.can_be_tried:
        is_error, said = LLMatcher.validate_grammar_with_warnings(compiled.grammar)
        if is_error:
            return reason_of(said[0]), ()
        return None, (*compiled.warnings, *(one for one in said if not one.startswith("no tokenizer")))
    matcher = byte_matcher(compiled.grammar)
    if matcher.is_error():
        return reason_of(matcher.get_error()), ()
    return _NO_TEXT if is_stuck(matcher) else None, (*compiled.warnings, *matcher.get_grammar_warnings())


# ---- grammars


class _Compiled(NamedTuple):
    grammar: str
    warnings: tuple[str, ...] = ()
    can_be_tried: bool = True  # without a model, and soon


def _compiled(kind: str, text: str) -> _Compiled:
    if kind == "json_object":
        return _Compiled(_schema_grammar('{"type": "object"}'))
    if kind == "json":
        schema = _Schema(text)
        if schema.inexact:
            grammar = LLMatcher.grammar_from_lark(schema.as_lark())
        elif schema.is_changed:
            grammar = grammar_json(schema.text[:-1], json.dumps({"whitespace_pattern": _BLANKS}))
        else:
            grammar = _schema_grammar(text)
        return _Compiled(grammar, schema.warnings, not schema.is_slow)
    if kind == "grammar":
        return _compiled_lark(grammar_from("grammar", text))
    return _Compiled(grammar_from(kind, text))  # type: ignore[arg-type]


def _schema_grammar(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _BLANKS})


def _compiled_lark(text: str) -> _Compiled:
    tokens = list(lark_tokens(text))
    if is_endless(tokens):
        raise ValueError(_NO_TEXT)
    names_tokens = any(token.kind == "special" for token in tokens)
    warnings = [_NAMES_TOKENS] if names_tokens else []
    pieces: list[str] = []
    end, can_be_tried = 0, not names_tokens
    for token in tokens:
        if token.directive == "%llguidance":
            _refuse_options(token)
        elif token.directive == "%json" and token.text.startswith("{"):
            schema = _Schema(token.text)
            schema.refuse_inexact()
            warnings += schema.warnings
            can_be_tried &= not schema.is_slow
            pieces += [text[end : token.start], schema.text]
            end = token.end
    return _Compiled(LLMatcher.grammar_from_lark("".join(pieces) + text[end:]), tuple(warnings), can_be_tried)


def _refuse_options(token: Token) -> None:
    options = json.loads(token.text)
    for key in options if isinstance(options, dict) else ():
        if key not in _HARMLESS:
            raise ValueError(f"%llguidance sets {key!r}, with which answers may be something else; remove it")


class _Schema:
    """A schema as llguidance should get it.

    text: with literals that llguidance reads right.
    inexact: numbers for which there are no such literals.

    Raises:
        ValueError: the text is no schema, or llguidance would make something else of it.
    """

    def __init__(self, text: str) -> None:
        schema: Any = parse(text)
        if not isinstance(schema, dict):
            raise ValueError("the schema is not a JSON object")
        switch = switched_at(schema)
        if switch is not None:
            raise ValueError(f"{switch} changes what a schema means to llguidance; remove it")
        count = impossible_count(schema)
        if count is not None:
            raise ValueError(count)
        is_without_some = drop_large_annotations(schema)
        has_other_references = write_references_as_paths(schema)
        is_without_endless = exclude_endless(schema)
        if is_without_endless is None:
            raise ValueError(_NO_TEXT)
        misjudged = misjudged_number(schema)
        if misjudged is not None:
            raise ValueError(
                f"{misjudged} goes wrong in llguidance's arithmetic, together with other bounds of the same value; "
                "leave one of them out"
            )
        has_careful, self.inexact = make_exact(schema)
        self._schema = schema
        self.warnings = tuple(keyword_warnings(schema))
        self.is_slow = has_slow_multiples(schema)
        self.is_changed = is_without_some or has_other_references or is_without_endless or has_careful
        self.text = dumps(schema) if self.is_changed else text

    def as_lark(self) -> str:
        """Convert the schema to a Lark grammar, in which numbers that llguidance compares inexactly are spelled out.

        Raises:
            ValueError: there is no such grammar here.
        """
        try:
            return lark_of(self._schema, self.inexact, _BLANKS)
        except CannotBeWrittenError:
            self.refuse_inexact()
            raise

    def refuse_inexact(self) -> None:
        if self.inexact:
            raise ValueError(refusal_of(self.inexact[0]))
