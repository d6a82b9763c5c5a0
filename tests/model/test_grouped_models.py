"""Models with grouped-query attention: whole jobs on any ranks, with shared prefixes, from the KV store, on paper."""

from __future__ import annotations

import functools
import json
import shutil

import pyarrow as pa
import pytest
import torch

from batchinfer.model.config import load_model_config
from batchinfer.model.ops import Ops
from batchinfer.model.page_format import PageFormat
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import weight_bytes
from batchinfer.plan.first_dtype import Machine, choose_dtype
from batchinfer.rank.load import BITS
from batchinfer.records import ModelError
from support.checkpoints import GROUPED_MODELS, edit_config, make_checkpoint, read_tensors, write_tensors
from support.jobs import answers, batchinfer, output_bytes, outputs, write_job, write_shard
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL
from support.triton_device import needs_triton

EXPERTS = ("qwen3-moe", "gpt-oss")
NUM_NEW = 24
LENGTHS = (5, 64, 1, 131, 30, 12)
DISAGGREGATED = {"mode": "disaggregated", "prefill_ranks": 1, "decode_ranks": 1}
LAYOUTS = {
    "2": {"prefill_ranks": 2, "overlap": True},
    "1+1": DISAGGREGATED,
    "2+2": {"mode": "disaggregated", "prefill_ranks": 2, "decode_ranks": 2, "overlap": True},
    "2, redundant": {"prefill_ranks": 2, "redundant_experts": 4},
    "1+2, redundant": {**DISAGGREGATED, "decode_ranks": 2, "redundant_experts": 2, "overlap": True},
}
# of each the layouts in make test
QUICK = {("qwen3-moe", "2, redundant"), ("qwen3-moe", "2+2"), ("qwen3-windows", "1+1"), ("gemma3-text", "2")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name -> a folder with the model, prompts that share beginnings, and the answers and logprobs of transformers."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = folder = tmp_path_factory.mktemp(name)
            theirs = make_checkpoint(folder / "model", name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(RANDOM_MODEL / file, folder / "model" / file)
            generator = torch.Generator().manual_seed(2)
            prompts = [torch.randint(0, 96, (length,), generator=generator).tolist() for length in LENGTHS]
            shared = torch.randint(0, 96, (100,), generator=generator).tolist()
            prompts += [shared + prompt for prompt in prompts[:4]]
            write_shard(folder / "prompts" / "a.parquet", {"ids": pa.array(prompts, pa.list_(pa.int32()))})
            write_shard(folder / "turned" / "a.parquet", {"ids": pa.array(prompts[::-1], pa.list_(pa.int32()))})
            write_shard(folder / "last" / "a.parquet", {"ids": pa.array(prompts[-1:], pa.list_(pa.int32()))})
            expected = []
            for prompt in prompts:
                tokens = list(prompt)
                for _ in range(NUM_NEW):
                    with torch.no_grad():
                        tokens.append(int(theirs(torch.tensor([tokens])).logits[0, -1].argmax()))
                expected.append(tokens[len(prompt) :])
            (folder / "expected.json").write_text(json.dumps(expected))
        return made[name]

    return get


def expected(folder):
    return json.loads((folder / "expected.json").read_text())


def run(folder, name, *, cluster=None, model=None, **parts):
    job = write_job(
        folder,
        name=f"{name}.toml",
        input={"prompt": None, "token_ids": "ids", **parts.pop("input", {})},
        output={"dir": name},
        model={"path": "model", "dtype": "float32", **(model or {})},
        sampling={"max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 0},
        cluster={"prefill_tokens": 90, **(cluster or {})},
        **parts,
    )
    ended = batchinfer("run", job)
    assert ended.code == 0, ended.err
    rows = outputs(folder / name)["a.parquet"]
    return [row["token_ids"] for row in rows], json.loads(batchinfer("report", folder / name, "--json").out)


@pytest.fixture(scope="module")
def one_rank(folders):
    """Name -> the folder of a run of that model on one rank."""

    @functools.cache
    def get(name):
        run(folders(name), "one-rank")
        return folders(name) / "one-rank"

    return get


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        # make test: a layout of a model of each kind
        pytest.param(name, ranks, marks=() if (name, ranks) in QUICK else pytest.mark.all)
        for name in (*EXPERTS, "llama", "qwen3-windows", "mistral-windows", "gemma3-text")
        for ranks in LAYOUTS
        if name in EXPERTS or "redundant" not in ranks
    ],
)
def test_outputs_are_those_of_one_rank_on_any_ranks(folders, one_rank, name, ranks):
    folder = folders(name)
    tokens, report = run(folder, f"ranks-{ranks}", cluster=LAYOUTS[ranks])
    assert tokens == expected(folder)
    assert output_bytes(folder / f"ranks-{ranks}") == output_bytes(one_rank(name))
    assert report["rows_ok"] == len(LENGTHS) + 4
    if "redundant" in ranks:
        twice = "SELECT layer, expert FROM placements GROUP BY ALL HAVING count(DISTINCT slot) > 1"
        sql = f"SELECT count(*) AS n FROM ({twice})"
        (found,) = json.loads(batchinfer("report", folder / f"ranks-{ranks}", "--json", "--sql", sql).out)
        assert found["n"] > 0


@pytest.mark.parametrize(
    "name", ["qwen3-windows", *(pytest.param(name, marks=pytest.mark.all) for name in (*EXPERTS, "gemma3-text"))]
)
def test_company_order_and_the_kv_store_change_no_bit_of_an_answer(folders, one_rank, name):
    folder = folders(name)
    expected_rows = answers(one_rank(name))
    kv = {"dir": "store", "persist": "all", "reuse": "always"}
    cold, first = run(folder, "cold", kv=kv)
    warm, second = run(folder, "warm", kv=kv)
    assert cold == warm == expected(folder)
    assert answers(folder / "cold") == answers(folder / "warm") == expected_rows
    assert first["cached_tokens"] >= 3 * 64  # prompts that share their first 100 tokens
    assert second["cached_tokens"] > first["cached_tokens"]
    turned, _ = run(folder, "turned-run", input={"files": ["turned/*.parquet"]}, cluster={"decode_requests": 3})
    assert turned[::-1] == expected(folder)
    logprobs = [row["logprobs"] for row in expected_rows]
    assert [row["logprobs"] for row in answers(folder / "turned-run")][::-1] == logprobs
    run(folder, "alone", input={"files": ["last/*.parquet"]})
    (alone,) = answers(folder / "alone")
    assert (alone["token_ids"], alone["logprobs"]) == (expected_rows[-1]["token_ids"], logprobs[-1])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3-moe", "bfloat16"),
        ("gpt-oss", "int4"),
        # make test: the two above
        *(pytest.param(name, "fp8", marks=pytest.mark.all) for name in ("qwen3-moe", "gpt-oss", "gemma3-text")),
        pytest.param("gemma3-text", "bfloat16", marks=pytest.mark.all),
    ],
)
def test_narrower_dtypes_end_well(folders, name, dtype):
    folder = folders(name)
    tokens, _ = run(folder, dtype, model={"dtype": dtype})
    # rounding changes tokens of random weights now and then, but not the first of most prompts
    least = 5 if dtype == "int4" else 7
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(tokens, expected(folder), strict=True)) >= least


@pytest.mark.parametrize(
    "name",
    # make test: the first has more
    ["gpt-oss", *(pytest.param(name, marks=pytest.mark.all) for name in ("qwen3-moe", "qwen2-moe", "gemma3-text"))],
)
def test_a_converted_model_gives_the_same_answers_on_two_ranks(folders, name):
    folder = folders(name)
    shutil.rmtree(folder / "converted", ignore_errors=True)
    ended = batchinfer("convert", folder / "model", folder / "converted", "--dtype", "float32")
    assert ended.code == 0, ended.err
    tokens, _ = run(folder, "converted-run", model={"path": "converted"}, cluster={"prefill_ranks": 2})
    assert tokens == expected(folder)


def test_kv_in_fp8_is_held_and_answers(folders):
    folder = folders("qwen3-moe")
    tokens, _ = run(folder, "narrow-kv", model={"dtype": "bfloat16"}, kv={"dtype": "fp8"})
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(tokens, expected(folder), strict=True)) >= 6


def test_a_token_takes_its_keys_and_values_in_all_layers(folders):
    model = load_model_config(folders("qwen3-moe") / "model")
    assert model.kv_bytes_per_token(2) == 3 * 2 * 2 * 8 * 2  # layers, keys and values, heads, width, bytes
    assert PageFormat("fp8").bytes_per_token(model) == 3 * (2 * 2 * 8 + 4)
    PageFormat("fp8").check(model)


def make_fp4_checkpoint(folder):
    """A gpt-oss with experts in MXFP4; returns transformers' model of the same values."""
    theirs = make_checkpoint(folder, "gpt-oss", intermediate_size=64)
    tensors, generator = read_tensors(folder), torch.Generator().manual_seed(4)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_in, num_out = tensors.pop(name).shape
        codes = torch.randint(0, 16, (num_experts, num_out, num_in), generator=generator)
        scales = torch.randint(120, 124, (num_experts, num_out, num_in // 32), generator=generator)
        values = table[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales - 127).repeat_interleave(32, dim=-1)
        theirs.get_parameter(name).data.copy_(values.transpose(1, 2))
        pairs = codes.unflatten(-1, (-1, 16, 2))
        tensors[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).byte()
        tensors[f"{name}_scales"] = scales.byte()
    write_tensors(folder, tensors)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return theirs


def logits_after(model, prompt, num_new=8):
    """The model's logits of a prompt and a greedy answer, and all of these tokens."""
    requests = PagedRequests(model, [prompt], max_new_tokens=num_new)
    requests.prefill([0], (1000,))
    requests.decode_greedily([0], num_new)
    return requests.all_logits(0), requests.tokens[0]


PROMPT = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(5))


def test_experts_in_fp4_are_widened_value_by_value(tmp_path):
    theirs = make_fp4_checkpoint(tmp_path)
    ours, tokens = logits_after(Transformer.load(tmp_path, dtype=torch.float32), PROMPT)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    assert (ours - logits).abs().max() < 1e-4
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors = read_tensors(tmp_path)
    write_tensors(tmp_path, tensors | {name: torch.full_like(tensors[name], 255)})
    with pytest.raises(ModelError, match="holds a scale that is not finite"):
        Transformer.load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    "backend", ["reference", "auto", pytest.param("triton", marks=[pytest.mark.all, needs_triton])]
)
def test_experts_held_in_fp4_give_the_bits_of_their_widened_values(tmp_path, monkeypatch, backend):
    make_fp4_checkpoint(tmp_path)
    held = Transformer.load(tmp_path, dtype=torch.bfloat16, backend=backend, **BITS["fp4"])
    assert "FP4 experts" in held.kernels
    found = logits_after(held, PROMPT)
    sizes = [
        sum(part.nbytes for part in held.ops.expert_format(torch.bfloat16, "cpu").slots(layer.mlp.down_EDF))
        for layer in held.weights.layers
    ]
    assert all(size <= 8 * 64 * 64 * 18 // 32 for size in sizes)
    # the twin: everything else as fp8 has it, experts in bfloat16
    monkeypatch.setattr(Ops, "expert_format", lambda ops, dtype, device: ops.weight_format(dtype, device))
    twin = logits_after(Transformer.load(tmp_path, dtype=torch.bfloat16, backend=backend, **BITS["fp8"]), PROMPT)
    assert torch.equal(found[0], twin[0])
    assert found[1] == twin[1]


def test_jobs_in_fp4_run_on_any_ranks_and_from_a_converted_folder(tmp_path):
    make_fp4_checkpoint(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / "model" / file)
    prompts = pa.array([PROMPT.tolist(), [5, 6, 7]], pa.list_(pa.int32()))
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": prompts})
    fp4 = {"dtype": "fp4"}
    one, _ = run(tmp_path, "one", model=fp4)
    two, _ = run(tmp_path, "two", model=fp4, cluster={"prefill_ranks": 2})
    ended = batchinfer("convert", tmp_path / "model", tmp_path / "converted", "--dtype", "fp4")
    assert ended.code == 0, ended.err
    mapped, _ = run(tmp_path, "mapped", model=fp4 | {"path": "converted"})
    assert one == two == mapped


def test_the_smallest_dtype_of_fp4_experts_is_fp4(tmp_path):
    make_fp4_checkpoint(tmp_path)
    assert choose_dtype(tmp_path, Machine(1, has_gpu=False, is_quick_in_8_bits=True))[0] == "fp4"
    config = load_model_config(tmp_path)
    assert weight_bytes(config, "fp4") == weight_bytes(config, "int4") < weight_bytes(config, "fp8")


def test_fp4_is_refused_where_experts_are_not_stored_so(folders, tmp_path):
    folder = folders("gpt-oss")
    ids = {"prompt": None, "token_ids": "ids"}
    job = write_job(folder, model={"path": "model", "dtype": "fp4"}, input=ids, output={"dir": "refused"})
    for ended in (
        batchinfer("plan", job),
        batchinfer("convert", folder / "model", tmp_path / "made", "--dtype", "fp4"),
    ):
        assert ended.code == 2
        assert "not stored in FP4" in ended.err
    assert not (tmp_path / "made").exists()


def test_a_plan_says_that_the_long_factors_count(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"ids": pa.array([[5, 6, 7]], pa.list_(pa.int32()))})
    for name, says in (("phi3-long", True), ("phi3-short", False)):
        make_checkpoint(tmp_path / name, name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(RANDOM_MODEL / file, tmp_path / name / file)
        ids = {"prompt": None, "token_ids": "ids"}
        job = write_job(tmp_path, input=ids, model={"path": name}, output={"dir": f"of-{name}"})
        ended = batchinfer("plan", job)
        assert ended.code == 0, ended.err
        assert ("the angles of all requests are by long_factor" in ended.err) == says


@pytest.mark.parametrize("name", GROUPED_MODELS)
def test_weights_take_what_their_tensors_take(name, tmp_path):
    make_checkpoint(tmp_path, name)
    stored = sum(tensor.numel() for tensor in read_tensors(tmp_path).values())
    config = load_model_config(tmp_path)
    assert config.unknown_keys == ()
    # results are filled up to 64 per product, which triples models of this size
    assert 4 * stored <= weight_bytes(config, "float32") <= 16 * stored + (1 << 20)


def test_simulate_knows_rows_windows_and_missing_experts(folders):
    results = {}
    for name in ("llama", "qwen3-windows", "qwen3-moe"):
        spec = folders(name) / "spec.toml"
        spec.write_text(
            f'[model]\npath = "{folders(name) / "model"}"\n[workload]\nrequests = 500\nprompt_tokens = 200\n'
            "output_tokens = 30\n[cluster]\nnodes = 4\n[prefill]\nep_size = 8\n[decode]\nep_size = 8\n"
            "requests_per_gpu = 16\n"
        )
        ended = batchinfer("simulate", spec, "--json")
        assert ended.code == 0, ended.err
        results[name] = json.loads(ended.out)
        assert results[name]["output_tokens"] == 15_000
    assert results["llama"]["decode"]["step_s_by_stage"]["routed experts"] == 0
    assert results["qwen3-moe"]["decode"]["step_s_by_stage"]["routed experts"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 4}, ["num_key_value_heads is 4", "a divisor of num_attention_heads = 6"]),
        ({"partial_rotary_factor": 0.4}, ["partial_rotary_factor is 0.4", "1.0: all of a head is rotated"]),
        ({"layer_types": ["linear_attention"] * 3}, ["layer_types", '"full_attention" for every layer']),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, ["longrope", '"llama3"', '"yarn"']),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            ["high_freq_factor is 1.0", "above low_freq_factor = 4"],
        ),
        ({"q_lora_rank": 8, "sliding_window_pattern": 2}, ["sliding_window_pattern is 2", "changes what"]),
        ({"model_type": "qwen3_next", "architectures": None}, ["qwen3_next", "gated delta-net"]),
    ],
)
def test_what_cannot_be_computed_is_refused_by_key(tmp_path, changes, words):
    make_checkpoint(tmp_path, "qwen3")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError) as error:
        load_model_config(tmp_path)
    for word in words:
        assert word in str(error.value)
