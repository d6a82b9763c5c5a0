"""Which form of tool calls a model folder shows as its own."""

from __future__ import annotations

import json
import shutil

import pytest

from batchinfer.data.encoders import Encoders
from batchinfer.data.tokenizer import OWN_TEMPLATES
from batchinfer.data.tokenizer_worker import forms_of_model
from support.checked_rows import make_job
from support.hostile import model_folder
from support.paths import SAMPLE_MODEL

V3 = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}"
KIMI = "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}{% endfor %}"
GLM = "{{- '<tool_call>' + call.name }}{% for k, v in args.items() %}<arg_key>{{ k }}</arg_key>{% endfor %}"
YOUTU = "{{ '<tool_call>' }}{{ call | tojson }}{{ '</tool_call>' }}"
MINIMAX = "{% set begin = '<minimax:tool_call>' %}{{ begin }}"
HARMONY = """{{ "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" }}"""
MISTRAL = '{{ "[TOOL_CALLS]" + name + "[ARGS]" }}'
V3_TOKENS = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]


@pytest.mark.parametrize(
    ("template", "tokens", "forms"),
    [
        (V3, V3_TOKENS, ["deepseek_v3"]),
        ((OWN_TEMPLATES / "deepseek_v32.jinja").read_text(), [*V3_TOKENS, "｜DSML｜"], ["deepseek_v32"]),
        ((OWN_TEMPLATES / "deepseek_v4.jinja").read_text(), [*V3_TOKENS, "｜DSML｜"], ["deepseek_v32"]),
        (KIMI, [], ["kimi_k2"]),
        (GLM, ["<tool_call>", "<arg_key>"], ["glm"]),
        (YOUTU, [], ["hermes"]),
        (MISTRAL, [], ["mistral"]),
        (MINIMAX, [], ["minimax"]),
        (HARMONY, [], ["harmony"]),
        (None, ["<|channel|>"], ["harmony"]),
        # the tokens decide where the template writes no calls
        ("{{ messages[0].content }}", V3_TOKENS, ["deepseek_v3"]),
        (None, ["[TOOL_CALLS]", "[ARGS]"], ["mistral"]),
        (None, ["<tool_call>", "<arg_key>"], ["glm"]),
        # a template of another family's form is written for a model that was trained on that
        (YOUTU, V3_TOKENS, ["hermes"]),
        ("{{ message.tool_calls }}{{ tools }}", ["<think>"], []),
        (None, [], []),
    ],
)
def test_the_template_shows_the_form_and_else_the_tokens_do(template, tokens, forms):
    assert forms_of_model(template, lambda mark: mark in tokens) == forms


@pytest.mark.parametrize(("tokens", "forms"), [([], []), (V3_TOKENS, ["deepseek_v3"]), (["[TOOL_CALLS]"], ["mistral"])])
def test_the_tokens_of_a_model_folder_show_the_form(tmp_path, tokens, forms):
    for path in SAMPLE_MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    flags = {**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}
    tokenizer["added_tokens"] += [{"id": first + i, "content": token, **flags} for i, token in enumerate(tokens)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = make_job("a", messages="m")
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": str(tmp_path)})})
    with Encoders(job, window=2048) as encoders:
        assert encoders.tool_forms == forms


def test_the_template_for_chats_with_tools_shows_the_form_and_whether_tools_are_written(tmp_path):
    folder = model_folder(tmp_path / "model", template=YOUTU)
    (folder / "additional_chat_templates").mkdir()
    job = make_job("a", messages="m")
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": str(folder)})})
    for text, is_written in ((KIMI, False), (KIMI + "{{ tools }}", True)):
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(text)
        with Encoders(job, window=2048) as encoders:
            assert (encoders.tool_forms, encoders.writes_tools) == (["kimi_k2"], is_written)
