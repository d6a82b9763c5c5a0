"""Search for endless constraints: Lark rules that need themselves, and schemas that no finite value satisfies."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from batchinfer.config.structured_outputs.schema_tree import children, list_under, subschemas, target_of

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
    """A token and its position in the grammar; the JSON after a directive is a token of kind "json"."""

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
        ValueError: a directive is not followed by JSON.
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


_START = "start"


def is_endless(tokens: Iterable[Token]) -> bool:
    """Return whether each text of the start rule contains another text of it; False if that cannot be decided."""
    bodies = _bodies(list(tokens))
    ends: set[str] = set()
    try:
        while new := {name for name, body in bodies.items() if name not in ends and _Body(body, ends, bodies).ends()}:
            ends |= new
    except _UnknownError:
        return False
    return _START in bodies and _START not in ends


def _bodies(tokens: list[Token]) -> dict[str, list[Token]]:
    """Return the tokens of each rule by its name: from its colon to the next line that does not go on with "|"."""
    bodies: dict[str, list[Token]] = {}
    body: list[Token] = []
    for line in _lines(tokens):
        texts = [token.text for token in line]
        if line[0].kind == "name" and ":" in texts:
            body = bodies.setdefault(texts[0].lstrip("!?"), [])
            body += line[texts.index(":") + 1 :]
        elif line[0].kind != "directive":
            body += line
    return bodies


def _lines(tokens: list[Token]) -> list[list[Token]]:
    lines: list[list[Token]] = [[]]
    for token in tokens:
        if token.kind == "newline":
            lines.append([])
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


class _UnknownError(Exception):
    """Error: a rule uses a part of the notation that this file does not read."""


class _Body:
    """Parser of a rule's body, for one pass.

    Args:
        ends: rules that are known to have a finite text.
        rules: names of all rules; other names are terminals, which have finite texts.
    """

    def __init__(self, tokens: list[Token], ends: set[str], rules: Iterable[str]) -> None:
        self._tokens, self._place = tokens, 0
        self._ends, self._rules = ends, rules

    def ends(self) -> bool:
        """Return whether the rule has a finite text, given the rules in `ends`."""
        found = self._alternatives()
        if self._next is not None:
            raise _UnknownError
        return found

    @property
    def _next(self) -> str | None:
        return self._tokens[self._place].text if self._place < len(self._tokens) else None

    def _alternatives(self) -> bool:
        found = self._sequence()
        while self._next == "|":
            self._place += 1
            found |= self._sequence()
        return found

    def _sequence(self) -> bool:
        found = True
        while self._next not in (None, "|", ")", "]"):
            found &= self._item()
        return found

    def _item(self) -> bool:
        token = self._tokens[self._place]
        self._place += 1
        if token.kind == "sign" and token.text in ("(", "["):
            found = self._alternatives() | (token.text == "[")
            self._place += 1
        elif token.kind in ("sign", "directive"):
            raise _UnknownError
        else:
            found = token.text in self._ends or token.text not in self._rules or not token.text.islower()
        return self._repeated(found)

    def _repeated(self, found: bool) -> bool:
        if self._next in ("?", "*", "+"):
            found |= self._next != "+"
            self._place += 1
        elif self._next == "{":
            found |= self._tokens[self._place + 1].text in ("0", ",")
            while self._next not in (None, "}"):
                self._place += 1
            self._place += 1
        elif self._next == "~":
            raise _UnknownError
        return found


def exclude_endless(schema: dict[str, Any]) -> bool | None:
    """Replace the schemas that only endless values satisfy by false, where a value may leave them out.

    A schema is endless if it needs itself: by references alone, or by a required property or item. llguidance would
    let an answer begin with such a value, and the answer could never end.

    Args:
        schema: changed in place.

    Returns:
        Whether something was replaced; None if the whole schema is endless.
    """
    parts = [part for _, part in subschemas(schema)]
    if not any("$ref" in part for part in parts):
        return False
    ends: set[int] = set()  # ids of schemas that a finite value satisfies
    while new := {id(part) for part in parts if id(part) not in ends and _ends(schema, part, ends)}:
        ends |= new
    if id(schema) not in ends:
        return None
    endless = []
    for path, part in subschemas(schema):
        named = [part.get(key) for key in ("$defs", "definitions")]  # definitions alone require nothing
        for place in children(part, path):
            if isinstance(place.value, dict) and id(place.value) not in ends:
                endless += [] if any(place.holder is holder for holder in named) else [place]
    for place in endless:
        place.replace(False)
    return bool(endless)


def _ends(root: dict[str, Any], part: dict[str, Any], ends: set[int]) -> bool:
    """Return whether a finite value may satisfy a schema, given the ids of schemas with finite values."""

    def may_end(value: Any) -> bool:
        return id(value) in ends if isinstance(value, dict) else value is not False

    target = target_of(root, part.get("$ref"))
    if target is not None and not may_end(target.value):
        return False
    if not all(map(may_end, list_under(part, "allOf"))):
        return False
    if any(list_under(part, name) and not any(map(may_end, list_under(part, name))) for name in ("anyOf", "oneOf")):
        return False
    types = [part["type"]] if isinstance(part.get("type"), str) else list_under(part, "type")
    if not types or any(kind not in ("array", "object") for kind in types):
        return True
    properties, required = part.get("properties"), list_under(part, "required")
    properties = properties if isinstance(properties, dict) else {}
    if "object" in types and all(may_end(properties.get(name)) for name in required if isinstance(name, str)):
        return True
    least = part.get("minItems", 0)
    first, rest = list_under(part, "prefixItems"), part.get("items")
    needs_rest = isinstance(least, int) and least > len(first)
    needed = [*first[: least if isinstance(least, int) else 0], *([rest] if needs_rest else [])]
    return "array" in types and all(may_end(item) for item in needed if not isinstance(item, list))
