"""Encoding of texts and chats by a model's tokenizer and chat template, and decoding of token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from batchinfer.data.control_tokens import ControlTokenError, ControlTokens
from batchinfer.data.text_encoder import TextEncoder, ids_of_bytes
from batchinfer.records import ModelError

if TYPE_CHECKING:
    from batchinfer.data.chat import ChatTemplate

# Tokens that begin and end thinking: of DeepSeek and most other models, and of Mistral.
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
# In harmony (gpt-oss) an answer is a row of messages, each with a header; thinking is messages of the channel analysis.
ANALYSIS_MARKS = ("<|channel|>analysis<|message|>", "<|end|>")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
# byte-level vocabularies (GPT-2) write printable bytes as themselves and the others as characters from U+0100 on
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
_DEFAULT, _TOOL_USE = "default", "tool_use"  # names of chat templates, as transformers looks for them
UNFINISHED = "\ufffd"  # decoded from the bytes of an incomplete character


class PromptTokenizer:
    """A model's tokenizer with its chat templates.

    Attributes:
        file: file of the vocabulary.
        templates: texts of the chat templates by name; {} if there are none.
        named_tokens: texts of bos_token and other named tokens, by name.
        eos_token_ids: ids that end an answer.
        vocab_size: number of ids of the tokenizer (the model may have more).
        digest: changes with every change that changes a prompt's ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        file: Path,
        templates: dict[str, str],
        named_tokens: dict[str, str],
        eos_token_ids: frozenset[int],
        digest: str,
    ) -> None:
        self._tokenizer, self.file = tokenizer, file
        self.templates, self.named_tokens = templates, named_tokens
        self._compiled: dict[str, ChatTemplate] = {}
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_ids, self.digest = eos_token_ids, digest

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self._tokenizer)  # made late because ranks only decode

    @cached_property
    def control(self) -> ControlTokens:
        """The control tokens, to find them in texts."""
        return ControlTokens(self._tokenizer)

    def most_chars(self, most_tokens: int) -> int | None:
        """Return a number of characters above which a text has more than `most_tokens` tokens; None if not known."""
        return self._encoder.most_chars(most_tokens)

    def encode_prompts(
        self, texts: list[str], most_tokens: int | None = None, control: str = "parse", *, special: bool = True
    ) -> list[list[int] | str]:
        """Return what `prompt_ids` returns, with ids as lists."""
        return list(map(ids_of_bytes, self.prompt_ids(texts, most_tokens, control, special=special)))

    def prompt_ids(
        self, texts: list[str], most_tokens: int | None = None, control: str = "parse", *, special: bool = True
    ) -> list[bytes | str]:
        """Encode raw prompts with the tokenizer's own special tokens.

        The special tokens are those of the post-processor in tokenizer.json, as in transformers 5: `add_bos_token` in
        tokenizer_config.json only describes how that file was made.

        Args:
            texts: the prompts.
            most_tokens: a text whose length implies more tokens is refused without encoding (the tokenizer needs
                some hundred bytes per token); None: no limit.
            control: input.control_tokens, for texts with control tokens.
            special: False for texts that follow a prompt, which get no special tokens.

        Returns:
            The ids of each text as bytes of uint32, or the error sentence if the text cannot be encoded.
        """
        if control == "parse":
            return self._encoder.encode(texts, most_tokens, add_special_tokens=special)
        results: list[bytes | str] = [b""] * len(texts)
        found = [self.control.first_in(text) for text in texts]
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
        """Return what `chat_ids` returns, with ids as lists."""
        found = self.chat_ids(chats, most_tokens, control, variables=variables, continues=continues)
        return list(map(ids_of_bytes, found))

    def chat_ids(
        self,
        chats: list[list[dict[str, Any]]],
        most_tokens: int | None = None,
        control: str = "parse",
        *,
        variables: list[dict[str, Any]] | None = None,
        continues: bool = False,
    ) -> list[bytes | str]:
        """Encode chats by the chat template for chats with tools or without, which writes all special tokens.

        Args:
            variables: the template's variables for each chat (see ChatTemplate.render).
            continues: see ChatTemplate.render.

        Returns:
            The ids of each chat as bytes of uint32, or the error sentence if the template refuses the chat.

        Raises:
            ModelError: the model folder has no usable chat template.
        """
        from batchinfer.data.chat import ChatError

        render = partial(self._render, continues)
        results: list[bytes | str] = [b""] * len(chats)
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

    def _render(self, continues: bool, chat: list[Any]) -> str:
        messages, variables = chat
        return self.chat_template(has_tools(variables)).render(messages, variables, continues=continues)

    def template_text(self, with_tools: bool = False) -> str | None:
        """Return the text of the chat template for chats with tools or without, None if there is none."""
        return self.templates.get(self._template_name(with_tools))

    def chat_template(self, with_tools: bool = False) -> ChatTemplate:
        """Return the compiled chat template for chats with tools or without.

        Raises:
            ModelError: the model folder has no such chat template, or an invalid one.
        """
        name = self._template_name(with_tools)
        if name not in self.templates:
            raise ModelError(self._no_template())
        if name not in self._compiled:
            # imported here because ranks only decode and need no template engine
            from batchinfer.data.chat import ChatTemplate

            self._compiled[name] = ChatTemplate(self.templates[name], self.named_tokens)
        return self._compiled[name]

    def _template_name(self, with_tools: bool) -> str:
        return _TOOL_USE if with_tools and _TOOL_USE in self.templates else _DEFAULT

    def _no_template(self) -> str:
        if not self.templates:
            return (
                "the model folder has no chat template, which input.messages needs; add chat_template.jinja, "
                "or give ready text in input.prompt"
            )
        names = ", ".join(sorted(self.templates))
        return (
            f"the chat templates of the model folder are called {names}, but chats "
            f"{'without tools ' if _TOOL_USE in self.templates else ''}need one called default; "
            "write the text of the one to use to chat_template.jinja"
        )

    def encode_piece(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, None if there is none."""
        return self._tokenizer.token_to_id(text)

    def to_json(self) -> str:
        """Return the tokenizer in the form of tokenizer.json, with tokens that other files of the folder add."""
        return self._tokenizer.to_str()

    def decode(self, ids: list[int], *, with_special: bool = False) -> str:
        """Return the text of generated ids, with UNFINISHED for the bytes of an incomplete character.

        Args:
            with_special: whether the text shows special tokens.
        """
        return self._tokenizer.decode(ids, skip_special_tokens=not with_special)

    def stream(self) -> TextStream:
        """Return an incremental decoder for one request."""
        return TextStream(self.decode)


def has_tools(variables: dict[str, Any]) -> bool:
    """Return whether a chat with these variables has tools, so that transformers takes the template for tools."""
    return variables.get("tools") is not None


def thinking_tokens(tokenizer: PromptTokenizer) -> tuple[int | None, int] | None:
    """Return the ids of the tokens that begin and end thinking; None if no token ends thinking.

    The first id is None if no token begins thinking.
    """
    for begin, end in THINKING_MARKS:
        if (end_id := tokenizer.token_id(end)) is not None:
            return tokenizer.token_id(begin), end_id
    return None


def harmony_tokens(tokenizer: PromptTokenizer) -> tuple[int, int, int, int] | None:
    """Return the ids of HARMONY_MARKS, None for a tokenizer of another format."""
    start, channel, message, end = map(tokenizer.token_id, HARMONY_MARKS)
    if start is None or channel is None or message is None or end is None:
        return None
    return start, channel, message, end


def token_bytes(tokenizer: PromptTokenizer, token_id: int) -> bytes | None:
    """Return the bytes of one token, perhaps a part of a character; None if they are not known."""
    text = tokenizer.decode([token_id], with_special=True)
    if UNFINISHED not in text:
        return text.encode()
    token = tokenizer._tokenizer.id_to_token(token_id) or ""
    if is_byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(is_byte[1])
    return bytes(_BYTE_OF[char] for char in token) if token and _BYTE_OF.keys() >= set(token) else None


class TextStream:
    """Incremental decoder of one request's token ids, for the search of stop strings.

    The pieces joined are `decode` of all ids, without UNFINISHED at the end: later bytes may complete that character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # ids   [0, _start) dropped   [_start, _shown) context of the next piece   [_shown, len) not returned whole yet
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0
        self._num_shown = 0  # characters returned of the text of ids[_start:]

    def push(self, token_id: int) -> str:
        """Add the next id and return the text that it makes certain, often ""."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._start :])
        certain = text.rstrip(UNFINISHED)
        piece = certain[self._num_shown :]
        self._num_shown += len(piece)
        if piece and certain == text:
            self._start, self._shown = self._shown, len(self._ids)
            self._num_shown = len(self._decode(self._ids[self._start :]))
        return piece


def _holds(token: str) -> str:
    return f"the text holds the control token {token}, which input.control_tokens = 'error' refuses"
