"""Control tokens in the input's texts: found, and kept as ordinary text if input.control_tokens says so.

A tokenizer takes every occurrence of an added token's text for that token. A chat template writes such tokens itself,
so control tokens of the template must be distinguished from text of the messages. For this, the chat is rendered a
second time: in the messages, the characters at which control tokens begin and end are replaced. Control tokens found in
the second text are the template's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from batchinfer.data.safe_cuts import keeps_text
from batchinfer.data.text_encoder import TextEncoder, ids_to_bytes, special_ids_around
from batchinfer.records import ModelError

Render = Callable[[list[Any]], str]  # of [messages, variables for the template]
_SPARE = range(0x10F000, 0x110000)  # code points for private use; a chat's replacements are not in the chat itself
_IS_SPARE = re.compile("[\U0010f000-\U0010ffff]")


class ControlTokenError(ValueError):
    """A row's control tokens cannot be treated as the job wants; the message is the row's error."""


class ControlTokens:
    """The added tokens of a tokenizer, except for tokens of white space alone, which are ordinary text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        # special tokens are text already where the model folder says so (split_special_tokens)
        parsed = {id: token for id, token in added if not (token.special and tokenizer.encode_special_tokens)}
        found = {id: token for id, token in parsed.items() if token.content.strip()}
        self._ids = set(found)
        self._texts = sorted({token.content for token in found.values()}, key=len, reverse=True)
        self._pattern = _any_of(self._texts)
        self._marks = sorted({char for text in self._texts for char in (text[0], text[-1])})
        self._normalizer = None if keeps_text(tokenizer) else tokenizer.normalizer
        self._normalized = _any_of(
            [self._normalizer.normalize_str(token.content) for token in found.values() if token.normalized]
            if self._normalizer
            else []
        )
        self._literal: LiteralTokenizer | None = None

    @property
    def literal(self) -> LiteralTokenizer:
        """The tokenizer that encodes the text of control tokens as ordinary text."""
        if self._literal is None:
            self._literal = LiteralTokenizer(self._tokenizer, self._ids)
        return self._literal

    def first_in(self, value: Any) -> str | None:
        """Return the text of the first control token in a text or in the texts of a chat; None if there is none."""
        for text in (value,) if isinstance(value, str) else _texts_in(value):
            if found := self._pattern.search(text) or self._first_normalized(text):
                return found[0]
        return None

    def are_in(self, values: list[Any]) -> list[bool]:
        """Return for each text or chat whether it has a control token."""
        # one search for all: a token that is in a text is in the joined texts, too
        if self._normalizer is None and not self._pattern.search(
            "\0".join(chain.from_iterable(map(_texts_in, values)))
        ):
            return [False] * len(values)
        return [self.first_in(value) is not None for value in values]

    def pieces(self, chat: list[Any], text: str, render: Render) -> list[str] | None:
        """Split the rendered text of a chat into [text, control token of the template, text, ...].

        Return None if all control tokens in the text are the template's.

        Raises:
            ControlTokenError: the template does not treat control tokens of the messages like other text.
        """
        spare = self._spare_chars(text, chat)
        marked = _Hidden({char: next(spare) for char in self._marks})
        rendered = render(marked.hide(chat))
        own = self._pattern.findall(rendered)
        if self._pattern.findall(text) == own and not any(map(self._first_normalized, _texts_in(chat))):
            return None
        # a template may look for a token in the messages (to drop an answer's thinking) and leave none: only what it
        # leaves is hidden then
        left = _Hidden({token: next(spare) * len(token) for token in self._texts if token in text})
        for hidden in (marked, left):
            rendered = render(hidden.hide(chat))
            if hidden.restore(rendered) == text and self._pattern.findall(rendered) == own:
                return [hidden.restore(piece) for piece in re.split(f"({self._pattern.pattern})", rendered)]
        token = self.first_in(chat) or self._pattern.findall(text)[-1]
        raise ControlTokenError(f"the chat template does not treat the control token {token} in the messages as text")

    def _first_normalized(self, text: str) -> re.Match[str] | None:
        return self._normalized.search(self._normalizer.normalize_str(text)) if self._normalizer else None

    def _spare_chars(self, text: str, chat: list[Any]) -> Iterator[str]:
        taken = {char for part in (text, *_texts_in(chat)) for char in _IS_SPARE.findall(part)}
        return (chr(code) for code in _SPARE if chr(code) not in taken)


class LiteralTokenizer:
    """A copy of a tokenizer whose control tokens have random names, so that their usual names are ordinary text."""

    def __init__(self, tokenizer: Tokenizer, control_ids: set[int]) -> None:
        parts = json.loads(tokenizer.to_str())
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        renamed = Tokenizer.from_str(json.dumps({**parts, "added_tokens": [], "post_processor": None}))
        renamed.encode_special_tokens = tokenizer.encode_special_tokens
        secret = os.urandom(8).hex()
        self._names = {token.content: f"{secret}-{id}." for id, token in added if id in control_ids}
        true_ids: dict[int, int] = {}
        for id, token in added:
            name = self._names.get(token.content, token.content)
            alias = AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and id not in control_ids,
                special=token.special,
            )
            renamed.add_special_tokens([alias]) if token.special else renamed.add_tokens([alias])
            own_id = renamed.token_to_id(name)
            assert own_id is not None
            true_ids[own_id] = id
        self._true_ids = np.arange(1 + max(renamed.get_vocab().values(), default=0))
        self._true_ids[list(true_ids)] = list(true_ids.values())
        # control tokens that are in the vocabulary of the BPE, too: merges may produce them
        self._unwanted = np.array([id for id in control_ids if id not in true_ids])
        self._encoder = TextEncoder(renamed)
        found = special_ids_around(tokenizer)
        if found is None:
            raise ModelError(
                "control_tokens = 'text' does not go with this tokenizer's post-processor; use 'parse' or 'error'"
            )
        self._start, self._end = found

    def encode(self, pieces: list[str], most_tokens: int | None, *, in_template: bool = False) -> bytes | str:
        """Return the ids of [text, control token, text, ...] as bytes of uint32, or the error sentence.

        Args:
            most_tokens: see TextEncoder.encode.
            in_template: omit the special tokens that the tokenizer puts around each text.
        """
        text = "".join(self._names[piece] if place % 2 else piece for place, piece in enumerate(pieces))
        (found,) = self._encoder.encode([text], most_tokens, add_special_tokens=False)
        if isinstance(found, str):
            return found
        array = np.frombuffer(found, np.uint32)
        if np.isin(array, self._unwanted).any():
            return "the tokenizer has no other tokens for the text of a control token in it"
        ids = self._true_ids[array].astype(np.uint32).tobytes()
        return ids if in_template else ids_to_bytes(self._start) + ids + ids_to_bytes(self._end)


class _Hidden:
    """A reversible replacement of some texts by others that do not occur elsewhere."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._pattern, self._back = _any_of(names), _any_of(names.values())
        self._texts = {name: text for text, name in names.items()}

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._names[found[0]], value)
        if isinstance(value, dict):
            return {self.hide(name) if _is_text(name) else name: self.hide(item) for name, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def restore(self, text: str) -> str:
        return self._back.sub(lambda found: self._texts[found[0]], text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the leftmost and longest of the texts, grouped by prefix: a tokenizer may have thousands."""
    rests: dict[str, list[str]] = {}
    for text in sorted(filter(None, texts), key=len, reverse=True):
        rests.setdefault(text[:2], []).append(re.escape(text[2:]))
    by_length = sorted(rests, key=len, reverse=True)
    return re.compile("|".join(f"{re.escape(start)}(?:{'|'.join(rests[start])})" for start in by_length) or r"(?!)")


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if _is_text(name):
                yield name
            yield from _texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


def _is_text(name: Any) -> bool:
    """Return whether a key is the user's text, as in a call's arguments, and no name that templates use ("role")."""
    return isinstance(name, str) and not name.isidentifier()
