"""input.user: text that goes through the chat template as the user's message; and who is warned of input.prompt."""

from __future__ import annotations

import pytest

from batchinfer.config import load_job
from support.jobs import batchinfer, output_bytes, outputs, write_job, write_shard
from support.paths import RANDOM_MODEL

QUESTIONS = ["What is 2 + 3?", "Name a river.", "<｜User｜>Say hello."]
WARNED = "text that goes to the model as it is, although it has a chat"


def job_of(tmp_path, name, inputs, columns, **parts):
    write_shard(tmp_path / name / "prompts" / "a.parquet", columns)
    return write_job(tmp_path / name, input={"prompt": None, **inputs}, sampling={"max_tokens": 4}, **parts)


def chats_of(texts, system=None):
    first = [] if system is None else [{"role": "system", "content": system}]
    return [[*first, {"role": "user", "content": text}] for text in texts]


@pytest.mark.parametrize("system", [None, "You are brief."])
@pytest.mark.parametrize("control_tokens", ["parse", "text"])
def test_a_text_gives_the_bytes_of_a_chat_of_one_message(tmp_path, system, control_tokens):
    both = {} if system is None else {"system": system}
    both["control_tokens"] = control_tokens
    texts = job_of(tmp_path, "user", {"user": "q", **both}, {"id": [0, 1, 2], "q": QUESTIONS})
    chats = job_of(tmp_path, "chats", {"messages": "q", **both}, {"id": [0, 1, 2], "q": chats_of(QUESTIONS)})
    for job in (texts, chats):
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
        assert WARNED not in ended.err
    assert output_bytes(texts.parent / "run") == output_bytes(chats.parent / "run")


def test_a_template_gives_the_bytes_of_a_chat_without_a_system_message(tmp_path):
    columns = {"id": [0, 1], "a": ["What is 2 + 3?", "Hello"], "b": ["In words.", ""]}
    texts = job_of(tmp_path, "template", {"template": "{{ a }}\n\n{{ b }}", "system": ""}, columns)
    both = [f"{a}\n\n{b}" for a, b in zip(columns["a"], columns["b"], strict=True)]
    chats = job_of(tmp_path, "chats", {"messages": "q"}, {"id": [0, 1], "q": chats_of(both)})
    for job in (texts, chats):
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
    assert output_bytes(texts.parent / "run") == output_bytes(chats.parent / "run")


def test_rows_without_a_text_are_bad_rows(tmp_path):
    job = job_of(tmp_path, "user", {"user": "q"}, {"id": [0, 1, 2], "q": ["Hello", "", None]})
    assert batchinfer("run", job).code == 3
    (rows,) = outputs(job.parent / "run").values()
    assert [row["error"] for row in rows] == [None, "q is empty", "q is null"]


@pytest.mark.parametrize(
    ("inputs", "columns", "said"),
    [
        ({"user": "q", "prompt": "q"}, {"q": ["a"]}, "exactly one must be set, but the job sets user and prompt"),
        ({"user": "q", "continue_final_message": True}, {"q": ["a"]}, "continue_final_message is for chats of input.m"),
        ({"user": "q"}, {"q": [7]}, "input.user: column 'q' is int64, but must be text"),
        ({"user": "q"}, {"q": chats_of(["a"])}, 'set input.messages = "q" instead'),
        ({"user": "q", "format": "openai"}, {"q": ["a"]}, "user does not go with format = 'openai'"),
        (
            {"user": "q", "system": "s"},
            {"q": ["a"], "s": ["b"]},
            "but 's' is a column of the input; if it holds the rows' system messages, set input.system = \"{{ s }}\"",
        ),
        (
            {"user": "q", "system": "s t"},
            {"q": ["a"], "s t": ["b"]},
            'name it in letters, digits and _, and set input.system = "{{ name }}"',
        ),
        ({"user": "q", "system": "{{ s }}"}, {"q": ["a"]}, "input.system names 's', which no input shard has"),
        ({"user": "q", "system": "Answer {{ s }."}, {"q": ["a"]}, "input.system is not valid Jinja: "),
        ({"user": "q", "system": "{{ 1 // 0 }}"}, {"q": ["a"]}, "input.system fails on the row: "),
        ({"user": "q", "system": "{{ q +}}"}, {"q": ["a"]}, "input.system is not valid Jinja: "),
        ({"format": "openai", "system": "{{ s }}"}, {"q": ["a"]}, "but lines of format = 'openai' have none; write"),
    ],
)
def test_what_makes_no_users_messages_is_refused(tmp_path, inputs, columns, said):
    ended = batchinfer("plan", job_of(tmp_path, "user", inputs, columns))
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("inputs", "texts", "warned"),
    [
        ({"prompt": "q"}, QUESTIONS, "warning: 2 prompts are " + WARNED),  # the third is written as its template does
        ({"prompt": "q"}, QUESTIONS[:1], "warning: 1 prompt is " + WARNED),
        ({"prompt": "q"}, QUESTIONS[2:], None),
        ({"user": "q"}, QUESTIONS, None),
        ({"template": "{{ q }}"}, QUESTIONS, "warning: 2 prompts are " + WARNED),
        ({"template": "{{ q }}", "system": ""}, QUESTIONS, None),
    ],
)
def test_a_plan_warns_of_plain_questions_to_a_model_that_chats(tmp_path, inputs, texts, warned):
    ended = batchinfer("plan", job_of(tmp_path, "job", inputs, {"q": texts}))
    assert ended.code == 0, ended.err
    assert (WARNED in ended.err) == (warned is not None)
    if warned is not None:
        remedy = 'user = "q" instead of input.prompt' if "prompt" in inputs else 'system ("" for none)'
        assert f"{warned} template; set input.{remedy} if these are questions to it" in ended.err


BEGIN = "<｜begin▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("inputs", "texts", "said"),
    [
        (
            {"prompt": "q"},
            [BEGIN + "a", "b", BEGIN + "c", None],
            "warning: 2 prompts begin with the BOS token, which",
        ),
        (
            {"template": "{{ q }}"},
            [BEGIN + "a", BEGIN[:-1]],
            "warning: 1 prompt begins with the BOS token, which",
        ),
        ({"prompt": "q"}, ["a" + BEGIN, "b"], None),
        ({"user": "q"}, [BEGIN + "a"], None),
    ],
)
def test_a_plan_warns_of_texts_with_the_bos_token_that_the_tokenizer_adds(tmp_path, inputs, texts, said):
    ended = batchinfer("plan", job_of(tmp_path, "job", inputs, {"q": texts}))
    assert ended.code == 0, ended.err
    assert ("begin" in ended.err) == (said is not None)
    assert (said or "") in ended.err


def test_init_asks_a_model_that_chats_by_its_template(tmp_path):
    write_shard(tmp_path / "data" / "a.parquet", {"question": QUESTIONS})
    ended = batchinfer("init", tmp_path / "data", "--model", RANDOM_MODEL, "-o", tmp_path / "job.toml")
    assert ended.code == 0, ended.err
    assert 'user = "question"' in (tmp_path / "job.toml").read_text()
    assert batchinfer("plan", tmp_path / "job.toml").code == 0


def test_no_system_message_beside_a_column_without_a_name(tmp_path):
    job = job_of(tmp_path, "user", {"template": "{{ q }}", "system": ""}, {"": [0], "q": ["a"]})
    planned = batchinfer("plan", job)
    assert planned.code == 0, planned.err


@pytest.mark.parametrize("system", [[], ["--system", "Be brief."]])
def test_init_shows_how_to_join_two_columns(tmp_path, system):
    write_shard(tmp_path / "a.parquet", {"instruction": ["Add."], "input": ["1 2"], "output": ["3"]})
    job = tmp_path / "job.toml"
    ended = batchinfer("init", tmp_path / "a.parquet", "--model", RANDOM_MODEL, "-o", job, *system)
    assert ended.code == 0, ended.err
    of_one = job.read_text()
    added = "" if system else 'system = ""\n'
    job.write_text(of_one.replace("user = ", f"{added}# user = ").replace("# template = ", "template = "))
    shown = batchinfer("plan", job, "--show", "0")
    assert shown.code == 0, shown.err
    assert "<｜User｜>Add.\n\n1 2<｜Assistant｜>" in shown.out
    assert ("Be brief." in shown.out) == bool(system)


def test_init_takes_a_system_message_for_all_rows(tmp_path):
    write_shard(tmp_path / "a.parquet", {"question": QUESTIONS})
    system = 'Answer in "one" word.'
    ended = batchinfer(
        "init", tmp_path / "a.parquet", "--model", RANDOM_MODEL, "-o", tmp_path / "job.toml", "--system", system
    )
    assert ended.code == 0, ended.err
    assert load_job(tmp_path / "job.toml").input.system == system


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"prompt_token_ids": [1, 2]}', "column 'prompt_token_ids' holds"),
        (
            "b.jsonl",
            '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "x"}}',
            "lines of",
        ),
    ],
)
def test_init_refuses_a_system_message_for_other_prompts(tmp_path, name, content, told):
    (tmp_path / name).write_text(content + "\n")
    ended = batchinfer(
        "init", tmp_path / name, "--model", RANDOM_MODEL, "-o", tmp_path / "job.toml", "--system", "Be brief."
    )
    assert ended.code == 2
    assert "--system goes with" in ended.err
    assert told in ended.err
    assert not (tmp_path / "job.toml").exists()


OWN = ["Be brief.", "", None, "Answer in French."]


def test_rows_have_system_messages_of_their_own(tmp_path):
    """A column's text is each row's system message, unless it is empty; the bytes are those of whole chats."""
    questions = [*QUESTIONS, "Hello"]
    system = "{{ s or '' }}{% if s and n > 2 %} Number {{ n }}.{% endif %}"
    columns = {"id": [0, 1, 2, 3], "q": questions, "s": OWN, "n": [1, 2, 3, 4]}
    texts = job_of(tmp_path, "own", {"user": "q", "system": system}, columns)
    written = ["Be brief.", None, None, "Answer in French. Number 4."]
    chats = [chats_of([q], own)[0] for q, own in zip(questions, written, strict=True)]
    whole = job_of(tmp_path, "chats", {"messages": "q"}, {"id": [0, 1, 2, 3], "q": chats})
    for job in (texts, whole):
        ended = batchinfer("run", job)
        assert ended.code == 0, ended.err
    assert output_bytes(texts.parent / "run") == output_bytes(whole.parent / "run")


def test_a_system_message_goes_with_chats_that_have_none(tmp_path):
    chats = [chats_of(["Hello"])[0], chats_of(["Hello"], "Sing.")[0]]
    job = job_of(
        tmp_path, "chats", {"messages": "q", "system": "{{ s }}"}, {"id": [0, 1], "q": chats, "s": ["a b", None]}
    )
    for row, text in enumerate(["a b\n\n<｜User｜>", "Sing.\n\n<｜User｜>"]):
        shown = batchinfer("plan", job, "--show", row)
        assert shown.code == 0, shown.err
        assert text in shown.out


def test_rows_whose_system_message_is_null_are_bad_rows(tmp_path):
    columns = {"id": [0, 1], "q": QUESTIONS[:2], "s": [None, "Be brief."]}
    job = job_of(tmp_path, "own", {"template": "{{ q }}", "system": "{{ s }}"}, columns)
    assert batchinfer("run", job).code == 3
    (rows,) = outputs(job.parent / "run").values()
    told = "input.system writes a value that is null (s is null); give it a default: {{ s or '' }}"
    assert [row["error"] for row in rows] == [told, None]


@pytest.mark.parametrize(
    ("system", "written"),
    [
        ('Write {x} as JSON: {"a": {}}.', 'Write {x} as JSON: {"a": {}}.'),
        ("{% raw %}Fill in {{ name }}{% endraw %}.", "Fill in {{ name }}."),
        ("Of {{ q }}:\n\n", "Of a:\n\n"),
    ],
)
def test_a_system_message_with_braces_of_json_or_in_raw_is_a_text(tmp_path, system, written):
    shown = batchinfer("plan", job_of(tmp_path, "user", {"user": "q", "system": system}, {"q": ["a"]}), "--show", "0")
    assert shown.code == 0, shown.err
    assert written + "\n\n<｜User｜>" in shown.out


@pytest.mark.parametrize("names", [("question", "system_prompt"), ("ask", "system")])
def test_init_takes_the_rows_own_system_messages(tmp_path, names):
    question, system = names
    write_shard(tmp_path / "a.parquet", {system: ["Be brief. " * 9, None], question: QUESTIONS[:2]})
    ended = batchinfer("init", tmp_path / "a.parquet", "--model", RANDOM_MODEL, "-o", tmp_path / "job.toml")
    assert ended.code == 0, ended.err
    assert f"column {system!r}: each row's own system message" in ended.out + ended.err
    inputs = load_job(tmp_path / "job.toml").input
    assert (inputs.user, inputs.system) == (question, f"{{{{ {system} or '' }}}}")
    assert batchinfer("plan", tmp_path / "job.toml").code == 0
