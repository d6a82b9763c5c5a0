"""Decode steps that find tokens without all logits: the same answers as from all logits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.fused import screened_head
from batchinfer.model.fused.screened_head import STEPS_BEFORE, TRIED_ROWS, ScreenedHead
from batchinfer.model.fused.stack import FusedDecode
from batchinfer.model.logit_changes import LogitChanges
from batchinfer.model.sampling import SamplingRows, sample
from batchinfer.model.schedules import PLAIN, Schedule
from batchinfer.model.step import StepHalves
from batchinfer.model.transformer import Transformer
from batchinfer.records import Request, RequestKey, sampling_key
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.screened import Screen
from support.one_rank import run_rank
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL

REASON = build.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ operations on this machine: {REASON}")

GREEDY = SamplingConfig(max_tokens=20, ignore_eos=True)
DRAWN = SamplingConfig(max_tokens=20, temperature=1.0, top_p=0.9)
SCORED = SamplingConfig(max_tokens=20, logprobs=2)
TOP_K = SamplingConfig(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9)
MIN_P = SamplingConfig(max_tokens=20, temperature=0.5, min_p=0.2)
PENALISED = SamplingConfig(max_tokens=20, repetition_penalty=1.3)
FORBIDDING = SamplingConfig(max_tokens=20, min_tokens=15, stop_token_ids=list(range(8, 250)))
STRUCTURED = SamplingConfig(max_tokens=20, structured_outputs={"regex": "[a-z]{3}( [a-z0-9]+)*"})
MIXED = (GREEDY, TOP_K, FORBIDDING, DRAWN, MIN_P, SCORED, STRUCTURED, PENALISED)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "fp8", "int4"])
def model(request):
    dtype = torch.float32 if request.param == "float32" else torch.bfloat16
    return Transformer.load(
        RANDOM_MODEL, dtype=dtype, eight_bit=request.param == "fp8", four_bit=request.param == "int4", backend="cpu"
    )


@pytest.fixture
def small(monkeypatch):
    """Screens heads of any size, from the first step on, next to any row; and on processors where it does not pay."""
    monkeypatch.setattr(screened_head, "LEAST_VALUES", 0)
    monkeypatch.setattr(screened_head, "STEPS_BEFORE", 0)
    monkeypatch.setattr(screened_head, "LEAST_BESIDE", 1)
    monkeypatch.setattr(screened_head, "can_screen", lambda head: True)


def rows_of(samplings):
    return SamplingRows.of([one.to_sampling() for one in samplings], list(range(len(samplings))))


def states_of(model, count):
    states = torch.randn(count, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return states.to(model.dtype)


def forbid(vocab_size, token_of_row):
    """The changes by which a token may not come in each of some rows."""
    allowed = np.full((len(token_of_row), -(-vocab_size // 32)), 2**32 - 1, dtype=np.uint32)
    for words, token in zip(allowed, token_of_row.values(), strict=True):
        words[token // 32] ^= np.uint32(1 << token % 32)
    return LogitChanges(masked_rows=np.array(list(token_of_row)), allowed=allowed)


def check_sampled(model, head, states, rows, changes=LogitChanges(), changed=()):  # noqa: B008  # frozen
    """Compare the sample of these states with that of their logits; return the screened rows."""
    positions = np.arange(len(states))
    screened = head.choose_rows(rows, changed)
    logits = model.ops.linear(states, model.weights.lm_head, float32_out=True)
    expected = sample(logits, rows, positions, model.logit_ops, changes)
    sampled = head.sample(states, screened, rows, positions, changes)
    assert sampled.is_finite.tolist() == expected.is_finite.tolist()
    assert sampled.tokens[expected.is_finite].tolist() == expected.tokens[expected.is_finite].tolist()
    wanted = rows.num_logprobs
    for row in np.flatnonzero((wanted >= 0) & expected.is_finite):
        assert sampled.logprobs[row] == expected.logprobs[row]
        assert sampled.top_tokens[row, : wanted[row]].tolist() == expected.top_tokens[row, : wanted[row]].tolist()
        assert sampled.top_logprobs[row, : wanted[row]].tolist() == expected.top_logprobs[row, : wanted[row]].tolist()
    return screened


def test_rows_of_every_kind_get_what_they_get_from_all_logits(model, small):
    head = ScreenedHead.of(model)
    assert check_sampled(model, head, states_of(model, 9), rows_of([GREEDY] * 9)).tolist() == list(range(9))
    states, rows = states_of(model, 24), rows_of(MIXED * 3)
    best = model.ops.argmax(model.ops.linear(states, model.weights.lm_head, float32_out=True))[0]
    changes = forbid(model.config.vocab_size, {row: int(best[row]) for row in (1, 3, 6, 7, 15)})
    screened = check_sampled(model, head, states, rows, changes, [7, 15, 23])
    others = (DRAWN, SCORED, PENALISED)
    assert screened.tolist() == [row for row in range(24) if MIXED[row % 8] not in others]
    # all rows screened, all with words that may not come
    changes = forbid(model.config.vocab_size, dict(enumerate(best.tolist())))
    for kind in (GREEDY, TOP_K, MIN_P):
        assert len(check_sampled(model, head, states, rows_of([kind] * 24), changes)) == 24


def test_rows_that_are_not_certain_get_all_logits(model, small):
    head, states = ScreenedHead.of(model), states_of(model, 6)
    states[2] = 0  # all words are alike
    states[4, 3] = float("nan")
    check_sampled(model, head, states, rows_of([GREEDY, GREEDY, GREEDY, SCORED, GREEDY, GREEDY]))
    check_sampled(model, head, states, rows_of([TOP_K, GREEDY, TOP_K, SCORED, MIN_P, TOP_K]))


def test_screening_begins_after_some_greedy_steps_and_only_where_it_pays(model, monkeypatch):
    assert ScreenedHead.of(model) is None, "the head is too small"
    monkeypatch.setattr(screened_head, "LEAST_VALUES", 0)
    monkeypatch.setattr(screened_head, "can_screen", lambda head: True)
    head, all_greedy = ScreenedHead.of(model), rows_of([GREEDY] * 15)
    for _ in range(STEPS_BEFORE):
        assert head.choose_rows(rows_of([DRAWN, SCORED]), []) is None
        assert head.choose_rows(all_greedy, []) is None
    assert head.choose_rows(all_greedy, []).tolist() == list(range(15))
    assert head.choose_rows(rows_of([GREEDY] * 15 + [DRAWN]), []) is None, "few rows beside one that needs all logits"
    assert head.choose_rows(rows_of([GREEDY] * 16 + [DRAWN]), []).tolist() == list(range(16))
    assert head.choose_rows(rows_of([GREEDY] * 16), [3]) is None
    assert head.choose_rows(rows_of([]), []) is None
    few = [{"top_k": 256}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5}]
    many = [{"top_k": 257}, {"top_p": 0.9}, {"min_p": 0.1, "top_p": 0.9}, {"top_k": 20, "logprobs": 0}]
    draws = rows_of([SamplingConfig(max_tokens=20, temperature=1.0, **keys) for keys in (few + many)])
    assert head.choose_rows(draws.take(np.arange(3)), []).tolist() == [0, 1, 2]
    for row in range(3, 7):
        assert head.choose_rows(draws.take(np.array([row])), []) is None


@pytest.mark.parametrize(("ended", "other"), [(GREEDY, TOP_K), (TOP_K, GREEDY)])
def test_screening_ends_where_most_rows_are_not_certain(model, small, ended, other):
    """Greedy rows and drawn ones are judged apart."""
    head, rows, others = ScreenedHead.of(model), rows_of([ended] * 64), rows_of([other] * 64)
    states = torch.zeros_like(states_of(model, 64))
    for _ in range(TRIED_ROWS // 64):
        check_sampled(model, head, states, rows)
    assert head.choose_rows(rows, []) is None
    assert len(check_sampled(model, head, states_of(model, 64), others)) == 64
    for _ in range(TRIED_ROWS // 64 - 1):
        check_sampled(model, head, states, others)
    assert head.choose_rows(others, []) is None


def test_a_head_that_is_not_finite_is_not_screened(model, small, monkeypatch):
    monkeypatch.setattr(Screen, "of", lambda head: None)
    assert ScreenedHead.of(model).choose_rows(rows_of([GREEDY]), []) is None


def test_a_step_without_logits_gives_the_states_of_the_one_with_them(model):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(8, 300, (count,), generator=generator) for count in (3, 70, 9)]
    requests = PagedRequests(model, prompts, max_new_tokens=2)
    requests.prefill(range(3), (100,))
    for tokens in requests.tokens:
        tokens.append(20)
    step, fused = requests.decode_input(range(3)), FusedDecode.of(model)
    halves = StepHalves(requests.decode_input([0, 1]), requests.decode_input([2]))
    expected = model.forward(step, requests.pages)
    assert fused is not None
    for other, schedule in ((step, PLAIN), (step, Schedule(decode=fused)), (halves, PLAIN)):
        output = model.forward(other.without_logits, requests.pages, schedule)
        assert output.logits.shape == (0, model.config.vocab_size)
        assert torch.equal(output.states, expected.states)
    logits = model.ops.linear(expected.states, model.weights.lm_head, float32_out=True)
    assert torch.equal(logits, expected.logits)


def make_requests():
    rng = random.Random(0)
    requests = []
    for row in range(20):
        tokens = [rng.randrange(8, 300) for _ in range(rng.choice([1, 5, 70]))]
        sampling = MIXED[row % len(MIXED)].to_sampling()
        requests.append(Request(RequestKey(0, row, 0), 0, tokens, sampling, sampling_key(3, str(row), 0, 0)))
    return requests


def results(feed):
    return {key: (done.token_ids, done.finish_reason, done.logprobs, done.text) for key, done in feed.done.items()}


def test_answers_are_those_from_all_logits(model, small, monkeypatch):
    tokenizer, candidates, rows_screened = load_tokenizer(RANDOM_MODEL), Screen.candidates, []
    rows_masked, rows_drawn = [], []

    def counted(screen, x, temperature, top_k, top_p, min_p, allowed):
        rows_screened.append(len(x))
        rows_drawn.append(int((temperature > 0).sum()))
        rows_masked.append(0 if allowed is None else int((allowed != -1).any(1).sum()))
        return candidates(screen, x, temperature, top_k, top_p, min_p, allowed)

    monkeypatch.setattr(Screen, "candidates", counted)
    screened = results(run_rank(model, tokenizer, make_requests()))
    assert sum(rows_screened) > 100
    assert sum(rows_masked) > 40
    assert sum(rows_drawn) > 40
    num_calls = len(rows_screened)
    monkeypatch.setattr(ScreenedHead, "of", lambda model: None)
    assert screened == results(run_rank(model, tokenizer, make_requests()))
    assert len(rows_screened) == num_calls
