"""The C++ operations in float32 and bfloat16: close to float64, the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer_kernels import reference, registry
from batchinfer_kernels.cpu import build, ops, packed
from batchinfer_kernels.reference import mla as reference_mla
from batchinfer_kernels.reference.mla import PagedKeys
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL
from support.plain_attention import decoded, paged

# Rounding errs by half a unit in the last place, of bfloat16 2^-8 of the value at most; a little room for float32 sums.
TOLERANCE = {torch.bfloat16: 2**-8 * 1.01, torch.float32: 2**-23}
# Largest error in float32, where plain PyTorch computes in float64 in between, of the largest value.
FLOAT32 = 2e-6
# Mean error in bfloat16 against the reference's own, which computes in it, too: a wrong order or a lost term is far
# above.
MOST_OF_REFERENCE = 1.25

KERNELS = Path(build.__file__).parents[2]
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def random(request):
    """Makes random tensors of one dtype."""

    def make(*shape, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(request.param)

    return make


def swiglu(x, gate_up, down):
    gate, up = (x.double() @ gate_up.double().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up @ down.double().T


def assert_as_good_as_reference(result, plain, exact):
    """Assert errors against float64 that are no larger than those of plain PyTorch in bfloat16, or of float32 sums."""
    ours, theirs = (result.double() - exact).abs(), (plain.double() - exact).abs()
    assert torch.isfinite(result).all()
    assert result.dtype is plain.dtype
    if result.dtype is torch.float32:
        assert ours.max() <= FLOAT32 * exact.abs().max()
        return
    assert ours.mean() <= MOST_OF_REFERENCE * theirs.mean() + 1e-12
    assert ours.max() <= 2 * theirs.max() + 1e-12


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("num_in", [1, 31, 32, 33, 100, 1024])
@pytest.mark.parametrize("num_out", [1, 5, 6, 7, 64, 131])
def test_a_product_is_the_exact_one_rounded_once(random, num_in, num_out):
    weight, bias = random(num_out, num_in, seed=1), random(num_out, seed=2)
    for num_rows in (0, 1, 2, 3, 4, 5, 65):
        x = random(num_rows, num_in)
        y = ops.linear(x, weight)
        assert y.shape == (num_rows, num_out)
        assert y.dtype == x.dtype
        exact = x.double() @ weight.double().T
        # float32 sums of num_in terms err by the size of the terms, not of the result
        terms = x.double().abs() @ weight.double().abs().T
        assert ((y - exact).abs() <= TOLERANCE[y.dtype] * exact.abs() + 1e-6 * terms).all()
        assert torch.equal(ops.linear(x, weight, bias), y + bias)


@pytest.mark.usefixtures("cpp")
def test_a_product_of_slices_is_the_product_of_copies(random):
    # neither rows 40 values apart nor a transposed weight are contiguous; the second even has gaps between its values
    x, weight = random(9, 40)[:, 3:20], random(17, 30, seed=1).T
    assert torch.equal(ops.linear(x, weight), ops.linear(x.clone(), weight.contiguous()))


@pytest.mark.usefixtures("cpp")
def test_infinities_and_missing_numbers_stay_in_their_row(random):
    x, weight = random(6, 50), random(9, 50, seed=1)
    x[1, 7], x[4, 49] = torch.inf, torch.nan
    y = ops.linear(x, weight)
    clean = [0, 2, 3, 5]
    assert torch.equal(y[clean], ops.linear(x[clean], weight))
    assert torch.isinf(y[1]).all()
    assert torch.isnan(y[4]).all()


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [(0, 0), (5, 127), (127, 130), (199, 255)])
def test_a_column_in_8_bits_of_which_a_value_is_not_finite_is_lost_alone(place, number):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in [(3, 256), (200, 256)])
    clean = ops.linear(x, ops.pack(weight, eight_bit=True))
    weight[place] = number
    y = ops.linear(x, ops.pack(weight, eight_bit=True))
    is_lost = torch.arange(200) == place[0]
    assert y[:, is_lost].isnan().all()
    assert torch.equal(y[:, ~is_lost], clean[:, ~is_lost])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 33), (64, 288), (131, 1000), (1536, 1024)])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(random, num_out, num_in, threads):
    x, weight = random(300, num_in), random(num_out, num_in, seed=1)
    threads(2)
    whole = ops.linear(x, weight)
    for num_threads in (1, 2):
        threads(num_threads)
        assert torch.equal(ops.linear(x, weight), whole)
        for start, stop in [(0, 1), (1, 3), (3, 8), (7, 72), (130, 300), (299, 300)]:
            assert torch.equal(ops.linear(x[start:stop], weight), whole[start:stop])
    assert torch.equal(ops.linear(x.flip(0), weight), whole.flip(0))
    # a column does not depend on the others either, so a weight may be split
    assert torch.equal(ops.linear(x, weight[num_out // 3 :]), whole[:, num_out // 3 :])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (33, 17), (64, 256), (256, 64), (600, 70)])
def test_a_batched_product_is_the_exact_one_rounded_once_in_any_company(
    random, num_in, num_out, is_transposed, threads
):
    weight = random(3, num_in, num_out, seed=1).mT if is_transposed else random(3, num_out, num_in, seed=1)
    x = random(65, 3, num_in + 1)[:, :, 1:].transpose(0, 1)  # as attention gives it: heads apart within a row
    threads(2)
    whole = ops.batched_linear(x, weight)
    assert torch.equal(ops.batched_linear(x, ops.pack(weight)), whole)
    exact, terms = x.double() @ weight.double().mT, x.double().abs() @ weight.double().abs().mT
    assert ((whole - exact).abs() <= TOLERANCE[whole.dtype] * exact.abs() + 1e-6 * terms).all()
    for num_threads, start, stop in [(1, 0, 65), (2, 0, 1), (1, 3, 10), (2, 64, 65), (2, 0, 0)]:
        threads(num_threads)
        assert torch.equal(ops.batched_linear(x[:, start:stop], weight), whole[:, start:stop])
        assert torch.equal(ops.batched_linear(x[1:2, start:stop], weight[1:2]), whole[1:2, start:stop])
    wider = torch.full((65, 3, num_out + 5), 7, dtype=whole.dtype)
    for function in (ops.batched_linear, reference.batched_linear):
        function(x, weight, wider[..., :num_out].transpose(0, 1))
        assert torch.equal(wider[..., :num_out].transpose(0, 1), function(x, weight))
        assert (wider[..., num_out:] == 7).all()


@pytest.mark.parametrize(("depth", "half"), [(64, 48), (7, 33), (256, 128)])
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_weight_packed_in_parts_has_the_bytes_of_the_whole(random, depth, half, is_int8):
    weight = random(2 * half, depth, seed=4)
    if is_int8 and weight.dtype is torch.float32:  # 8 bits are rounded from bfloat16
        with pytest.raises(RuntimeError, match="do not take rows of Float"):
            packed.pack(weight, is_int8=True)
        return
    whole = packed.pack(weight, is_int8=is_int8, is_paired=True)
    room = packed.Packed.empty(3, 2 * half, depth, kind=whole.kind, is_paired=True)
    room.data.zero_()
    room.put(1, *weight.chunk(2))
    assert torch.equal(room.data[1], whole.data[0])
    assert not room.data[[0, 2]].any()
    with pytest.raises(RuntimeError, match="room for"):
        room.put(0, weight[:half])
    with pytest.raises(RuntimeError, match="different shapes"):
        room.put(0, weight[:half], weight[: half - 1])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("width", [1, 15, 16, 17, 500, 1024])
def test_norm_and_activation_are_as_good_as_the_reference_and_keep_their_bits(random, width, threads):
    x, up, weight = 3 * random(65, width), random(65, width, seed=1), random(width, seed=2)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert_as_good_as_reference(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), normed)
    active = torch.nn.functional.silu(x.double()) * up.double()
    assert_as_good_as_reference(ops.silu_mul(x, up), reference.silu_mul(x, up), active)
    for operation in (lambda rows: ops.rms_norm(rows, weight, 1e-6), lambda rows: ops.silu_mul(rows, rows)):
        whole = operation(x)
        for num_threads, start, stop in [(1, 0, 65), (2, 0, 1), (1, 3, 10), (2, 64, 65), (2, 0, 0)]:
            threads(num_threads)
            assert torch.equal(operation(x[start:stop]), whole[start:stop])


@pytest.mark.usefixtures("cpp")
def test_the_activation_of_extreme_values():
    gate = torch.tensor([[-torch.inf, -200.0, -88.9, 0.0, 88.9, 200.0, torch.inf, torch.nan]]).bfloat16()
    y = ops.silu_mul(gate, torch.ones_like(gate))[0]
    assert y[1:6].tolist() == [0.0, 0.0, 0.0, *gate[0, 4:6].tolist()]
    assert y[6] == torch.inf
    assert torch.isnan(y[7])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize(("hidden", "intermediate"), [(40, 24), (33, 7), (128, 96), (1024, 512)])
def test_experts_are_as_good_as_the_reference(random, hidden, intermediate):
    num_rows = torch.tensor([3, 0, 65, 1, 4])
    x = random(int(num_rows.sum()), hidden)
    gate_up = random(5, 2 * intermediate, hidden, seed=1) / hidden**0.5
    down = random(5, hidden, intermediate, seed=2) / intermediate**0.5
    exact = torch.cat(
        [swiglu(rows, *weights) for rows, *weights in zip(x.split(num_rows.tolist()), gate_up, down, strict=True)]
    )
    assert_as_good_as_reference(
        ops.grouped_mlp(x, num_rows, gate_up, down), reference.grouped_mlp(x, num_rows, gate_up, down), exact
    )


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("is_int8", [False, True], ids=["16 bits", "8 bits"])
def test_rows_that_meet_many_panels_have_the_bits_of_those_that_meet_one(is_int8, threads):
    """Products in tiles copy rows that meet many panels into tiles first (csrc/tile.h), from any address."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in [(83, 650), (1700, 650)])
    gate_up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in [(2, 1300, 650), (2, 650, 650)])
    threads(1)
    by_many = ops.linear(x, packed.pack(weight, is_int8=is_int8))
    for start in range(0, 1700, 256):
        by_few = ops.linear(x, packed.pack(weight[start : start + 256], is_int8=is_int8))
        assert torch.equal(by_many[:, start : start + 256], by_few)
    weights = packed.pack(gate_up, is_int8=is_int8, is_paired=True), packed.pack(down, is_int8=is_int8)
    tokens, counts = torch.randint(83, (112,), generator=generator), torch.tensor([70, 42])
    y = ops.grouped_mlp(x, counts, *weights, tokens)
    assert torch.equal(y, ops.grouped_mlp(x[tokens], counts, *weights))
    for row in (0, 15, 16, 69, 70, 111):
        alone = torch.tensor([row < 70, row >= 70]).long()
        assert torch.equal(ops.grouped_mlp(x, alone, *weights, tokens[row : row + 1])[0], y[row])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("num_rows", [[3, 0, 17, 8, 1], [0, 0, 0, 0, 0], [20, 20, 20, 20, 20]])
def test_both_layouts_of_experts_give_the_same_bits_in_any_company(random, num_rows, threads):
    gate_up, down = random(5, 2 * 72, 40, seed=1), random(5, 40, 72, seed=2)
    blocks, counts = random(5, 20, 40), torch.tensor(num_rows)
    is_row = torch.arange(20) < counts[:, None]
    blocks[~is_row] = torch.nan  # rows that are not there may hold anything
    threads(2)
    y = ops.masked_mlp(blocks, counts.int(), gate_up, down)
    assert not y[~is_row].any()
    for num_threads in (1, 2):
        threads(num_threads)
        assert torch.equal(ops.grouped_mlp(blocks[is_row], counts, gate_up, down), y[is_row])
        for expert, count in enumerate(num_rows):
            for row in range(count):
                alone = ops.grouped_mlp(
                    blocks[expert, row : row + 1], torch.tensor([1]), gate_up[expert : expert + 1], down[expert][None]
                )
                assert torch.equal(alone[0], y[expert, row])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize(
    ("heads", "latent_dim", "rotary"),
    [(1, 16, 6), (3, 64, 16), (16, 256, 32), (40, 80, 64), (33, 16, 0), (2, 3, 2), (9, 35, 4)],
)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_decode_attention_is_as_good_as_the_reference(random, heads, latent_dim, rotary, num_queries):
    kv_tokens = [num_queries, 63, 64, 65, 130, 200]
    pages, table, kv_tokens = paged(random, kv_tokens, latent_dim + rotary)
    q = random(len(kv_tokens) * num_queries, heads, latent_dim + rotary, seed=1)
    positions = (kv_tokens[:, None] - num_queries + torch.arange(num_queries)).flatten()
    options = {"latent_dim": latent_dim, "scale": (latent_dim + rotary) ** -0.5}
    keys = PagedKeys(pages, table, kv_tokens, positions)
    result, plain = ops.mla_decode(q, keys, **options), reference_mla.mla_decode(q, keys, **options)
    exact, terms = decoded(q, keys.pages, keys.page_table_BP, keys.positions_T, **options)
    assert torch.isfinite(result).all()
    ours, theirs = (result - exact).abs(), (plain - exact).abs()
    if result.dtype is torch.float32:
        assert (ours <= FLOAT32 * terms).all()
        return
    # the result is rounded, and unlike in the reference so is each softmax weight before it meets its latent
    assert (ours <= TOLERANCE[result.dtype] * (exact.abs() + terms)).all()
    assert ours.mean() <= 1.6 * theirs.mean()


@pytest.mark.usefixtures("cpp")
def test_decode_attention_follows_a_peak_that_comes_late(random):
    # key 70 outweighs all before it: sums of the first page must shrink to nothing
    pages, table, kv_tokens = paged(random, [71], 32)
    q = 30 * pages[table[0, 1], 6][None, None]
    result = ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, kv_tokens - 1), latent_dim=16, scale=1.0)
    assert torch.equal(result[0, 0], pages[table[0, 1], 6, :16])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("heads", [18, 70])
def test_decode_attention_of_a_request_has_the_same_bits_in_any_company(random, heads, threads):
    pages, table, kv_tokens = paged(random, [200, 1, 64, 130, 65, 499], 96)
    q = random(len(kv_tokens), heads, 96, seed=1)

    def attend(requests, columns):
        return ops.mla_decode(
            q[requests],
            PagedKeys(pages, table[requests, :columns], kv_tokens[requests], kv_tokens[requests] - 1),
            latent_dim=64,
            scale=0.1,
        )

    threads(2)
    whole = attend(torch.arange(6), 8)
    for num_threads in (1, 2):
        threads(num_threads)
        for requests, columns in [([0], 4), ([1, 2], 1), ([4, 0, 3], 5), ([5, 4, 3, 2, 1, 0], 8)]:
            assert torch.equal(attend(torch.tensor(requests), columns), whole[requests])
    # neither do heads depend on each other
    others = ops.mla_decode(q[:, 7:15], PagedKeys(pages, table, kv_tokens, kv_tokens - 1), latent_dim=64, scale=0.1)
    assert torch.equal(others, whole[:, 7:15])


@pytest.mark.usefixtures("cpp")
def test_queries_of_one_step_have_the_bits_of_queries_one_by_one(random):
    pages, table, kv_tokens = paged(random, [70], 48)
    q, positions = random(8, 4, 48, seed=1), torch.arange(62, 70)
    together = ops.mla_decode(q, PagedKeys(pages, table, kv_tokens, positions), latent_dim=32, scale=0.1)
    for row, position in enumerate(positions.tolist()):
        alone = ops.mla_decode(
            q[row : row + 1],
            PagedKeys(pages, table, torch.tensor([position + 1]), positions[row : row + 1]),
            latent_dim=32,
            scale=0.1,
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize(
    ("heads", "nope", "rotary", "v_dim", "latent_dim"),
    [(1, 5, 1, 16, 48), (3, 16, 8, 32, 48), (2, 6, 4, 11, 48), (16, 64, 32, 64, 48), (3, 7, 2, 5, 13)],
)
@pytest.mark.parametrize("context", [1, 64, 150])
def test_prefill_attention_is_as_good_as_the_reference_and_cut_anywhere_gives_the_same_bits(
    random, heads, nope, rotary, v_dim, latent_dim, context, threads
):
    pages, table, _ = paged(random, [context], latent_dim + rotary)
    q, kv_b = random(context, heads, nope + rotary, seed=1), random(heads, nope + v_dim, latent_dim, seed=2) / 7
    options = {"v_dim": v_dim, "scale": (nope + rotary) ** -0.5}

    def attend(function, start, stop):
        keys = PagedKeys(pages, table[:1], torch.tensor([stop]), torch.arange(start, stop))
        return function(q[start:stop], keys, kv_b, torch.tensor([stop - start]), **options)

    threads(2)
    whole = attend(ops.mla_prefill, 0, context)
    kept = pages[table[0]].flatten(0, 1)[:context]
    kv = (kept[:, :latent_dim].double() @ kv_b.double().flatten(0, 1).T).unflatten(-1, (heads, -1))
    keys = torch.cat([kv[..., :nope], kept[:, None, latent_dim:].double().expand(-1, heads, -1)], -1)
    scores = torch.einsum("tha,xha->htx", q.double(), keys) * options["scale"]
    weights = scores.masked_fill(torch.ones(context, context).triu(1).bool(), -torch.inf).softmax(-1)
    exact = torch.einsum("htx,xhv->thv", weights, kv[..., nope:])
    ours, theirs = (whole - exact).abs(), (attend(reference_mla.mla_prefill, 0, context) - exact).abs()
    assert torch.isfinite(whole).all()
    if whole.dtype is torch.float32:
        assert ours.max() <= FLOAT32 * kv.abs().max()
    else:
        assert ours.mean() <= MOST_OF_REFERENCE * theirs.mean()
        assert ours.max() <= 2 * theirs.max()
    for num_threads, start, stop in [(1, 0, context), (2, 0, 1), (1, context // 3, context), (2, context // 5, 70)]:
        threads(num_threads)
        if start < stop <= context:
            assert torch.equal(attend(ops.mla_prefill, start, stop), whole[start:stop])


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("functions", [ops, reference_mla], ids=["C++", "reference"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad", [70, 75, 100, 127])
@pytest.mark.parametrize("heads", [3, 16])
def test_a_token_that_is_not_finite_changes_no_bit_of_those_before_it(random, functions, heads, bad, number):
    """Other prompts share its pages. Zero times infinity is NaN."""
    pages, table, _ = paged(random, [140], 48 + 16)
    q, kv_b = random(140, heads, 32 + 16, seed=1), random(heads, 32 + 32, 48, seed=2) / 7
    absorbed = random(140, heads, 48 + 16, seed=3)

    def attend(start, stop):
        keys = PagedKeys(pages, table[:1], torch.tensor([stop]), torch.arange(start, stop))
        options = {"v_dim": 32, "scale": 0.1}
        prefilled = functions.mla_prefill(q[start:stop], keys, kv_b, torch.tensor([stop - start]), **options)
        return prefilled, functions.mla_decode(absorbed[start:stop], keys, latent_dim=48, scale=0.1)

    before = attend(60, 140)
    pages[table[0, bad // 64], bad % 64] = number
    for result, expected in zip(attend(60, 140), before, strict=True):
        assert torch.equal(result[: bad - 60], expected[: bad - 60])
        assert not torch.isfinite(result[bad - 60 :]).any()


@pytest.mark.usefixtures("cpp")
def test_a_request_without_tokens_gives_zeros(random):
    pages, table, _ = paged(random, [5], 32)
    nothing = torch.tensor([0])
    result = ops.mla_decode(random(1, 2, 32), PagedKeys(pages, table, nothing, nothing), latent_dim=16, scale=1.0)
    assert not result.any()


@pytest.mark.usefixtures("cpp")
def test_wrong_shapes_are_refused(random):
    x, weight = random(3, 8), random(4, 9)
    with pytest.raises(RuntimeError, match="x is 8 wide, weight 9"):
        ops.linear(x, weight)
    with pytest.raises(RuntimeError, match="num_rows add up to 2, x has 3"):
        ops.grouped_mlp(x, torch.tensor([2]), random(1, 12, 8), random(1, 8, 6))
    with pytest.raises(RuntimeError, match="room for 3"):
        ops.masked_mlp(x[None], torch.tensor([4]), random(1, 12, 8), random(1, 8, 6))
    with pytest.raises(RuntimeError, match="page 9"):
        ops.mla_decode(
            random(1, 2, 32),
            PagedKeys(random(2, 64, 32), torch.tensor([[9]]), torch.tensor([3]), torch.tensor([2])),
            latent_dim=16,
            scale=1.0,
        )


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_a_whole_model_does_not_depend_on_batch_chunks_leftovers_or_threads(seed, threads):
    model = Transformer.load(RANDOM_MODEL, dtype=torch.bfloat16, backend="cpu")
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, 96, (length,), generator=generator) for length in (1, 7, 64, 65, 130, 33, 2, 200)]
    order = torch.randperm(len(prompts), generator=generator).tolist()
    threads(2)
    together = PagedRequests(model, prompts, max_new_tokens=8, seed=seed, garbage=10.0 ** (5 * seed))
    together.prefill(order, [(1000,), (64, 13, 1, 100, 7), (50,)][seed])
    together.decode_greedily(order, 8)
    threads(1)
    for i, prompt in enumerate(prompts):
        alone = PagedRequests(model, [prompt], max_new_tokens=8)
        alone.prefill([0], [1000])
        alone.decode_greedily([0], 8)
        assert torch.equal(together.all_logits(i), alone.all_logits(0)), f"request {i} of {order}"


@pytest.mark.usefixtures("cpp")
def test_cpu_by_name_takes_the_reference_where_nothing_else_was_written():
    chosen = Ops.select("cpu")
    assert chosen.linear.implementation is ops.linear
    assert chosen.mla_decode.implementation is ops.mla_decode
    assert chosen.silu_mul.implementation is ops.silu_mul
    rows = registry.explain("cpu")
    assert {row.op for row in rows if row.chosen and row.candidate == "cpu"} >= {"linear", "grouped_mlp", "masked_mlp"}


@pytest.mark.usefixtures("cpp")
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_auto_takes_them_for_all_operations_of_a_model(dtype):
    chosen = Ops.select("auto", dtype)
    assert chosen.linear.implementation is ops.linear
    assert chosen.names(dtype) == build.numerics(dtype)
    (row,) = [row for row in registry.explain() if (row.op, row.candidate) == ("linear", "cpu")]
    assert (row.chosen, row.reason) == (True, "in use")
