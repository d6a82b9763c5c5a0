"""The thinking of a reasoning model before its answer, followed token by token to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from batchinfer.data.prompt_tokenizer import PromptTokenizer, harmony_tokens, thinking_tokens

Mode = Literal["none", "auto", "deepseek_r1"]


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The ids of <think> (None: the tokenizer has none) and </think>, or of the marks of Mistral or Seed-OSS."""

    begin: int | None
    end: int
    is_blank: Callable[[int], bool] = lambda _: False  # whether a token is white space

    @classmethod
    def of(cls, tokenizer: PromptTokenizer) -> "ThinkingTokens | None":
        """Return a tokenizer's thinking tokens; None if it has no token for the end of thinking."""
        found = thinking_tokens(tokenizer)
        if found is None:
            return None
        return cls(*found, lambda token: tokenizer.decode([token], with_special=True).isspace())

    def last_of(self, prompt: Sequence[int], *, anywhere: bool) -> int | None:
        """Return the mark in which a prompt ends, but for white space; with `anywhere` its last mark; else None."""
        for token in reversed(prompt):
            if token in (self.begin, self.end):
                return token
            if not (anywhere or self.is_blank(token)):
                break
        return None


class Thinking:
    """The thinking in one answer.

    A prompt that ends in <think> or </think> says whether the answer begins in thinking. Where it ends in neither, the
    answer does by "deepseek_r1", and by "auto" when its first token is <think>, but for white space: GLM-4.5 writes a
    line break before it.

    Args:
        continues: the answer continues the prompt's last message, in which the mark may be further back.
    """

    def __init__(self, tokens: ThinkingTokens, prompt: Sequence[int], mode: Mode, *, continues: bool = False) -> None:
        self._tokens = tokens
        last = tokens.last_of(prompt, anywhere=continues)
        self.is_open = last == tokens.begin if last is not None else mode == "deepseek_r1"
        self._may_begin = last is None
        self.has_begun = self.is_open
        self.num_tokens = 0  # of the answer up to the end of thinking, which is one of them
        self.num_seen = 0  # tokens of the answer
        self._num_before = 0  # tokens up to <think>, where that is one of the answer's

    @property
    def end_token(self) -> int:
        """The token that ends the thinking, or the next one on the way to its end."""
        return self._tokens.end

    @property
    def may_still_begin(self) -> bool:
        """Whether the next tokens decide if the last ones belong to the thinking."""
        return self.may_begin_with is not None

    @property
    def may_begin_with(self) -> int | None:
        """The token <think> if the next token may be it and the answer may go on without it, else None."""
        return self._tokens.begin if self._may_begin else None

    def accept(self, token: int) -> None:
        """Take a generated token into account."""
        self.num_seen += 1
        if token == self.may_begin_with:
            self.is_open = self.has_begun = True
            self._num_before = self.num_seen
        self._may_begin = self._may_begin and self._tokens.is_blank(token)
        if self.is_open:
            self.num_tokens = self.num_seen
            self.is_open = token != self._tokens.end

    def split(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of the thinking and those of the answer, without the marks around the thinking."""
        end = self.num_tokens - (not self.is_open)
        return token_ids[self._num_before : end], token_ids[self.num_tokens :]


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """The tokens of harmony's marks.

    to_answer: the tokens from thinking to the answer: <|end|><|start|>assistant<|channel|>final<|message|>.
    line: a line break, between messages of the thinking.
    """

    start: int
    channel: int
    message: int
    end: int
    to_answer: tuple[int, ...]
    line: tuple[int, ...]
    text: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: PromptTokenizer) -> "HarmonyTokens | None":
        """Return a tokenizer's marks; None if it is not of harmony."""
        found = harmony_tokens(tokenizer)
        if found is None:
            return None
        piece = tokenizer.encode_piece
        to_answer = piece("<|end|><|start|>assistant<|channel|>final<|message|>")
        return cls(*found, tuple(to_answer), tuple(piece("\n")), partial(tokenizer.decode, with_special=True))


class HarmonyThinking:
    """The thinking in one answer of harmony: its messages in the channel analysis, before the first other message.

    The header of a message without a recipient (final; commentary for the user) belongs to neither part, and a call's
    header to the answer. The attributes and methods are those of Thinking.
    """

    may_begin_with: int | None = None  # an answer always begins with a header

    def __init__(self, tokens: HarmonyTokens, prompt: Sequence[int]) -> None:
        self._tokens = tokens
        self._header: list[int] | None = None  # of the message that begins; None: inside a message
        self._header_start = 0  # of the answer's tokens
        self._thoughts: list[list[int]] = []  # by message
        self.is_open = self.has_begun = False
        self.num_tokens = 0
        self.num_seen = 0
        start = next((place for place in reversed(range(len(prompt))) if prompt[place] == tokens.start), None)
        if start is not None:
            self.is_open = True
            for token in prompt[start:]:
                self.accept(token)
            self.has_begun = self.is_open and self._header is None
            self._thoughts = [[]] if self.has_begun else []
            self.num_tokens = self.num_seen = self._header_start = 0

    @property
    def may_still_begin(self) -> bool:
        """Whether the answer is in a header."""
        return self.is_open and self._header is not None

    @property
    def end_token(self) -> int:
        """The next token of the marks that lead to the answer."""
        if self._header is None:
            return self._tokens.end
        header, way = tuple(self._header), self._tokens.to_answer[1:]
        return way[len(header)] if header == way[: len(header)] else self._tokens.message

    def accept(self, token: int) -> None:
        """Take a generated token into account."""
        self.num_seen += 1
        if not self.is_open:
            return
        if self._header is None and self.has_begun and token not in (self._tokens.end, self._tokens.start):
            self._thoughts[-1].append(token)
            self.num_tokens = self.num_seen
        elif token == self._tokens.end:
            self._begin_header([], self.num_seen)
        elif token == self._tokens.message:
            self._end_header()
        elif token == self._tokens.start:
            self._begin_header([token], self.num_seen - 1)
        elif self._header is not None:
            self._header.append(token)

    def split(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of the thinking and those of the answer."""
        thought = [token for place, body in enumerate(self._thoughts) for token in (*self._line(place), *body)]
        return thought, token_ids[self.num_tokens :]

    def _line(self, place: int) -> tuple[int, ...]:
        return self._tokens.line if place else ()

    def _begin_header(self, header: list[int], start: int) -> None:
        self._header, self._header_start = header, start
        self.num_tokens = start

    def _end_header(self) -> None:
        text = self._tokens.text(self._header or [])
        self._header, self.has_begun = None, True
        self.num_tokens = self.num_seen
        if "<|channel|>analysis" in text:
            self._thoughts.append([])
            return
        self.is_open = False
        if " to=" in text:
            self.num_tokens = self._header_start


AnyThinking = Thinking | HarmonyThinking


def answer_text(text: str) -> str:
    """Return the text behind the end of thinking without the line breaks before the answer."""
    return text.lstrip("\n")
