"""The plain PyTorch operations against formulas written out, and the choice between implementations."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch

from batchinfer_kernels import reference, registry, row_check
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.implementation import Implementation, accepts_all
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference import rows as reference_rows
from batchinfer_kernels.reference.experts import ExpertBiases
from batchinfer_kernels.reference.gating import GateRule
from batchinfer_kernels.reference.mla import PagedKeys
from batchinfer_kernels.reference.pointwise import GEGLU_TANH, Activation
from support.plain_rows import skip_unless_equal

TOLERANCE = {"float32": 2e-5}
KERNELS = Path(registry.__file__).parent


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def choose(logits, bias=None, **changes):
    rule = GateRule("noaux_tc", topk=2, num_groups=1, topk_groups=1, normalize=True, scale=1.0)
    return reference.gate(torch.tensor(logits), bias, rule._replace(**changes))


def test_gate_worked_example_v3():
    # sigmoid:            0.5   0.881 0.731 0.269     groups {0, 1} and {2, 3}
    # with bias:          0.5   0.881 1.731 0.269     group sums 1.381 and 2.0: the second group is used
    ids, weights = choose([[0.0, 2.0, 1.0, -1.0]], torch.tensor([0.0, 0.0, 1.0, 0.0]), num_groups=2, scale=2.5)
    assert ids.tolist() == [[2, 3]]
    # the bias is not part of the weights: sigmoid(1) and sigmoid(-1) add up to 1
    assert weights.tolist()[0] == pytest.approx([2.5 * 0.7310586, 2.5 * 0.2689414])


def test_gate_worked_example_v2():
    logits = [[0.0, 3.0, 2.0, 1.9]]  # groups {0, 1} and {2, 3} score by their best expert
    probabilities = torch.softmax(torch.tensor(logits[0]), 0).tolist()
    ids, weights = choose(logits, method="group_limited_greedy", num_groups=2, normalize=False, scale=16.0)
    assert ids.tolist() == [[1, 0]]
    assert weights.tolist()[0] == pytest.approx([16 * probabilities[1], 16 * probabilities[0]])
    ids, weights = choose(logits, method="greedy", normalize=True, scale=16.0)
    assert ids.tolist() == [[1, 2]]
    assert weights.sum().item() == pytest.approx(1.0)  # normalised weights are not scaled


def test_gate_worked_example_mistral_4():
    logits = [[3.0, 0.0, 2.5, 2.4]]  # groups {0, 1} and {2, 3}: the best is in the first, the best two in the second
    probabilities = torch.softmax(torch.tensor(logits[0]), 0).tolist()
    ids, weights = choose(logits, method="group_top2", num_groups=2, scale=1.5)
    assert ids.tolist() == [[2, 3]]
    total = probabilities[2] + probabilities[3]
    assert weights.tolist()[0] == pytest.approx([1.5 * one / total for one in probabilities[2:]])
    assert choose(logits, method="group_limited_greedy", num_groups=2)[0].tolist() == [[0, 1]]


def test_gate_worked_example_gpt_oss():
    # logits with bias: 3.5, 2, 1, 3.5: the first and the last are equal, and share a softmax with the third
    ids, weights = choose([[3.5, 1.0, 1.0, 3.0]], torch.tensor([0.0, 1.0, 0.0, 0.5]), method="topk_softmax", topk=3)
    assert ids.tolist() == [[0, 3, 1]]
    assert weights.tolist()[0] == pytest.approx(torch.softmax(torch.tensor([3.5, 3.5, 2.0]), 0).tolist())


def test_softmax_of_the_chosen_tells_logits_apart_that_softmax_of_all_rounds_to_one_value():
    logits = [[100.0, -20.0, -19.5, -21.0]]
    ids, weights = choose(logits, method="topk_softmax", topk=2)
    assert ids.tolist() == [[0, 2]]
    near = 1 + 2**-23  # the next number, whose exp is the same in float32 far from zero
    assert choose([[-80.0, -80.0 * near, -80.0 / near]], method="topk_softmax", topk=1)[0].tolist() == [[2]]
    assert weights.tolist()[0] == pytest.approx([1.0, 0.0])


def test_equal_scores_go_to_the_lowest_index():
    ids, _ = choose([[0.0] * 8], topk=3)
    assert ids.tolist() == [[0, 1, 2]]
    ids, _ = choose([[0.0] * 8], topk=3, num_groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2]]
    ids, _ = choose([[1.0, 5.0, 5.0, 1.0, 5.0]], topk=4, method="greedy")
    assert ids.tolist() == [[1, 2, 4, 0]]


@pytest.mark.parametrize("seed", range(20))
def test_gate_takes_the_best_experts_of_the_best_groups(seed):
    logits, bias = random(1, 12, seed=seed), 0.3 * random(12, seed=seed + 100)
    ids, weights = choose(logits.tolist(), bias, topk=4, num_groups=4, topk_groups=2, scale=2.5)
    scores = torch.sigmoid(logits[0])
    choice = (scores + bias).tolist()
    groups = sorted(range(4), key=lambda g: -sum(sorted(choice[3 * g : 3 * g + 3])[1:]))[:2]
    best = sorted((e for e in range(12) if e // 3 in groups), key=lambda e: -choice[e])[:4]
    assert ids[0].tolist() == best
    assert torch.allclose(weights[0], 2.5 * scores[best] / scores[best].sum())


def test_rope_turns_pairs():
    # a quarter turn takes (1, 0) to (0, 1); at angle 0 nothing moves
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert reference.pointwise.rope(x, cos, sin, interleaved=True).tolist() == [
        [-2.0, 1.0, 3.0, 4.0]
    ]  # pairs (0, 1) (2, 3)
    assert reference.pointwise.rope(x, cos, sin, interleaved=False).tolist() == [
        [-3.0, 2.0, 1.0, 4.0]
    ]  # pairs (0, 2) (1, 3)


def test_norm_activation_and_grouped_mlp_follow_their_formulas():
    x, weight = random(5, 12), random(12, seed=1)
    assert torch.allclose(reference.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (12,), weight, 1e-6))
    assert torch.allclose(reference.silu_mul(x, x + 1), torch.nn.functional.silu(x) * (x + 1))
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    assert torch.allclose(reference.silu_mul(x, x + 1, GEGLU_TANH), gelu * (x + 1), atol=1e-6)
    gate_up, down = random(3, 16, 12, seed=2), random(3, 12, 8, seed=3)
    y = reference.grouped_mlp(x, torch.tensor([2, 0, 3]), gate_up, down)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        gate, up = (gate_up[expert] @ x[row]).chunk(2)
        assert torch.allclose(y[row], down[expert] @ (torch.nn.functional.silu(gate) * up), atol=1e-5)


GPT_OSS = Activation(limit=7.0, alpha=1.702, shift=1.0)


def clamped(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def test_the_activation_of_gpt_oss_and_biases_of_experts_follow_their_formulas():
    x, up = 5 * random(5, 12), 5 * random(5, 12, seed=1)
    assert torch.allclose(reference.silu_mul(x, up, GPT_OSS), clamped(x, up), atol=1e-5)
    gate_up, down = random(3, 16, 12, seed=2), random(3, 12, 8, seed=3)
    biases = ExpertBiases(random(3, 16, seed=4), random(3, 12, seed=5))
    options = {"activation": GPT_OSS, "biases": biases}
    y = reference.grouped_mlp(x, torch.tensor([2, 0, 3]), gate_up, down, **options)
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        gate, up = (gate_up[expert] @ x[row] + biases.gate_up_EF[expert]).chunk(2)
        exact = down[expert] @ clamped(gate, up) + biases.down_ED[expert]
        assert torch.allclose(y[row], exact, rtol=1e-4, atol=1e-4)
    blocks = torch.zeros(3, 3, 12)
    blocks[0, :2], blocks[2] = x[:2], x[2:]
    masked = reference.masked_mlp(blocks, torch.tensor([2, 0, 3]), gate_up, down, **options)
    assert torch.equal(torch.cat([masked[0, :2], masked[2]]), y)


@pytest.mark.parametrize("seed", range(5))
def test_masked_mlp_equals_grouped_mlp_bit_for_bit(seed):
    num_rows = torch.tensor([[3, 0, 17, 8, 1], [0, 0, 0, 0, 0], [20, 20, 20, 20, 20]])[seed % 3]
    gate_up, down = random(5, 2 * 24, 40, seed=seed), random(5, 40, 24, seed=seed + 50)
    blocks = random(5, 20, 40, seed=seed + 100)
    is_row = torch.arange(20) < num_rows[:, None]
    blocks[~is_row] = torch.nan  # rows that are not there may hold anything
    y = reference.masked_mlp(blocks, num_rows.int(), gate_up, down)
    assert torch.equal(y[is_row], reference.grouped_mlp(blocks[is_row], num_rows, gate_up, down))
    assert not y[~is_row].any()


def test_both_attention_forms_equal_softmax_written_out():
    heads, nope, rope, v_dim, latent, context = 3, 8, 4, 5, 12, 150
    pages, page_ids = random(7, 64, latent + rope), torch.tensor([4, 0, 6])
    kv_b, q = random(heads, nope + v_dim, latent, seed=1), random(context, heads, nope + rope, seed=2)
    kept = pages[page_ids].flatten(0, 1)[:context]
    keys = torch.cat(
        [
            torch.einsum("xc,hnc->xhn", kept[:, :latent], kv_b[:, :nope]),
            kept[:, None, latent:].expand(-1, heads, -1),
        ],
        -1,
    )
    values = torch.einsum("xc,hvc->xhv", kept[:, :latent], kv_b[:, nope:])
    scores = torch.einsum("tha,xha->htx", q, keys) * 0.3
    scores = scores.masked_fill(torch.ones(context, context).triu(1).bool(), -torch.inf)
    expected = torch.einsum("htx,xhv->thv", scores.softmax(-1), values)

    plain = reference_mla.mla_prefill(
        q,
        PagedKeys(pages, page_ids[None], torch.tensor([context]), torch.arange(context)),
        kv_b,
        torch.tensor([context]),
        v_dim=v_dim,
        scale=0.3,
    )
    assert (plain - expected).abs().max() < TOLERANCE["float32"] * expected.abs().max()

    at = torch.tensor([149, 0, 64, 63])  # four requests that share pages, each at another position
    absorbed_q = torch.cat([torch.einsum("thn,hnc->thc", q[at, :, :nope], kv_b[:, :nope]), q[at, :, nope:]], -1)
    absorbed = reference_mla.mla_decode(
        absorbed_q, PagedKeys(pages, page_ids.expand(4, 3), at + 1, at), latent_dim=latent, scale=0.3
    )
    absorbed = torch.einsum("thc,hvc->thv", absorbed, kv_b[:, nope:])
    assert (absorbed - expected[at]).abs().max() < TOLERANCE["float32"] * expected.abs().max()


def test_attention_is_the_same_in_pieces(monkeypatch):
    shape = row_check.AttentionShape(num_heads=3, nope_dim=8, rotary_dim=4, value_dim=5, latent_dim=16)
    skip_unless_equal(
        [row_check.decode_attention(shape, torch.float32), row_check.prefill_attention(shape, random(3, 13, 16))]
    )
    pages, q = random(8, 64, 20), random(100, 3, 12)
    table, at = torch.arange(8).view(4, 2), torch.tensor([127, 3, 64, 90])

    def both():
        plain = reference_mla.mla_prefill(
            q,
            PagedKeys(
                pages,
                torch.tensor([[0, 1], [2, 9]]),  # of the second only the first page is looked at
                torch.tensor([100, 40]),
                torch.cat([torch.arange(30, 100), torch.arange(10, 40)]),
            ),
            random(3, 13, 16),
            torch.tensor([70, 30]),
            v_dim=5,
            scale=0.3,
        )
        decode = reference_mla.mla_decode(
            random(4, 3, 20), PagedKeys(pages, table, at + 1, at), latent_dim=16, scale=0.3
        )
        return plain, decode

    whole = both()
    monkeypatch.setattr(reference_mla, "MAX_SCORES", 1)
    monkeypatch.setattr(reference_mla, "MAX_DECODE_VALUES", 1)
    pieces = both()
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


@pytest.mark.parametrize("num_in", [5, 16, 33, 256])
@pytest.mark.parametrize("num_out", [1, 6, 8, 10, 24, 64])
def test_a_row_of_a_product_does_not_depend_on_the_other_rows(num_in, num_out):
    x, weight, batches = random(40, num_in), random(num_out, num_in, seed=1), random(3, num_in, num_out, seed=2)
    skip_unless_equal([row_check.product(weight), row_check.batched_product(batches.transpose(1, 2))])
    whole, whole_batched = reference.linear(x, weight), reference.products.batched_matmul(x.expand(3, -1, -1), batches)
    for start, stop in [(0, 1), (1, 3), (3, 10), (7, 15), (11, 40)]:
        assert torch.equal(reference.linear(x[start:stop], weight), whole[start:stop])
        part = reference.products.batched_matmul(x[start:stop].expand(3, -1, -1), batches)
        assert torch.equal(part, whole_batched[:, start:stop])


@pytest.mark.parametrize("width", [1, 7, 16, 33, 1000])
def test_a_row_of_other_operations_does_not_depend_on_the_other_rows(width):
    x, weight = 3 * random(37, width), random(width, seed=1)
    operations = {
        "silu_mul": lambda rows: reference.silu_mul(rows, rows),
        "rms_norm": lambda rows: reference.rms_norm(rows, weight, 1e-6),
        "gate": lambda rows: reference.gate(
            rows, None, GateRule("noaux_tc", topk=1, num_groups=1, topk_groups=1, normalize=False, scale=1.0)
        )[1],
    }
    for name, operation in operations.items():
        whole = operation(x)
        for start, stop in [(0, 1), (1, 4), (5, 22), (30, 37)]:
            assert torch.equal(operation(x[start:stop]), whole[start:stop]), name


@pytest.mark.parametrize("width", [1, 2, 3, 1003, 50257, 129280])
def test_the_logarithm_of_a_sum_of_powers_does_not_depend_on_the_other_rows_or_the_threads(width, threads):
    threads(2)
    for seed in range(6):
        logits = 3 * random(9, width, seed=seed)
        whole = reference.log_sum_exp(logits)
        assert torch.allclose(whole, logits.double().logsumexp(dim=-1), rtol=1e-15, atol=1e-14)
        for start, stop in [(row, row + 1) for row in range(9)] + [(0, 5), (3, 9)]:
            assert torch.equal(reference.log_sum_exp(logits[start:stop]), whole[start:stop])
        threads(1)
        assert torch.equal(reference.log_sum_exp(logits), whole)
        threads(2)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (300, 130), (127, 513)])
def test_fp8_blocks_keep_three_bits_after_the_leading_one(shape):
    weight = random(*shape) * torch.logspace(-6, 2, shape[0])[:, None]
    quantised, scale = reference.quantize_fp8_block(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = reference.dequantize_fp8_block(quantised, scale, torch.float32)
    for block_row in range(scale.shape[0]):
        for block_column in range(scale.shape[1]):
            block = (slice(128 * block_row, 128 * block_row + 128), slice(128 * block_column, 128 * block_column + 128))
            expected = quantised[block].float() * scale[block_row, block_column]
            assert torch.equal(back[block], expected)
            smallest = scale[block_row, block_column] * 2**-9  # below it, E4M3 has no bits left
            assert ((back[block] - weight[block]).abs() <= weight[block].abs() / 16 + smallest / 2).all()


def test_every_operation_has_a_candidate_and_a_reason():
    rows = registry.explain()
    assert {row.op for row in rows} == set(registry.ops())
    for op in registry.ops():
        assert [row.chosen for row in rows if (row.op, row.reason) == (op, "in use")] == [True]
    assert all(row.reason for row in rows)
    assert registry.select("linear").name == ("cpu" if cpu_build.why_not() is None else "reference")
    assert registry.select("linear", "reference").implementation.run is reference.linear


def test_a_named_candidate_that_cannot_run_is_refused_with_its_reason(monkeypatch):
    broken = [
        registry.Candidate(
            "linear", name, Implementation(reference.linear, accepts_all), lambda: "no GPU of compute capability 9.0"
        )
        for name in ("hopper", "triton", "cpu")
    ]
    listed = {**registry._CANDIDATES, "linear": (*broken, registry._CANDIDATES["linear"][-1])}
    monkeypatch.setattr(registry, "_CANDIDATES", listed)
    assert registry.select("linear").name == "reference"  # auto goes on to the next one
    with pytest.raises(registry.BackendError, match="hopper cannot run here: no GPU of compute capability 9"):
        registry.select("linear", "hopper")
    with pytest.raises(registry.BackendError, match="use one of auto, hopper, triton, cpu, reference"):
        registry.select("linear", "cuda")
    with pytest.raises(registry.BackendError, match="no operation 'matmul'"):
        registry.select("matmul")
    rows = {row.candidate: row for row in registry.explain() if row.op == "linear"}
    assert list(rows) == ["hopper", "triton", "cpu", "reference"]
    assert (rows["hopper"].chosen, rows["reference"].chosen) == (False, True)


def test_calls_that_a_candidate_refuses_go_to_the_next_one_and_are_counted(monkeypatch):
    monkeypatch.setattr(registry, "_fallbacks", Counter())

    def candidate(name, refused):
        implementation = Implementation(lambda x: (name, x), lambda x: f"{x} is too large" if x > refused else None)
        return registry.Candidate("double", name, implementation, lambda: None)

    double = registry.Operation([candidate("hopper", 1), candidate("triton", 2), candidate("reference", 3)])
    assert [double(x) for x in (1, 2, 2, 3)] == [("hopper", 1), ("triton", 2), ("triton", 2), ("reference", 3)]
    assert registry.fallbacks() == {
        ("double", "hopper", "triton", "2 is too large"): 2,
        ("double", "hopper, triton", "reference", "3 is too large; 3 is too large"): 1,
    }
    assert registry.num_fallbacks() == 3
    with pytest.raises(registry.BackendError, match=r"double: no implementation takes .*reference: 4 is too large"):
        double(4)
    with pytest.raises(RuntimeError, match="2 is too large"):
        double.implementation(2)


def test_what_a_named_choice_cannot_take_goes_on_to_the_reference_and_is_seen():
    if cpu_build.why_not() is not None:
        pytest.skip(f"no C++ operations on this machine: {cpu_build.why_not()}")
    x, weight = random(3, 8).half(), random(4, 8).half()
    linear = registry.select("linear", "cpu")
    key = ("linear", "cpu", "reference", "rows are in torch.float16")
    before = registry.fallbacks().get(key, 0)
    assert torch.equal(linear(x, weight), reference.linear(x, weight))
    assert registry.fallbacks()[key] == before + 1
    packed = registry.select("pack", "cpu")(random(4, 8))
    with pytest.raises(registry.BackendError, match="reference: a packed weight takes rows of its own kind on the CPU"):
        linear(x, packed)


def settings(value):
    return torch.full((3,), value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


GATE = GateRule("noaux_tc", topk=2, num_groups=2, topk_groups=1, normalize=True, scale=2.5)
OF_ANY_DTYPE = [
    ("gate", lambda: [random(3, 8), random(8, seed=1), GATE]),
    ("add_sums", lambda: [random(3, 8), random(3, 8, seed=1), random(3, 8, seed=2)]),
    ("sum_per_token", lambda: [random(6, 8), torch.arange(6).flip(0), random(3, 2, seed=1)]),
    ("cos_sin", lambda: [random(3, 4), 1.5]),
    ("rms_norm", lambda: [random(3, 8), random(8, seed=1), 1e-6]),
    ("draw", lambda: [random(3, 8), *map(settings, (1.0, 0, 1.0, 0.0, 0.5))]),
]


@pytest.mark.parametrize(("op", "arguments"), OF_ANY_DTYPE, ids=[op for op, _ in OF_ANY_DTYPE])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_operands_in_other_dtypes_go_on_to_the_reference(op, arguments, dtype):
    given = arguments()
    for place, operand in enumerate(given):
        if isinstance(operand, torch.Tensor) and operand.is_floating_point():
            changed = [*given[:place], operand.to(dtype), *given[place + 1 :]]
            found, expected = registry.select(op)(*changed), getattr(reference, op)(*changed)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("op", "arguments"), OF_ANY_DTYPE, ids=[op for op, _ in OF_ANY_DTYPE])
def test_operands_with_gaps_in_memory_are_taken(op, arguments):
    given = arguments()
    gaps = [torch.stack([x, x], -1)[..., 0] if isinstance(x, torch.Tensor) else x for x in given]
    torch.testing.assert_close(registry.select(op)(*gaps), registry.select(op)(*given))


def test_every_candidate_says_what_it_does_not_take():
    for row in registry.explain():
        assert row.rejected_arguments, (row.op, row.candidate)
        assert not row.rejected_arguments.startswith("Reject"), 'doctor prints this behind "does not take:"'


def test_no_candidate_imports_the_registry_or_another_candidate():
    folders = {"cpu", "triton", "hopper"}
    for folder in (*folders, "reference"):
        for path in (KERNELS / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
                for package, inner, *_ in (f"{node.module}.{name}".split(".") for name in names):
                    assert (package, inner) != ("batchinfer_kernels", "registry"), path
                    assert package != "batchinfer_kernels" or inner not in folders - {folder}, (path, inner)


@pytest.mark.parametrize("count", range(0, 9))
def test_equal_logits_are_told_by_their_ids_however_many_are_asked_for(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.randint(3, (50, 8), generator=generator).float()
    tokens, values = reference.most_likely(logits, count)
    for row, (of_row, chosen) in enumerate(zip(tokens.tolist(), values.tolist(), strict=True)):
        in_order = sorted(range(8), key=lambda token: (-logits[row, token].item(), token))
        assert of_row == in_order[:count]
        assert chosen == logits[row, of_row].tolist()


def test_no_more_tokens_are_told_than_there_are():
    assert reference.most_likely(torch.zeros(2, 3), 9)[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_on_a_device_they_are_found_by_keys_and_are_the_same(count):
    generator = torch.Generator().manual_seed(count)
    logits = torch.cat([torch.randn(20, 40, generator=generator), torch.randint(-2, 3, (20, 40)) * 1.5])
    logits[3, 7], logits[4, 2], logits[5] = -torch.inf, torch.inf, 0.0
    logits[6], logits[6, ::2] = 0.0, -0.0
    by_keys = reference_rows._largest_keys(logits, count)
    for ours, expected in zip(by_keys, reference.most_likely(logits, count), strict=True):
        assert torch.equal(ours, expected)
