"""The model's tokenizer and chat template, as the model folder defines them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from batchinfer.records import ModelError

if TYPE_CHECKING:
    from batchinfer.data.chat import ChatTemplate

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ENCODE_CHARS = 1 << 20  # characters encoded at once: the tokenizer holds some hundred bytes per token while it works
UNFINISHED = "\ufffd"  # what decoding shows for bytes that are not a whole character yet


def load_tokenizer(folder: Path) -> PromptTokenizer:
    """Read tokenizer.json and the files beside it, in the layouts that Hugging Face writes.

    Raises:
        ModelError: tokenizer.json is missing, or a file is broken; the message names it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"there is no {file}; the model folder needs the tokenizer in this (fast) format")
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    try:
        text = file.read_text(encoding="utf-8")
        tokenizer = Tokenizer.from_str(text)
        named = _named_tokens(config)
        _add_special_tokens(tokenizer, config, named)
    except Exception as error:
        # the tokenizers library raises plain Exception for whatever is wrong in the file
        raise ModelError(f"cannot read {file}: {' '.join(str(error).split())[:200]}; restore the file") from None
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


class PromptTokenizer:
    """Text and chats to token ids, token ids to text.

    Attributes:
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
        self._template_text = template
        self._named_tokens = named_tokens
        self._template: ChatTemplate | None = None
        self._longest_token = _longest_token(tokenizer)
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.digest = digest

    def encode_prompts(self, texts: list[str], most_tokens: int | None = None) -> list[list[int] | str]:
        """Raw prompts with the tokenizer's own special tokens.

        Which those are, tokenizer.json alone decides (its post-processor), as in transformers 5: `add_bos_token` in
        tokenizer_config.json describes how the file was made.

        Args:
            texts: the prompts.
            most_tokens: a text so long that it must have more tokens than this is refused without encoding it (the
                tokenizer needs some hundred bytes per token); unset: encode whatever comes.

        Returns:
            The ids of each text; for a text that cannot be encoded, the error sentence.
        """
        return self._encode(texts, most_tokens, add_special_tokens=True)

    def encode_chats(self, chats: list[list[dict[str, Any]]], most_tokens: int | None = None) -> list[list[int] | str]:
        """Chats through the template, up to where the assistant answers; special tokens come from the template only.

        Returns:
            The ids of each chat; for a chat that the template refuses, the error sentence.

        Raises:
            ModelError: the model folder has no usable chat template.
        """
        from batchinfer.data.chat import ChatError

        template = self.chat_template()
        results: list[list[int] | str] = []
        places, texts = [], []
        for place, chat in enumerate(chats):
            try:
                texts.append(template.render(chat))
                places.append(place)
                results.append([])
            except ChatError as error:
                results.append(str(error))
        for place, ids in zip(places, self._encode(texts, most_tokens, add_special_tokens=False), strict=True):
            results[place] = ids
        return results

    def chat_template(self) -> ChatTemplate:
        """The compiled template.

        Raises:
            ModelError: there is none, or it is not valid.
        """
        if self._template_text is None:
            raise ModelError(
                "the model folder has no chat template, which input.messages needs; add chat_template.jinja, "
                "or give ready text in input.prompt"
            )
        if self._template is None:
            # a rank, which only decodes, does without the template engine
            from batchinfer.data.chat import ChatTemplate

            self._template = ChatTemplate(self._template_text, self._named_tokens)
        return self._template

    def decode(self, ids: list[int]) -> str:
        """The text of generated ids, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A fresh incremental decoder for one request."""
        return TextStream(self.decode)

    def _encode(self, texts: list[str], most_tokens: int | None, *, add_special_tokens: bool) -> list[list[int] | str]:
        most_chars = None
        if most_tokens is not None and self._longest_token is not None:
            most_chars = most_tokens * self._longest_token
        results: list[list[int] | str] = []
        for first, end in _slices([len(text) for text in texts], most_chars):
            if most_chars is not None and len(texts[first]) > most_chars:
                size = len(texts[first])
                results.append(f"the prompt has {size} characters, more than fit into {most_tokens} tokens")
            else:
                results += self._encode_together(texts[first:end], add_special_tokens)
        return results

    def _encode_together(self, texts: list[str], add_special_tokens: bool) -> list[list[int] | str]:
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        except Exception as error:
            # one bad text fails them all: find it
            if len(texts) == 1:
                return [f"the tokenizer cannot encode the text: {' '.join(str(error).split())[:200]}"]
            half = len(texts) // 2
            first = self._encode_together(texts[:half], add_special_tokens)
            return first + self._encode_together(texts[half:], add_special_tokens)


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


def _slices(lengths: list[int], most_chars: int | None) -> Iterator[tuple[int, int]]:
    """Cut [0, len(lengths)) into runs of about ENCODE_CHARS characters; a text of more than most_chars stands alone."""
    first, chars = 0, 0
    for place, length in enumerate(lengths):
        alone = most_chars is not None and length > most_chars
        if place > first and (alone or chars + length > ENCODE_CHARS):
            yield first, place
            first, chars = place, 0
        chars += ENCODE_CHARS + 1 if alone else length
    if first < len(lengths):
        yield first, len(lengths)


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Most characters that one token can stand for; None when the tokenizer may drop or merge characters."""
    parts = json.loads(tokenizer.to_str())
    normalizer, model = parts.get("normalizer"), parts["model"]
    keeps_text = normalizer is None or (normalizer["type"] == "Sequence" and not normalizer["normalizers"])
    keeps_text = keeps_text and model["type"] == "BPE" and model.get("unk_token") is None
    keeps_text = keeps_text and "ByteLevel" in json.dumps(parts.get("pre_tokenizer"))
    keeps_text = keeps_text and "Removed" not in json.dumps(parts.get("pre_tokenizer"))
    if not keeps_text or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return None
    return max(map(len, tokenizer.get_vocab()), default=None)


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {file}: {error}; restore the file") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; restore the file")
    return value


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
    """chat_template.jinja, else `chat_template` of tokenizer_config.json: a text, or a list with a default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {file}: {error}; restore the file") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict)]
        found = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


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
