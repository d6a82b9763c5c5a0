"""Decode steps in fixed memory: what a graph is given. The recorder here starts the work again, as a graph would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.config import PAGE_TOKENS, ClusterConfig
from batchinfer.config.rank_layout import RankPlace
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.model.fused.graph_size import filled_up, graph_pages, graph_rows
from batchinfer.model.fused.graphs import ON_HOST, DecodeGraphs, why_not_recorded
from batchinfer.model.sampling import sample
from batchinfer.model.schedules import Schedule, plain
from batchinfer.model.step import StepInput, StepOutput
from batchinfer.model.transformer import Transformer
from batchinfer.rank import kv_budget
from batchinfer.rank.context import RankContext
from batchinfer.rank.kv_budget import RESERVE_SHARE, bytes_for_pages, largest_steps, measured_budget
from support.checkpoints import make_checkpoint
from support.paths import RANDOM_MODEL
from support.plain_rows import skip_unless_equal

FILLER = 20  # the page of rows that fill up
GARBAGE = 1e3


class Recorder:
    """Starts the work again where a GPU would start a graph: results land in the memory of the first ones."""

    def __init__(self):
        self.num_recorded = self.num_started = 0

    def __call__(self, work):
        self.num_recorded += 1
        held = work()

        def start():
            self.num_started += 1
            output = work()
            held.logits.copy_(output.logits)
            held.expert_counts.copy_(output.expert_counts)
            return held

        return start


@pytest.fixture(scope="module")
def model():
    model = Transformer.load(RANDOM_MODEL, dtype=torch.float32, backend="reference")
    skip_unless_equal(model)  # rows that fill a step up change nothing then
    return model


def step_of(lengths, seed=0):
    """Return a step of one token for requests of these lengths, with separate pages in any order."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = [-(-length // PAGE_TOKENS) for length in lengths]
    page_ids = torch.randperm(FILLER, generator=generator)[: sum(num_pages)].split(num_pages)
    table = torch.nn.utils.rnn.pad_sequence(page_ids, batch_first=True)
    kv_tokens = torch.tensor(lengths)
    last_page = torch.stack([ids[-1] for ids in page_ids])
    return StepInput(
        tokens=torch.randint(0, 90, (len(lengths),), generator=generator),
        positions=kv_tokens - 1,
        slots=last_page * PAGE_TOKENS + (kv_tokens - 1) % PAGE_TOKENS,
        logit_rows=torch.arange(len(lengths)),
        page_table=table,
        kv_tokens=kv_tokens,
    )


def pages_of(model):
    pages = model.new_pages(FILLER + 1)
    pages.normal_(generator=torch.Generator().manual_seed(1))
    return pages


def test_rows_are_filled_up_to_a_size_that_has_a_graph():
    assert [graph_rows(count) for count in (1, 2, 3, 8, 9, 16, 17, 33, 256)] == [1, 2, 4, 8, 16, 16, 32, 48, 256]
    step = step_of([70, 3, 130])
    assert [graph_pages(count) for count in (0, 1, 3, 4, 5, 8, 9)] == [4, 4, 4, 4, 8, 8, 16]
    filled, is_counted = filled_up(step, graph_rows(3), graph_pages(3), FILLER)
    assert is_counted.tolist() == [1, 1, 1, 0]
    assert filled.page_table.tolist() == [
        *([*row, FILLER] for row in step.page_table.tolist()),
        [FILLER] * 4,
    ]
    assert filled.kv_tokens.tolist() == [70, 3, 130, 1]
    assert filled.slots.tolist() == [*step.slots.tolist(), FILLER * PAGE_TOKENS]
    assert filled.logit_rows.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_requests", range(1, 70))
def test_filler_rows_have_slots_of_their_own_on_the_filler_page(num_requests):
    num_rows = graph_rows(min(num_requests, FILLER))
    filled, is_counted = filled_up(step_of([1] * min(num_requests, FILLER)), num_rows, 4, FILLER)
    assert len(set(filled.slots.tolist())) == len(filled.slots) == len(is_counted)
    assert set((filled.slots[is_counted == 0] // PAGE_TOKENS).tolist()) <= {FILLER}
    assert graph_rows(num_requests) - num_requests < PAGE_TOKENS


def test_steps_in_fixed_memory_have_the_results_of_plain_steps(model):
    pages, plain_pages = pages_of(model), pages_of(model)
    recorder = Recorder()
    graphs = Schedule(decode=DecodeGraphs(FILLER, recorder))
    lengths = ([70, 3, 130], [71, 4, 131], [9, 200, 64, 65], [5], [3, 3, 3], [300, 2, 1])
    for seed, step in enumerate(map(step_of, lengths, range(len(lengths)))):
        output, expected = model.forward(step, pages, graphs), model.forward(step, plain_pages)
        assert torch.equal(output.logits, expected.logits), seed
        assert torch.equal(output.expert_counts, expected.expert_counts), seed
        # other requests' pages stay as they were
        assert torch.equal(pages[:, :FILLER], plain_pages[:, :FILLER]), seed
    # sizes 4 x 4, 1 x 4 and 4 x 8 (rows x pages) are met in a plain step first, then started
    assert (recorder.num_recorded, recorder.num_started) == (3, 3)


def test_where_attention_is_sparse_a_graph_is_of_one_kind_of_step(tmp_path):
    make_checkpoint(tmp_path, "glm-dsa-shared", index_topk=64)
    model = Transformer.load(tmp_path, dtype=torch.float32, backend="reference")
    skip_unless_equal(model)
    pages, plain_pages = pages_of(model), pages_of(model)
    recorder = Recorder()
    graphs = Schedule(decode=DecodeGraphs(FILLER, recorder))
    # at most 64 keys, more, and both: each is met in a plain step first
    lengths = ([63, 64, 9], [65, 130, 70], [64, 65, 2], [1, 2, 64], [131, 65, 66], [66, 64, 200])
    for seed, step in enumerate(map(step_of, lengths, range(len(lengths)))):
        output, expected = model.forward(step, pages, graphs), model.forward(step, plain_pages)
        assert torch.equal(output.logits, expected.logits), seed
        assert torch.equal(pages[:, :FILLER], plain_pages[:, :FILLER]), seed
        assert output.logits.isfinite().all()
    assert (recorder.num_recorded, recorder.num_started) == (3, 3)


def test_what_stands_on_the_filler_page_reaches_no_request(model):
    pages, plain_pages = pages_of(model), pages_of(model)
    pages[:, FILLER] = GARBAGE
    step = step_of([70, 3, 130])
    output = model.forward(step, pages, Schedule(decode=DecodeGraphs(FILLER, Recorder())))
    assert torch.equal(output.logits, model.forward(step, plain_pages).logits)


def test_a_rank_on_a_cpu_has_no_graphs_and_no_filler_page(model):
    assert why_not_recorded(model) == ON_HOST
    context = RankContext(model, load_tokenizer(Path(RANDOM_MODEL)), num_pages=5, prefill_tokens=64, decode_requests=4)
    assert context.pages.shape[1] == 5
    assert context.schedule.decode is plain
    assert (context.graphs, context.no_graphs) == (None, ON_HOST)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("sizes", [(64, 3, 10), (100, 70, 200), (5, 2, 1000), (300, 1, 64)])
def test_the_largest_steps_run_within_their_pages(model, sizes, scores):
    prefill_tokens, decode_requests, largest_tokens = sizes
    steps, num_pages = largest_steps(*sizes, model.config.vocab_size, scores=scores)
    prefill, decode = steps
    assert (len(prefill.tokens), len(decode.tokens)) == (prefill_tokens, decode_requests)
    assert prefill.prefill[0].context_tokens == max(prefill_tokens, largest_tokens)
    lengths = [largest_tokens] * decode_requests
    lengths[1:2] = [1] * len(lengths[1:2])
    assert decode.kv_tokens.tolist() == lengths
    pages = model.new_pages(num_pages)
    outputs: list[StepOutput] = []
    for step in steps:
        assert len(set(step.slots.tolist())) == len(step.slots), "two tokens would write to one slot"
        assert int(step.slots.max()) < num_pages * PAGE_TOKENS
        outputs.append(model.forward(step, pages))
        assert torch.isfinite(outputs[-1].logits).all()
    assert (outputs[0].scores is not None) == scores
    if outputs[0].scores is not None:
        assert len(outputs[0].logits) + len(outputs[0].scores.logprobs) == prefill_tokens
    # a measured step must not send all its rows to the same experts
    assert (outputs[0].expert_counts[0] > 0).sum() > model.config.num_experts_per_tok


@pytest.mark.parametrize(("runs_prefill", "runs_decode"), [(True, True), (True, False), (False, True)])
def test_the_room_is_measured_with_the_steps_that_a_rank_runs(model, monkeypatch, runs_prefill, runs_decode):
    """The steps run here; what a GPU would say of its memory is made up."""
    calls, ran, drawn = [], [], []
    gib = 2**30
    facts = {"memory_allocated": 3 * gib, "max_memory_allocated": 7 * gib, "mem_get_info": (60 * gib, 140 * gib)}
    facts["memory_reserved"] = 12 * gib
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", *facts):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name) or facts.get(name))
    forward = model.forward

    def noted_forward(step, pages):
        ran.append("prefill" if step.prefill else "decode")
        return forward(step, pages)

    def noted_sample(logits, rows, *others):
        drawn.append(int((rows.temperature > 0).sum()))
        return sample(logits, rows, *others)

    monkeypatch.setattr(model, "forward", noted_forward)
    monkeypatch.setattr(kv_budget, "sample", noted_sample)
    role = "both" if runs_prefill and runs_decode else "prefill" if runs_prefill else "decode"
    cluster = ClusterConfig(prefill_tokens=70, decode_requests=5)
    room = measured_budget(model, cluster, RankPlace(0, role, 0, 1), largest_tokens=100)
    assert room == 60 * gib - 4 * gib - int(RESERVE_SHARE * 140 * gib)
    shared = measured_budget(model, cluster, RankPlace(0, role, 0, 1), largest_tokens=100, num_sharing=2)
    assert shared == 70 * gib - 12 * gib - 4 * gib - int(RESERVE_SHARE * 70 * gib), "half of the GPU, less what it has"
    assert ran == (["prefill"] * runs_prefill + ["decode"] * runs_decode) * 2
    assert drawn == [5] * len(ran)
    assert calls.index("synchronize") < calls.index("max_memory_allocated") < calls.index("mem_get_info")


def test_pages_get_what_the_largest_step_and_the_reserve_leave():
    gib = 2**30
    room = bytes_for_pages(total=140 * gib, free=60 * gib, working=4 * gib)
    assert room == 56 * gib - int(RESERVE_SHARE * 140 * gib)
    assert bytes_for_pages(total=140 * gib, free=10 * gib, working=4 * gib) == 0
