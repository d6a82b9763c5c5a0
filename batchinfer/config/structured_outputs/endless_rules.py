"""Grammars in Lark whose rules need themselves, so that no text ever ends."""

from collections.abc import Iterable

from batchinfer.config.structured_outputs.lark_text import Token

_START = "start"


def is_endless(tokens: Iterable[Token]) -> bool:
    """Whether the start rule of a grammar needs itself in every text; False also where that cannot be told."""
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
    """A rule has something that is not followed here."""


class _Body:
    """Reads the body of a rule once.

    Args:
        ends: rules of which it is known that a text of theirs ends.
        rules: all names of rules; other names are of terminals or of parts that end.
    """

    def __init__(self, tokens: list[Token], ends: set[str], rules: Iterable[str]) -> None:
        self._tokens, self._place = tokens, 0
        self._ends, self._rules = ends, rules

    def ends(self) -> bool:
        """Whether a text of the rule may end."""
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
