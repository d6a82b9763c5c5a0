"""The text of a grammar in llguidance's kind of Lark, cut into its tokens."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_BLANKS = re.compile(r"\s*")
_TOKEN = re.compile(
    r"""
      (?P<skip>    (?:\#|//)[^\n]* | [ \t]+ )
    | (?P<string>  "(?:\\.|[^"\\])*"i? )
    | (?P<regexp>  /(?:\\.|[^/\\])+/[imslux]* )
    | (?P<special> <[^<>\s]+> )
    | (?P<data>    %(?:json|regex|llguidance)\b )
    | (?P<directive> %[a-z]+ )
    | (?P<name>    !?[_?]?[a-zA-Z][_a-zA-Z0-9\-]* )
    | (?P<grammar> @[a-zA-Z0-9_\-]+ )
    | (?P<number>  [+-]?[0-9]+ )
    | (?P<newline> (?:\r?\n)+[ \t]* )
    | (?P<sign>    ::|->|\.\.|. )
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A token and where it is; JSON behind a directive is a token of kind "json"."""

    kind: str
    text: str
    start: int
    directive: str = ""  # of JSON: "%json", "%regex" or "%llguidance"

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def lark_tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of a grammar without blanks and comments.

    Raises:
        ValueError: what follows a directive is not JSON.
    """
    position, directive = 0, ""
    while position < len(text):
        if directive:
            start = _BLANKS.match(text, position).end()  # type: ignore[union-attr]
            _, end = json.JSONDecoder().raw_decode(text, start)
            yield Token("json", text[start:end], start, directive)
            position, directive = end, ""
            continue
        found = _TOKEN.match(text, position)
        assert found is not None  # any character is a sign
        kind, position = str(found.lastgroup), found.end()
        if kind == "data":
            directive = found.group()
        elif kind != "skip":
            yield Token(kind, found.group(), found.start())
