"""Grammars of answers: their tokenizer, the tokens that may come next, and the end of an answer."""

import functools
import json
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from batchinfer.config.structured_outputs import grammar_of, reason_of
from batchinfer.config.structured_outputs.endless import lark_tokens

MOST_COMPILED = 1024  # grammars that stay compiled
_MOST_CHARS = 200  # of a reason


class GrammarMatcher:
    """The state of one answer under its grammar, a copy of the compiled grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.has_stopped = matcher.is_stopped()  # after the latest token; also where that was not allowed

    def accept(self, token: int) -> None:
        """Add a token to the answer."""
        self.matcher.consume_token(token)
        self.has_stopped = self.matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing more may come but its end."""
        return self.has_stopped and not self.matcher.is_error()

    @property
    def problem(self) -> str | None:
        """The reason why the answer cannot go on: a limit of the library, or a token that was not allowed."""
        if not self.matcher.is_error():
            return None
        return reason_of(self.matcher.get_error()).replace(MARK, "")[:_MOST_CHARS]


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
        marked_json, self._marked_names = without_spelt_tokens(tokenizer_json)
        # without ids, llguidance finds the end token by its name
        ends = sorted(eos_token_ids) or LLTokenizer(tokenizer_json).eos_tokens
        self._tokenizer = LLTokenizer(marked_json, n_vocab=vocab_size, eos_token=ends)
        self._executor = LLExecutor(num_threads)
        self._words = (vocab_size + 31) // 32
        self._compiled = functools.lru_cache(MOST_COMPILED)(self._compile)

    def matcher(self, kind: str, text: str) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer; `kind` and `text` as for `grammar_of`."""
        return GrammarMatcher(self._compiled(kind, text).deep_copy())

    def masks(self, matchers: list[GrammarMatcher]) -> np.ndarray:
        """[N, ceil(V / 32)] uint32, bit t % 32 of word t // 32: whether token t may come next in each answer."""
        masks = np.zeros((len(matchers), self._words), dtype=np.uint32)
        if matchers:
            pairs = [(matcher.matcher, place) for place, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, 4 * self._words, len(matchers))
        return masks

    def _compile(self, kind: str, text: str) -> LLMatcher:
        grammar = grammar_of(kind, text)
        if kind == "grammar":
            grammar = with_marked_names(grammar, self._marked_names)
        return LLMatcher(self._tokenizer, grammar, log_level=0)


MARK = "\U000f0ba7\U000f1c3d"  # characters for private use


def without_spelt_tokens(tokenizer_json: str) -> tuple[str, frozenset[str]]:
    """Mark the names of the added tokens that llguidance treats as control tokens.

    Returns:
        tokenizer.json, and the names that have a mark in it.
    """
    tokenizer = json.loads(tokenizer_json)
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "") for pair in model.get("merges", ())}
    marked = {token["content"]: _marked(token["content"]) for token in added if _is_control(token)}
    marked = {name: marked[name] for name in marked.keys() - merged}
    for token in added:
        if token["content"] in marked:
            token |= {"content": marked[token["content"]], "special": True}
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {marked.get(name, name): number for name, number in vocab.items()}
    else:
        model["vocab"] = [[marked.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in marked:
        model["unk_token"] = marked[model["unk_token"]]
    return json.dumps(tokenizer, ensure_ascii=False), frozenset(marked)


def with_marked_names(lark: str, names: frozenset[str]) -> str:
    """Return a grammar with a mark in these names of tokens."""
    pieces, end = [], 0
    for token in lark_tokens(lark):
        if token.kind == "special" and token.text in names:
            pieces += [lark[end : token.start], _marked(token.text)]
            end = token.end
    return "".join(pieces) + lark[end:]


def _is_control(token: dict[str, Any]) -> bool:
    name = token["content"]
    return bool(token["special"]) or (name.startswith("<") and name.endswith(">"))


def _marked(name: str) -> str:
    return name[:1] + MARK + name[1:]
