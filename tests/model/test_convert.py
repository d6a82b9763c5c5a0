"""A converted folder: the bytes of the original's answers, mapped; whole or absent; refused where it does not fit."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from safetensors import safe_open

from batchinfer.checked_json import json_text
from batchinfer.commands.convert import convert as command
from batchinfer.config import load_job
from batchinfer.config.job import VALUE_BYTES
from batchinfer.config.rank_layout import rank_places
from batchinfer.model.config import load_model_config
from batchinfer.model.convert import convert_model
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import LAYOUT, MANIFEST, MTP, read_packed
from batchinfer.model.transformer import Transformer
from batchinfer.model.weight_bytes import PROJECTED_FP8, mtp_bytes, weight_bytes
from batchinfer.plan.first_dtype import Machine, choose_dtype
from batchinfer.protocol.messages import Start
from batchinfer.rank import kv_budget
from batchinfer.rank.load import BITS, DTYPES
from batchinfer.records import ConfigError, ModelError
from batchinfer.whole_files import TEMPORARY
from batchinfer_kernels.cpu import packed
from support.checkpoints import make_checkpoint
from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.packed_weights import pack_int4
from support.paths import RANDOM_MODEL, SAMPLE_MODEL
from support.small_disks import small_disk

__all__ = ["small_disk"]

pytestmark = pytest.mark.usefixtures("cpp")

ALL = ("float32", "bfloat16", "fp8", "int4")
TWO_RANKS = {"prefill_ranks": 2}
MORE_SLOTS = {"prefill_ranks": 2, "redundant_experts": 2}
LAYOUTS = {"one rank": {}, "two ranks": TWO_RANKS, "redundant experts": MORE_SLOTS}
OFTEN = {"float32": "redundant experts", "bfloat16": "one rank", "fp8": "two ranks", "int4": "redundant experts"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts, and the model with random weights converted to each dtype."""
    folder = tmp_path_factory.mktemp("converted")
    write_questions(folder / "prompts", (4, 3))
    for dtype in ALL:
        convert(RANDOM_MODEL, folder / dtype, dtype)
    return folder


def convert(model, target, dtype, code=0):
    ended = batchinfer("convert", model, target, "--dtype", dtype)
    assert ended.code == code, ended.err
    return ended


def run(folder, name, model, dtype, cluster=None, code=0):
    job = write_job(
        folder,
        name=f"{name}.toml",
        output={"dir": name},
        model={"path": str(model), "dtype": dtype},
        sampling={"max_tokens": 8, "ignore_eos": True, "logprobs": 2, "temperature": 0.7},
        cluster=cluster or {},
    )
    ended = batchinfer("run", job)
    assert ended.code == code, ended.err
    return ended if code else output_bytes(folder / name)


def marks_of(dtype, layout):
    """Return the tier of a case: bfloat16 in one layout is in `make test`, each other dtype in `make test-all`."""
    if OFTEN[dtype] != layout:
        return pytest.mark.slow
    return () if dtype == "bfloat16" else pytest.mark.all


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [pytest.param(dtype, layout, marks=marks_of(dtype, layout)) for dtype in ALL for layout in LAYOUTS],
)
def test_answers_are_those_of_the_original_to_the_byte(folder, dtype, layout):
    cluster, name = LAYOUTS[layout], f"{dtype}-{layout}"
    original = run(folder, f"original-{name}", RANDOM_MODEL, dtype, cluster)
    assert run(folder, f"mapped-{name}", folder / dtype, dtype, cluster) == original


@pytest.mark.all  # make test: answers of the original, above
@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_other_forms_of_a_checkpoint_are_converted_too(dtype, tmp_path):
    make_checkpoint(tmp_path / "model", "kimi-k2", hidden_size=64, moe_intermediate_size=96)
    pack_int4(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "made", dtype)
    plain, mapped = (
        Transformer.load(tmp_path / name, dtype=DTYPES[dtype], **BITS.get(dtype, {})) for name in ("model", "made")
    )
    for ours, theirs in zip(mapped.weights.layers, plain.weights.layers, strict=True):
        assert torch.equal(ours.attention.out.weight.data, theirs.attention.out.weight.data)
    moe, expected = mapped.weights.layers[-1].mlp, plain.weights.layers[-1].mlp
    assert torch.equal(moe.gate_up_EFD.data, expected.gate_up_EFD.data)
    assert moe.down_EDF.kind is expected.down_EDF.kind


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("kind", ["with drafts", "with an indexer"])
def test_every_part_is_mapped_as_it_would_be_read(kind, dtype, tmp_path):
    model = SAMPLE_MODEL
    if kind == "with an indexer":
        make_checkpoint(model := tmp_path / "model", "v32")
    convert(model, tmp_path / "made", dtype)
    packed = read_packed(tmp_path / "made")
    assert packed.has_mtp == (kind == "with drafts")
    options = {"dtype": DTYPES[dtype], "mtp": packed.has_mtp, **BITS.get(dtype, {})}
    read, mapped = (Transformer.load(folder, **options).weights for folder in (model, tmp_path / "made"))
    parts, others = ([*parts_of((one.layers, one.mtp, one.lm_head))] for one in (read, mapped))
    assert len(parts) == len(others) > 20
    for (name, tensor), (other_name, other) in zip(parts, others, strict=True):
        assert name == other_name
        assert torch.equal(tensor, other), name


def parts_of(value, name=""):
    """Name and tensor of everything in it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple) and not hasattr(value, "_fields"):
        for place, item in enumerate(value):
            yield from parts_of(item, f"{name}.{place}")
    elif value is not None and not isinstance(value, int):
        for field in getattr(value, "_fields", None) or value.__dataclass_fields__:
            yield from parts_of(getattr(value, field), f"{name}.{field}")


@pytest.mark.all  # make test: every part, above
def test_a_rank_maps_its_experts_and_takes_others_from_the_files(folder):
    bits = BITS["int4"]
    whole = Transformer.load(folder / "int4", dtype=torch.bfloat16, **bits)
    config = load_model_config(folder / "int4")
    half = range(config.n_routed_experts // 2, config.n_routed_experts)
    part = Transformer.load(
        folder / "int4",
        dtype=torch.bfloat16,
        dispatchers=[None] * config.num_moe_layers,
        expert_ids=[half] * config.num_moe_layers,
        **bits,
    )
    held, every = part.weights.layers[-1].mlp.down_EDF.data, whole.weights.layers[-1].mlp.down_EDF.data
    assert torch.equal(held, every[list(half)])
    assert part.weights.mapped_bytes < whole.weights.mapped_bytes
    assert held.untyped_storage().data_ptr() <= held.data_ptr()
    assert held.untyped_storage().nbytes() > held.nbytes  # a part of the file's memory, no copy


def test_kv_pages_leave_room_for_mapped_weights(folder, tmp_path, monkeypatch):
    job = load_job(write_job(tmp_path, model={"path": str(folder / "int4"), "dtype": "int4"}, cluster={}))
    model = Transformer.load(folder / "int4", dtype=torch.bfloat16, **BITS["int4"])
    start = Start(job="", most_tokens=10**9, largest_tokens=100, transfer_folder="", traced=False, model_digests={})

    def num_pages(free_bytes):
        monkeypatch.setattr(kv_budget, "free_memory_bytes", lambda: free_bytes)
        return kv_budget.kv_budget(job, model, rank_places(job.cluster)[0], start, 1).num_pages

    mapped = num_pages(20_000_000 + model.weights.mapped_bytes)
    model.weights = replace(model.weights, mapped_bytes=0)
    assert mapped == num_pages(20_000_000)


def test_a_folder_has_what_a_job_reads_besides_weights(folder):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / "int4" / file).read_bytes() == (RANDOM_MODEL / file).read_bytes()
    assert not list((folder / "int4").glob("model*.safetensors"))
    manifest = json.loads((folder / "int4" / MANIFEST).read_text())
    assert manifest["dtype"] == "int4"
    for name, file in manifest["files"].items():
        path = folder / "int4" / name
        assert path.stat().st_size == file["bytes"]
        with safe_open(path, framework="pt") as opened:
            assert list(opened.keys())
    assert choose_dtype(folder / "int4", Machine(1, has_gpu=False, is_quick_in_8_bits=True))[0] == "int4"


def test_chat_templates_in_their_own_folder_are_copied(tmp_path):
    source = shutil.copytree(RANDOM_MODEL, tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    convert(source, tmp_path / "int4", "int4")
    assert (tmp_path / "int4" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"


def test_the_layout_has_a_version_that_changes_with_it():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-64, 64, (70, 130), generator=generator).float().bfloat16()
    tensors = [packed.pack(weight), packed.pack(weight, is_int8=True), packed.pack(weight, is_int4=True)]
    digest = blake2b(b"".join(one.data.numpy().tobytes() for one in tensors), digest_size=8).hexdigest()
    assert (LAYOUT, digest) == (2, "13a9204c807ac5af"), "panels have changed: raise packed_folder.LAYOUT"


def test_the_size_of_a_packed_weight_is_computed_right():
    weight = torch.ones(128, 256).bfloat16()
    assert packed.pack(weight, is_int8=True).data.nbytes == weight.numel() * PROJECTED_FP8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": LAYOUT + 1}, "was converted to layout 3, this version reads 2; run `batchinfer convert"),
        ({"dtype": "fp8"}, "was converted to fp8, but model.dtype is 'int4'; run `batchinfer convert"),
        ({"files": {"ends.safetensors": {"bytes": 7}}}, "ends.safetensors has"),
        ({"files": {"layer-00077.safetensors": {"bytes": 7}}}, "layer-00077.safetensors is missing"),
        ({"files": 3}, "is damaged"),
    ],
)
def test_what_does_not_fit_is_one_sentence(folder, change, words, tmp_path):
    shutil.copytree(folder / "int4", tmp_path / "model")
    manifest = json.loads((tmp_path / "model" / MANIFEST).read_text())
    manifest.pop("checksum")
    (tmp_path / "model" / MANIFEST).write_text(json_text(manifest | change))
    write_questions(tmp_path / "prompts", (1,))
    assert words in one_error(run(tmp_path, "run", tmp_path / "model", "int4", code=2))
    with pytest.raises(ModelError, match=r"converted|damaged|missing|bytes"):
        Transformer.load(tmp_path / "model", dtype=torch.bfloat16, **BITS["int4"])


def one_error(ended):
    (sentence,) = (line for line in ended.err.splitlines() if line.startswith("error: "))
    return sentence


def test_a_job_without_the_cpp_operations_is_told_to_take_the_original(folder, tmp_path):
    write_questions(tmp_path / "prompts", (1,))
    ended = run(tmp_path, "run", folder / "fp8", "fp8", {"backend": "reference"}, code=2)
    assert f"give the folder that it was made from, {RANDOM_MODEL.absolute()}" in one_error(ended)


def test_a_folder_that_is_there_and_a_converted_model_are_refused(folder, tmp_path):
    ended = convert(RANDOM_MODEL, folder / "int4", "int4", code=2)
    assert "is there already" in one_error(ended)
    (tmp_path / "link").symlink_to("nowhere")
    assert "is there already" in one_error(convert(RANDOM_MODEL, tmp_path / "link", "int4", code=2))
    ended = convert(folder / "int4", tmp_path / "again", "int4", code=2)
    assert "is converted already" in one_error(ended)
    assert not (tmp_path / "again").exists()


@pytest.mark.all  # make test: answers of the original, above
def test_any_dtype_of_a_job_can_be_asked_for():
    (choice,) = [param.type.choices for param in command.params if param.name == "dtype"]
    assert list(choice) == list(VALUE_BYTES) == list(DTYPES)


def test_a_disk_without_the_room_leaves_nothing(small_disk):
    small_disk.fill(but_bytes=1 << 16)
    ended = convert(RANDOM_MODEL, small_disk.folder / "made", "bfloat16", code=2)
    assert re.search(r"takes \d+\.\d MB in .* has [\d.]+ KB free; free space or choose", one_error(ended))
    small_disk.free()

    def told(_, __):  # while the first layers are written
        if not small_disk.filler.exists():
            small_disk.fill(but_bytes=1 << 16)

    ops = Ops.select("cpu", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cannot write .*made: No space left on device; free space"):
        convert_model(
            RANDOM_MODEL, small_disk.folder / "made", ops, dtype=torch.bfloat16, name="bfloat16", on_read=told
        )
    assert [path.name for path in small_disk.folder.iterdir()] == ["filler"]


@pytest.mark.all  # make test: every part with drafts, above
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "fp4"])  # experts of this model are not in FP4
def test_the_layer_for_multi_token_prediction_takes_what_is_foretold(tmp_path, dtype):
    ops = Ops.select("cpu", DTYPES[dtype], **BITS.get(dtype, {}))
    convert_model(SAMPLE_MODEL, tmp_path / "made", ops, dtype=DTYPES[dtype], name=dtype, on_read=None)
    found, told = (tmp_path / "made" / MTP).stat().st_size, mtp_bytes(load_model_config(SAMPLE_MODEL), dtype)
    least = 0.7 if dtype in BITS else 0.95  # depths of 64 are filled up to blocks of 128
    assert least * found < told < 1.05 * found


@pytest.mark.all  # make test: every part with drafts, above
def test_the_layer_for_multi_token_prediction_needs_room_too(tmp_path, monkeypatch):
    config, ops = load_model_config(SAMPLE_MODEL), Ops.select("cpu", torch.bfloat16)
    room = shutil.disk_usage(tmp_path)._replace(free=weight_bytes(config, "bfloat16") + 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(ConfigError, match="free space or choose another folder"):
        convert_model(SAMPLE_MODEL, tmp_path / "made", ops, dtype=torch.bfloat16, name="bfloat16", on_read=None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_in_all_is_known_from_the_first_tensor_on(tmp_path):
    told = []
    ops = Ops.select("cpu", torch.bfloat16)
    how = {"dtype": torch.bfloat16, "name": "bfloat16", "on_read": lambda *counts: told.append(counts)}
    convert_model(SAMPLE_MODEL, tmp_path / "made", ops, **how)  # with a layer for multi-token prediction
    assert (tmp_path / "made" / MTP).exists()
    assert {total for _, total in told} == {told[-1][0]}


def test_one_that_is_killed_leaves_no_folder_of_that_name(tmp_path):
    started = [sys.executable, "-m", "batchinfer", "convert", RANDOM_MODEL, tmp_path / "made", "--dtype", "int4"]
    killed = subprocess.Popen(list(map(str, started)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob(f".made.*{TEMPORARY}/layer-00000.safetensors")) and killed.poll() is None:
        time.sleep(0.001)
    killed.send_signal(signal.SIGKILL)
    if killed.wait() == -signal.SIGKILL:
        assert not (tmp_path / "made").exists()
    convert(RANDOM_MODEL, tmp_path / "second", "int4")
    assert read_packed(tmp_path / "second") is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_form_of_gpus_asks_for_a_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    ended = batchinfer("convert", RANDOM_MODEL, tmp_path / "made", "--dtype", "fp8", "--gpu")
    assert ended.code == 2
    assert "--gpu needs a machine with a GPU" in ended.err
    assert not (tmp_path / "made").exists()
