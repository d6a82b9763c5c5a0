"""Requests' changes of the model's logits, by the definitions of transformers, vLLM and OpenAI."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.sampling import SamplingRows, sample
from batchinfer.rank.logit_rules import LogitRules, RuleMaker, StepRules, bad_word_tokens
from batchinfer.rank.thinking import Thinking, ThinkingTokens
from batchinfer.records import Request, RequestKey
from batchinfer_kernels.reference.rows import FORBIDDEN, apply_token_bitmask
from support.changed_logits import apply_rules
from support.divisors import Divisors
from support.paths import SAMPLE_MODEL

VOCABULARY, EOS = 257, 3


@pytest.fixture(params=range(5))
def case(request):
    """Random logits, a prompt, and tokens generated so far."""
    rng = np.random.default_rng(request.param)
    logits = torch.from_numpy(rng.normal(0, 4, VOCABULARY).astype(np.float32))
    return logits, rng.integers(4, VOCABULARY, 40).tolist(), rng.integers(4, 30, rng.integers(0, 90)).tolist()


def changed(case, bad_words=(), **sampling):
    """The logits after the rules of this sampling."""
    logits, prompt, generated = case
    how = SamplingConfig(max_tokens=200, **sampling).to_sampling()
    rules = LogitRules(how, prompt, frozenset([EOS]), [list(word) for word in bad_words], None)
    for token in generated:
        rules.accept(token)
    logits = logits.clone()
    apply_rules(rules, logits)
    return torch.where(logits == FORBIDDEN, -torch.inf, logits)


def by_transformers(case, processor, *, with_prompt=True):
    logits, prompt, generated = case
    ids = torch.tensor([[*(prompt if with_prompt else []), *generated]], dtype=torch.int64)
    return processor(ids, logits.clone()[None])[0]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_is_penalised_as_in_transformers(case, penalty):
    expected = by_transformers(case, RepetitionPenaltyLogitsProcessor(penalty))
    assert torch.equal(changed(case, repetition_penalty=penalty), expected)


def test_a_penalty_divides_alike_on_any_device(case):
    """By a plain number PyTorch multiplies on a GPU, with a rounded inverse."""
    with Divisors() as found:
        changed(case, repetition_penalty=1.3)
    assert found.divisors
    assert all(isinstance(divisor, torch.Tensor) for divisor in found.divisors)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, -0.25), (1.5, 0.75)])
def test_presence_and_frequency_are_penalised_as_openai_defines_it(case, presence, frequency):
    logits, _, generated = case
    counts = np.bincount(generated, minlength=VOCABULARY).astype(np.float32)
    expected = logits - frequency * torch.from_numpy(counts) - presence * torch.from_numpy((counts > 0) * 1.0).float()
    assert torch.equal(changed(case, presence_penalty=presence, frequency_penalty=frequency), expected)


def test_biases_are_added_as_in_transformers(case):
    bias = {"5": -7.5, "9": 3.25, "200": 100.0}
    processor = SequenceBiasLogitsProcessor([[[int(token)], value] for token, value in bias.items()])
    assert torch.equal(changed(case, logit_bias=bias), by_transformers(case, processor))


def test_nothing_ends_an_answer_that_is_too_short(case):
    _, prompt, generated = case
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 30, [EOS, 11, 17])
    found = changed(case, min_tokens=30, stop_token_ids=[11, 17])
    assert torch.equal(found, by_transformers(case, processor))
    assert torch.isneginf(found).sum() == (3 if len(generated) < 30 else 0)


def test_bad_words_do_not_come(case):
    _, _, generated = case
    words = [[7], [*generated[-1:], 8], [*generated[-3:], 9], [4, 4, 4, 4, 10]]
    # of the output alone, as in vLLM
    processor = NoBadWordsLogitsProcessor(words)
    if len(generated) > 5:
        assert torch.equal(changed(case, words), by_transformers(case, processor, with_prompt=False))
        assert torch.isneginf(changed(case, words))[[7, 8, 9]].all()


def test_rules_come_in_the_order_of_vllms_sampler(case):
    """Biases come before penalties, and a bias never brings a forbidden token back."""
    logits, prompt, _ = case
    bias = {str(prompt[0]): 50.0, str(EOS): 100.0}
    found = changed(case, logit_bias=bias, repetition_penalty=2.0, min_tokens=200)
    assert found[prompt[0]] == (logits[prompt[0]] + 50) / 2
    assert torch.isneginf(found[EOS])


def test_words_are_found_at_the_start_of_a_text_and_behind_a_space():
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    found = bad_word_tokens(("the", " and", "a long phrase of words"), tokenizer)
    texts = [tokenizer.decode(tokens) for tokens in found]
    assert {text.strip() for text in texts} == {"the", "and", "a long phrase of words"}
    assert {"the", " the"} & set(texts)


def test_a_structured_output_of_which_bad_words_leave_nothing_is_an_error_that_says_so():
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    maker = RuleMaker(tokenizer, tokenizer.vocab_size)
    how = SamplingConfig(max_tokens=9, structured_outputs={"choice": ["7", "8"]}, bad_words=["7", "8"])
    rules = maker.make(Request(RequestKey(0, 0, 0), 0, [5], how.to_sampling(), 0), None)
    (token,) = tokenizer.encode_piece("7")
    logits = torch.zeros(tokenizer.vocab_size)
    apply_rules(rules, logits, maker.grammars.masks([rules.grammar])[0])
    rules.accept(token)  # whatever is drawn where nothing may come
    assert rules.problem == "bad_words and min_tokens forbid every token that may come next"


@pytest.mark.parametrize("word", ["lamp", " lamp", "crowns\n"])
def test_a_bad_word_does_not_come_at_the_start_or_behind_a_space(word):
    """In the sample model's vocabulary " lamp" is one token and "lamp" are several."""
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    found = bad_word_tokens((word,), tokenizer)
    texts = [tokenizer.decode(tokens) for tokens in found]
    assert texts == [word.lstrip(), " " + word.lstrip()]
    assert found == [tokenizer.encode_piece(text) for text in texts]


@pytest.mark.parametrize("asked", [{"bad_words": ["parsnips"]}, {"structured_outputs": {"regex": "[a-z]+"}}])
def test_tokens_beyond_the_models_vocabulary_change_nothing(asked):
    """Tokenizer, generation_config.json and a plan may name ids for which the model has no logits."""
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    tokenizer.eos_token_ids = frozenset([EOS, 5000])
    vocab_size = tokenizer.vocab_size - 24
    assert max(tokens[-1] for tokens in bad_word_tokens(("parsnips",), tokenizer)) >= vocab_size
    stops = {"stop_token_ids": [vocab_size, tokenizer.vocab_size - 1]}
    how = SamplingConfig(max_tokens=9, min_tokens=2, thinking_budget=0, **stops, **asked).to_sampling()
    thinking = Thinking(ThinkingTokens(None, vocab_size), [], "deepseek_r1")
    maker = RuleMaker(tokenizer, vocab_size)
    rules = maker.make(Request(RequestKey(0, 0, 0), 0, [5], how, 0), thinking)
    logits = torch.zeros(vocab_size)
    maker.begin([(0, rules)]).changes().apply(logits[None], apply_token_bitmask)
    assert logits[EOS] == FORBIDDEN
    allowed = [tokenizer.decode([token]) for token in (logits == 0).nonzero().flatten().tolist()]
    assert 0 < len(allowed) < vocab_size
    assert "structured_outputs" not in asked or all(re.fullmatch("[a-z]+", text) for text in allowed)


def test_other_rows_and_log_probabilities_do_not_notice(case):
    logits = torch.stack([case[0], case[0].flip(0), case[0].roll(7)])
    how = [SamplingConfig(max_tokens=5, temperature=t, logprobs=3).to_sampling() for t in (0.0, 1.0, 0.0)]
    rows = SamplingRows.of(how, [1, 2, 3])
    positions = np.zeros(3, dtype=np.int64)
    plain = sample(logits.clone(), rows, positions)
    best = int(plain.tokens[2])
    never_the_best = StepRules([(2, LogitRules(how[2], [], frozenset(), [[best]], None))], None, VOCABULARY)
    ruled = sample(logits.clone(), rows, positions, changes=never_the_best.changes())
    assert ruled.tokens[:2].tolist() == plain.tokens[:2].tolist()
    assert ruled.tokens[2] != best
    assert ruled.is_finite.all()
    assert ruled.top_tokens.tolist() == plain.top_tokens.tolist()
    assert ruled.logprobs[2] < plain.logprobs[2]
    assert ruled.logprobs[:2].tolist() == plain.logprobs[:2].tolist()


def test_draws_follow_the_changed_logits():
    """Chi-square of 20,000 draws with a bias and a token that may not come."""
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 1, 12).astype(np.float32))
    how = SamplingConfig(max_tokens=5, temperature=0.8, logit_bias={"4": 1.5}, min_tokens=2).to_sampling()
    rules = LogitRules(how, [], frozenset([EOS]), [], None)
    num = 20_000
    rows = SamplingRows.of([how] * num, rng.integers(0, 2**63, num).tolist())
    changes = StepRules([(row, rules) for row in range(num)], None, len(logits)).changes()
    tokens = sample(logits.repeat(num, 1), rows, np.zeros(num, dtype=np.int64), changes=changes).tokens
    expected = logits.double()
    expected[4] += 1.5
    expected[EOS] = -torch.inf
    shares = (expected / 0.8).softmax(0).numpy()
    counts = np.bincount(tokens, minlength=12)
    assert counts[EOS] == 0
    others = shares > 0
    chi_square = ((counts[others] - num * shares[others]) ** 2 / (num * shares[others])).sum()
    assert chi_square < 29.6  # 10 degrees of freedom, 0.1 %


def test_rows_of_a_step_are_changed_together_as_each_alone():
    """Rows with each kind of rule, and rows without rules between them; the vocabulary is no multiple of 32."""
    rng = np.random.default_rng(5)
    tokenizer = load_tokenizer(SAMPLE_MODEL)
    maker, vocab_size = RuleMaker(tokenizer, tokenizer.vocab_size - 11), tokenizer.vocab_size - 11
    kinds = (
        {"logit_bias": {"5": 3.5, "90": -2.0}},
        {"repetition_penalty": 1.3, "min_tokens": 30},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25, "bad_words": ["the"]},
        {"structured_outputs": {"regex": "[a-z]+ [0-9]+"}},
        {"structured_outputs": {"regex": "[a-z ]+"}, "min_tokens": 30, "logit_bias": {"70": 1.0}},
        {"min_tokens": 30, "stop_token_ids": [11, 64]},
        {"bad_words": ["xyzzy"]},  # which cannot come next
    )
    rows = []
    for number, kind in enumerate(kinds * 2):
        how = SamplingConfig(max_tokens=99, **kind).to_sampling()
        request = Request(RequestKey(0, number, 0), 0, rng.integers(20, vocab_size, 30).tolist(), how, number)
        rules = maker.make(request, None)
        for token in tokenizer.encode_piece("of the"[: number + 1]):
            rules.accept(token)
        rows.append((3 * number + 1, rules))
    logits = torch.from_numpy(rng.normal(0, 4, (3 * len(rows) + 2, vocab_size)).astype(np.float32))
    together = logits.clone()
    maker.begin(rows).changes().apply(together, apply_token_bitmask)
    alone = logits.clone()
    for row, rules in rows:
        mask = None if rules.grammar is None else maker.grammars.masks([rules.grammar])[0]
        apply_rules(rules, alone[row], mask)
    assert torch.equal(together, alone)
    untouched = sorted(set(range(len(logits))) - {row for row, _ in rows} | {row for row, _ in rows[6::7]})
    assert torch.equal(together[untouched], logits[untouched])
    assert not any(torch.equal(together[row], logits[row]) for row, _ in rows if row not in untouched)
    some = np.array([1, 2, 4, 10, 13, 19])  # rows of a part of the step
    part = logits[some].clone()
    maker.begin(rows).changes().of_rows(some, len(logits)).apply(part, apply_token_bitmask)
    assert torch.equal(part, alone[some])
