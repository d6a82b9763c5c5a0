"""The table of running sequences gives each sequence the tokens that it would have accepted one by one."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from batchinfer.config import PAGE_TOKENS
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.sampling import Sampled
from batchinfer.rank.batch import take_token
from batchinfer.rank.decode_table import HELD_STEPS, DecodeTable
from batchinfer.rank.sequence import Sequence, pages_needed
from batchinfer.records import Request, RequestKey, RequestTimes, Sampling
from support.paths import RANDOM_MODEL

TOKENIZER = load_tokenizer(Path(RANDOM_MODEL))
VOCABULARY = 300
EOS = frozenset([7, 8])


def sequence(row: int, rng: np.random.Generator, **sampling) -> Sequence:
    """A sequence whose prompt has run: it has one generated token."""
    values = {"max_tokens": 40, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "n": 1, "seed": 0}
    values |= {"stop": (), "stop_token_ids": (), "ignore_eos": False, "logprobs": None} | sampling
    prompt = rng.integers(10, VOCABULARY, rng.integers(1, 2 * PAGE_TOKENS)).tolist()
    request = Request(RequestKey(0, row, 0), 0, prompt, Sampling(**values), sampling_key=row)
    made = Sequence(
        request=request,
        pages=rng.permutation(1000)[: pages_needed(request)].tolist(),
        num_computed=len(prompt),
        times=RequestTimes(),
        stream=TOKENIZER.stream() if values["stop"] else None,
    )
    first = np.array([10 + row])
    take_token(
        made, Sampled(first, first > 0, -first / 3, first[:, None] + range(3), -first[:, None] / range(1, 4)), 0, EOS
    )
    return made


def any_sequence(row: int, rng: np.random.Generator) -> Sequence:
    kind = rng.integers(7)
    return sequence(
        row,
        rng,
        max_tokens=int(rng.integers(2, 3 * HELD_STEPS)),
        ignore_eos=kind == 1,
        stop_token_ids=(int(rng.integers(VOCABULARY)),) if kind == 2 else (),
        stop=("e", "no such text") if kind in (3, 4) else (),
        logprobs=int(rng.integers(4)) if kind in (4, 5) else None,
    )


def step_of(table: DecodeTable, rng: np.random.Generator) -> Sampled:
    count = len(table.sequences)
    wanted = [one.request.sampling.logprobs for one in table.sequences]
    most = max((number for number in wanted if number is not None), default=-1)
    tokens, is_finite = rng.integers(0, VOCABULARY, count), rng.random(count) > 0.001
    if most < 0:
        return Sampled(tokens, is_finite)
    top_tokens = rng.integers(0, VOCABULARY, (count, most))
    return Sampled(tokens, is_finite, -rng.random(count), top_tokens, -rng.random((count, most)))


def state_of(one: Sequence) -> tuple:
    return one.token_ids, one.finish_reason, one.stop_reason, one.ended_by_token, one.error, one.logprobs


@pytest.mark.parametrize("seed", range(20))
def test_sequences_leave_as_if_each_had_seen_all_its_tokens(seed):
    rng = np.random.default_rng(seed)
    table, plain, num_made, num_left = DecodeTable(EOS), {}, 0, 0
    for step in range(3 * HELD_STEPS):
        if step % 10 == 0:
            new = [any_sequence(num_made + place, rng) for place in range(rng.integers(4))]
            num_made += len(new)
            new = [one for one in new if one.finish_reason is None]
            plain |= {one.request.key: copy.deepcopy(one) for one in new}
            table.add(new)
        if step % 23 == 0 and table.sequences:
            (gone,) = table.remove({table.sequences[rng.integers(len(table.sequences))].request.key})
            assert state_of(gone) == state_of(plain.pop(gone.request.key))
        if step % 7 == 0:
            table.next_halves()
        sampled = step_of(table, rng)
        for row, one in enumerate(table.sequences):
            take_token(plain[one.request.key], sampled, row, EOS)
        left = table.accept(sampled)
        assert {one.request.key for one in left} == {key for key, one in plain.items() if one.finish_reason}
        for one in left:
            assert state_of(one) == state_of(plain.pop(one.request.key))
            if one.logprobs is not None and one.error is None:
                assert np.frombuffer(one.logprobs.token_ids, np.int32).tolist() == one.token_ids
        num_left += len(left)
        assert {one.request.key for one in table.sequences} == set(plain)
        assert sorted(table.kv_lengths) == sorted(one.kv_tokens for one in plain.values())
    assert num_left > 0


def test_a_step_runs_the_last_token_of_each_sequence_at_the_end_of_its_pages():
    rng = np.random.default_rng(0)
    table, new = DecodeTable(EOS), [sequence(row, rng, ignore_eos=True) for row in range(5)]
    table.add(new[:3])
    table.accept(Sampled(np.array([50, 51, 52]), np.ones(3, dtype=bool)))
    table.add(new[3:])
    step = table.next_step()
    assert step.tokens.tolist() == [50, 51, 52, 13, 14]
    for row, one in enumerate(new):
        # the prompt, and of three sequences one generated token, lie in the pages already
        position = one.num_prompt_tokens + (row < 3)
        assert step.positions[row] == position
        assert step.kv_tokens[row] == position + 1
        page = one.pages[position // PAGE_TOKENS]
        assert step.slots[row] == page * PAGE_TOKENS + position % PAGE_TOKENS
        num_pages = position // PAGE_TOKENS + 1
        assert step.page_table[row, :num_pages].tolist() == one.pages[:num_pages]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
def test_halves_are_equal_in_number_and_nearly_equal_in_kv_tokens(count):
    rng = np.random.default_rng(count)
    table = DecodeTable(EOS)
    table.add([sequence(row, rng) for row in range(count)])
    halves = table.next_halves()
    sizes = [half.kv_tokens.tolist() for half in (halves.first, halves.second)]
    assert abs(len(sizes[0]) - len(sizes[1])) <= 1
    if count:
        assert abs(sum(sizes[0]) - sum(sizes[1])) <= max(sizes[0] + sizes[1])
    tokens = [*halves.first.tokens.tolist(), *halves.second.tokens.tolist()]
    assert tokens == table.next_step().tokens.tolist() == [one.token_ids[-1] for one in table.sequences]
    assert sizes[0] + sizes[1] == [one.kv_tokens for one in table.sequences]
    assert all(map(is_by_turns, sizes))


def is_by_turns(lengths):
    """Whether long and short ones are: the longest, the shortest, the second longest and so on."""
    longest_first, middle = sorted(lengths, reverse=True), (len(lengths) + 1) // 2
    return (lengths[::2], lengths[1::2]) == (longest_first[:middle], longest_first[middle:][::-1])


def test_arranged_sequences_are_by_turns_with_all_that_is_theirs_until_one_comes_or_goes():
    rng = np.random.default_rng(0)
    table = DecodeTable(EOS)
    new = [sequence(row, rng) for row in range(9)]
    table.add(new[:7])
    table.arrange()
    step = table.next_step()
    assert is_by_turns(step.kv_tokens.tolist())
    assert step.tokens.tolist() == [one.token_ids[-1] for one in table.sequences]
    assert step.kv_tokens.tolist() == [one.kv_tokens for one in table.sequences]
    table.accept(Sampled(np.arange(50, 57), np.ones(7, dtype=bool)))
    table.arrange()  # no sequence has joined or left
    assert table.next_step().tokens.tolist() == list(range(50, 57))
    table.add(new[7:])
    table.arrange()
    assert is_by_turns(table.next_step().kv_tokens.tolist())
    halves = table.next_halves()
    assert is_by_turns(halves.first.kv_tokens.tolist())
    table.arrange()
    assert is_by_turns(table.next_step().kv_tokens.tolist())
