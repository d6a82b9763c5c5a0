"""Reading checkpoints: tensors that are found, their form in memory, and bytes that are not read."""

from __future__ import annotations

import weakref

import pytest
import torch

from batchinfer.model.checkpoint import Checkpoint
from batchinfer.model.config import load_model_config
from batchinfer.model.integers import from_compressed_tensors
from batchinfer.model.moe import swiglu
from batchinfer.model.ops import Ops
from batchinfer.model.stored_weights import StoredWeights
from batchinfer.model.weight_loading import exchange_experts
from batchinfer.rank.load import BITS
from batchinfer.records import ModelError
from batchinfer_kernels.cpu import build
from batchinfer_kernels.reference import grouped_mlp, linear, quantize_fp8_block, silu_mul
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.weight_format import format_of
from support.checkpoints import edit_config, make_checkpoint, read_tensors, split_into_shards, write_tensors
from support.packed_weights import AWQ, GPTQ, pack, pack_int4, pack_with_zeros
from support.small_weights import FP8, IN_BFLOAT16, RAGGED, WHOLE_GROUPS, change, load, quantise


def all_tensors(value):
    """Every tensor inside nested weights, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, int):
        return []
    parts = value if isinstance(value, tuple) else [getattr(value, name) for name in value.__slots__]
    return [tensor for part in parts for tensor in all_tensors(part)]


def same(left, right):
    left, right = all_tensors(left), all_tensors(right)
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_tensors_arrive_where_they_belong(tmp_path):
    make_checkpoint(tmp_path, "v3-groups")
    stored, weights = read_tensors(tmp_path), load(tmp_path)
    moe, prefix = weights.layers[1].mlp, "model.layers.1.mlp"
    assert torch.equal(moe.gate_up_EFD[5, :24], stored[f"{prefix}.experts.5.gate_proj.weight"])
    assert torch.equal(moe.gate_up_EFD[5, 24:], stored[f"{prefix}.experts.5.up_proj.weight"])
    assert torch.equal(moe.down_EDF[5], stored[f"{prefix}.experts.5.down_proj.weight"])
    assert torch.equal(moe.router_bias_E, stored[f"{prefix}.gate.e_score_correction_bias"])
    kv_up = weights.layers[2].attention.kv_up_HZC
    assert kv_up.shape == (2, 24, 16)
    assert torch.equal(kv_up.flatten(0, 1), stored["model.layers.2.self_attn.kv_b_proj.weight"])
    assert weights.expert_ids == (tuple(range(16)),) * 2


def test_the_tensors_of_indexers_arrive_in_the_layers_that_have_one(tmp_path):
    make_checkpoint(tmp_path, "glm-dsa-shared")
    stored, layers = read_tensors(tmp_path), load(tmp_path, dtype=torch.bfloat16).layers
    assert [layer.attention.indexer is not None for layer in layers] == [True, False, True, False]
    indexer, prefix = layers[2].attention.indexer, "model.layers.2.self_attn.indexer"
    names = {"query": "wq_b.weight", "key": "wk.weight", "key_norm": "k_norm.weight", "key_bias": "k_norm.bias"}
    for name, of_file in names.items():
        assert torch.equal(getattr(indexer, name), stored[f"{prefix}.{of_file}"].bfloat16())
    assert torch.equal(indexer.heads, stored[f"{prefix}.weights_proj.weight"])


@pytest.mark.parametrize("name", ["v3", "v32"])
def test_an_fp8_checkpoint_equals_its_dequantised_twin_exactly(tmp_path, name):
    quantised, twin = tmp_path / "fp8", tmp_path / "plain"
    for folder in (quantised, twin):
        make_checkpoint(folder, name, **RAGGED)
    write_tensors(twin, quantise(quantised))
    assert same(load(quantised), load(twin))
    assert same(load(quantised, dtype=torch.bfloat16), load(twin, dtype=torch.bfloat16))


# rows of 12 values as compressed-tensors 0.20.0 packs them in 4 bits (pack_to_int32); the first is 0xfea98710, 0xb0ff
#   values         -8 -7 -1  0  1  2  6  7 | 7  7 -8  3
#   four bits each  0  1  7  8  9  a  e  f | f  f  0  b      the first in the lowest bits
PACKED = torch.tensor([[-22444272, 45311], [-2004318072, 17767], [1514880045, 7695]], dtype=torch.int32)
VALUES = torch.tensor(
    [
        [-8, -7, -1, 0, 1, 2, 6, 7, 7, 7, -8, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, -1, -2, -3, -4],
        [5, -6, 4, -5, 3, -4, 2, -3, 7, -8, 6, -7],
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 4, 12])
def test_packed_values_are_those_of_compressed_tensors(group, dtype):
    assert torch.equal(pack(VALUES), PACKED)
    scale = torch.rand(3, 12 // group, generator=torch.Generator().manual_seed(group)).bfloat16().float()
    exact = VALUES.double() * scale.double().repeat_interleave(group, dim=1)  # 4 bits × 8 bits: exact in float32
    assert torch.equal(from_compressed_tensors(PACKED, scale, group).widened(dtype), exact.float().to(dtype))


# groups that fill integers or not, of all projections or of experts alone, with several formats of scales
INT4 = {
    "kimi-k2": {"words": ".experts."},
    "kimi-k25": {"words": ".experts.", "group": 8},
    "v3-no-q-lora": {"words": "_proj", "group": 4, "scale_dtype": torch.float16},
    "v3-odd-sizes": {"words": ".mlp.", "group": 9, "scale_dtype": torch.float32},
}


def packed_and_wide(folder, name):
    """Folders of a packed checkpoint and of the same weights wide."""
    sizes = {"hidden_size": 72, "moe_intermediate_size": 36, "intermediate_size": 63} if name == "v3-odd-sizes" else {}
    for part in ("packed", "wide"):
        make_checkpoint(folder / part, name, **WHOLE_GROUPS | sizes)
    write_tensors(folder / "wide", pack_int4(folder / "packed", **INT4[name]))
    return folder / "packed", folder / "wide"


def in_bfloat16(folder):
    """Store all floats in bfloat16; scales are already."""
    tensors = read_tensors(folder)
    write_tensors(folder, {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()})


@pytest.mark.parametrize("name", INT4)
def test_a_packed_checkpoint_equals_its_dequantised_twin_exactly(tmp_path, name):
    packed, wide = packed_and_wide(tmp_path, name)
    options = [{}, {"dtype": torch.bfloat16}, IN_BFLOAT16]
    assert [same(load(packed, **chosen), load(wide, **chosen)) for chosen in options] == [True] * 3
    if "scale_dtype" not in INT4[name]:
        in_bfloat16(packed)
        in_bfloat16(wide)  # rounded where it is stored, not where it is loaded
        assert [same(load(packed, **chosen), load(wide, **chosen)) for chosen in options[1:]] == [True] * 2


def test_one_expert_of_a_packed_checkpoint_is_wide_at_a_time(tmp_path, monkeypatch):
    packed, _ = packed_and_wide(tmp_path, "kimi-k2")
    read, most, original = [], 0, StoredWeights.read

    def watched(self, name, dtype, **how):
        nonlocal most
        weight = original(self, name, dtype, **how)
        read.append(weakref.ref(weight))
        most = max(most, sum(one() is not None for one in read))
        return weight

    monkeypatch.setattr(StoredWeights, "read", watched)
    load(packed)
    assert len(read) > 50
    assert most <= 3  # gate, up and down


def test_shards_and_their_index_equal_a_single_file(tmp_path):
    make_checkpoint(tmp_path, "v3")
    single = load(tmp_path)
    split_into_shards(tmp_path, 3)
    assert same(load(tmp_path), single)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert same(load(tmp_path), single)  # without an index every *.safetensors is read


def test_router_stays_float32_in_bfloat16(tmp_path):
    make_checkpoint(tmp_path, "v3")
    weights, stored = load(tmp_path, dtype=torch.bfloat16), read_tensors(tmp_path)
    moe = weights.layers[1].mlp
    assert torch.equal(moe.router_bias_E, stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert torch.equal(moe.router_ED, stored["model.layers.1.mlp.gate.weight"])
    dtypes = {tensor.dtype for tensor in all_tensors(weights.layers[0])}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("packed", [False, True])
def test_only_the_experts_asked_for_are_read(tmp_path, monkeypatch, packed):
    make_checkpoint(tmp_path, "v3")
    if packed:
        pack_int4(tmp_path, group=8)
    everything, read = load(tmp_path), []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: read.append(name) or original(self, name))
    part = load(tmp_path, expert_ids=[(6, 2), (2, 2, 0)])  # per layer; a redundant slot repeats an expert
    kept = {tuple(name.split(".")[2:6:3]) for name in read if ".mlp.experts." in name}
    assert kept == {("1", "2"), ("1", "6"), ("2", "2"), ("2", "0")}
    assert part.expert_ids == ((6, 2), (2, 2, 0))
    assert torch.equal(part.layers[1].mlp.down_EDF, everything.layers[1].mlp.down_EDF[[6, 2]])
    assert torch.equal(part.layers[2].mlp.down_EDF, everything.layers[2].mlp.down_EDF[[2, 2, 0]])
    assert torch.equal(part.layers[1].mlp.router_ED, everything.layers[1].mlp.router_ED)
    with pytest.raises(ModelError, match="expert_ids"):
        load(tmp_path, expert_ids=[(0,), (8,)])


# whole blocks everywhere but in the latent; and MLPs that end within a block
SIZES = {
    "whole": {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "kv_lora_rank": 136},
    "ragged": RAGGED,
}


def stored_bits(folder, *names):
    """Values and scales of FP8 weights as they are in the file, each [1, ...]."""
    tensors = read_tensors(folder)
    return [(tensors[name].view(torch.uint8)[None], tensors[f"{name}_scale_inv"][None]) for name in names]


def held_bits(weight, num_parts=1):
    """The same of a weight in memory that is several above each other."""
    values, scales = weight.values.view(torch.uint8), weight.scales
    return list(zip(values.unflatten(0, (num_parts, -1)), scales.unflatten(0, (num_parts, -1)), strict=True))


def assert_holds(weight, stored):
    """Bit for bit what is stored, and zeros where the last block is not full."""
    held = held_bits(weight, len(stored))
    for (values, scales), (stored_values, stored_scales) in zip(held, stored, strict=True):
        rows, columns = stored_values.shape[1:]
        assert torch.equal(values[:rows, :columns], stored_values[0])
        assert torch.equal(scales, stored_scales[0])
        assert not values[rows:].any()
        assert not values[:, columns:].any()


@pytest.mark.parametrize("sizes", SIZES)
def test_an_fp8_checkpoint_is_held_in_fp8_bit_for_bit(tmp_path, sizes):
    make_checkpoint(tmp_path, "v3", **SIZES[sizes])
    plain = quantise(tmp_path)
    weights = load(tmp_path, **IN_BFLOAT16)
    for index, layer in enumerate(weights.layers):
        attention, prefix = layer.attention, f"model.layers.{index}.self_attn"
        for held, name in [
            (attention.q_down, "q_a_proj"),
            (attention.q, "q_b_proj"),
            (attention.kv_down, "kv_a_proj_with_mqa"),
            (attention.out, "o_proj"),
        ]:
            assert_holds(held.weight, stored_bits(tmp_path, f"{prefix}.{name}.weight"))
        kv_up = plain[f"{prefix}.kv_b_proj.weight"].bfloat16()
        assert torch.equal(attention.kv_up_HZC.flatten(0, 1), kv_up)
    dense, shared = weights.layers[0].mlp, weights.layers[2].mlp.shared
    for mlp, prefix in [(dense, "model.layers.0.mlp"), (shared, "model.layers.2.mlp.shared_experts")]:
        names = [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
        assert_holds(mlp.gate_up.weight, stored_bits(tmp_path, *names[:2]))
        assert_holds(mlp.down.weight, stored_bits(tmp_path, *names[2:]))
    moe = weights.layers[1].mlp
    for expert in range(8):
        names = [f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        assert_holds(moe.gate_up_EFD[expert], stored_bits(tmp_path, *names[:2]))
        assert_holds(moe.down_EDF[expert], stored_bits(tmp_path, *names[2:]))
    others = [weights.embedding, weights.norm, weights.lm_head, weights.layers[0].attention.kv_norm]
    assert {tensor.dtype for tensor in others} == {torch.bfloat16}
    assert moe.router_ED.dtype == torch.float32


def test_a_wider_checkpoint_is_rounded_once_each_half_for_itself(tmp_path):
    make_checkpoint(tmp_path, "v2-groups", **RAGGED)  # its MLPs have biases
    stored, weights = read_tensors(tmp_path), load(tmp_path, **IN_BFLOAT16)
    out = stored["model.layers.1.self_attn.o_proj.weight"].bfloat16()
    expected = BlockScaled(*quantize_fp8_block(out))
    assert_holds(
        weights.layers[1].attention.out.weight, [(expected.values.view(torch.uint8)[None], expected.scales[None])]
    )
    gate_up, x = weights.layers[0].mlp.gate_up, torch.randn(3, 144).bfloat16()
    assert gate_up.weight.values.shape == (2 * 256, 144)  # 200 rows in whole blocks
    gate_TF, up_TF = linear(x, *gate_up).chunk(2, dim=-1)
    for half, part in ((gate_TF, "gate"), (up_TF, "up")):
        plain = stored[f"model.layers.0.mlp.{part}_proj.weight"].bfloat16()
        bias = stored[f"model.layers.0.mlp.{part}_proj.bias"].bfloat16()
        alone = linear(x, BlockScaled(*quantize_fp8_block(plain)), bias)
        assert torch.equal(half[:, :200], alone)
        assert not half[:, 200:].any()


def test_zeros_behind_an_mlp_s_width_change_no_result(tmp_path):
    make_checkpoint(tmp_path, "v3", **RAGGED)
    quantise(tmp_path)
    stored, weights, x = read_tensors(tmp_path), load(tmp_path, **IN_BFLOAT16), torch.randn(5, 144).bfloat16()

    def alone(prefix):
        gate, up, down = (
            BlockScaled(stored[f"{prefix}.{part}_proj.weight"], stored[f"{prefix}.{part}_proj.weight_scale_inv"])
            for part in ("gate", "up", "down")
        )
        return linear(silu_mul(linear(x, gate), linear(x, up)), down)

    assert torch.equal(swiglu(IN_BFLOAT16["ops"], x, weights.layers[0].mlp), alone("model.layers.0.mlp"))
    moe = weights.layers[1].mlp
    y = grouped_mlp(x, torch.tensor([0, 0, 5, 0, 0, 0, 0, 0]), moe.gate_up_EFD, moe.down_EDF)
    assert torch.equal(y, alone("model.layers.1.mlp.experts.2"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(backend, dtype) for backend in ("reference", "cpu") for dtype in ("bfloat16", "fp8", "int4")],
)
def test_experts_change_places_and_come_from_the_checkpoint(backend, dtype, packed, tmp_path):
    if backend == "cpu" and build.why_not() is not None:
        pytest.skip(f"no C++ operations on this machine: {build.why_not()}")
    make_checkpoint(tmp_path, "v3")
    if packed:
        pack_int4(tmp_path, group=8)
    config = load_model_config(tmp_path)
    options = {"dtype": torch.bfloat16, "ops": Ops.select(backend, torch.bfloat16, **BITS.get(dtype, {}))}
    before, after = [(6, 2, 0), (2, 2, 7)], [(2, 6, 1), (7, 2, 2)]
    moved = exchange_experts(load(tmp_path, expert_ids=before, **options), tmp_path, config, after)
    expected = load(tmp_path, expert_ids=after, **options)
    assert moved.expert_ids == expected.expert_ids
    for layer in (1, 2):
        for name in ("gate_up_EFD", "down_EDF"):
            ours, wanted = getattr(moved.layers[layer].mlp, name), getattr(expected.layers[layer].mlp, name)
            assert type(ours) is type(wanted)
            for left, right in zip(format_of(ours).slots(ours), format_of(wanted).slots(wanted), strict=True):
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_biases_of_experts_change_places_with_them(tmp_path):
    make_checkpoint(tmp_path, "gpt-oss")
    config, before, after = load_model_config(tmp_path), [(6, 2, 0)] * 3, [(2, 5, 6)] * 3
    moved = exchange_experts(load(tmp_path, expert_ids=before), tmp_path, config, after)
    assert same(moved, load(tmp_path, expert_ids=after))


@pytest.mark.parametrize(("head_dim", "is_kept"), [(64, True), (48, False)])
def test_queries_keys_and_values_in_fp8_are_joined_bit_for_bit_unless_a_block_would_have_rows_of_two(
    tmp_path, head_dim, is_kept
):
    make_checkpoint(tmp_path, "qwen3", hidden_size=128, num_attention_heads=4, head_dim=head_dim)
    plain = quantise(tmp_path)
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    held = load(tmp_path, **IN_BFLOAT16).layers[1].attention.qkv.weight
    if is_kept:
        stored = [bits for name in names for bits in stored_bits(tmp_path, name)]
        assert torch.equal(held.values.view(torch.uint8), torch.cat([values[0] for values, _ in stored]))
        assert torch.equal(held.scales, torch.cat([scales[0] for _, scales in stored]))
    else:
        rounded = BlockScaled(*quantize_fp8_block(torch.cat([plain[name].bfloat16() for name in names])))
        assert torch.equal(held.values.view(torch.uint8), rounded.values.view(torch.uint8))
        assert torch.equal(held.scales, rounded.scales)


@pytest.mark.parametrize(("head_dim", "is_kept"), [(64, True), (48, False)])
def test_neighbouring_rotary_pairs_are_put_a_half_apart_in_their_blocks_if_they_stay_there(tmp_path, head_dim, is_kept):
    make_checkpoint(tmp_path, "glm4", hidden_size=128, num_attention_heads=4, head_dim=head_dim, rope_parameters=None)
    plain = quantise(tmp_path)
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    half = head_dim // 2  # which is rotated
    pairs = [*range(0, half, 2), *range(1, half, 2), *range(half, head_dim)]
    order = [head * head_dim + row for head in range(6) for row in pairs] + list(range(6 * head_dim, 8 * head_dim))
    held = load(tmp_path, **IN_BFLOAT16).layers[1].attention.qkv
    if is_kept:
        stored = stored_bits(tmp_path, *names)
        assert torch.equal(held.weight.values.view(torch.uint8), torch.cat([values[0] for values, _ in stored])[order])
        assert torch.equal(held.weight.scales, torch.cat([scales[0] for _, scales in stored]))
    else:
        rounded = BlockScaled(*quantize_fp8_block(torch.cat([plain[name].bfloat16() for name in names])[order]))
        assert torch.equal(held.weight.values.view(torch.uint8), rounded.values.view(torch.uint8))
    biases = [read_tensors(tmp_path)[name.replace("weight", "bias")] for name in names]
    assert torch.equal(held.bias, torch.cat(biases)[order].bfloat16())


@pytest.mark.parametrize("sizes", SIZES)
def test_experts_that_change_places_stay_the_stored_bytes(sizes, tmp_path):
    make_checkpoint(tmp_path, "v3", **SIZES[sizes])
    quantise(tmp_path)
    config, before, after = load_model_config(tmp_path), [(6, 2, 0), (2, 2, 7)], [(2, 6, 1), (7, 2, 2)]
    moved = exchange_experts(load(tmp_path, expert_ids=before, **IN_BFLOAT16), tmp_path, config, after)
    for layer, experts in zip((1, 2), after, strict=True):
        for slot, expert in enumerate(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            stored = stored_bits(tmp_path, *(f"{prefix}.{part}_proj.weight" for part in ("gate", "up")))
            assert_holds(moved.layers[layer].mlp.gate_up_EFD[slot], stored)
            assert_holds(moved.layers[layer].mlp.down_EDF[slot], stored_bits(tmp_path, f"{prefix}.down_proj.weight"))


JOINED = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}


def take_apart(folder, sizes):
    """Store the joined projections of a phi3 as a llama does."""
    heads, kv_heads = (sizes["head_dim"] * sizes[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        if name.endswith("qkv_proj.weight"):
            parts = dict(zip("qkv", tensor.split([heads, kv_heads, kv_heads]), strict=True))
            tensors |= {name.replace("qkv_proj", f"{part}_proj"): rows for part, rows in parts.items()}
        elif name.endswith("gate_up_proj.weight"):
            parts = dict(zip(("gate", "up"), tensor.chunk(2), strict=True))
            tensors |= {name.replace("gate_up", part): rows for part, rows in parts.items()}
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)
    edit_config(folder, model_type="llama", architectures=["LlamaForCausalLM"], sliding_window=None)


@pytest.mark.parametrize(
    ("store", "options"),
    [
        *((store, {}) for store in ("plain", "fp8", "compressed-tensors", "gptq", "awq")),
        *((store, IN_BFLOAT16) for store in ("plain", "compressed-tensors", "gptq", "awq")),
    ],
)
def test_joined_projections_equal_those_that_are_stored_apart(tmp_path, store, options):
    make_checkpoint(tmp_path, "phi3", **JOINED, intermediate_size=96)
    plain = read_tensors(tmp_path)
    if store == "fp8":
        plain = quantise(tmp_path)
    elif store == "compressed-tensors":
        plain = pack_int4(tmp_path, words="_proj.")
    elif store != "plain":
        plain = pack_with_zeros(tmp_path, GPTQ if store == "gptq" else AWQ)
    joined = load(tmp_path, **options)
    write_tensors(tmp_path, plain)
    edit_config(tmp_path, quantization_config=None)
    take_apart(tmp_path, JOINED)
    assert same(joined, load(tmp_path, **options))


@pytest.mark.parametrize("width", [96, 128])
def test_joined_projections_in_fp8_stay_bit_for_bit_unless_a_block_would_have_rows_of_gate_and_up(tmp_path, width):
    make_checkpoint(tmp_path, "phi3", **JOINED, intermediate_size=width)
    plain = quantise(tmp_path)
    layer, prefix = load(tmp_path, **IN_BFLOAT16).layers[1], "model.layers.1"
    for held, name in ((layer.attention.qkv, "self_attn.qkv_proj"), (layer.mlp.gate_up, "mlp.gate_up_proj")):
        if width == 128 or "qkv" in name:
            ((values, scales),) = stored_bits(tmp_path, f"{prefix}.{name}.weight")
        else:
            rounded = BlockScaled.empty(1, 256, 64)
            rounded.put(0, *plain[f"{prefix}.{name}.weight"].bfloat16().chunk(2))
            values, scales = rounded.values.view(torch.uint8), rounded.scales
        assert torch.equal(held.weight.values.view(torch.uint8), values[0])
        assert torch.equal(held.weight.scales, scales[0])


def test_extra_prediction_layers_and_known_leftovers_are_left_alone(tmp_path):
    make_checkpoint(tmp_path, "v3")  # 3 layers, num_nextn_predict_layers 1
    plain = load(tmp_path)
    change(
        tmp_path,
        model__layers__3__eh_proj__weight=torch.ones(2, 4),
        model__layers__3__mlp__experts__0__up_proj__weight=torch.ones(1),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
    )
    assert same(load(tmp_path), plain)
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"2 unknown: model\.layers\.3\.eh_proj\.weight, model\.layers\.3"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "store", "experts"),
    [
        ({}, None, None),
        ({"name": "v32"}, None, None),
        ({"name": "gpt-oss"}, None, None),
        ({"name": "qwen3-moe"}, quantise, None),
        (RAGGED, quantise, None),
        (WHOLE_GROUPS, pack_int4, None),
        (WHOLE_GROUPS, pack_int4, [0, 3, 3]),
        ({}, None, [0, 3, 3]),
        ({"tie_word_embeddings": True}, None, []),
    ],
    ids=[
        "all",
        "sparse",
        "turned and alternating",
        "fp8, joined",
        "fp8",
        "packed",
        "packed, some",
        "some, one of them twice",
        "tied",
    ],
)
def test_loading_tells_how_much_is_read_of_what_it_will_read(tmp_path, sizes, store, experts):
    make_checkpoint(tmp_path, **sizes)
    if store:
        store(tmp_path)
    config, told = load_model_config(tmp_path), []
    held = None if experts is None else [experts] * config.num_moe_layers
    load(tmp_path, expert_ids=held, on_read=lambda done, total: told.append((done, total)))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}, "the last tensor makes it all"
    if experts is None:  # each stored tensor that is not for training only
        stored = read_tensors(tmp_path)
        assert done[-1] == sum(tensor.nbytes for tensor in stored.values())


def test_a_layer_too_many_is_no_layer_for_multi_token_prediction(tmp_path):
    """transformers writes num_nextn_predict_layers = 1 for each DeepSeek V3, also for those without such a layer."""
    make_checkpoint(tmp_path, "v3")
    edit_config(tmp_path, num_nextn_predict_layers=1, num_hidden_layers=2)  # of 3
    with pytest.raises(ModelError, match=r"unknown: model\.layers\.2\."):
        load(tmp_path)


def test_a_tied_head_is_the_embedding(tmp_path):
    make_checkpoint(tmp_path, "v3-odd-sizes")
    assert "lm_head.weight" not in read_tensors(tmp_path)
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding
    change(tmp_path, lm_head__weight=weights.embedding.clone())  # some tools write it all the same
    told = []
    assert load(tmp_path, on_read=lambda done, total: told.append((done, total))).lm_head.abs().sum() > 0
    assert told[-1][0] == told[-1][1]


def test_a_tied_head_beside_another_one_is_refused(tmp_path):
    """transformers 5 uses the head that is stored, transformers 4 and vLLM the embedding."""
    make_checkpoint(tmp_path, "v3-odd-sizes")
    change(tmp_path, lm_head__weight=torch.zeros(96, 45))
    with pytest.raises(ModelError, match=r"lm_head.weight differs from the embedding, but tie_word_embeddings in conf"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            torch.zeros(96, 45).to(torch.float8_e4m3fn),
            r"lm_head\.weight is FP8, but there is no lm_head\.weight_scale_inv",
        ),
        (torch.zeros(96, 45, dtype=torch.int32), r"lm_head\.weight is I32; supported are"),
        (torch.zeros(95, 45), r"lm_head\.weight is \[95, 45\] instead of \[96, 45\]"),
    ],
)
def test_the_header_of_a_tied_head_is_checked_too(tmp_path, head, words):
    make_checkpoint(tmp_path, "v3-odd-sizes")
    edit_config(tmp_path, quantization_config=FP8)
    change(tmp_path, lm_head__weight=head)
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def powers_of_two(folder, dtype):
    """Change the scales of an FP8 checkpoint to powers of two in this dtype, as `scale_fmt` "ue8m0" means them."""
    tensors = read_tensors(folder)
    scales = {name: scale.log2().round().exp2() for name, scale in tensors.items() if name.endswith("_scale_inv")}
    write_tensors(folder, tensors | {name: scale.to(dtype) for name, scale in scales.items()})
    edit_config(folder, quantization_config=FP8 | {"scale_fmt": "ue8m0"})


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, IN_BFLOAT16], ids=["float32", "bfloat16", "fp8"])
def test_scales_in_e8m0_equal_those_in_float32(tmp_path, options):
    for folder, dtype in ((tmp_path / "e8m0", torch.float8_e8m0fnu), (tmp_path / "float32", torch.float32)):
        make_checkpoint(folder, "v3", **RAGGED)
        quantise(folder)
        powers_of_two(folder, dtype)
    assert (
        read_tensors(tmp_path / "e8m0")["model.layers.0.self_attn.o_proj.weight_scale_inv"].dtype
        == torch.float8_e8m0fnu
    )
    assert same(load(tmp_path / "e8m0", **options), load(tmp_path / "float32", **options))
