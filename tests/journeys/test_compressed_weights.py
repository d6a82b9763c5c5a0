"""DeepSeek-V4 folders in the published forms: experts in FP4 or FP8, the rest in FP8, or all in bfloat16.

Jobs on them give the answers of the same weights multiplied out, of a converted folder, and of several ranks.
"""

import json
import re
import shutil
from functools import cache

import pyarrow as pa
import pytest
import torch

from batchinfer.model.packed_folder import read_packed
from support.compressed_models import published_tensors, random_model, write_compressed
from support.jobs import answers, batchinfer, write_job, write_shard
from support.paths import RANDOM_MODEL
from support.tiers import first_in_make_test

pytestmark = pytest.mark.usefixtures("cpp")

SIZES = {"hidden_size": 160, "moe_intermediate_size": 64, "sliding_window": 8, "index_topk": 3}
SIZES |= {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0], "num_nextn_predict_layers": 1}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
FP8 |= {"activation_scheme": "dynamic"}
KEYS = {
    "fp4": {"quantization_config": FP8, "expert_dtype": "fp4"},
    "fp8": {"quantization_config": FP8, "expert_dtype": "fp8"},
    "bfloat16": {},
}
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_IN_FP8 = re.compile(r"(attn\.w\w+|indexer\.wq_b|shared_experts\.w[123]|\.experts\.\d+\.w[123])\.weight$")
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight [N, K] as bytes of two columns each, the even one low; E8M0 [N, K / 32]; and multiplied out."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - _VALUES).abs().argmin(-1)
    exact = (_VALUES[codes] * exponents.exp2()[..., None]).flatten(1)
    codes = codes.flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return packed, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu), exact


def in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight as E4M3, E8M0 for each 128 x 128, and multiplied out."""
    num_rows, num_columns = (-(-size // 128) for size in weight.shape)
    exponents = torch.empty(num_rows, num_columns)
    stored, exact = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(num_rows):
        for column in range(num_columns):
            block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            exponents[row, column] = (weight[block].abs().max() / 448).log2().ceil()
            stored[block] = (weight[block] / exponents[row, column].exp2()).to(torch.float8_e4m3fn)
            exact[block] = stored[block].float() * exponents[row, column].exp2()
    return stored, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu), exact


@cache
def forms() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return by form a model's tensors as they are stored, and multiplied out."""
    drawn = published_tensors(random_model(**SIZES))
    stores = {"fp4": (in_fp4, in_fp8), "fp8": (in_fp8, in_fp8)}
    found = {}
    for form in KEYS:
        stored, exact = {}, {}
        for name, tensor in drawn.items():
            is_small = tensor.dtype != torch.float32 or tensor.dim() != 2 or "hc_" in name or name.endswith("ape")
            if form in stores and _IN_FP8.search(name):
                store = stores[form][0 if _EXPERT.search(name) else 1]
                stored[name], stored[name.replace(".weight", ".scale")], exact[name] = store(tensor)
            else:
                stored[name] = exact[name] = tensor if is_small else tensor.bfloat16()
        stored["mtp.0.e_proj.weight"] = torch.zeros(4, 4)  # a layer that is not read
        found[form] = stored, exact
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    draw = torch.Generator().manual_seed(9)
    prompts = [torch.randint(2, 96, (length,), generator=draw).tolist() for length in (1, 6, 131, 40)]
    write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
    return folder


def model_folder(folder, form, *, multiplied_out=False):
    target = folder / (f"{form}-out" if multiplied_out else form)
    if not target.exists():
        keys = {} if multiplied_out else KEYS[form]
        write_compressed(target, forms()[form][multiplied_out], **SIZES, **keys)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(RANDOM_MODEL / file, target / file)
    return target


def run(folder, name, model, dtype, **cluster):
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"prompt": None, "token_ids": "ids"},
        model={"path": str(model), "dtype": dtype},
        output={"dir": name},
        sampling={"max_tokens": 6, "ignore_eos": True, "logprobs": 2},
        cluster=cluster,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    return answers(folder / name)


@pytest.mark.parametrize("form", first_in_make_test(KEYS))
def test_stored_weights_give_the_answers_of_weights_multiplied_out(folder, form):
    found = [
        run(folder, f"{form}-{out}", model_folder(folder, form, multiplied_out=out), "float32") for out in (False, True)
    ]
    assert found[0] == found[1]


PAIRS = ["fp4 fp4", "fp8 int4", "fp4 int4", "fp4 fp8", "fp8 fp8", "bfloat16 bfloat16", "bfloat16 int4", "fp8 bfloat16"]


@pytest.mark.parametrize("pair", first_in_make_test(PAIRS, 2))
def test_a_converted_folder_and_ranks_with_parts_of_the_experts_give_the_same_answers(folder, pair):
    form, dtype = pair.split()
    model, name = model_folder(folder, form), f"{form}-{dtype}"
    wanted = run(folder, f"{name}-one", model, dtype)
    converted = folder / f"{name}-packed"
    ended = batchinfer("convert", model, converted, "--dtype", dtype)
    assert ended.code == 0, ended.err
    assert read_packed(converted).dtype == dtype
    assert json.loads((converted / "config.json").read_text())["model_type"] == "deepseek_v4"
    assert run(folder, f"{name}-of-packed", converted, dtype) == wanted
    ranks = {"prefill_ranks": 2, "decode_ranks": 2, "redundant_experts": 2, "prefill_tokens": 64}
    assert run(folder, f"{name}-ranks", model, dtype, **ranks) == wanted
    assert run(folder, f"{name}-ranks-of-packed", converted, dtype, **ranks) == wanted


def test_layers_that_are_not_read_are_named(folder):
    plan = write_job(
        folder,
        name="named.toml",
        input={"prompt": None, "token_ids": "ids"},
        output={"dir": "named"},
        model={"path": str(model_folder(folder, "fp4"))},
        cluster={"speculate": "auto"},
    )
    assert "mtp.*" in batchinfer("run", plan).err
