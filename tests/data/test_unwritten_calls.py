"""Tool calls in a chat's history that the chat template does not write: the plan warns once, with the rows."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.data.chat import ChatTemplate
from support.jobs import batchinfer, write_job
from support.openai_batches import chat, completion, response, write_batch
from support.paths import RANDOM_MODEL

SILENT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
PLAIN = [{"role": "user", "content": "Hello"}]
CALLED = [*PLAIN, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "Rain"}]
BAD = [{"role": None, "content": "", "tool_calls": [CALL]}]  # an error row, which has its own sentence
CHATS = [CALLED, PLAIN, BAD, CALLED]
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
RESPONSE = [*PLAIN, FUNCTION_CALL, {"type": "function_call_output", "call_id": "call_1", "output": "Rain"}]


def write_chats(folder, form):
    """Write CHATS in a form; return the keys of [input] for them."""
    folder.mkdir()
    texts = list(map(json.dumps, CHATS))
    if form == "lines":
        (folder / "a.jsonl").write_text("".join(f'{{"messages": {text}}}\n' for text in texts))
        return {"messages": "messages"}
    if form == "openai":
        lines = [chat("a", messages=CALLED), chat("b"), completion("c", '"tool_calls"'), response("d", RESPONSE)]
        write_batch(folder / "a.jsonl", lines)
        return {"format": "openai"}
    column = {
        "structs": lambda: pa.array(CHATS),
        "texts": lambda: pa.array(texts),
        "dictionary": lambda: pa.array(texts).dictionary_encode(),
        "json": lambda: pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts)),
    }[form]()
    pq.write_table(pa.table({"messages": column}), folder / "a.parquet")
    return {"messages": "messages"}


def warnings(folder, template, keys):
    model = shutil.copytree(RANDOM_MODEL, folder / "model")
    (model / "chat_template.jinja").write_text(template)
    inputs = {"files": ["prompts/*"], "prompt": None, **keys}
    ended = batchinfer("plan", write_job(folder, input=inputs, model={"path": str(model)}))
    assert ended.code == 0, ended.err
    return [line for line in ended.err.splitlines() if "does not write tool calls" in line]


@pytest.mark.parametrize("form", ["structs", "texts", "dictionary", "json", "lines", "openai"])
def test_a_plan_warns_of_calls_that_the_template_does_not_write(tmp_path, form):
    keys = write_chats(tmp_path / "prompts", form)
    (warning,) = warnings(tmp_path, SILENT, keys)
    assert warning == (
        f"warning: the chat template of {tmp_path / 'model'} does not write tool calls, so the model does not see the "
        "tool_calls in the messages of 2 rows; give the folder a template that writes tool calls"
    )


@pytest.mark.parametrize("template", [SILENT + "{{ messages[1].tool_calls | tojson }}", "{{ messages | tojson }}"])
def test_a_plan_does_not_warn_of_calls_that_the_template_writes(tmp_path, template):
    keys = write_chats(tmp_path / "prompts", "structs")
    assert warnings(tmp_path, template, keys) == []


def test_a_plan_does_not_warn_if_no_row_has_calls(tmp_path):
    (tmp_path / "prompts").mkdir()
    pq.write_table(pa.table({"messages": [PLAIN, PLAIN]}), tmp_path / "prompts" / "a.parquet")
    assert warnings(tmp_path, SILENT, {"messages": "messages"}) == []


def test_a_template_that_refuses_the_trial_chat_counts_as_one_that_writes_calls():
    template = "{% for one in messages %}{% if not one.content %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    assert ChatTemplate(template, {}).writes_calls
    assert not ChatTemplate(SILENT, {}).writes_calls
