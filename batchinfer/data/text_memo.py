"""Tokens of parts of texts that came before: a beginning that texts share, and every word, is tokenised once.

    text      system prompt, examples, ...          | ... | question       stretches from cut to cut (safe_cuts.py)
    stretch   word| word|,| word| word|.\\n\\nWord                           chunks from cut to cut

A stretch that is new is put together from its chunks, and only chunks that are new go through the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from batchinfer.data.safe_cuts import SafeCuts

STRETCH_CHARS = 512  # at least: of a beginning that texts share, fewer than these are put together again
MEMO_BYTES = 32 << 20  # of each memo, of which a worker has two; a full one begins anew
ENTRY_BYTES = 200  # of an entry beside what it holds

Encode = Callable[[list[str]], list[list[int]]]


class TextMemo:
    """Encodes texts with what it remembers of those before.

    Args:
        encode: the ids of each text, without what the tokenizer puts around it.
    """

    def __init__(self, cuts: SafeCuts, encode: Encode) -> None:
        self._cuts = cuts
        self._encode = encode
        self._stretches, self._chunks = _Memo(), _Memo()

    def encode(self, texts: list[str]) -> list[bytes]:
        """The ids of each text, as the bytes of uint32."""
        stretches = [list(self._stretches_of(text)) for text in texts]
        new = list(self._stretches.missing(stretches))
        chunks = [self._cuts.chunk.findall(stretch) for stretch in new]
        words = list(self._chunks.missing(chunks))
        self._chunks.update(words, [np.array(ids, np.uint32).tobytes() for ids in self._encode(words)])
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
    """Ids of texts, as bytes."""

    def __init__(self) -> None:
        self._ids: dict[str, bytes] = {}
        self._num_bytes = 0

    def missing(self, texts: list[list[str]]) -> set[str]:
        # asked one by one: a difference from the keys would go through all that is remembered
        return {text for text in set().union(*texts) if text not in self._ids}

    def update(self, texts: list[str], ids: list[bytes]) -> None:
        self._ids.update(zip(texts, ids, strict=True))
        self._num_bytes += sum(map(len, texts)) + sum(map(len, ids)) + len(texts) * ENTRY_BYTES

    def joined(self, texts: list[str]) -> bytes:
        return b"".join(map(self._ids.__getitem__, texts))

    def shrink(self) -> None:
        if self._num_bytes > MEMO_BYTES:
            self._ids, self._num_bytes = {}, 0
