"""What an answer must be: from what a job or row asks for to a grammar of llguidance, or what is wrong with it."""

import functools
import json

from llguidance import LLMatcher, grammar_from

from batchinfer.sanitize import words_of

# between any two parts of JSON: enough to indent, and no model can go on with blanks for ever
_BLANKS = r"[\x20\x0A\x0D\x09]{0,32}"
_ANY_OBJECT = '{"type": "object"}'
MOST_CHARS = 1 << 20


def grammar_of(kind: str, text: str) -> str:
    """The grammar as llguidance takes it.

    Args:
        kind: json, regex, choice, grammar or json_object.
        text: the schema or list as JSON, the pattern, or the grammar in Lark's or GBNF's notation.

    Raises:
        ValueError: the text cannot be read.
    """
    if kind in ("json", "json_object"):
        schema = _ANY_OBJECT if kind == "json_object" else text
        if not isinstance(json.loads(schema), dict):
            raise ValueError("the schema is not a JSON object")
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _BLANKS})
    return grammar_from(kind, text)  # type: ignore[arg-type]


@functools.lru_cache(256)  # texts of a million characters are held, too
def problem_of(kind: str, text: str) -> str | None:
    """Why a grammar cannot be used, in the library's words; None: it can."""
    if len(text) > MOST_CHARS:
        return f"it has {len(text):,} characters, more than {MOST_CHARS:,}"
    try:
        is_error, said = LLMatcher.validate_grammar_with_warnings(grammar_of(kind, text))
    except (ValueError, RecursionError) as error:
        return " ".join(words_of(error).split())
    return " ".join(said[0].split()) if is_error else None
