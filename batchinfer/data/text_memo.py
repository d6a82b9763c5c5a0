"""Cache of the tokens of parts of texts: each word, and each beginning that texts share, is tokenised once.

    text      system prompt, examples, ...          | ... | question       stretches from cut to cut (safe_cuts.py)
    stretch   word| word|,| word| word|.\\n\\nWord                           chunks from cut to cut

Tokens of a new stretch are joined from those of its chunks; only new chunks are encoded by the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from batchinfer.data.safe_cuts import SafeCuts

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
