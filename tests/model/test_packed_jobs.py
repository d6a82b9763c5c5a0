"""Whole jobs over checkpoints of packed 4-bit weights: the answers of the same weights stored wide, or one sentence."""

import json
import shutil

import pyarrow as pa
import pytest
import torch

from batchinfer.config import load_job
from batchinfer.model.config import load_model_config
from batchinfer.model.integer_forms import IntegerForm
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.model.weight_loading import load_weights
from batchinfer.plan.first_dtype import stored_dtype
from batchinfer.plan.preflight import check_job
from batchinfer.rank.load import BITS, DTYPES
from support.checkpoints import edit_config, make_checkpoint, read_tensors, write_tensors
from support.jobs import answers, batchinfer, write_job, write_shard
from support.packed_weights import int4_config, pack_int4
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL

pytestmark = pytest.mark.all  # make test: test_integers, test_quantization

SIZES = {"hidden_size": 64, "moe_intermediate_size": 96}  # whole groups of 32
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"
ONE_RANK = {"prefill_ranks": 1}
TWO_RANKS = {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 2, "redundant_experts": 2, "overlap": True}


@pytest.fixture(scope="module", params=["kimi-k25", pytest.param("kimi-k2", marks=pytest.mark.slow)])
def folder(request, tmp_path_factory):
    """Prompts, a packed checkpoint, and the same weights wide; a carrier says in its text_config what is packed."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("packed", "wide"):
        make_checkpoint(folder / name, request.param, **SIZES)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(RANDOM_MODEL / file, folder / name / file)
    write_tensors(folder / "wide", pack_int4(folder / "packed"))
    if request.param == "kimi-k25":
        config = json.loads((folder / "packed" / "config.json").read_text())
        text = config["text_config"] | {"quantization_config": config["quantization_config"]}
        edit_config(folder / "packed", quantization_config=None, text_config=text)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in (70, 5, 64, 1, 33)]
    write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array([*prompts, prompts[0]], pa.list_(pa.int32()))})
    return folder


def job_of(folder, model, dtype="float32", **parts):
    sampling = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    given = {"input": {"prompt": None, "token_ids": "ids"}, "model": {"path": model, "dtype": dtype}}
    return write_job(folder, **given, sampling=sampling, **parts)


def answered(folder, model, dtype, cluster):
    """Tokens and log-probabilities."""
    name = f"{model}-{dtype}-{len(cluster)}"
    job = job_of(folder, model, dtype, output={"dir": name}, cluster=cluster)
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    found = answers(folder / name)
    assert [len(row["token_ids"]) for row in found] == [6] * 6
    return found


@pytest.mark.parametrize(
    ("dtype", "cluster"),
    [
        pytest.param("float32", ONE_RANK, id="float32-one rank"),
        pytest.param("bfloat16", TWO_RANKS, id="bfloat16-two ranks"),
        pytest.param("fp8", TWO_RANKS, id="fp8-two ranks"),
        pytest.param("float32", TWO_RANKS, id="float32-two ranks", marks=pytest.mark.slow),
        pytest.param("bfloat16", ONE_RANK, id="bfloat16-one rank", marks=pytest.mark.slow),
        pytest.param("fp8", ONE_RANK, id="fp8-one rank", marks=pytest.mark.slow),
    ],
)
def test_answers_and_their_log_probabilities_are_those_of_the_weights_stored_wide(folder, dtype, cluster):
    assert answered(folder, "packed", dtype, cluster) == answered(folder, "wide", dtype, cluster)


def test_memory_is_asked_for_what_is_held_and_the_first_dtype_is_bfloat16(folder):
    packed, wide = (load_model_config(folder / name) for name in ("packed", "wide"))
    assert (packed.integers, wide.integers) == (IntegerForm("compressed-tensors", 32), None)
    assert weight_bytes(packed, "bfloat16") == weight_bytes(wide, "bfloat16")
    assert stored_dtype(folder / "packed") == "bfloat16"


@pytest.fixture
def model(tmp_path):
    make_checkpoint(tmp_path / "model", "kimi-k2", **SIZES)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": pa.array([[1, 2]], pa.list_(pa.int32()))})
    pack_int4(tmp_path / "model")
    return tmp_path / "model"


def refused(command, folder):
    ended = batchinfer(command, job_of(folder, "model"))
    assert ended.code == 2, ended.err
    (sentence,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    return sentence


def test_a_plan_refuses_what_headers_and_config_show(tmp_path, model):
    tensors = read_tensors(model)
    write_tensors(model, {name: tensor for name, tensor in tensors.items() if name != f"{EXPERT}_scale"})
    assert f"1 missing: {EXPERT}_scale" in refused("plan", tmp_path)
    write_tensors(model, tensors)
    check_job(load_job(job_of(tmp_path, "model")), load_model_config(model))
    edit_config(model, quantization_config=int4_config(symmetric=False))
    assert "weights.symmetric is false" in refused("plan", tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.all  # make test: what a plan refuses, above
def test_a_run_refuses_scales_that_are_no_numbers(tmp_path, model):
    tensors = read_tensors(model)
    tensors[f"{EXPERT}_scale"][3, 1] = float("nan")
    write_tensors(model, tensors)
    assert f"{EXPERT}_scale is from nan to nan, but a scale is finite" in refused("run", tmp_path)


def logits(folder, dtype, backend="auto"):
    """Return the logits of the last token of each prompt."""
    model = Transformer.load(folder, dtype=DTYPES[dtype], backend=backend, **BITS.get(dtype, {}))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 96, (length,), generator=generator) for length in (40, 3, 64, 17, 9, 30)]
    requests = PagedRequests(model, prompts, max_new_tokens=1)
    requests.prefill(range(len(prompts)), (1000,))
    return torch.cat([requests.all_logits(number)[-1:] for number in range(len(prompts))])


@pytest.mark.all  # make test: answers, above
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_in_int4_logits_are_as_near_to_those_of_the_dequantised_twin_as_8_bits_come(folder, backend, request):
    if backend == "cpu":
        request.getfixturevalue("cpp")
    exact = logits(folder / "wide", "float32")
    int4 = (logits(folder / "packed", "int4", backend) - exact).norm()
    fp8 = (logits(folder / "wide", "fp8", backend) - exact).norm()
    assert int4 <= 1.1 * fp8


@pytest.mark.parametrize("group", [32, 96, 16])
def test_in_int4_experts_are_held_as_they_are_stored_where_groups_are_whole(group, tmp_path):
    make_checkpoint(tmp_path, "kimi-k2", hidden_size=96, moe_intermediate_size=96)
    twin = pack_int4(tmp_path, group=group)
    ops = Ops.select("reference", torch.bfloat16, **BITS["int4"])
    weights = load_weights(tmp_path, load_model_config(tmp_path), dtype=torch.bfloat16, ops=ops)
    down = weights.layers[1].mlp.down_EDF
    expected = torch.stack(
        [twin[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"] for expert in range(len(down.values))]
    )
    assert torch.equal(down.plain(), expected) == (group >= 32)
    assert (down.plain() - expected).norm() <= 0.15 * expected.norm()
