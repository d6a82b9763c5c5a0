"""The model against transformers' own, its two attention forms against each other, and each row against its company."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchinfer.model.moe import YieldPoint
from batchinfer.model.step import PrefillSpan, StepInput, StepTensors
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.overlap import run_to_end
from batchinfer.parallel.spans import MicroBatchSpans, SpanLog
from batchinfer.records import ModelError
from support.checkpoints import MODELS, make_checkpoint
from support.paged_steps import PagedRequests
from support.plain_rows import skip_unless_equal

# of a logit: the largest difference in float32, the median in bfloat16; logits have a deviation near 1 (7 in
# v3-odd-sizes)
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
PROMPT_LENGTHS = (5, 64, 1, 131, 30, 65)
INVARIANT_MODELS = (
    "v3",
    "v3-groups",
    "v3-yarn",
    "v3-odd-sizes",
    "v3-wide",
    "v2-groups",
    "v32",
    "glm-dsa-shared",
    "mistral4",
    "qwen3-windows",
    "qwen3-moe-normed",
    "llama-biased",
    "mistral-windows",
    "smollm3",
    "qwen2-moe",
    "granite",
    "olmo2",
    "exaone4",
    "glm4",
    "minimax-m2",
    "gpt-oss",
)


def random_prompts(lengths=PROMPT_LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folder -> (transformers' model, ours), made when first asked for."""
    made = {}

    def get(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            theirs = make_checkpoint(folder, name)
            made[name] = theirs, Transformer.load(folder, dtype=torch.float32), folder
        return made[name]

    return get


@pytest.mark.parametrize("chunks", [(1000,), (50, 7, 64)], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_64_greedy_tokens_equal_those_of_transformers(models, name, chunks):
    theirs, ours, _ = models(name)
    prompts = random_prompts()
    requests = PagedRequests(ours, prompts, max_new_tokens=64, seed=3)
    requests.prefill(range(len(prompts)), chunks)
    requests.decode_greedily(range(len(prompts)), 64)
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = theirs(torch.tensor([requests.tokens[i]])).logits[0]
        difference = (requests.all_logits(i) - expected).abs().max()
        assert difference < TOLERANCE["float32"], f"request {i}: {difference}"
        # each generated token is transformers' best after the same tokens, so its own greedy run gives the same
        assert requests.tokens[i][len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", INVARIANT_MODELS)
def test_a_row_does_not_depend_on_its_batch_on_chunks_or_on_leftovers_in_pages(models, name):
    _, ours, _ = models(name)
    skip_unless_equal(ours)
    prompts = random_prompts((1, 7, 64, 65, 130, 33, 2, 11, 9))
    alone = []
    for prompt in prompts:
        requests = PagedRequests(ours, [prompt], max_new_tokens=12)
        requests.prefill([0], [1000])
        requests.decode_greedily([0], 12)
        alone.append(requests.all_logits(0))
    for seed, (order, chunks) in enumerate(
        [
            (range(9), (1000,)),
            (range(8, -1, -1), (13, 1, 64, 100, 7)),
            ((3, 1, 0, 2, 8, 7, 6, 5, 4), (64,)),
        ]
    ):
        together = PagedRequests(ours, prompts, max_new_tokens=12, seed=seed, garbage=10.0 ** (10 * seed))
        together.prefill(order, chunks)
        together.decode_greedily(order, 12)
        for i in range(len(prompts)):
            assert torch.equal(together.all_logits(i), alone[i]), f"request {i}, order {list(order)}, chunks {chunks}"


@pytest.mark.parametrize("name", ["v3", "v32", "qwen3-windows"])
def test_leftovers_that_are_not_finite_change_nothing(models, name):
    _, ours, _ = models(name)
    results = []
    for leftover in (0.0, float("inf"), float("nan")):
        requests = PagedRequests(ours, random_prompts(), max_new_tokens=3)
        requests.pages.fill_(leftover)
        requests.prefill(range(6), (40,))
        requests.decode_greedily(range(6), 3)
        results.append(torch.cat([requests.all_logits(i) for i in range(6)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", MODELS)
def test_plain_and_absorbed_attention_agree(models, name):
    _, ours, _ = models(name)
    prompts = random_prompts((70, 3, 129))
    logits = []
    for absorbed in (False, True):
        requests = PagedRequests(ours, prompts, max_new_tokens=5)
        requests.prefill(range(3), (1000,))
        for tokens in requests.tokens:
            tokens += [11, 12, 13, 14, 15]
        for _ in range(5):
            if absorbed:
                requests.decode_step(range(3))
            else:
                requests.prefill_step(range(3), dict.fromkeys(range(3), 1))
        logits.append(torch.cat([requests.all_logits(i)[-5:] for i in range(3)]))
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE["float32"]


@pytest.mark.parametrize("name", ["v3", "v3-odd-sizes", "v32", "glm-dsa-shared", "qwen3-windows"])
def test_several_tokens_per_request_in_a_decode_step_equal_one_at_a_time(models, name):
    _, ours, _ = models(name)
    skip_unless_equal(ours)
    logits = []
    for num_queries in (1, 2, 3, 6):
        requests = PagedRequests(ours, random_prompts((61, 4)), max_new_tokens=6)
        requests.prefill(range(2), (1000,))
        for tokens in requests.tokens:
            tokens += [21, 22, 23, 24, 25, 26]
        for _ in range(6 // num_queries):
            requests.decode_step(range(2), num_queries)
        logits.append(torch.cat([requests.all_logits(i) for i in range(2)]))
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_only_the_rows_asked_for_get_logits_and_the_last_layer_finishes_no_others(models):
    _, ours, _ = models("v3-groups")
    tokens = torch.arange(10)
    page_ids = torch.tensor([1])
    step = StepInput(tokens, tokens, 64 + tokens, torch.tensor([9, 4]), prefill=(PrefillSpan(0, 10, 10, page_ids),))
    output = ours.forward(step, ours.new_pages(2))
    nothing = StepInput(tokens, tokens, 64 + tokens, torch.tensor([], dtype=torch.int64), prefill=step.prefill)
    assert output.logits.shape == (2, 96)
    assert output.logits.dtype == torch.float32
    assert output.expert_counts.shape == (ours.num_moe_layers, 16)
    assert output.expert_counts.sum(1).tolist() == [10 * 4, 2 * 4]
    without = ours.forward(nothing, ours.new_pages(2))
    assert without.logits.shape == (0, 96)
    assert without.expert_counts.sum(1).tolist() == [10 * 4, 0]


def test_rows_whose_logits_nobody_wants_leave_the_same_latents(models):
    _, ours, _ = models("v3-groups")
    tokens, page_ids = torch.arange(70), torch.tensor([1, 2])
    prefill = (PrefillSpan(0, 70, 70, page_ids),)
    some, all_pages = ours.new_pages(3), ours.new_pages(3)
    all_rows = ours.forward(StepInput(tokens, tokens, 64 + tokens, tokens, prefill=prefill), all_pages)
    wanted = torch.tensor([69, 3, 64])
    output = ours.forward(StepInput(tokens, tokens, 64 + tokens, wanted, prefill=prefill), some)
    assert torch.equal(some, all_pages)
    assert torch.equal(output.logits, all_rows.logits[wanted])


def test_a_decode_step_without_requests_is_allowed(models):
    _, ours, _ = models("v3")
    requests = PagedRequests(ours, random_prompts((4,)), max_new_tokens=1)
    output = requests.decode_step([])
    assert output.logits.shape == (0, 96)
    assert output.expert_counts.sum() == 0


def test_a_layer_yields_after_each_exchange_and_two_steps_can_take_turns(models):
    folder = models("v3")[2]  # one dense layer, then two with experts
    ours = Transformer.load(folder, dtype=torch.float32, backend="reference")  # in C++ a layer here is a single call

    def step(start):
        tokens = torch.arange(start, start + 20)
        span = PrefillSpan(0, 20, 20, torch.tensor([start]))
        return StepInput(tokens, torch.arange(20), start * 64 + torch.arange(20), torch.arange(20), prefill=(span,))

    pages = ours.new_pages(4)
    plain = [ours.forward(step(start), pages).logits for start in (1, 2)]
    pages = ours.new_pages(4)
    spans = MicroBatchSpans(SpanLog())
    running = {start: ours.points(StepTensors.of(step(start), ours.device), pages, spans) for start in (1, 2)}
    seen, results = {1: [], 2: []}, {}
    while running:
        for start, points in list(running.items()):
            try:
                seen[start].append(next(points))
            except StopIteration as end:
                results[start] = end.value.logits
                del running[start]
    assert seen[1] == seen[2] == [YieldPoint.DISPATCH, YieldPoint.COMBINE] * 2
    assert torch.equal(results[1], plain[0])
    assert torch.equal(results[2], plain[1])


class TwoStreams:
    """A residual of two streams of which sublayers see the sum: what they give goes to one or the other in turn."""

    def open(self, embedded_TD):
        return embedded_TD, torch.zeros_like(embedded_TD)

    def enter(self, state):
        return state[0] + state[1], state

    def take(self, ops, past, rows_S):
        return past[0][rows_S], past[1][rows_S]

    def base(self, past):
        return past[1]

    def leave(self, past, sum_TD):
        return sum_TD, past[0]

    def close(self, state):
        return state[0] + state[1]


@pytest.mark.parametrize("name", ["v3", "qwen3"])
def test_a_residual_of_another_kind_goes_around_every_sublayer(tmp_path, name):
    make_checkpoint(tmp_path, name)
    logits = []
    for residual in (None, TwoStreams()):
        model = Transformer.load(tmp_path, dtype=torch.float32)
        if residual is not None:
            model.residual = residual
            model.layers = tuple(replace(layer, residuals=(residual, residual)) for layer in model.layers)
        requests = PagedRequests(model, random_prompts((70, 3)), max_new_tokens=5)
        requests.prefill(range(2), (40,))
        requests.decode_greedily(range(2), 5)
        logits.append(torch.cat([requests.all_logits(i) for i in range(2)]))
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE["float32"]


def test_run_to_end_returns_what_the_generator_returns():
    def points():
        yield YieldPoint.DISPATCH
        return 7

    assert run_to_end(points()) == 7


@pytest.mark.parametrize("name", ["v3", "v3-wide", "v2-greedy"])
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(models, name):
    theirs, _, folder = models(name)
    rounded = Transformer.load(folder, dtype=torch.bfloat16)
    prompts = random_prompts()
    requests = PagedRequests(rounded, prompts, max_new_tokens=2)
    assert requests.pages.dtype == torch.bfloat16
    requests.prefill(range(6), (50,))
    for tokens in requests.tokens:
        tokens += [1, 2]
    requests.decode_step(range(6), 2)
    theirs_rounded = copy.deepcopy(theirs).bfloat16()
    our_errors, their_errors = [], []
    for i in range(6):
        tokens = torch.tensor([requests.tokens[i]])
        with torch.no_grad():
            expected, also_rounded = theirs(tokens).logits[0], theirs_rounded(tokens).logits[0]
        our_errors.append((requests.all_logits(i) - expected).abs())
        their_errors.append((also_rounded.float() - expected).abs())
    # medians, because a token whose experts change by rounding is far off in both
    assert torch.cat(our_errors).median() < 1.1 * torch.cat(their_errors).median()
    assert torch.cat(our_errors).median() < TOLERANCE["bfloat16"]


def test_dense_layers_only(tmp_path: Path):
    theirs = make_checkpoint(tmp_path, "v3", first_k_dense_replace=3)
    ours = Transformer.load(tmp_path, dtype=torch.float32)
    requests = PagedRequests(ours, random_prompts((9,)), max_new_tokens=1)
    output = requests.prefill_step([0], {0: 9})
    with torch.no_grad():
        expected = theirs(torch.tensor([requests.tokens[0]])).logits[0]
    assert (output.logits - expected).abs().max() < TOLERANCE["float32"]
    assert output.expert_counts.shape == (0, 0)


def test_an_unknown_backend_is_refused_with_the_known_ones(models):
    _, _, folder = models("v3")
    with pytest.raises(ModelError, match=r"no implementation 'fast'; use one of auto, .*cpu, reference"):
        Transformer.load(folder, dtype=torch.float32, backend="fast")
