"""Two micro-batches in turn: the order of the published figures, and the same numbers as one after the other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.model.step import PrefillSpan, StepHalves, StepInput
from batchinfer.model.transformer import Transformer
from batchinfer.parallel.all_to_all import AllToAllDispatcher
from batchinfer.parallel.overlap import run_decode_pair, run_prefill_pair, run_to_end
from batchinfer.parallel.placement import Placement
from batchinfer.parallel.row_format import RowFormat
from batchinfer.parallel.spans import SpanLog
from batchinfer.records import COMPUTE, FLIGHT, RECEIVE, SEND
from support.checkpoints import make_checkpoint
from support.exchanges import ThreadedMesh

MODELS = ("v3", "v3-groups", "v2-groups")
NUM_PAGES = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model name -> folder of a random checkpoint, made when first asked for."""
    made = {}

    def get(name, **overrides):
        key = (name, *sorted(overrides.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            make_checkpoint(made[key], name, **overrides)
        return made[key]

    return get


class Requests:
    """Some prompts with pages in shuffled order, for one model."""

    def __init__(self, lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(0, 96, (length + 8,), generator=generator) for length in lengths]
        self.lengths = lengths
        num_pages = [-(-len(tokens) // PAGE_TOKENS) for tokens in self.tokens]
        self.page_ids = torch.randperm(NUM_PAGES, generator=generator)[: sum(num_pages)].split(num_pages)

    def prefill(self, *chunks):
        """A step of prompt chunks (request, first token, behind the last token)."""
        spans, start = [], 0
        for i, first, end in chunks:
            spans.append(PrefillSpan(start, end - first, end, self.page_ids[i][: -(-end // PAGE_TOKENS)]))
            start += end - first
        return self._step([(i, position) for i, first, end in chunks for position in range(first, end)], tuple(spans))

    def decode(self, order, token):
        """A step with the token-th token behind the prompt of each of these requests."""
        width = max((len(self.page_ids[i]) for i in order), default=1)
        table = torch.zeros(len(order), width, dtype=torch.int64)
        for row, i in enumerate(order):
            table[row, : len(self.page_ids[i])] = self.page_ids[i]
        kv_tokens = torch.tensor([self.lengths[i] + token + 1 for i in order], dtype=torch.int64)
        return self._step([(i, self.lengths[i] + token) for i in order], page_table=table, kv_tokens=kv_tokens)

    def _step(self, rows, prefill=(), **decode):
        return StepInput(
            tokens=torch.tensor([int(self.tokens[i][position]) for i, position in rows], dtype=torch.int64),
            positions=torch.tensor([position for _, position in rows], dtype=torch.int64),
            slots=torch.tensor(
                [int(self.page_ids[i][p // PAGE_TOKENS]) * PAGE_TOKENS + p % PAGE_TOKENS for i, p in rows],
                dtype=torch.int64,
            ),
            logit_rows=torch.arange(len(rows)),
            prefill=prefill,
            **decode,
        )

    def everything(self):
        """All prompts as chunks."""
        return [(i, 0, length) for i, length in enumerate(self.lengths)]


def cut(chunks, num_tokens):
    """The first `num_tokens` tokens of some chunks, and the rest."""
    first, second = [], []
    for i, start, end in chunks:
        middle = min(max(start + num_tokens, start), end)
        num_tokens -= middle - start
        first += [(i, start, middle)] if middle > start else []
        second += [(i, middle, end)] if end > middle else []
    return first, second


# --- the schedule -----------------------------------------------------------------------------------------------------


def segments(name, count, log):
    """A micro-batch of `count` segments that writes down which one runs."""
    for segment in range(count):
        log.append(f"{name}{segment}")
        if segment < count - 1:
            yield
    return name


def test_prefill_takes_turns_and_the_first_goes_first():
    log = []
    assert run_prefill_pair(segments("a", 3, log), segments("b", 3, log)) == ("a", "b")
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_decode_takes_turns_and_the_first_stays_one_segment_ahead():
    log = []
    assert run_decode_pair(segments("a", 4, log), segments("b", 4, log)) == ("a", "b")
    assert log == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "b3"]


def test_alone_every_segment_follows_at_once():
    log = []
    assert run_to_end(segments("a", 3, log)) == "a"
    assert log == ["a0", "a1", "a2"]


@pytest.mark.parametrize("run_pair", [run_prefill_pair, run_decode_pair])
def test_what_goes_wrong_in_one_micro_batch_is_not_hidden(run_pair):
    def fails():
        yield
        yield
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        run_pair(segments("a", 5, []), fails())


# --- the published orders, read from the spans of a real step ---------------------------------------------------------

# rank's own lane: what it computes, "> X" where it starts to send and "< X" where it takes in what has come
PREFILL_LAYER = [
    "ATTN(1)",
    "> DISPATCH(1)",
    "SHARED(0)",
    "< COMBINE(0)",
    "ATTN(0)",
    "> DISPATCH(0)",
    "< DISPATCH(1)",
    "MLP(1)",
    "> COMBINE(1)",
    "< DISPATCH(0)",
    "MLP(0)",
    "> COMBINE(0)",
    "SHARED(1)",
    "< COMBINE(1)",
]


def own_lane(log):
    """Return the rank's own spans in the order of time."""
    marks = {COMPUTE: "", SEND: "> ", RECEIVE: "< "}
    spans = sorted((span for span in log.spans if span.kind != FLIGHT), key=lambda span: span.start_s)
    assert all(earlier.end_s <= later.start_s for earlier, later in itertools.pairwise(spans))
    return [f"{marks[span.kind]}{span.name}({span.micro_batch})" for span in spans]


def of_kind(log, kind):
    spans = sorted((span for span in log.spans if span.kind == kind), key=lambda span: (span.start_s, span.end_s))
    return [f"{span.name}({span.micro_batch})" for span in spans]


def recorded_prefill(folder):
    model = Transformer.load(folder, dtype=torch.float32, backend="reference")
    requests, log = Requests((30, 90, 11)), SpanLog()
    halves = StepHalves(*(requests.prefill(*half) for half in cut(requests.everything(), 70)))
    model.forward(halves, model.new_pages(NUM_PAGES), log=log)
    return log


def recorded_decode(folder):
    model = Transformer.load(folder, dtype=torch.float32, backend="reference")
    requests, log = Requests((30, 90, 11)), SpanLog()
    pages = model.new_pages(NUM_PAGES)
    model.forward(requests.prefill(*requests.everything()), pages)
    model.forward(StepHalves(requests.decode([0, 2], 0), requests.decode([1], 0)), pages, log=log)
    return log


@pytest.mark.parametrize("num_moe_layers", [1, 2, 5])
def test_prefill_computes_and_communicates_in_the_published_order(folders, num_moe_layers):
    log = recorded_prefill(folders("v3", num_hidden_layers=1 + num_moe_layers))
    published = ["ATTN(1)", "SHARED(0)", "ATTN(0)", "MLP(1)", "MLP(0)", "SHARED(1)"]
    # the first layer with experts has no shared expert of a layer before; at the end micro-batch 0 has one left
    first = ["DENSE(1)", "ATTN(1)", "DENSE(0)", "ATTN(0)", "MLP(1)", "MLP(0)", "SHARED(1)"]
    assert of_kind(log, COMPUTE) == first + published * (num_moe_layers - 1) + ["LOGITS(1)", "SHARED(0)", "LOGITS(0)"]
    published = ["COMBINE(0)", "DISPATCH(1)", "DISPATCH(0)", "COMBINE(1)"]
    assert of_kind(log, FLIGHT) == [*published[1:], *published * (num_moe_layers - 1), "COMBINE(0)"]


def test_in_prefill_rows_travel_under_the_other_micro_batch_s_work(folders):
    lane = own_lane(recorded_prefill(folders("v3", num_hidden_layers=4)))
    second_layer = lane.index("< COMBINE(1)") + 1
    assert lane[second_layer : second_layer + 2 * len(PREFILL_LAYER)] == PREFILL_LAYER * 2


@pytest.mark.parametrize("num_moe_layers", [1, 2, 5])
def test_decode_computes_and_communicates_in_the_published_order(folders, num_moe_layers):
    log = recorded_decode(folders("v3", num_hidden_layers=1 + num_moe_layers))
    published = ["SHARED(0)", "ATTN-0(1)", "MLP(0)", "ATTN-1(1)"]
    swapped = ["SHARED(1)", "ATTN-0(0)", "MLP(1)", "ATTN-1(0)"]
    first = ["DENSE(0)", "ATTN-0(0)", "ATTN-1(0)", "SHARED(0)", "DENSE(1)", *published[1:]]
    last = ["SHARED(1)", "LOGITS(0)", "MLP(1)", "LOGITS(1)"]
    assert of_kind(log, COMPUTE) == first + (swapped + published) * (num_moe_layers - 1) + last
    assert of_kind(log, FLIGHT) == ["DISPATCH(0)", "COMBINE(0)", "DISPATCH(1)", "COMBINE(1)"] * num_moe_layers


def test_in_decode_rows_travel_under_the_other_micro_batch_s_work(folders):
    lane = own_lane(recorded_decode(folders("v3", num_hidden_layers=4)))
    half_layer = ["> DISPATCH({0})", "SHARED({0})", "< COMBINE({1})", "ATTN-0({1})", "< DISPATCH({0})", "MLP({0})"]
    half_layer += ["> COMBINE({0})", "ATTN-1({1})"]
    both = [item.format(*roles) for roles in ((1, 0), (0, 1)) for item in half_layer]
    second_layer = lane.index("> DISPATCH(1)")
    assert lane[second_layer : second_layer + 2 * len(both)] == both * 2


def test_a_plain_step_goes_through_the_same_stages_one_after_the_other(folders):
    model = Transformer.load(folders("v3"), dtype=torch.float32, backend="reference")
    requests, log = Requests((9,)), SpanLog()
    model.forward(requests.prefill((0, 0, 9)), model.new_pages(NUM_PAGES), log=log)
    layer = ["ATTN(0)", "> DISPATCH(0)", "< DISPATCH(0)", "MLP(0)", "> COMBINE(0)", "SHARED(0)", "< COMBINE(0)"]
    assert own_lane(log) == ["DENSE(0)", *layer * 2, "LOGITS(0)"]


# --- the same numbers -------------------------------------------------------------------------------------------------


def check_equal(paired, plain):
    assert torch.equal(paired.logits, plain.logits)
    assert torch.equal(paired.expert_counts, plain.expert_counts)


@pytest.mark.parametrize("num_first", [0, 1, 29, 30, 31, 64, 71, 119, 120, 131], ids=lambda n: f"first-{n}-of-131")
@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_step_cut_anywhere_gives_the_same_logits_and_pages(folders, name, num_first):
    # prompts of 30, 90 and 11 tokens; where the cut lies inside one, micro-batch 0 attends to what 1 has written
    model = Transformer.load(folders(name), dtype=torch.float32, backend="reference")
    requests = Requests((30, 90, 11))
    pages, plain_pages = model.new_pages(NUM_PAGES), model.new_pages(NUM_PAGES)
    plain = model.forward(requests.prefill(*requests.everything()), plain_pages)
    first, second = (requests.prefill(*half) for half in cut(requests.everything(), num_first))
    assert (len(first.tokens), len(second.tokens)) == (num_first, 131 - num_first)
    check_equal(model.forward(StepHalves(first, second), pages), plain)
    assert torch.equal(pages, plain_pages)


def test_a_prompt_can_take_over_latents_that_the_other_micro_batch_computes(folders):
    # request 1 begins with the first 20 tokens of request 0: it copies their latents and computes only the rest
    model = Transformer.load(folders("v3"), dtype=torch.float32, backend="reference")
    requests = Requests((50, 45))
    requests.tokens[1][:20] = requests.tokens[0][:20]
    copy_from, copy_to = (int(requests.page_ids[i][0]) * PAGE_TOKENS + torch.arange(20) for i in range(2))
    pages, plain_pages = model.new_pages(NUM_PAGES), model.new_pages(NUM_PAGES)
    plain = model.forward(requests.prefill((0, 0, 50), (1, 0, 45)), plain_pages)
    first = requests.prefill((0, 0, 50))
    second = replace(requests.prefill((1, 20, 45)), copy_from=copy_from, copy_to=copy_to)
    output = model.forward(StepHalves(first, second), pages)
    assert torch.equal(output.logits, plain.logits[[*range(50), *range(70, 95)]])
    assert torch.equal(pages, plain_pages)


@pytest.mark.parametrize("num_first", [0, 1, 3, 5])
@pytest.mark.parametrize("name", MODELS)
def test_decode_steps_in_two_micro_batches_give_the_same_logits(folders, name, num_first):
    model = Transformer.load(folders(name), dtype=torch.float32, backend="reference")
    requests, order = Requests((30, 63, 11, 1, 120)), [3, 0, 4, 2, 1]
    pages = model.new_pages(NUM_PAGES)
    model.forward(requests.prefill(*requests.everything()), pages)
    plain_pages = pages.clone()
    for token in range(4):
        plain = model.forward(requests.decode(order, token), plain_pages)
        halves = (requests.decode(half, token) for half in (order[:num_first], order[num_first:]))
        check_equal(model.forward(StepHalves(*halves), pages), plain)
    assert torch.equal(pages, plain_pages)


# --- over ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_redundant", [0, 4])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_experts_and_overlap_equal_one_that_does_neither(folders, name, num_ranks, num_redundant):
    # every rank but the last has prompts; the last takes part without any
    alone = Transformer.load(folders(name), dtype=torch.float32)
    placement = Placement.in_order(alone.config.n_routed_experts, num_ranks, num_redundant)
    lengths = [(9 + rank, 70 - 20 * rank, 5) if rank < num_ranks - 1 else () for rank in range(num_ranks)]

    def work(exchange):
        layers = alone.num_moe_layers
        dispatchers = [AllToAllDispatcher(exchange, placement, RowFormat("float32")) for _ in range(layers)]
        experts = [placement.experts_of_rank(exchange.rank)] * layers
        model = Transformer.load(folders(name), dtype=torch.float32, dispatchers=dispatchers, expert_ids=experts)
        requests = Requests(lengths[exchange.rank], seed=exchange.rank)
        pages = model.new_pages(NUM_PAGES)
        halves = (requests.prefill(*half) for half in cut(requests.everything(), 41))
        outputs = [model.forward(StepHalves(*halves), pages)]
        order = list(range(len(requests.lengths)))
        for token in range(2):
            halves = (requests.decode(half, token) for half in (order[:1], order[1:]))
            outputs.append(model.forward(StepHalves(*halves), pages))
        return outputs

    for rank, (prefill, *decode) in enumerate(ThreadedMesh(num_ranks).run(work)):
        requests = Requests(lengths[rank], seed=rank)
        pages = alone.new_pages(NUM_PAGES)
        check_equal(prefill, alone.forward(requests.prefill(*requests.everything()), pages))
        for token, outputs in enumerate(decode):
            check_equal(outputs, alone.forward(requests.decode(list(range(len(requests.lengths))), token), pages))


def test_experts_that_move_between_steps_compute_their_rows_on_their_new_rank(folders):
    name, num_ranks = MODELS[0], 2
    alone = Transformer.load(folders(name), dtype=torch.float32)
    num_experts, num_layers = alone.config.n_routed_experts, alone.num_moe_layers
    before = Placement.in_order(num_experts, num_ranks)
    # even numbers here, odd ones there
    order = (*range(0, num_experts, 2), *range(1, num_experts, 2))
    after = Placement(order, (1.0,) * num_experts, num_experts, num_ranks)

    def work(exchange):
        dispatchers = [AllToAllDispatcher(exchange, before, RowFormat("float32")) for _ in range(num_layers)]
        experts = [before.experts_of_rank(exchange.rank)] * num_layers
        model = Transformer.load(folders(name), dtype=torch.float32, dispatchers=dispatchers, expert_ids=experts)
        requests, steps = Requests((9, 70), seed=exchange.rank), []
        for placement in (before, after):
            if placement is after:
                model.place_experts(folders(name), [after] * num_layers, exchange.rank)
            num_before = model.expert_rows.sum()
            output = model.forward(requests.prefill(*requests.everything()), model.new_pages(NUM_PAGES))
            steps.append((output, model.expert_rows.sum() - num_before))
        return steps

    ranks = ThreadedMesh(num_ranks).run(work)
    for step, placement in enumerate((before, after)):
        counts_E = sum(outputs[step][0].expert_counts.sum(0) for outputs in ranks)
        for rank, outputs in enumerate(ranks):
            requests = Requests((9, 70), seed=rank)
            expected = alone.forward(requests.prefill(*requests.everything()), alone.new_pages(NUM_PAGES))
            check_equal(outputs[step][0], expected)
            assert outputs[step][1] == counts_E[list(placement.experts_of_rank(rank))].sum()
