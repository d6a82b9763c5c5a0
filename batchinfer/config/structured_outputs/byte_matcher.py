"""Matchers for trying a grammar without a model; every token is one byte."""

import functools

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

END = 256  # the token that ends a text
_MOST_FORCED = 1000  # bytes that are followed


class _Bytes:
    """A tokenizer as TokenizerWrapper wants it."""

    eos_token_id, bos_token_id = END, None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def byte_matcher(grammar: str) -> LLMatcher:
    """Return a matcher of a grammar at the beginning of its text; token b is the byte b."""
    return LLMatcher(_tokenizer(), grammar, log_level=0)


def is_stuck(matcher: LLMatcher) -> bool:
    """Return whether no byte may come next, neither here nor after the bytes that the grammar forces."""
    matcher.compute_bitmask()
    forced = b"" if matcher.is_error() else matcher.compute_ff_bytes()
    if 0 < len(forced) <= _MOST_FORCED:
        matcher.consume_tokens(list(forced))
        matcher.compute_bitmask()
    return is_dead_end(matcher.get_error())


def is_dead_end(error: str) -> bool:
    """Return whether an error text of llguidance means that no token may come next."""
    return error.startswith("NoExtension")


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
