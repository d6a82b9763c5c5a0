"""The thinking of a reasoning model before its answer, followed token by token to its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from batchinfer.data.prompt_tokenizer import PromptTokenizer, thinking_tokens

Mode = Literal["none", "auto", "deepseek_r1"]


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The ids of <think> (None: the tokenizer has none) and </think>, or of Mistral's [THINK] and [/THINK]."""

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
        self._num_seen = 0
        self._num_before = 0  # tokens up to <think>, where that is one of the answer's

    @property
    def end_token(self) -> int:
        """The token </think>."""
        return self._tokens.end

    @property
    def may_begin_with(self) -> int | None:
        """The token <think> if the next token may be it, else None."""
        return self._tokens.begin if self._may_begin else None

    def accept(self, token: int) -> None:
        """Take a generated token into account."""
        self._num_seen += 1
        if token == self.may_begin_with:
            self.is_open = self.has_begun = True
            self._num_before = self._num_seen
        self._may_begin = self._may_begin and self._tokens.is_blank(token)
        if self.is_open:
            self.num_tokens = self._num_seen
            self.is_open = token != self._tokens.end

    def split(self, token_ids: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of the thinking and those of the answer, without the marks around the thinking."""
        end = self.num_tokens - (not self.is_open)
        return token_ids[self._num_before : end], token_ids[self.num_tokens :]


def answer_text(text: str) -> str:
    """Return the text behind the end of thinking without the line breaks before the answer."""
    return text.lstrip("\n")
