"""The model's tokenizer and chat template, as the model folder defines them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from batchinfer.data import tekken_file, tiktoken_model
from batchinfer.data.control_tokens import ControlTokenError, ControlTokens
from batchinfer.data.text_encoder import TextEncoder
from batchinfer.records import ModelError
from batchinfer.sanitize import words_of

if TYPE_CHECKING:
    from batchinfer.data.chat import ChatTemplate

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What begins and ends a model's thinking: DeepSeek's and most others', Mistral's.
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Mistral's marks of tool calls are special tokens, which texts of answers do not show; these they need.
SHOWN_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
OWN_TEMPLATES = Path(__file__).with_name("chat_templates")
HAVE_OWN_TEMPLATE = ("deepseek_v32",)  # model types whose folders have the form of chats as a program, or not at all
# how vocabularies of bytes write them, as GPT-2 did: printable ones as they are, the others from U+0100 on
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
UNFINISHED = "\ufffd"  # what decoding shows for bytes that are not a whole character yet


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """Read tokenizer.json, tiktoken.model or tekken.json, and the files beside it as Hugging Face writes them.

    Raises:
        ModelError: both are missing, or a file is broken; the message names it.
    """
    settings_file = folder / "tokenizer_config.json"
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(settings_file)}
    file = _vocabulary_file(folder, config)
    try:
        text = file.read_text(encoding="utf-8")
        if file.name == tiktoken_model.FILE:
            tokenizer = tiktoken_model.tokenizer_of(file, text)
            names = tiktoken_model.named_tokens(settings_file, config, tokenizer.get_vocab_size())
            config["added_tokens_decoder"] = names
        elif file.name == tekken_file.FILE:
            tokenizer = tekken_file.tokenizer_of(file, text, SHOWN_MARKS)
            config = tekken_file.NAMED | config
        else:
            tokenizer = Tokenizer.from_str(_with_marks_shown(text))
        named = _named_tokens(config)
        _add_special_tokens(tokenizer, config, named)
        if file.name == tiktoken_model.FILE:
            tiktoken_model.check_names(settings_file, tokenizer, names)
    except ModelError:
        raise
    except Exception as error:
        # the tokenizers library raises plain Exception for whatever is wrong in the file
        raise ModelError(f"cannot read {file}: {' '.join(str(error).split())[:200]}; restore the file") from None
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise ModelError(
            f"model.dropout in {file} is {dropout}: it cuts a text into other tokens each time, which is for training; "
            "set it to null"
        )
    # the file may have been saved with a training set-up; a prompt is never cut or filled up
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))
    template = _template_text(folder, config)
    eos_token_ids = _eos_token_ids(folder, tokenizer, named)
    settings = [named, config.get("added_tokens_decoder"), tokenizer.encode_special_tokens, sorted(eos_token_ids)]
    digest = hashlib.blake2b(digest_size=16)
    for part in (text, template or "", json.dumps(settings, sort_keys=True)):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return PromptTokenizer(tokenizer, template, named, eos_token_ids, digest.hexdigest())


def has_chat_template(folder: Path) -> bool:
    """Whether a model folder has one.

    Raises:
        ModelError: one of its files is broken.
    """
    return _template_text(folder, _read_json(folder / "tokenizer_config.json")) is not None


class PromptTokenizer:
    """Text and chats to token ids, token ids to text.

    Attributes:
        template_text, named_tokens: the chat template, if there is one; texts of bos_token and others.
        eos_token_ids: the ids that end an answer.
        vocab_size: ids that the tokenizer knows (the model may have more).
        digest: changes with anything that changes a prompt's ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        named_tokens: dict[str, str],
        eos_token_ids: frozenset[int],
        digest: str,
    ) -> None:
        self._tokenizer = tokenizer
        self.template_text = template
        self.named_tokens = named_tokens
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

    The pieces joined are the start of `decode` of all ids: a piece waits while its bytes are not a whole character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # ids   [0, _start) forgotten   [_start, _shown) context of the next piece   [_shown, len) not shown yet
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Take the next id; returns the text that is certain now and was not before, often ""."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._start : self._shown])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(known) or text.endswith(UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


def _render(template: ChatTemplate, continues: bool, chat: list[Any]) -> str:
    messages, variables = chat
    return template.render(messages, variables, continues=continues)


def _holds(token: str) -> str:
    return f"the text holds the control token {token}, which input.control_tokens = 'error' refuses"


def _vocabulary_file(folder: Path, config: dict[str, Any]) -> Path:
    file, other = folder / "tokenizer.json", folder / tiktoken_model.FILE
    if not file.exists() and other.is_file():
        if config.get("tokenizer_class") == tiktoken_model.TOKENIZER_CLASS:
            return other
        raise ModelError(
            f"{other} says nothing of how texts are split, and tokenizer_class in tokenizer_config.json is "
            f"{config.get('tokenizer_class')!r}, not {tiktoken_model.TOKENIZER_CLASS!r}, whose rule is known here; "
            "add a tokenizer.json"
        )
    if not file.exists() and (folder / tekken_file.FILE).is_file():
        return folder / tekken_file.FILE
    if not file.is_file():
        raise ModelError(f"there is no {file}; the model folder needs the tokenizer in this (fast) format")
    return file


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {words_of(error)}; restore the file") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; restore the file")
    return value


def _read_text(file: Path) -> str:
    try:
        if not file.is_file():  # reading a pipe would wait for ever
            raise OSError("it is not a regular file")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}; restore the file") from None


def _with_marks_shown(text: str) -> str:
    """tokenizer.json where tokens that texts need are no special ones."""
    if not any(json.dumps(mark) in text for mark in SHOWN_MARKS):
        return text
    file = json.loads(text)
    for token in file.get("added_tokens") or []:
        token["special"] = token.get("special") and token.get("content") not in SHOWN_MARKS
    return json.dumps(file)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": text, ...}; a token is given as text or as {"content": text, ...}."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            named[name] = value
    return named


def _add_special_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Make special tokens known that only tokenizer_config.json declares, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    details = {value["content"]: value for _, value in sorted(listed.items(), key=lambda item: int(item[0]))}
    for name, text in named.items():
        if isinstance(config[name], dict):
            details.setdefault(text, config[name])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in dict.fromkeys([*details, *named.values()]):
        if text in known:
            continue
        flags = {key: bool(details.get(text, {}).get(key)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
        token = AddedToken(text, special=text in named.values() or bool(details.get(text, {}).get("special")), **flags)
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])


def _template_text(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's `chat_template` (text, or a list with a default), else ours."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read_text(file)
    found = config.get("chat_template")
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if isinstance(found, str):
        return found
    kind = _read_json(folder / "config.json").get("model_type")
    return _read_text(OWN_TEMPLATES / f"{kind}.jinja") if kind in HAVE_OWN_TEMPLATE else None


def _eos_token_ids(folder: Path, tokenizer: Tokenizer, named: dict[str, str]) -> frozenset[int]:
    """From generation_config.json, else config.json, else the tokenizer's own end token."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        found = _read_json(file).get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelError(f"eos_token_id in {file} is {found!r}, which is not a token id or a list of them")
        return frozenset(ids)
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return frozenset() if own is None else frozenset([own])
