"""Changes of the model's logits that a request asks for, before its token is sampled.

The order is that of vLLM's sampler: forbidden tokens, biases, then penalties for earlier tokens.
Definitions: repetition_penalty of Keskar et al. 2019 as in transformers, over prompt and output; presence_penalty and
frequency_penalty of OpenAI's API, over the output; bad_words and min_tokens of vLLM.
"""

# V vocabulary, K tokens

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.model.logit_changes import LogitChanges, TokenValues
from batchinfer.rank.thinking import AnyThinking
from batchinfer.records import Request, Sampling

if TYPE_CHECKING:
    from batchinfer.rank.grammars import GrammarMatcher, Grammars

MOST_MASK_THREADS = 4

ALL_BITS = np.uint32(2**32 - 1)


class LogitRules:
    """The rules of one request, which follow the tokens that it generates.

    Args:
        prompt: the prompt's tokens.
        ends: tokens that end an answer.
        bad_words: see `bad_word_tokens`.
        grammar: of the answer after its thinking; None: any answer. If the answer may begin with thinking, <think> is
            allowed first.
        thinking: takes each token before these rules do.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: list[int],
        ends: frozenset[int],
        bad_words: list[list[int]],
        grammar: GrammarMatcher | None,
        thinking: AnyThinking | None = None,
    ) -> None:
        self._sampling, self._bad_words = sampling, bad_words
        self._grammar, self._thinking = grammar, thinking
        self._was_thinking = self._is_thinking
        self._is_stuck = False
        self._tokens: list[int] = []
        self._ends = sorted({*ends, *sampling.stop_token_ids})
        bias = sampling.logit_bias
        self._biased = np.array([token for token, _ in bias], dtype=np.int64)
        self._bias = np.array([value for _, value in bias], dtype=np.float32)
        self._repetition = np.array([sampling.repetition_penalty], dtype=np.float32)
        self._presence = np.array([sampling.presence_penalty], dtype=np.float32)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._has_counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        self._is_repetitive = sampling.repetition_penalty != 1.0
        self.has_values = bool(bias) or self._has_counts or self._is_repetitive  # biases or penalties of some tokens
        limits = grammar, sampling.thinking_budget
        self._may_forbid = bool(sampling.min_tokens or bad_words) or any(limit is not None for limit in limits)
        self._repeated = _Seen(prompt if self._is_repetitive else [])
        self._generated = _Seen([])

    def accept(self, token: int) -> None:
        """Take a generated token into account."""
        self._tokens.append(token)
        if self._is_repetitive:
            self._repeated.add(token)
        if self._has_counts:
            self._generated.add(token)
        if self._grammar is None:
            return
        if self._thinking is None:
            self._grammar.accept(token)
            return
        if not (self._was_thinking or self._is_thinking):
            self._grammar.accept(token)
        self._was_thinking = self._is_thinking

    @property
    def grammar(self) -> GrammarMatcher | None:
        """The grammar that limits the next token; None if none does, as while the answer is thinking."""
        return self._grammar if self._thinking is None or not self._thinking.is_open else None

    @property
    def have_stopped(self) -> bool:
        """Whether the answer cannot go on: it is complete, or there is a problem."""
        return self._is_stuck or (self._grammar is not None and self._grammar.has_stopped)

    @property
    def is_complete(self) -> bool:
        """Whether the answer can only end now."""
        return self._grammar is not None and self._grammar.is_complete

    @property
    def problem(self) -> str | None:
        """Reason why the answer cannot go on; None if it can."""
        if self._is_stuck:
            return "bad_words and min_tokens forbid every token that may come next"
        return None if self._grammar is None else self._grammar.problem

    @property
    def _is_thinking(self) -> bool:
        return self._thinking is not None and self._thinking.is_open

    def values(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield the biases and penalties: a field of LogitChanges, [K] int64 tokens, [K] or [1] float32 values."""
        if len(self._biased):
            yield "biases", self._biased, self._bias
        if self._is_repetitive:
            yield "repetition_penalties", self._repeated.tokens, self._repetition
        if self._frequency:
            yield "frequency_penalties", self._generated.tokens, self._frequency * self._generated.counts
        if self._presence[0]:
            yield "presence_penalties", self._generated.tokens, self._presence

    def allowed(self, mask: np.ndarray | None, vocab_size: int) -> np.ndarray | None:
        """Return [ceil(V / 32)] uint32, the tokens that may come next; None: all of them.

        Args:
            mask: likewise, those that the grammar allows (`Grammars.masks`), none beyond the vocabulary; it may be
                changed and returned.
        """
        if not self._may_forbid:
            return None
        sampling, thinking = self._sampling, self._thinking
        budget = sampling.thinking_budget
        if budget is not None and thinking is not None and thinking.is_open and thinking.num_tokens >= budget:
            only = np.zeros(num_words(vocab_size), dtype=np.uint32)
            _allow(only, thinking.end_token)
            return only
        forbidden = list(self._ends) if len(self._tokens) < sampling.min_tokens else []
        for *before, last in self._bad_words:
            if before == self._tokens[len(self._tokens) - len(before) :]:
                forbidden.append(last)
        if mask is None and not forbidden:
            return None
        has_grammar = mask is not None
        if mask is None:
            mask = np.full(num_words(vocab_size), ALL_BITS)
        # white space before <think> would count as part of the grammar's text
        elif thinking is not None and thinking.may_begin_with is not None and not self._tokens:
            _allow(mask, thinking.may_begin_with)
        if forbidden:
            for token in forbidden:
                if token < vocab_size:
                    mask[token // 32] &= ~np.uint32(1 << token % 32)
            self._is_stuck = has_grammar and not mask.any()
        return mask


class RuleMaker:
    """Factory of the rules of a rank's requests.

    Args:
        vocab_size: the model's; tokens beyond it, which tokenizer and generation_config.json may name, are ignored.
    """

    def __init__(self, tokenizer: PromptTokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._ends = frozenset(token for token in tokenizer.eos_token_ids if token < vocab_size)
        self._bad_words = functools.lru_cache(1024)(functools.partial(bad_word_tokens, tokenizer=tokenizer))

    def make(self, request: Request, thinking: AnyThinking | None) -> LogitRules | None:
        """Return a request's rules; None if it takes the model's logits unchanged."""
        sampling = request.sampling
        if not sampling.changes_logits:
            return None
        grammar = None if sampling.structured is None else self.grammars.matcher(*sampling.structured)
        bad_words = [tokens for tokens in self._bad_words(sampling.bad_words) if tokens[-1] < self._vocab_size]
        if thinking is not None and thinking.end_token >= self._vocab_size:
            thinking = None
        return LogitRules(sampling, request.token_ids, self._ends, bad_words, grammar, thinking)

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The grammar compiler, made for the first grammar, as this takes about a second for a large vocabulary."""
        # few jobs have grammars: ranks of other jobs start without loading the library
        from batchinfer.rank.grammars import Grammars

        threads = min(MOST_MASK_THREADS, torch.get_num_threads())
        vocab_size = max(self._vocab_size, self._tokenizer.vocab_size)
        return Grammars(self._tokenizer.to_json(), vocab_size, self._ends, num_threads=threads)

    def begin(self, rows: list[tuple[int, LogitRules]]) -> StepRules:
        """Return the rules of some rows of a step; a thread computes the masks of grammars while the model computes."""
        matchers = [rules.grammar for _, rules in rows if rules.grammar is not None]
        masks = self._thread.submit(self.grammars.masks, matchers) if matchers else None
        return StepRules(rows, masks, self._vocab_size)

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar masks")


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules of some rows of a step, rows ascending.

    masks: [N, W] uint32 of the rows that have grammars; None: there are none.
    vocab_size: the model's.
    """

    rows: list[tuple[int, LogitRules]]
    masks: Future[np.ndarray] | None
    vocab_size: int

    def changes(self) -> LogitChanges:
        """Wait for the masks and return the changes of logits."""
        if not self.rows:
            return LogitChanges()
        masks = iter(() if self.masks is None else self._within_vocabulary(self.masks.result()))
        masked, allowed = [], []
        for row, rules in self.rows:
            may_come = rules.allowed(None if rules.grammar is None else next(masks), self.vocab_size)
            if may_come is not None:
                masked.append(row)
                allowed.append(may_come)
        parts: dict[str, tuple[list[int], list[np.ndarray], list[np.ndarray]]] = {}
        for row, rules in self.rows:
            for kind, tokens, values in rules.values() if rules.has_values else ():
                rows, of_tokens, of_values = parts.setdefault(kind, ([], [], []))
                rows.append(row)
                of_tokens.append(tokens)
                of_values.append(values)
        return LogitChanges(
            **{kind: TokenValues.of(*columns) for kind, columns in parts.items()},
            masked_rows=np.array(masked, dtype=np.int64),
            allowed=np.array(allowed, dtype=np.uint32).reshape(len(masked), num_words(self.vocab_size)),
        )

    def _within_vocabulary(self, masks: np.ndarray) -> np.ndarray:
        """Return the masks without the tokens that the tokenizer has beyond the model's vocabulary."""
        masks = masks[:, : num_words(self.vocab_size)]
        if rest := self.vocab_size % 32:
            masks[:, -1] &= np.uint32(2**rest - 1)
        return masks


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words with a bit for each token."""
    return -(-vocab_size // 32)


def _allow(words: np.ndarray, token: int) -> None:
    words[token // 32] |= np.uint32(1 << token % 32)


class _Seen:
    """Distinct tokens and the number of times that each occurred."""

    def __init__(self, tokens: list[int]) -> None:
        distinct, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._tokens, self._counts = distinct, counts.astype(np.float32)

    @property
    def tokens(self) -> np.ndarray:
        """[K] int64."""
        return self._tokens[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """[K] float32."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        """Count one more of a token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):  # make room for twice as many
                room = max(64, 2 * place)
                self._tokens, self._counts = np.resize(self._tokens, room), np.resize(self._counts, room)
            self._tokens[place], self._counts[place] = token, 0
        self._counts[place] += 1


def bad_word_tokens(words: tuple[str, ...], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Return each word's tokens at the start of a text, and after a space."""
    texts = [before + word.lstrip() for word in words for before in ("", " ")]
    found = dict.fromkeys(tuple(tokenizer.encode_piece(text)) for text in texts)
    return [list(tokens) for tokens in found if tokens]
