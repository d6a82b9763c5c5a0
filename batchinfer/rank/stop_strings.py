"""Stop strings: where in the text of an answer one of them ends it."""

from __future__ import annotations

import functools

from batchinfer.data.prompt_tokenizer import UNFINISHED, PromptTokenizer, TextStream
from batchinfer.rank.thinking import AnyThinking, answer_text
from batchinfer.records import Sampling

MOST_ENDS = 256  # sets of last characters whose tokens are kept


class StopSearch:
    """The text of one answer as its tokens come, and the stop string that ends it.

    Args:
        sampling: the request's, with stop strings.
        stream: a fresh decoder.
        thinking: the answer's thinking, which is no part of the text, None if it is.
    """

    def __init__(self, sampling: Sampling, stream: TextStream, thinking: AnyThinking | None) -> None:
        self._sampling, self._stream, self._thinking = sampling, stream, thinking
        self._num_read = 0  # tokens
        self._text = ""
        self.text_end: int | None = None  # where the stop string cuts the text

    @property
    def is_cut(self) -> bool:
        """Whether generated text follows the end of the answer."""
        return self.text_end is not None and self.text_end < len(self._text)

    def read(self, token_ids: list[int], num_tokens: int, *, is_whole: bool) -> tuple[str, int] | None:
        """Read new tokens; return the stop string and the number of tokens up to its end, None if there is none.

        Tokens wait while the next ones decide whether they belong to the thinking.

        Args:
            token_ids: all generated tokens.
            num_tokens: the number of these that are part of the text or the thinking.
            is_whole: no further tokens will come.
        """
        thinking = self._thinking
        if thinking is not None and thinking.may_still_begin and not is_whole:
            return None
        is_apart = thinking is not None and thinking.has_begun
        if thinking is not None:
            self._num_read = max(self._num_read, thinking.num_tokens)
        found = None
        for place in range(self._num_read, num_tokens):
            piece = self._stream.push(token_ids[place])
            if is_apart and not self._text:
                piece = answer_text(piece)
            self._text += piece
            if self.text_end is None and place >= self._sampling.min_tokens:
                stop = find_stop(self._text, len(piece), self._sampling.stop)
                if stop is not None:
                    start, string = stop
                    self.text_end = start + len(string) * self._sampling.include_stop_str_in_output
                    found = string, place + 1
        self._num_read = max(self._num_read, num_tokens)
        return found


class StopTokens:
    """Tokens with which an answer may complete a stop string: their text has the last character of one.

    An answer is searched when one of these comes, and at its end. If a tokenizer's text of a token depended on its
    neighbours in an unforeseen way, the stop string would be found later, and the answer cut at the same place.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode_piece("a")[-1:]  # behind a word some tokens begin with a space
        self._text_before = tokenizer.decode(self._before)
        self._texts: dict[int, str] = {}
        self._of_ends = functools.lru_cache(MOST_ENDS)(functools.partial(CompletingTokens, self))

    def of(self, stop: tuple[str, ...]) -> CompletingTokens | None:
        """Return the tokens that may complete one of these stop strings; None if any token may."""
        ends = frozenset(string[-1] for string in stop)
        # that a character stays partial is shown by the next token, whatever it is
        return None if UNFINISHED in ends else self._of_ends(ends)

    def text(self, token: int) -> str:
        """Return the text that a token can add, alone and behind a word."""
        if token not in self._texts:
            behind = self._tokenizer.decode([*self._before, token])
            text = self._tokenizer.decode([token]) + behind.removeprefix(self._text_before)
            self._texts[token] = text
        return self._texts[token]


class CompletingTokens(dict[int, bool]):
    """For each token, whether its text has the last character of a stop string; computed at the first look-up.

    Args:
        ends: last characters of stop strings.
    """

    def __init__(self, tokens: StopTokens, ends: frozenset[str]) -> None:
        super().__init__()
        self._tokens = tokens
        self._ends = ends | {UNFINISHED}  # a token with a part of a character may complete any

    def __missing__(self, token: int) -> bool:
        found = self[token] = not self._ends.isdisjoint(self._tokens.text(token))
        return found


def find_stop(text: str, num_new: int, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the start of the first stop string that the new text completes, and the string; None if there is none.

    As in vLLM, the result is that of adding one character at a time: of several stop strings the one that ends first
    counts, and of those that end at the same character the first of the list.

    Args:
        text: the answer so far.
        num_new: characters at the end of `text` that are new; a stop string may begin before them.
    """
    starts = [(text.find(string, max(0, len(text) - num_new - len(string) + 1)), string) for string in stop]
    return min((found for found in starts if found[0] >= 0), key=lambda found: found[0] + len(found[1]), default=None)
