"""The engine on one rank: a row's tokens never depend on other rows, and every prefix is computed once."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.transformer import Transformer
from batchinfer.plan.prefix import plan_prefixes
from batchinfer.rank.sequence import pages_needed
from batchinfer.records import ConfigError, Request, RequestKey, sampling_key
from support.one_rank import run_rank as run
from support.paths import RANDOM_MODEL
from support.plain_rows import skip_unless_equal

GREEDY = SamplingConfig(max_tokens=12).to_sampling()
DRAWN = SamplingConfig(max_tokens=12, temperature=1.0, top_p=0.95, top_k=50, seed=3, logprobs=2).to_sampling()


@pytest.fixture(scope="module")
def model():
    return Transformer.load(RANDOM_MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(RANDOM_MODEL)


def make_requests(seed=0, count=24):
    """Prompts with long common starts that end inside pages, and a few short and long ones; greedy and drawn."""
    rng = random.Random(seed)
    systems = [[rng.randrange(8, 300) for _ in range(length)] for length in (150, 64, 7)]
    requests = []
    for row in range(count):
        system = systems[row % 3] if row % 8 else []
        tokens = system + [rng.randrange(8, 300) for _ in range(rng.choice([1, 5, 40, 130]))]
        sampling = DRAWN if row % 4 == 1 else GREEDY
        requests.append(Request(RequestKey(0, row, 0), 0, tokens, sampling, sampling_key(3, str(row), 0, 0)))
    return requests


def results(feed):
    return {key: (done.token_ids, done.finish_reason, done.logprobs, done.text) for key, done in feed.done.items()}


def in_prefix_order(requests):
    lengths = [len(request.token_ids) for request in requests]
    flat = np.concatenate([request.token_ids for request in requests])
    plan = plan_prefixes(flat, np.cumsum([0, *lengths]), block_tokens=PAGE_TOKENS)
    return [requests[index] for index in plan.order], plan


def computed_tokens(feed):
    return sum(record.new_tokens for record in feed.records if record.kind == "prefill")


@pytest.fixture(scope="module")
def alone(model, tokenizer):
    """Run each request alone, with no prefix to share: the oracle."""
    skip_unless_equal(model)
    expected = {}
    for request in make_requests():
        expected |= results(run(model, tokenizer, [request], share_prefixes=False))
    return expected


def test_packed_rows_equal_rows_run_alone_to_the_last_bit(model, tokenizer, alone):
    assert results(run(model, tokenizer, make_requests())) == alone


def test_the_order_does_not_matter(model, tokenizer, alone):
    for seed in range(3):
        requests = make_requests()
        random.Random(seed).shuffle(requests)
        assert results(run(model, tokenizer, requests)) == alone


@pytest.mark.parametrize("prefill_tokens", [1, 17, 64, 100, 301])
def test_where_prompts_are_cut_does_not_matter(model, tokenizer, alone, prefill_tokens):
    requests = make_requests()
    if prefill_tokens == 1:
        requests = requests[:8]
    feed = run(model, tokenizer, requests, prefill_tokens=prefill_tokens)
    assert results(feed) == {request.key: alone[request.key] for request in requests}
    assert max(record.new_tokens for record in feed.records if record.kind == "prefill") <= prefill_tokens


def most_at_once(feed):
    """The most requests that a decode step had."""
    return max(record.num_requests for record in feed.records if record.kind == "decode")


@pytest.mark.parametrize("decode_requests", [1, 3])
def test_a_request_whose_prompt_was_cut_has_its_place_among_those_that_decode(model, tokenizer, alone, decode_requests):
    feed = run(model, tokenizer, make_requests(), decode_requests=decode_requests, prefill_tokens=30)
    assert most_at_once(feed) == decode_requests
    assert results(feed) == alone


@pytest.mark.parametrize("spare_pages", [0, 1, 5])
def test_a_small_page_budget_makes_requests_wait_and_changes_nothing(model, tokenizer, alone, spare_pages):
    requests = make_requests()
    smallest = max(pages_needed(request) for request in requests)
    feed = run(model, tokenizer, requests, num_pages=smallest + spare_pages)
    assert results(feed) == alone
    assert max(record.pages_used for record in feed.records) <= smallest + spare_pages
    assert most_at_once(feed) < most_at_once(run(model, tokenizer, make_requests()))


def test_sharing_prefixes_changes_nothing(model, tokenizer, alone):
    feed = run(model, tokenizer, make_requests(), share_prefixes=False)
    assert results(feed) == alone
    assert computed_tokens(feed) == sum(len(request.token_ids) for request in make_requests())


@pytest.mark.parametrize(
    ("decode_requests", "prefill_tokens"),
    [(1, 50), (3, 50), (64, 50), pytest.param(1, 2048, marks=pytest.mark.slow), (3, 2048), (64, 2048)],
)
def test_in_the_plans_order_every_distinct_token_is_computed_once(model, tokenizer, decode_requests, prefill_tokens):
    requests, plan = in_prefix_order(make_requests(count=40))
    feed = run(model, tokenizer, requests, decode_requests=decode_requests, prefill_tokens=prefill_tokens)
    repeats = sum(plan.shared_tokens - plan.cached_tokens)  # last tokens of repeated prompts run again
    assert computed_tokens(feed) == plan.distinct_tokens + repeats


def test_a_tight_budget_still_computes_each_prefix_once_in_the_plans_order(model, tokenizer):
    requests, plan = in_prefix_order(make_requests(count=40))
    tight = max(pages_needed(request) for request in requests) + 2
    feed = run(model, tokenizer, requests, num_pages=tight)
    assert computed_tokens(feed) <= 1.01 * plan.distinct_tokens


def test_equal_prompts_with_other_draws_share_all_but_the_last_token(model, tokenizer):
    prompt = make_requests()[1].token_ids
    requests = [
        Request(RequestKey(0, 0, sample), 0, prompt, DRAWN, sampling_key(3, "a", 0, sample)) for sample in range(6)
    ]
    feed = run(model, tokenizer, requests)
    assert computed_tokens(feed) == len(prompt) + 5
    assert len({tuple(done.token_ids) for done in feed.done.values()}) > 1


def test_a_request_that_can_never_fit_stops_the_run_with_a_remedy(model, tokenizer):
    with pytest.raises(ConfigError, match=r"raise cluster\.page_bytes"):
        run(model, tokenizer, make_requests(), num_pages=2)


def test_finish_reasons(model, tokenizer):
    prompt = make_requests()[1].token_ids
    free = run(model, tokenizer, [Request(RequestKey(0, 0, 0), 0, prompt, GREEDY, 0)]).done[RequestKey(0, 0, 0)]
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    stop_token = free.token_ids[4]
    first = free.token_ids.index(stop_token)

    def finish(**changes):
        request = Request(RequestKey(0, 0, 0), 0, prompt, replace(GREEDY, **changes), 0)
        return run(model, tokenizer, [request]).done[RequestKey(0, 0, 0)]

    by_token = finish(stop_token_ids=(stop_token,))
    assert (by_token.finish_reason, by_token.stop_reason) == ("stop", str(stop_token))
    assert by_token.token_ids == free.token_ids[: first + 1]  # the stop token is among the tokens, not in the text
    assert by_token.text == tokenizer.decode(free.token_ids[:first])

    piece = free.text[3:6]
    by_string = finish(stop=(piece, "never in the text"))
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", piece)
    assert by_string.text == free.text[: free.text.index(piece)]
    assert finish(max_tokens=1).token_ids == free.token_ids[:1]


def test_the_models_end_token_ends_a_request_unless_ignored(model, tokenizer, monkeypatch):
    prompt = make_requests()[1].token_ids
    request = Request(RequestKey(0, 0, 0), 0, prompt, GREEDY, 0)
    free = run(model, tokenizer, [request]).done[request.key]
    monkeypatch.setattr(tokenizer, "eos_token_ids", frozenset([free.token_ids[2]]))
    first = free.token_ids.index(free.token_ids[2])
    ended = run(model, tokenizer, [request]).done[request.key]
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert ended.stop_reason is None
    ignoring = replace(request, sampling=replace(GREEDY, ignore_eos=True))
    assert run(model, tokenizer, [ignoring]).done[request.key].token_ids == free.token_ids


def test_kv_tokens_sum_counts_what_each_new_token_attended_to(model, tokenizer):
    request = Request(RequestKey(0, 0, 0), 0, [9, 10, 11, 12, 13], replace(GREEDY, max_tokens=3), 0)
    feed = run(model, tokenizer, [request])
    assert feed.done[request.key].kv_tokens_sum == 5 + 6 + 7
    assert sum(record.kv_tokens for record in feed.records) == 5 + 6 + 7


def test_two_threads_give_rows_that_do_not_depend_on_the_batch_either(model, tokenizer):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        skip_unless_equal(model)
        requests = make_requests(count=9)
        expected = {}
        for request in requests:
            expected |= results(run(model, tokenizer, [request], share_prefixes=False))
        assert results(run(model, tokenizer, requests)) == expected
    finally:
        torch.set_num_threads(before)
