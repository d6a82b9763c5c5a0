"""Sweeps of one rank: completions of streamed weights are those of resident ones, for answers and for prompts alone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from batchinfer.config import SamplingConfig
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.config import load_model_config
from batchinfer.model.convert import convert_model
from batchinfer.model.memory_split import MemorySplit, split_memory
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.transformer import Transformer
from batchinfer.protocol.feed import Inbox
from batchinfer.rank.drafter import Drafter
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.rank.sweep import PromptPace
from batchinfer.records import Request, RequestKey
from support.checkpoints import make_checkpoint
from support.drafted import Always, InTurn
from support.one_rank import Feed, run_rank, whole_prompts
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

pytestmark = pytest.mark.usefixtures("cpp")

SMALL = {"prefill_tokens": 20, "decode_requests": 3}  # most of a sweep: 320 prompt tokens, 48 rows
ANSWERS = SamplingConfig(max_tokens=9, temperature=0.9, ignore_eos=True, logprobs=2).to_sampling()
FIRST_TOKENS = replace(ANSWERS, max_tokens=1)
SCORES = replace(ANSWERS, max_tokens=0, logprobs=None, prompt_logprobs=2)


@pytest.fixture(scope="module", params=first_in_make_test(["bfloat16", "int4", "float32", "fp8"]))
def models(request, tmp_path_factory):
    """The same model with resident and with streamed weights."""
    resident, streamed = both(RANDOM_MODEL, tmp_path_factory.mktemp("sweep") / "model", request.param)
    yield resident, streamed
    streamed.stream.close()


def both(source, folder, dtype):
    """Convert a model; return it with resident weights, and with weights that are read into two or three slots."""
    bits = BITS.get(dtype, {})
    ops = Ops.select("cpu", DTYPES[dtype], **bits)
    convert_model(source, folder, ops, dtype=DTYPES[dtype], name=dtype, on_read=lambda done, total: None)
    packed, num_layers = read_packed(folder), load_model_config(folder).num_hidden_layers
    sizes = [packed.layer_bytes(layer) for layer in range(num_layers)]
    memory = split_memory(sizes, memory_bytes=1 << 30, fixed_bytes=0, least_kv_bytes=0, useful_kv_bytes=None)
    how = bits | {"dtype": DTYPES[dtype], "mtp": packed.has_mtp}
    return tuple(Transformer.load(folder, memory=split, **how) for split in (None, memory))


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(RANDOM_MODEL)


def requests_with(sampling, count=40):
    """Prompts that begin alike and branch inside pages, some longer than a step."""
    rng = random.Random(4)
    starts = [[rng.randrange(8, 300) for _ in range(length)] for length in (150, 64, 7)]
    made = []
    for row in range(count):
        tokens = starts[row * 3 // count] + [rng.randrange(8, 300) for _ in range(1 + row % 5)]
        score_from = 1 if sampling is SCORES else 0
        made.append(Request(RequestKey(0, row, 0), 0, tokens, sampling, row, score_from=score_from))
    return made


def found_in(feed):
    done = [feed.done[key] for key in sorted(feed.done, key=lambda key: key.row)]
    return [(one.text, one.token_ids, one.finish_reason, one.error, one.logprobs, one.prompt_logprobs) for one in done]


@pytest.mark.parametrize("num_pages", [400, 12])
@pytest.mark.parametrize("sampling", [ANSWERS, FIRST_TOKENS, SCORES], ids=["answers", "first tokens", "scores"])
def test_completions_are_those_of_resident_weights(models, tokenizer, sampling, num_pages):
    resident, streamed = models
    requests = requests_with(sampling)
    expected = found_in(run_rank(resident, tokenizer, requests))
    feed = run_rank(streamed, tokenizer, requests, num_pages=num_pages, **SMALL)
    assert found_in(feed) == expected
    sweeps = sum(record.streamed_bytes > 0 for record in feed.records)
    assert 1 < sweeps < len(feed.records)
    if sampling is ANSWERS:
        spread = run_rank(streamed, tokenizer, requests, num_pages=num_pages, spreads_prompts=True, **SMALL)
        assert found_in(spread) == expected
    else:
        alone = run_rank(streamed, tokenizer, requests, num_pages=num_pages, prompts_alone=True, **SMALL)
        assert found_in(alone) == expected
        assert sum(record.new_tokens for record in alone.records) >= sum(record.new_tokens for record in feed.records)


@pytest.mark.parametrize("decode_requests", [64, 12])
@pytest.mark.parametrize("make_rule", [lambda: Always(2), InTurn], ids=["always", "in turn"])
def test_drafted_tokens_are_those_of_resident_weights(models, tokenizer, make_rule, decode_requests):
    """Tokens are drafted once one step has all that run: with 12 rows a step, for the last requests."""
    resident, streamed = models
    sampling = SamplingConfig(max_tokens=30, ignore_eos=True, logprobs=1).to_sampling()
    drawn = SamplingConfig(max_tokens=25, temperature=0.7, stop=["e "], presence_penalty=0.3).to_sampling()
    requests = [replace(one, sampling=drawn if one.key.row % 3 else sampling) for one in requests_with(sampling, 20)]
    expected = found_in(run_rank(resident, tokenizer, requests))

    def drafter(context):
        return Drafter.of(context, make_rule())

    sizes = {"prefill_tokens": 40, "decode_requests": decode_requests}
    plain = run_rank(streamed, tokenizer, requests, **sizes)
    drafted = run_rank(streamed, tokenizer, requests, make_drafter=drafter, **sizes)
    assert found_in(plain) == found_in(drafted) == expected
    assert sum(record.drafted_tokens for record in drafted.records) > 0
    assert sum(record.drafted_tokens for record in plain.records) == 0
    assert sum(record.output_tokens for record in drafted.records) == sum(len(one[1]) for one in expected)


@pytest.mark.all
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-windows", "minimax-m2", "glm-dsa-shared", "v2-groups"])
def test_models_of_other_families_sweep_to_the_same_completions(tmp_path, tokenizer, name):
    make_checkpoint(tmp_path / "plain", name)
    resident, streamed = both(tmp_path / "plain", tmp_path / "packed", "bfloat16")
    requests = [
        replace(request, token_ids=[token % 90 for token in request.token_ids]) for request in requests_with(ANSWERS)
    ]
    expected = found_in(run_rank(resident, tokenizer, requests))
    found = found_in(run_rank(streamed, tokenizer, requests, num_pages=40, **SMALL))
    streamed.stream.close()
    assert found == expected
    assert len({text for text, *_ in found}) > 1


def test_pages_of_prompts_alone_are_those_of_one_layer(models):
    pages = models[1].new_pages(5, one_layer=True)
    assert pages.shape[:2] == (4, 5)
    assert pages.stride(0) == 0


def test_a_sweep_that_is_left_delivers_nothing(models, tokenizer):
    class Leaving(Feed):
        """A feed whose job ends in the middle of the third sweep."""

        num_asked = 0

        def goes_on(self):
            self.num_asked += 1
            return self.num_asked < 10

        def receive(self, wait_s=0.0):
            handed, self.requests = self.requests, []
            return Inbox(requests=handed, pieces=whole_prompts(handed), leave=self.num_asked >= 10)

    requests = requests_with(ANSWERS, count=4)
    feed = Leaving(requests)
    with pytest.raises(AssertionError):  # not all are done
        run_rank(models[1], tokenizer, requests, feed=feed)
    assert feed.num_asked == 10
    assert not feed.done
    assert sum(record.output_tokens for record in feed.records) == 2 * 4
    assert found_in(run_rank(models[1], tokenizer, requests)) == found_in(run_rank(models[0], tokenizer, requests))


def test_a_sweep_takes_as_many_prompt_steps_as_its_reads_leave_time_for():
    split = MemorySplit((0, 1, 2, 0), (4, 4, 4), 0, sweep_bytes=1000)
    stream = SimpleNamespace(split=split, sweep_read_s=0.0)
    pace = PromptPace(stream, step_tokens=100)
    assert pace.num_steps == 1  # nothing is measured
    stream.sweep_read_s = 10.0
    for num_tokens, seconds in ((100, 2.0), (50, 1.0)):
        pace.note(num_tokens, seconds)
    assert pace.num_steps == 5
    pace.note(150, 97.0)
    assert pace.num_steps == 1
