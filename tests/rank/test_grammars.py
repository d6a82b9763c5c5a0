"""Grammars of a model's tokens: texts that spell control tokens, masks of other texts, and reasons without clocks."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from batchinfer.config.structured_outputs import grammar_of
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.rank.grammars import Grammars, without_spelt_tokens
from support.constraints import CONSTRAINTS
from support.paths import SAMPLE_MODEL

SAMPLE = load_tokenizer(SAMPLE_MODEL)
ENDS = SAMPLE.eos_token_ids
ADDED = [
    *(AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>", "crowns!")),
    *(AddedToken(name, special=True, normalized=True) for name in ("<tool_call>", "[ARGS]")),
]
TEXTS = [
    "<｜User｜>",
    "ends with <｜end▁of▁sentence｜>",
    "<think>x</think>",
    'a <tool_call>[ARGS]{"a": 1}',
    "12 crowns! <think>",
]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_str(SAMPLE.to_json())
    tokenizer.add_tokens(ADDED)
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer.to_str(), tokenizer.get_vocab_size(), ENDS)


def allowed(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def answer(grammars, kind, text, rng):
    """The tokens of one answer that the grammar allows, drawn."""
    matcher, tokens = grammars.matcher(kind, text), []
    while not matcher.is_complete and len(tokens) < 300:
        going_on = [token for token in allowed(grammars.masks([matcher])[0]) if token not in ENDS]
        assert going_on, matcher.problem
        tokens.append(rng.choice(going_on))
        matcher.accept(tokens[-1])
        assert matcher.problem is None
    return tokens


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_spells_added_tokens_is_answered_as_a_text(grammars, tokenizer, text):
    quoted, asked = json.dumps(text, ensure_ascii=False), json.dumps({"type": "object"} | object_with(text))
    control = {tokenizer.token_to_id(one.content) for one in ADDED if one.content != "crowns!"} | {0, 1, 2, 3}
    for kind, content, expected in [
        ("choice", json.dumps([text]), text),
        ("json", json.dumps({"const": text}), quoted),
        ("regex", "".join(f"\\{char}" if char in "[]{}|" else char for char in text), text),
        ("grammar", f"start: {quoted}", text),
        ("json", asked, None),
    ]:
        tokens = answer(grammars, kind, content, random.Random(0))
        found = tokenizer.decode(tokens, skip_special_tokens=False)
        assert found == expected if expected is not None else json.loads(found) == {text: 1}
        assert not control & set(tokens)


def object_with(name):
    return {"properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}


@pytest.mark.parametrize("number", range(len(CONSTRAINTS)))
def test_masks_are_those_of_the_tokenizer_as_it_is(grammars, tokenizer, number):
    kind, content = CONSTRAINTS[number]
    text = content if kind == "regex" else json.dumps(content, ensure_ascii=False)
    plain = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=sorted(ENDS))
    expected, matcher = LLMatcher(plain, grammar_of(kind, text), log_level=0), grammars.matcher(kind, text)
    rng = random.Random(number)
    for _ in range(40):
        mask = grammars.masks([matcher])[0]
        assert mask.tobytes() == expected.compute_bitmask()
        token = rng.choice(allowed(mask))
        if token in ENDS:
            break
        matcher.accept(token)
        expected.consume_token(token)


def test_a_grammar_may_still_name_control_tokens(grammars, tokenizer):
    think, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
    matcher = grammars.matcher("grammar", 'start: <think> "<think>" </think> "7" // <tool_call>')
    assert allowed(grammars.masks([matcher])[0]) == [think]
    tokens = answer(grammars, "grammar", 'start: <think> "<think>" </think> "7"', random.Random(1))
    assert tokenizer.decode(tokens) == "<think><think></think>7"
    assert (tokens[0], tokens.count(think), tokens.count(end)) == (think, 1, 1)
    unknown = grammars.matcher("grammar", 'start: <nobody> "a"').problem
    assert unknown is not None
    assert 'unknown special token: "<nobody>"' in unknown
    assert unknown.isprintable()


def test_a_reason_is_without_the_state_and_the_times_of_the_parser(grammars):
    reasons = set()
    for _ in range(5):
        matcher = grammars.matcher("regex", "[0-9]{3}")
        matcher.accept(SAMPLE.encode_piece("x")[0])
        reasons.add(matcher.problem)
    (reason,) = reasons
    assert reason is not None
    assert "doesn't satisfy the grammar" in reason
    assert "state" not in reason
    assert "time" not in reason


def test_a_dead_end_is_one_sentence(grammars):
    named_by_pattern = {"type": "object", "patternProperties": {"^a$": {"type": "integer"}}, "required": ["a"]}
    matcher = grammars.matcher("json", json.dumps(named_by_pattern | {"additionalProperties": False}))
    for token in SAMPLE.encode_piece('{"a":1,'):
        matcher.accept(token)
    for _ in range(100):  # behind the comma come blanks, and no other name
        may_come = allowed(grammars.masks([matcher])[0])
        if matcher.problem is not None:
            break
        matcher.accept(may_come[0])
    assert matcher.problem is not None
    assert matcher.problem.startswith("no text goes on from here")


def test_names_stay_that_the_tokenizer_builds_from_others():
    added = [{"id": number, "content": name, "special": True} for number, name in enumerate(["<a>", "<b>", "x"])]
    of_pairs = {"vocab": {"<a>": 0, "<b>": 1, "x": 2, "y": 3}, "merges": [["<", "b>"]], "unk_token": "<a>"}
    text, marked = without_spelt_tokens(json.dumps({"model": of_pairs, "added_tokens": added}))
    found = json.loads(text)
    first, second, third, last = found["model"]["vocab"]
    assert marked == {"<a>", "x"}
    assert (second, last) == ("<b>", "y")
    assert first == found["model"]["unk_token"] == found["added_tokens"][0]["content"] != "<a>"
    assert third == found["added_tokens"][2]["content"] != "x"
    of_scores = {"vocab": [["<a>", 0.0], ["y", -1.5]], "unk_id": 0}
    text, marked = without_spelt_tokens(json.dumps({"model": of_scores, "added_tokens": added[:1]}))
    assert marked == {"<a>"}
    assert json.loads(text)["model"]["vocab"] == [[first, 0.0], ["y", -1.5]]
