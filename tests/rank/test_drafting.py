"""Drafted tokens change no byte of any row, whatever is drafted and for any request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from batchinfer.config import SamplingConfig
from batchinfer.model.mtp import DraftInput
from batchinfer.model.transformer import Transformer
from batchinfer.rank import draft_states, drafter
from batchinfer.rank.context import RankContext
from batchinfer.rank.drafter import Drafter
from batchinfer.records import Request
from batchinfer_kernels.cpu.packed import Packed
from support.drafted import (
    PLAIN_WAYS,
    TOKENIZER,
    WAYS,
    Always,
    InTurn,
    counts,
    everything,
    sample_requests,
    step_by_step,
    with_mtp,
)
from support.one_rank import Feed, run_rank
from support.paths import RANDOM_MODEL, SAMPLE_MODEL
from support.plain_rows import skip_unless_equal
from support.tiers import first_in_make_test

DTYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "fp8": {"dtype": torch.bfloat16, "eight_bit": True},
}


# make test: one dtype in C++ and the reference
DRAFTED = ["float32", "reference", *(pytest.param(dtype, marks=pytest.mark.all) for dtype in ("bfloat16", "fp8"))]


@pytest.fixture(scope="module", params=DRAFTED)
def model(request) -> Transformer:
    made = (
        Transformer.load(SAMPLE_MODEL, dtype=torch.float32, backend="reference", mtp=True)
        if request.param == "reference"
        else Transformer.load(SAMPLE_MODEL, **DTYPES[request.param], mtp=True)
    )
    if request.param == "reference":
        skip_unless_equal(made)
    return made


@pytest.mark.parametrize("ways", [WAYS, PLAIN_WAYS], ids=["all ways", "ways of one call"])
@pytest.mark.parametrize(
    ("decode_requests", "num_guesses"),
    [(1, 1), (5, 3), (64, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 3), (5, 1), (64, 3)))],
)
def test_rows_are_the_same_with_drafts_and_without(model, num_guesses, decode_requests, ways):
    if ways is PLAIN_WAYS and not isinstance(model.weights.lm_head, Packed):
        pytest.skip("steps with guesses are not one call here")
    requests = sample_requests(ways=ways)
    plain = run_rank(model, TOKENIZER, requests, decode_requests=decode_requests)
    drafted = run_rank(
        *(model, TOKENIZER, requests),
        decode_requests=decode_requests,
        make_drafter=with_mtp(Always(num_guesses)),
    )
    assert everything(drafted) == everything(plain)
    assert counts(plain) == (0, 0)
    num_drafted, num_accepted = counts(drafted)
    assert num_drafted > num_accepted > 0
    assert sum(one.output_tokens for one in drafted.records) == sum(one.output_tokens for one in plain.records)
    assert sum(one.kv_tokens for one in drafted.records if one.kind == "decode") == sum(
        one.kv_tokens for one in plain.records if one.kind == "decode"
    )


def test_one_call_and_step_by_step_draft_alike():
    """The same guesses but for end tokens, behind which nothing is run."""
    model = Transformer.load(SAMPLE_MODEL, dtype=torch.bfloat16, mtp=True)
    requests = sample_requests(40, ways=PLAIN_WAYS[:3])
    found = [
        counts(run_rank(model, TOKENIZER, requests, decode_requests=4, make_drafter=how(Always(2))))
        for how in (with_mtp, step_by_step)
    ]
    in_one_call, by_steps = found
    assert in_one_call[0] < by_steps[0]
    assert in_one_call[1] > 0.9 * (by_steps[1] - len(requests))
    assert in_one_call[1] / in_one_call[0] > by_steps[1] / by_steps[0]


def test_a_call_runs_several_steps(model_in_one_call):
    requests = [
        replace(one, sampling=SamplingConfig(max_tokens=40, ignore_eos=True).to_sampling())
        for one in sample_requests(4)
    ]
    feed = run_rank(model_in_one_call, TOKENIZER, requests, make_drafter=with_mtp(Always(1)))
    assert max(record.output_tokens / record.num_requests for record in feed.records) > 2


@pytest.fixture
def model_in_one_call(monkeypatch) -> Transformer:
    """The rank is in no hurry to look at its messages."""
    monkeypatch.setattr(drafter, "_MICROSECONDS", 10**9)
    return Transformer.load(SAMPLE_MODEL, dtype=torch.float32, mtp=True)


def test_nine_of_ten_first_guesses_are_right_on_the_sample_model(model):
    requests = [replace(one, sampling=SamplingConfig(max_tokens=40).to_sampling()) for one in sample_requests(40)]
    feed = run_rank(model, TOKENIZER, requests, decode_requests=8, make_drafter=with_mtp(Always(1)))
    # what is drafted for a request's last token is never looked at
    num_drafted, num_accepted = counts(feed)
    assert num_accepted >= 0.95 * (num_drafted - len(requests))


@pytest.mark.parametrize("dtype", first_in_make_test(DTYPES))
def test_wrong_guesses_change_nothing(dtype):
    """A model of random weights guesses hardly anything right, so nearly all guessed rows are rolled back."""
    model = Transformer.load(RANDOM_MODEL, **DTYPES[dtype], mtp=True)
    plain = run_rank(model, TOKENIZER, sample_requests())
    drafted = run_rank(model, TOKENIZER, sample_requests(), make_drafter=with_mtp(InTurn()))
    assert everything(drafted) == everything(plain)
    num_drafted, num_accepted = counts(drafted)
    assert num_accepted < 0.2 * num_drafted


class Oracle:
    """Guesses what a request has got in an earlier run, each token with some chance."""

    def __init__(self, requests: list[Request], feed: Feed, chance: float) -> None:
        self._tokens = {one.sampling_key: feed.done[one.key].token_ids for one in requests}
        self._chance, self._rng = chance, np.random.default_rng(0)

    def __call__(self, model: Any, given: DraftInput, pages: torch.Tensor) -> torch.Tensor:
        assert int((given.places + 1).max()) <= 64 * given.page_table.shape[1]
        return torch.tensor(
            [
                [self._guess(key, place + guess) for key, place in zip(given.sampling.key, given.num_new, strict=True)]
                for guess in range(given.num_guesses)
            ]
        )

    def _guess(self, key: int, place: int) -> int:
        tokens = self._tokens[int(key)]
        return tokens[place] if place < len(tokens) and self._rng.random() < self._chance else 5


def test_a_right_guess_saves_a_step():
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32)
    requests = [replace(sample_requests(1)[0], sampling=SamplingConfig(max_tokens=25, ignore_eos=True).to_sampling())]
    plain = run_rank(model, TOKENIZER, requests)
    oracle = Oracle(requests, plain, 1.0)
    drafted = run_rank(model, TOKENIZER, requests, make_drafter=lambda context: Drafter(model, oracle, Always(3)))
    assert everything(drafted) == everything(plain)
    # 24 tokens after that of prefill: 1 + 3 in each step
    assert [one.output_tokens for one in drafted.records] == [1, 4, 4, 4, 4, 4, 4]
    assert [one.drafted_tokens for one in drafted.records] == [0, 3, 3, 3, 3, 3, 3]


@pytest.mark.all  # make test: wrong guesses, above
def test_long_answers_outlast_the_keys_of_the_layer(monkeypatch):
    monkeypatch.setattr(draft_states, "_PAGES", 1)
    model = Transformer.load(SAMPLE_MODEL, dtype=torch.float32, mtp=True)
    requests = sample_requests(4)
    requests = [replace(one, sampling=replace(one.sampling, max_tokens=150, ignore_eos=True)) for one in requests]
    plain = run_rank(model, TOKENIZER, requests)
    for rule in (Always(2), InTurn()):
        drafted = run_rank(model, TOKENIZER, requests, make_drafter=with_mtp(rule))
        assert everything(drafted) == everything(plain)


def test_rows_with_rules_are_not_drafted_for():
    model = Transformer.load(SAMPLE_MODEL, dtype=torch.float32, mtp=True)
    sampling = SamplingConfig(max_tokens=20, repetition_penalty=1.1).to_sampling()
    requests = [replace(one, sampling=sampling) for one in sample_requests(3)]
    feed = run_rank(model, TOKENIZER, requests, make_drafter=with_mtp(Always(2)))
    assert counts(feed) == (0, 0)


def test_prompts_leave_their_states_only_where_few_requests_run():
    """The first guesses need the prompt's states."""
    model = Transformer.load(SAMPLE_MODEL, dtype=torch.float32, mtp=True)
    rates = []
    for decode_requests in (8, 60):
        requests = [replace(one, sampling=SamplingConfig(max_tokens=40).to_sampling()) for one in sample_requests(60)]
        num_drafted, num_accepted = counts(
            run_rank(model, TOKENIZER, requests, decode_requests=decode_requests, make_drafter=with_mtp(Always(1)))
        )
        rates.append(num_accepted / num_drafted)
    assert rates[0] > rates[1] + 0.1


def test_a_model_without_the_layer_has_nothing_to_draft_with():
    model = Transformer.load(SAMPLE_MODEL, dtype=torch.float32)
    context = RankContext(model, TOKENIZER, num_pages=4, prefill_tokens=64, decode_requests=4)
    assert model.mtp is None
    with pytest.raises(AssertionError):
        _ = context.draft
