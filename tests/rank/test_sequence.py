"""When a request is finished, and what its text is."""

from __future__ import annotations

import pytest

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.rank.sequence import Sequence
from batchinfer.records import Request, RequestKey, RequestTimes
from support.paths import SAMPLE_MODEL

TOKENIZER = load_tokenizer(SAMPLE_MODEL)


def tokens_of(text):
    """Its tokens, without special ones."""
    (tokens,) = TOKENIZER.encode_prompts([text])
    return [token for token in tokens if TOKENIZER.decode([token])]


def run(tokens, **sampling):
    """A request that generates these tokens until it is finished."""
    request = Request(RequestKey(0, 0, 0), 0, [5], SamplingConfig(**sampling).to_sampling(), 0)
    stream = TOKENIZER.stream() if sampling.get("stop") else None
    sequence = Sequence(request, [0], 1, RequestTimes(), stream)
    for token in tokens:
        if sequence.finish_reason is None:
            sequence.accept(token, None, frozenset({1}))
    return sequence


@pytest.mark.parametrize("max_tokens", [1, 3, 7])
def test_an_answer_has_no_more_tokens_than_it_may(max_tokens):
    done = run([10, 11, 12, 13, 14, 15, 16, 17], max_tokens=max_tokens)
    assert (len(done.token_ids), done.finish_reason) == (max_tokens, "length")


def test_a_stop_string_is_found_where_pieces_meet_and_is_not_in_the_text():
    text = "one two three four"
    tokens = tokens_of(text)
    pieces = [TOKENIZER.decode([token]) for token in tokens]
    # from the middle of the text over two pieces
    stop = text[len(pieces[0]) - 1 : len(pieces[0]) + 1]
    done = run(tokens, max_tokens=50, stop=[stop])
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert len(done.token_ids) < len(tokens)
    assert done.completion(TOKENIZER).text == text[: text.index(stop)]


def test_the_end_token_is_no_part_of_the_text():
    tokens = tokens_of("one two")
    done = run([*tokens, 1, 20], max_tokens=50)
    assert (done.finish_reason, done.token_ids) == ("stop", [*tokens, 1])
    assert done.completion(TOKENIZER).text == TOKENIZER.decode(tokens)
