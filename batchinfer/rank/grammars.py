"""A grammar as it goes along with one answer: which tokens may come next, and when there is nothing more to come."""

import functools

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from batchinfer.config.structured_outputs import grammar_of

MOST_COMPILED = 1024  # grammars that stay compiled


class GrammarMatcher:
    """The state of one answer; a copy of what was compiled once for all rows with this grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        self.matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing more may come but its end."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def problem(self) -> str | None:
        """Why no answer can be made of it any more: a limit of the library, or a token that was not allowed."""
        return " ".join(self.matcher.get_error().split())[:200] if self.matcher.is_error() else None


class Grammars:
    """Compiles grammars for one model's tokens, each once.

    Args:
        tokenizer_json: the tokenizer as tokenizer.json has it, added tokens included.
        vocab_size: the model's or the tokenizer's, whichever is larger.
        eos_token_ids: tokens that may come when the answer is whole.
        num_threads: that look for the next tokens of many answers at once.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: frozenset[int], *, num_threads: int = 1
    ) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)
        self._executor = LLExecutor(num_threads)
        self._words = (vocab_size + 31) // 32
        self._compiled = functools.lru_cache(MOST_COMPILED)(self._compile)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """The beginning of an answer; `kind` and `text` as for `grammar_of`."""
        return GrammarMatcher(self._compiled(kind, text).deep_copy())

    def masks(self, matchers: list[GrammarMatcher]) -> np.ndarray:
        """[N, ceil(V / 32)] uint32, bit t % 32 of word t // 32: whether token t may come next in each answer."""
        masks = np.zeros((len(matchers), self._words), dtype=np.uint32)
        if matchers:
            pairs = [(matcher.matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * self._words, len(matchers))
        return masks

    def _compile(self, kind: str, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, grammar_of(kind, text), log_level=0)
