"""Text and chats to token ids, and token ids to text, by a model's tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from batchinfer.data.control_tokens import ControlTokenError, ControlTokens
from batchinfer.data.text_encoder import TextEncoder
from batchinfer.records import ModelError

if TYPE_CHECKING:
    from batchinfer.data.chat import ChatTemplate

# What begins and ends a model's thinking: DeepSeek's and most others', Mistral's.
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# how vocabularies of bytes write them, as GPT-2 did: printable ones as they are, the others from U+0100 on
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
UNFINISHED = "\ufffd"  # what decoding shows for bytes that are not a whole character yet


class PromptTokenizer:
    """Text and chats to token ids, token ids to text.

    Attributes:
        file, template_text: of the vocabulary; the chat template, if there is one.
        named_tokens, eos_token_ids: texts of bos_token and others; the ids that end an answer.
        vocab_size: ids that the tokenizer knows (the model may have more).
        digest: changes with anything that changes a prompt's ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        file: Path,
        template: str | None,
        named_tokens: dict[str, str],
        eos_token_ids: frozenset[int],
        digest: str,
    ) -> None:
        self._tokenizer, self.file = tokenizer, file
        self.template_text, self.named_tokens = template, named_tokens
        self._template: ChatTemplate | None = None
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids, self.digest = eos_token_ids, digest

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self._tokenizer)  # who only decodes, or wants the digest, does without

    @cached_property
    def control(self) -> ControlTokens:
        """The control tokens that texts may spell."""
        return ControlTokens(self._tokenizer)

    def most_chars(self, most_tokens: int) -> int | None:
        """Characters with which a text must have more tokens than this; None: not known."""
        return self._encoder.most_chars(most_tokens)

    def encode_prompts(
        self, texts: list[str], most_tokens: int | None = None, control: str = "parse", *, special: bool = True
    ) -> list[list[int] | str]:
        """Raw prompts with the tokenizer's own special tokens.

        Which those are, tokenizer.json alone decides (its post-processor), as in transformers 5: `add_bos_token` in
        tokenizer_config.json describes how the file was made.

        Args:
            texts: the prompts.
            most_tokens: a text so long that it must have more tokens than this is refused without encoding it (the
                tokenizer needs some hundred bytes per token); unset: encode whatever comes.
            control: input.control_tokens, for texts that spell control tokens.
            special: False for texts that follow a prompt, which get no tokens of the tokenizer's own.

        Returns:
            The ids of each text; for a text that cannot be encoded, the error sentence.
        """
        results: list[list[int] | str] = [[]] * len(texts)
        found = [None if control == "parse" else self.control.first_in(text) for text in texts]
        for place, token in enumerate(found):
            if token is not None and control == "error":
                results[place] = _holds(token)
            elif token is not None:
                results[place] = self.control.literal.encode([texts[place]], most_tokens, in_template=not special)
        plain = [place for place, token in enumerate(found) if token is None]
        encoded = self._encoder.encode([texts[place] for place in plain], most_tokens, add_special_tokens=special)
        for place, ids in zip(plain, encoded, strict=True):
            results[place] = ids
        return results

    def encode_chats(
        self,
        chats: list[list[dict[str, Any]]],
        most_tokens: int | None = None,
        control: str = "parse",
        *,
        variables: list[dict[str, Any]] | None = None,
        continues: bool = False,
    ) -> list[list[int] | str]:
        """Chats through the template, up to where the assistant answers; special tokens come from the template only.

        Args:
            variables, continues: see ChatTemplate.render; the variables for each chat.

        Returns:
            The ids of each chat; for a chat that the template refuses, the error sentence.

        Raises:
            ModelError: the model folder has no usable chat template.
        """
        from batchinfer.data.chat import ChatError

        render = partial(_render, self.chat_template(), continues)
        results: list[list[int] | str] = [[]] * len(chats)
        places, texts = [], []
        for place, chat in enumerate(map(list, zip(chats, variables or [{}] * len(chats), strict=True))):
            try:
                token = self.control.first_in(chat) if control == "error" else None
                text = "" if token else render(chat)
                pieces = self.control.pieces(chat, text, render) if control == "text" else None
            except (ChatError, ControlTokenError) as error:
                results[place] = str(error)
                continue
            if token is not None:
                results[place] = _holds(token)
            elif pieces is not None:
                results[place] = self.control.literal.encode(pieces, most_tokens, in_template=True)
            else:
                texts.append(text)
                places.append(place)
        for place, ids in zip(places, self._encoder.encode(texts, most_tokens, add_special_tokens=False), strict=True):
            results[place] = ids
        return results

    def chat_template(self) -> ChatTemplate:
        """The compiled template.

        Raises:
            ModelError: there is none, or it is not valid.
        """
        if self.template_text is None:
            raise ModelError(
                "the model folder has no chat template, which input.messages needs; add chat_template.jinja, "
                "or give ready text in input.prompt"
            )
        if self._template is None:
            # a rank, which only decodes, does without the template engine
            from batchinfer.data.chat import ChatTemplate

            self._template = ChatTemplate(self.template_text, self.named_tokens)
        return self._template

    def encode_piece(self, text: str) -> list[int]:
        """The ids of a piece of text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        """The id of a token that is exactly this text."""
        return self._tokenizer.token_to_id(text)

    def to_json(self) -> str:
        """The tokenizer as tokenizer.json has it, with the tokens that other files of the folder add."""
        return self._tokenizer.to_str()

    def decode(self, ids: list[int], *, with_special: bool = False) -> str:
        """The text of generated ids, UNFINISHED for bytes of no whole character; special tokens when asked for."""
        return self._tokenizer.decode(ids, skip_special_tokens=not with_special)

    def stream(self) -> TextStream:
        """A fresh incremental decoder for one request."""
        return TextStream(self.decode)


def thinking_tokens(tokenizer: PromptTokenizer) -> tuple[int | None, int] | None:
    """The ids that begin (None: there is none) and end thinking; None: no token ends it."""
    for begin, end in THINKING_MARKS:
        if (end_id := tokenizer.token_id(end)) is not None:
            return tokenizer.token_id(begin), end_id
    return None


def token_bytes(tokenizer: PromptTokenizer, token_id: int) -> bytes | None:
    """The bytes of one token, which may be no whole character; None: they cannot be told."""
    text = tokenizer.decode([token_id], with_special=True)
    if UNFINISHED not in text:
        return text.encode()
    token = tokenizer._tokenizer.id_to_token(token_id) or ""
    if is_byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(is_byte[1])
    return bytes(_BYTE_OF[char] for char in token) if token and _BYTE_OF.keys() >= set(token) else None


class TextStream:
    """Turns one request's token ids into text piece by piece, for stop strings.

    The pieces joined are `decode` of all ids without UNFINISHED at its end: the bytes to come may make it a character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # ids   [0, _start) dropped   [_start, _shown) context of the next piece   [_shown, len) not shown whole yet
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0
        self._num_shown = 0  # characters of the text of ids[_start:] that were returned

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now and was not before, often ""."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        certain = text.rstrip(UNFINISHED)
        piece = certain[self._num_shown :]
        self._num_shown += len(piece)
        if piece and certain == text:
            self._start, self._shown = self._shown, len(self._ids)
            self._num_shown = len(self._decode(self._ids[self._start :]))
        return piece


def _render(template: ChatTemplate, continues: bool, chat: list[Any]) -> str:
    messages, variables = chat
    return template.render(messages, variables, continues=continues)


def _holds(token: str) -> str:
    return f"the text holds the control token {token}, which input.control_tokens = 'error' refuses"
