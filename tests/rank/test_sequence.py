"""The end of a request, and its text."""

from __future__ import annotations

import pytest
import torch

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.rank.logit_rules import RuleMaker
from batchinfer.rank.sequence import Sequence
from batchinfer.rank.thinking import Thinking, ThinkingTokens
from batchinfer.records import Request, RequestKey, RequestTimes
from support.changed_logits import apply_rules
from support.paths import SAMPLE_MODEL

TOKENIZER = load_tokenizer(SAMPLE_MODEL)


def tokens_of(text):
    """Its tokens, without special ones."""
    (tokens,) = TOKENIZER.encode_prompts([text])
    return [token for token in tokens if TOKENIZER.decode([token])]


RULES = RuleMaker(TOKENIZER, TOKENIZER.vocab_size)


def run(tokens, *, end_of_thinking=None, separates_reasoning=False, **sampling):
    """A request that generates these tokens until it is finished; it begins in thinking if that has an end."""
    request = Request(RequestKey(0, 0, 0), 0, [5], SamplingConfig(**sampling).to_sampling(), 0)
    stream = TOKENIZER.stream() if sampling.get("stop") else None
    thinking = end_of_thinking and Thinking(ThinkingTokens(None, end_of_thinking), [5], "deepseek_r1")
    rules = RULES.make(request, thinking)
    sequence = Sequence(request, [0], 1, RequestTimes(), stream, rules, thinking, separates_reasoning)
    for token in tokens:
        if sequence.finish_reason is None:
            sequence.accept(token, frozenset({1}))
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


NUMBER = {"max_tokens": 5, "structured_outputs": {"regex": "[0-9]+"}}
DIGITS = [token for digit in "123" for token in tokens_of(digit)]


@pytest.mark.parametrize(
    ("tokens", "more", "valid"),
    [
        ([*DIGITS, 1], {}, True),  # the end token may come where the answer is whole
        (DIGITS[:2], {"structured_outputs": {"regex": "[0-9]{2}"}}, True),  # nothing more may come
        (DIGITS, {"max_tokens": 3}, False),
        (DIGITS, {"stop": ["3"]}, False),
        (DIGITS, {"stop_token_ids": DIGITS[1:2], "include_stop_str_in_output": True}, False),
        ([*DIGITS, 300], {}, False),  # a letter: an error row
        ([300, 9, *DIGITS[:2], 1], {"end_of_thinking": 9}, True),
        ([300, 9, *DIGITS], {"end_of_thinking": 9}, False),
        ([300, 301, 1], {"end_of_thinking": 9}, False),  # ended without a limit, but before the answer
    ],
)
def test_a_structured_output_is_valid_when_all_of_it_is_there(tokens, more, valid):
    done = run(tokens, **{**NUMBER, **more})
    assert done.finish_reason is not None
    assert done.completion(TOKENIZER).structured_valid is valid


def test_a_structured_output_that_is_complete_ends_before_min_tokens_and_one_that_may_go_on_does_not():
    complete = run(DIGITS, **NUMBER | {"structured_outputs": {"regex": "[0-9]{2}"}, "min_tokens": 4})
    assert (len(complete.token_ids), complete.finish_reason) == (2, "stop")
    assert "a structured output that is complete" in SamplingConfig.model_fields["min_tokens"].description
    goes_on = run(DIGITS, **NUMBER | {"min_tokens": 4})
    assert goes_on.finish_reason is None
    logits = torch.zeros(TOKENIZER.vocab_size)
    apply_rules(goes_on.rules, logits, RULES.grammars.masks([goes_on.rules.grammar])[0])
    assert {int(token) for token in (logits == 0).nonzero()}.isdisjoint(TOKENIZER.eos_token_ids)
    assert (logits == 0).any()


@pytest.mark.parametrize(
    ("more", "text", "valid"),
    [
        ({"stop": ["2"]}, "1", False),
        ({"stop": ["2"], "include_stop_str_in_output": True}, "12", True),
        ({"stop": ["2"], "min_tokens": 3}, "12", True),  # nothing may stop it so early
        ({"stop_token_ids": DIGITS[1:2]}, "1", False),
        ({"stop_token_ids": DIGITS[1:2], "include_stop_str_in_output": True}, "12", True),
    ],
)
def test_what_stops_an_answer_cuts_it_also_where_it_completes_a_structured_output(more, text, valid):
    done = run(DIGITS, **NUMBER | {"structured_outputs": {"regex": "[0-9]{2}"}} | more)
    completion = done.completion(TOKENIZER)
    assert (completion.finish_reason, completion.text, completion.structured_valid) == ("stop", text, valid)
    assert (completion.stop_reason is None) is ("min_tokens" in more)


THINK, END, BLANK = 8, 9, 10
MARKS = ThinkingTokens(THINK, END, lambda token: token == BLANK)


@pytest.mark.parametrize(
    ("prompt", "auto", "deepseek_r1"),
    [
        ([5, THINK], True, True),
        ([5, THINK, BLANK, BLANK], True, True),  # as DeepSeek-R1's template: <think> and a line break
        ([5, END], False, False),
        ([5, THINK, END, BLANK], False, False),  # GLM without thinking
        ([5, THINK, 6], False, True),  # a user's text that spells it
        ([THINK, END, 5, 6], False, True),  # an earlier answer of Kimi-K2-Thinking
        ([], False, True),
    ],
)
def test_a_prompts_end_says_whether_its_answer_begins_in_thinking(prompt, auto, deepseek_r1):
    assert Thinking(MARKS, prompt, "auto").is_open is auto
    assert Thinking(MARKS, prompt, "deepseek_r1").is_open is deepseek_r1


@pytest.mark.parametrize("prompt", [[], [5, THINK, 6], [THINK, END, 5, 6]])
def test_an_answer_may_begin_its_thinking_where_the_prompts_end_says_nothing(prompt):
    thinking = Thinking(MARKS, prompt, "auto")
    for token in (THINK, 7, END, 6):
        thinking.accept(token)
    assert thinking.split([THINK, 7, END, 6]) == ([7], [6])


@pytest.mark.parametrize("mode", ["auto", "deepseek_r1"])
def test_white_space_may_come_before_an_answers_thinking(mode):
    thinking = Thinking(MARKS, [5], mode)
    answer = [BLANK, THINK, 7, END, 6]  # as GLM-4.5 answers
    for place, token in enumerate(answer):
        thinking.accept(token)
        assert thinking.is_open is ((mode == "deepseek_r1" or place > 0) and place < 3)
    assert thinking.split(answer) == ([7], [6])
    assert thinking.num_tokens == 4


def test_a_mark_behind_the_first_word_of_an_answer_is_text():
    thinking = Thinking(MARKS, [5], "auto")
    for token in (BLANK, 7, THINK, 8):
        thinking.accept(token)
    assert (thinking.has_begun, thinking.num_tokens) == (False, 0)


@pytest.mark.parametrize(("prompt", "is_open"), [([5, THINK, 6], True), ([5, THINK, 6, END, 7], False), ([5], False)])
def test_a_message_that_is_continued_may_have_begun_its_thinking_further_back(prompt, is_open):
    assert Thinking(MARKS, prompt, "auto", continues=True).is_open is is_open


def test_a_stop_string_is_not_found_over_the_end_of_thinking():
    mark = 3  # a control token, which no text shows, as Mistral's [/THINK]
    tokens = [*tokens_of("I see.\n"), mark, *tokens_of("\nOne two"), 1]
    how = {"end_of_thinking": mark, "separates_reasoning": True, "max_tokens": 50}
    for stop, text, stop_reason in (["\n\nOn", "I"], "One two", None), (["see", " tw"], "One", " tw"):
        completion = run(tokens, **how, stop=stop).completion(TOKENIZER)
        found = completion.text, completion.reasoning, completion.stop_reason, completion.finish_reason
        assert found == (text, "I see.", stop_reason, "stop")


def test_a_structured_output_cut_in_white_space_before_it_is_not_valid():
    blank, *digits = tokens_of("\n"), *DIGITS[:2]
    marks = Thinking(ThinkingTokens(THINK, END, lambda token: token in blank), [5], "auto")
    settings = SamplingConfig(
        max_tokens=9,
        stop=["\n"],
        include_stop_str_in_output=True,
        structured_outputs={"regex": "\n[0-9]{2}"},
    )
    request = Request(RequestKey(0, 0, 0), 0, [5], settings.to_sampling(), 0)
    rules = RULES.make(request, marks)
    done = Sequence(request, [0], 1, RequestTimes(), TOKENIZER.stream(), rules, marks, separates_reasoning=True)
    for token in (*blank, *digits):
        if done.finish_reason is None:
            done.accept(token, frozenset({1}))
    completion = done.completion(TOKENIZER)
    found = completion.text, completion.token_ids, completion.stop_reason, completion.structured_valid
    assert found == ("\n", blank, "\n", False)


def test_an_answer_without_a_structured_output_is_neither_valid_nor_not():
    assert run([10, 1], max_tokens=5, bad_words=["x"]).completion(TOKENIZER).structured_valid is None
