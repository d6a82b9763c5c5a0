"""Changes of the model's logits that a request asks for, before its token is sampled.

The order is that of vLLM's sampler: forbidden tokens, biases, then penalties for earlier tokens.
Definitions: repetition_penalty of Keskar et al. 2019 as in transformers, over prompt and output; presence_penalty and
frequency_penalty of OpenAI's API, over the output; bad_words and min_tokens of vLLM.
"""

# V vocabulary, K tokens

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from batchinfer.data.prompt_tokenizer import PromptTokenizer
from batchinfer.model.sampling import Changes
from batchinfer.rank.thinking import AnyThinking
from batchinfer.records import Request, Sampling
from batchinfer_kernels.reference.fp8 import divided
from batchinfer_kernels.transfer import to_device

if TYPE_CHECKING:
    from batchinfer.rank.grammars import GrammarMatcher, Grammars

MOST_MASK_THREADS = 4

# The logit of a forbidden token: finite, as rows are checked for that, and too small to have any weight in a draw.
NEVER = -1e30


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
        self._ends = torch.tensor(sorted({*ends, *sampling.stop_token_ids}), dtype=torch.int64)
        bias = sampling.logit_bias
        self._biased = torch.tensor([token for token, _ in bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in bias], dtype=torch.float32)
        self._repeated = _Seen(prompt if sampling.repetition_penalty != 1.0 else [])
        self._generated = _Seen([])

    def accept(self, token: int) -> None:
        """Take a generated token into account."""
        self._tokens.append(token)
        if self._sampling.repetition_penalty != 1.0:
            self._repeated.add(token)
        if self._sampling.presence_penalty or self._sampling.frequency_penalty:
            self._generated.add(token)
        if self._grammar is not None and not (self._was_thinking or self._is_thinking):
            self._grammar.accept(token)
        self._was_thinking = self._is_thinking

    @property
    def grammar(self) -> GrammarMatcher | None:
        """The grammar that limits the next token; None if none does, as while the answer is thinking."""
        return None if self._is_thinking else self._grammar

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

    def apply(self, logits_V: torch.Tensor, mask: np.ndarray | None) -> None:
        """Change the logits of the next token in place.

        Args:
            mask: [ceil(V / 32)] uint32, tokens that the grammar allows (`Grammars.masks`).
        """
        sampling = self._sampling
        if len(self._bias):
            logits_V[to_device(self._biased, logits_V.device)] += to_device(self._bias, logits_V.device)
        if sampling.repetition_penalty != 1.0:
            seen, _ = self._repeated.on(logits_V.device)
            values, penalty = logits_V[seen], sampling.repetition_penalty
            logits_V[seen] = torch.where(values < 0, values * penalty, divided(values, penalty))
        if sampling.presence_penalty or sampling.frequency_penalty:
            seen, counts = self._generated.on(logits_V.device)
            logits_V[seen] -= sampling.frequency_penalty * counts
            logits_V[seen] -= sampling.presence_penalty
        ends = self._ends if len(self._tokens) < sampling.min_tokens else self._ends[:0]
        words = [last for *before, last in self._bad_words if before == self._tokens[len(self._tokens) - len(before) :]]
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits_V)]
            # white space before <think> would count as part of the grammar's text
            if self._thinking is not None and self._thinking.may_begin_with is not None and not self._tokens:
                bits[self._thinking.may_begin_with] = 1
            logits_V.masked_fill_(to_device(torch.from_numpy(bits == 0), logits_V.device), NEVER)
            bits[[*ends.tolist(), *words]] = 0
            self._is_stuck = bool(len(ends) or words) and not bits.any()
        if len(ends):
            logits_V[to_device(ends, logits_V.device)] = NEVER
        for word in words:
            logits_V[word] = NEVER
        budget, thinking = sampling.thinking_budget, self._thinking
        if budget is not None and thinking is not None and thinking.is_open and thinking.num_tokens >= budget:
            logits_V.fill_(NEVER)
            logits_V[thinking.end_token] = 0.0


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
        return StepRules(rows, self._thread.submit(self.grammars.masks, matchers) if matchers else None)

    @functools.cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "grammar masks")


@dataclass(frozen=True, slots=True)
class StepRules:
    """The rules of the rows of one step."""

    rows: list[tuple[int, LogitRules]]
    masks: Future[np.ndarray] | None

    def changes(self) -> Changes:
        """Wait for the masks and return the changes of logits for `sample`."""
        masks = iter(() if self.masks is None else self.masks.result())
        return [
            (row, functools.partial(rules.apply, mask=None if rules.grammar is None else next(masks)))
            for row, rules in self.rows
        ]


class _Seen:
    """Distinct tokens and the number of times that each occurred."""

    def __init__(self, tokens: list[int]) -> None:
        distinct, counts = np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
        self._place = {token: place for place, token in enumerate(distinct.tolist())}
        self._tokens, self._counts = distinct, counts.astype(np.float32)

    def add(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):  # make room for twice as many
                room = max(64, 2 * place)
                self._tokens, self._counts = np.resize(self._tokens, room), np.resize(self._counts, room)
            self._tokens[place], self._counts[place] = token, 0
        self._counts[place] += 1

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [K] int64 tokens and [K] float32 counts on a device."""
        num = len(self._place)
        tokens, counts = torch.from_numpy(self._tokens[:num]), torch.from_numpy(self._counts[:num])
        return to_device(tokens, device), to_device(counts, device)


def bad_word_tokens(words: tuple[str, ...], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Return each word's tokens at the start of a text, and after a space if its first token is another one there."""
    found = []
    for word in words:
        plain, behind_space = (tokenizer.encode_piece(before + word.strip()) for before in ("", " "))
        found.append(plain)
        if behind_space[:1] != plain[:1] and len(behind_space) == len(plain):
            found.append(behind_space)
    return [tokens for tokens in found if tokens]
