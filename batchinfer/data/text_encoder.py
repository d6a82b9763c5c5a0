"""Encoding of texts in runs of limited size, which bounds the tokenizer's memory, with a cache of frequent parts."""

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer, models

from batchinfer.data.safe_cuts import SafeCuts, keeps_text, safe_cuts

STRETCH_CHARS = 512  # least characters of a stretch; of a shared beginning, fewer than these are joined again
MEMO_BYTES = 32 << 20  # of each cache, of which a worker has two; a full one is emptied
ENTRY_BYTES = 200  # of an entry, in addition to its text and ids

Encode = Callable[[list[str]], list[list[int]]]


class TextMemo:
    """Encoder that caches the tokens of parts of texts.

    Args:
        encode: returns the ids of each text, without the special tokens around it.
    """

    def __init__(self, cuts: SafeCuts, encode: Encode) -> None:
        self._cuts = cuts
        self._encode = encode
        self._stretches, self._chunks = _Memo(), _Memo()

    def encode(self, texts: list[str]) -> list[bytes]:
        """Return the ids of each text, as bytes of uint32."""
        stretches = [[text] if len(text) <= STRETCH_CHARS else list(self._stretches_of(text)) for text in texts]
        new = list(self._stretches.missing(stretches))
        chunks = [self._cuts.chunk.findall(stretch) for stretch in new]
        words = list(self._chunks.missing(chunks))
        self._chunks.update(words, list(map(ids_to_bytes, self._encode(words))))
        self._stretches.update(new, [self._chunks.joined(parts) for parts in chunks])
        found = [self._stretches.joined(parts) for parts in stretches]
        self._chunks.shrink()
        self._stretches.shrink()
        return found

    def _stretches_of(self, text: str) -> Iterator[str]:
        first = 0
        while cut := self._cuts.cut.search(text, first + STRETCH_CHARS):
            yield text[first : cut.end()]
            first = cut.end()
        yield text[first:]


class _Memo:
    """Cache of the ids of texts, as bytes of uint32."""

    def __init__(self) -> None:
        self._ids: dict[str, bytes] = {}
        self._num_bytes = 0

    def missing(self, texts: list[list[str]]) -> set[str]:
        # one by one: the set difference with the keys would go through all entries
        return {text for text in set().union(*texts) if text not in self._ids}

    def update(self, texts: list[str], ids: list[bytes]) -> None:
        self._ids.update(zip(texts, ids, strict=True))
        self._num_bytes += sum(map(len, texts)) + sum(map(len, ids)) + len(texts) * ENTRY_BYTES

    def joined(self, texts: list[str]) -> bytes:
        return b"".join(map(self._ids.__getitem__, texts))

    def shrink(self) -> None:
        if self._num_bytes > MEMO_BYTES:
            self._ids, self._num_bytes = {}, 0


ENCODE_CHARS = 1 << 18  # characters encoded at once: the tokenizer holds some hundred bytes per token while it works


class TextEncoder:
    """A tokenizer that encodes at most about ENCODE_CHARS characters, or one text, at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._longest_token = _longest_token(tokenizer)
        cuts = safe_cuts(tokenizer)
        self._memo = TextMemo(cuts, self._ids) if cuts is not None else None

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        return special_ids_around(self._tokenizer)

    def most_chars(self, most_tokens: int | None) -> int | None:
        """Return a number of characters above which a text has more than `most_tokens` tokens; None if not known."""
        return None if most_tokens is None or self._longest_token is None else most_tokens * self._longest_token

    def encode(self, texts: list[str], most_tokens: int | None, *, add_special_tokens: bool) -> list[bytes | str]:
        """Return the ids of each text as bytes of uint32, or its error sentence."""
        most_chars = self.most_chars(most_tokens)
        results: list[bytes | str] = []
        for first, end in _slices(list(map(len, texts)), most_chars):
            if most_chars is not None and len(texts[first]) > most_chars:
                results.append(too_long(len(texts[first]), most_tokens))
            else:
                results += self._encode_together(texts[first:end], add_special_tokens)
        return results

    def _encode_together(self, texts: list[str], add_special_tokens: bool) -> list[bytes | str]:
        try:
            if self._memo is None or (add_special_tokens and self._around is None):
                return list(map(ids_to_bytes, self._ids(texts, add_special_tokens=add_special_tokens)))
            start, end = map(ids_to_bytes, self._around if self._around and add_special_tokens else ([], []))
            return [start + ids + end for ids in self._memo.encode(texts)]
        except MemoryError:
            raise  # no property of one text
        except Exception as error:
            # one bad text makes the whole call fail: find it by halves
            if len(texts) == 1:
                return [f"the tokenizer cannot encode the text: {' '.join(str(error).split())[:200]}"]
            half = len(texts) // 2
            first = self._encode_together(texts[:half], add_special_tokens)
            return first + self._encode_together(texts[half:], add_special_tokens)

    def _ids(self, texts: list[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]


def ids_to_bytes(ids: list[int]) -> bytes:
    """Return token ids as bytes of uint32."""
    return np.array(ids, np.uint32).tobytes()


def ids_of_bytes(found: bytes | str) -> list[int] | str:
    """Return the token ids in bytes of uint32; an error sentence stays."""
    return found if isinstance(found, str) else np.frombuffer(found, np.uint32).tolist()


def too_long(num_chars: int, most_tokens: int | None) -> str:
    """Return the error sentence of a text that is too long for the window."""
    return f"the prompt has {num_chars} characters, more than fit into {most_tokens} tokens"


def _slices(lengths: list[int], most_chars: int | None) -> Iterator[tuple[int, int]]:
    """Yield runs [first, end) of texts with at most ENCODE_CHARS characters. A longer text gets a separate run.

    A text of more than `most_chars` characters gets a separate run, too.
    """
    if lengths and sum(lengths) <= min(ENCODE_CHARS, most_chars or ENCODE_CHARS):
        yield 0, len(lengths)
        return
    first, chars = 0, 0
    for place, length in enumerate(lengths):
        alone = most_chars is not None and length > most_chars
        if place > first and (alone or chars + length > ENCODE_CHARS):
            yield first, place
            first, chars = place, 0
        chars += ENCODE_CHARS + 1 if alone else length
    if first < len(lengths):
        yield first, len(lengths)


def special_ids_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids that the tokenizer puts before and after each text; None if they are not known."""
    alone = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    places = [first for first in range(len(whole)) if whole[first : first + len(alone)] == alone]
    if len(whole) != len(alone) + tokenizer.num_special_tokens_to_add(is_pair=False) or len(places) != 1:
        return None
    return whole[: places[0]], whole[places[0] + len(alone) :]


def _longest_token(tokenizer: Tokenizer) -> int | None:
    """Return the most characters of one token; None if the tokenizer may drop or merge characters."""
    model = tokenizer.model
    pre_tokenizer = str(tokenizer.pre_tokenizer and tokenizer.pre_tokenizer.__getstate__())
    keeps_all = keeps_text(tokenizer) and isinstance(model, models.BPE) and model.unk_token is None
    keeps_all = keeps_all and "ByteLevel" in pre_tokenizer and "Removed" not in pre_tokenizer
    if not keeps_all or any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    return max(map(len, tokenizer.get_vocab()), default=None)
