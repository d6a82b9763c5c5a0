"""`doctor --model`: whether a model folder runs here, in which dtypes, with how much memory, or why not."""

import json
import shutil

import pytest

from batchinfer.checked_json import json_text
from batchinfer.config import VALUE_BYTES
from batchinfer.doctor import model_check
from batchinfer.model.config import load_model_config
from batchinfer.model.packed_folder import ENDS, LAYOUT, MANIFEST, PackedFolder, layer_name
from batchinfer.model.stream_forecast import ProductSpeeds, StreamForecast, swept_job
from batchinfer.model.weight_bytes import rank_bytes, weight_bytes
from support.checkpoints import edit_config
from support.hollow_weights import write_hollow_weights
from support.jobs import batchinfer
from support.paths import RANDOM_MODEL
from support.published_shapes import V2_LITE

KV_BYTES = 27 * (512 + 64) * 2  # of a token of V2-Lite in bfloat16


@pytest.fixture
def folder(tmp_path):
    """A folder of DeepSeek-V2-Lite's size, without its values."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RANDOM_MODEL / file, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    write_hollow_weights(tmp_path)
    return tmp_path


def found_in(folder, code=0):
    ended = batchinfer("doctor", "--model", folder, "--json")
    assert ended.code == code, ended.err
    return json.loads(ended.out)


def test_each_dtype_comes_with_its_memory_or_with_what_is_short(folder, monkeypatch):
    free = 20_000_000_000
    monkeypatch.setattr(model_check, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(model_check.torch.cuda, "is_available", lambda: False)
    model, found = load_model_config(folder), found_in(folder)
    assert (found["runs"], found["reason"], found["dtype"]) == (True, None, "fp8")
    assert (found["model_type"], found["layers"], found["routed_experts"]) == ("deepseek_v2", 27, 64)
    assert list(found["dtypes"]) == list(VALUE_BYTES)
    for name, fit in found["dtypes"].items():
        assert fit["weight_bytes"] == weight_bytes(model, name)
        assert fit["kv_bytes_per_token"] == KV_BYTES * (2 if name == "float32" else 1)
    assert "not stored in FP4" in found["dtypes"]["fp4"]["reason"]
    wide, narrow = found["dtypes"]["bfloat16"], found["dtypes"]["fp8"]
    assert "needs 31.7 GB, but 20.0 GB is free" in wide["reason"]
    assert (wide["kv_tokens"], wide["requests_at_once"], wide["ranks_needed"]) == (0, 0, 2)
    tokens = (free - rank_bytes(model, "fp8")) // 2 // (64 * KV_BYTES) * 64
    assert narrow == narrow | {"reason": None, "kv_tokens": tokens, "requests_at_once": tokens // 4096}
    text = batchinfer("doctor", "--model", folder).out
    assert "runs here" in text
    assert f"{tokens // 4096} requests at once" in text
    assert "it fits on 2 hosts like this one" in text
    assert 'Use model.dtype = "fp8"' in text


def test_a_converted_folder_that_does_not_fit_is_streamed(folder, monkeypatch):
    monkeypatch.setattr(model_check, "free_memory_bytes", lambda: 20_000_000_000)
    monkeypatch.setattr(model_check.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(PackedFolder, "check", lambda packed, dtype: None)  # the files are not there
    names = [ENDS, *(layer_name(number) for number in range(27))]
    files = {name: {"bytes": 1_120_000_000} for name in names}
    manifest = {"dtype": "bfloat16", "layout": LAYOUT, "source": "original", "files": files}
    (folder / MANIFEST).write_text(json_text(manifest))

    def measured(job, split, tokens):
        swept = swept_job(job, load_model_config(folder), split, tokens)
        return StreamForecast(split, tokens, swept, 1e9, ProductSpeeds(120.0, 2.0))

    monkeypatch.setattr(model_check, "measured_forecast", measured)
    fit = found_in(folder)["dtypes"]["bfloat16"]
    assert (fit["reason"], fit["sweep_bytes"]) == (None, 27 * 1_120_000_000)
    num = fit["requests_at_once"]
    assert 20 < num < 100  # in 18 GB without three layers, ends and steps
    seconds = max(30.24, num / 2)
    assert fit["sweep"] == {
        "disk_bytes_per_s": 1e9,
        "seconds": seconds,
        "prompt_tokens_per_s": 120.0,
        "output_tokens_per_s": 2.0,
    }
    text = batchinfer("doctor", "--model", folder).out
    assert "of which 30.2 GB are read from disk in each sweep" in text
    assert f"{seconds:,.1f} s at 1.0 GB/s: {num / seconds:,.3g} output tokens/s, where products alone would" in text


def test_a_model_too_large_for_this_machine_does_not_run(folder, monkeypatch):
    monkeypatch.setattr(model_check, "free_memory_bytes", lambda: 4_000_000_000)
    monkeypatch.setattr(model_check.torch.cuda, "is_available", lambda: False)
    assert found_in(folder, code=2)["runs"] is False
    ended = batchinfer("doctor", "--model", folder)
    assert ended.code == 2
    assert "does not run here" in ended.out
    assert "Use model.dtype" not in ended.out


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: edit_config(folder, model_type="qwen3_next"), "linear-attention state"),
        (lambda folder: edit_config(folder, num_hidden_layers=28), "the tensors do not fit config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "not a safetensors file"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json"),
    ],
    ids=["no config", "a hybrid", "a layer short", "damaged weights", "damaged tokenizer"],
)
def test_a_refused_folder_comes_with_its_reason(folder, break_it, why):
    break_it(folder)
    found = found_in(folder, code=2)
    assert found["runs"] is False
    assert why in found["reason"]
    ended = batchinfer("doctor", "--model", folder)
    assert (ended.code, ended.out) == (2, "")
    assert why in ended.err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["default", "tool_use"], "and a chat template."),
        (
            ["tool_use"],
            "chat templates called tool_use but none called default, so it takes prompts and messages only with",
        ),
        (
            ["rag"],
            "chat templates called rag but none called default, so it takes prompts and no messages; to take all",
        ),
        ([], "no chat template, so it takes prompts but no messages."),
    ],
)
def test_named_chat_templates_are_told_from_a_missing_one(tmp_path, names, said):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    settings["chat_template"] = [{"name": name, "template": template} for name in names]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert said in batchinfer("doctor", "--model", model).out


@pytest.mark.parametrize("arguments", [("--json",), ("--model", "x", "--bench"), ("--model", "x", "--all")])
def test_reports_that_exclude_each_other_are_refused(arguments):
    ended = batchinfer("doctor", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert "--model" in ended.err
