"""The tokenizer and the chat template: the same ids as transformers gives, and sentences instead of crashes."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from batchinfer.data.chat import MAX_CHARS, ChatError, ChatTemplate
from batchinfer.data.prompt_tokenizer import thinking_tokens
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.records import ModelError

SAMPLE = Path(__file__).parents[2] / "sample_data"
TEXTS = [
    "",
    " ",
    "hello",
    "  two  spaces ",
    "123456 7",
    "naïve ☃ 漢字 🏳️‍🌈",
    "<｜User｜>x<｜end▁of▁sentence｜>",
    "a\r\n\tb" * 500,
]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def sample():
    return load_tokenizer(SAMPLE / "model")


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(SAMPLE / "model")


@pytest.fixture
def folder(tmp_path):
    """A copy of the sample model's small files, to change."""
    for file in (SAMPLE / "model").glob("*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def change(file: Path, **values: object) -> None:
    table = json.loads(file.read_text()) if file.exists() else {}
    table.update(values)
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


# ---- agreement with transformers


def test_raw_prompts_are_encoded_as_by_transformers(sample, reference):
    found = sample.encode_prompts(TEXTS)
    assert found == [reference(text).input_ids for text in TEXTS]
    assert [ids.count(reference.bos_token_id) for ids in found] == [1] * len(TEXTS)


def test_chats_are_encoded_as_by_transformers(sample, reference):
    rows = pq.read_table(SAMPLE / "prompts" / "part-00000.parquet")["messages"].to_pylist()
    chats = [chat for chat in rows if chat and all(message["role"] and message["content"] for message in chat)]
    chats += [[{"role": "user", "content": text}] for text in TEXTS]
    chats = [chat for chat in chats if all(message["role"] != "narrator" for message in chat)]
    expected = [reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    assert sample.encode_chats(chats) == expected
    assert [ids.count(reference.bos_token_id) for ids in expected] == [1] * len(chats)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if loop.first %}{{ bos_token }}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['content'].strip() }}{% endfor %}\n",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 7 %}{% endfor %}{{ ns.n }}{{ tools }}",
        "{% for m in messages %}{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}{{ pad_token }}",
        "{{ 'name' in messages[0] }}{{ messages[-1].get('name') }}{{ add_generation_prompt }}",
    ],
)
def test_templates_render_as_in_transformers(sample, reference, template):
    chat = [{"role": "system", "content": "<b> é"}, {"role": "user", "content": " hi ", "name": None}]
    names = {"bos_token": reference.bos_token, "eos_token": reference.eos_token, "pad_token": reference.pad_token}
    expected = reference.apply_chat_template(chat, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(template, names).render(chat) == expected


# as GLM-4.6's own template writes tools and the arguments of calls
GLM_46 = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools

<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{% for tc in m.tool_calls or [] %}<tool_call>{{ tc.function.name }}
{% for k, v in tc.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""


@pytest.mark.parametrize("ensure_ascii", ["(ensure_ascii=False)", "", "(indent=2)"])
def test_tools_in_chinese_are_written_as_by_transformers(sample, reference, folder, ensure_ascii):
    """Not as escapes, which would double their tokens, and without HTML's."""
    about = "查询天气 <b>&amp; 'quoted' \u2028 \"两次\" </b> 🙂"
    city = {"type": "string", "description": about, "enum": ["北京", "Köln", "a<b", "A&B", "it's"]}
    parameters = {"type": "object", "properties": {"城市": city}, "required": ["城市"]}
    tools = [{"type": "function", "function": {"name": "weather", "description": about, "parameters": parameters}}]
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "weather", "arguments": {"城市": ["北京", {"于": None}]}},
    }
    chat = [{"role": "user", "content": "北京?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = GLM_46.replace("(ensure_ascii=False)", ensure_ascii)
    (folder / "chat_template.jinja").write_text(template)
    expected = reference.apply_chat_template(
        chat, tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    (found,) = load_tokenizer(folder).encode_chats([chat], variables=[{"tools": tools}])
    assert found == expected
    written = sample.decode(found, with_special=True)
    assert all(text in written for text in ("查询天气 <b>&amp; 'quoted'", "北京", "a<b", "it's", "于"))
    assert "\\u" not in written


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = [
    {"role": "user", "content": "hi", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_calls": None},
]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # as DeepSeek's own templates ask
        ("{% if m.content is none %}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endif %}", "[f]"),
        ("{{ m['content'] }};{{ tools }}", "hi;None;None4;None"),
        ("{{ m.content | trim }};{{ 'x' ~ m.content }};{{ m.content | string }}", "hi;xhi;hi;x;4;x4;4"),
        ("{{ '%s' | format(m.content) }}{{ m.content | default('') }}{{ m.content or '' }}", "hihihi444"),
        (
            "{{ ['<', m.content, '>'] | join }}{{ m.content.split('b')[-1] }}{{ 'a' in m.content }}",
            "<hi>hiFalse<>False<4>4False",
        ),
        ("{% if m.content is not none and m.content != none %}[{{ m.content }}]{% endif %}", "[hi][4]"),
        (
            "{{ m.content is string }}{{ m.content == '' }}{{ m.content is defined }}, ",
            "TrueFalseTrue, FalseFalseTrue, TrueFalseTrue, ",
        ),
        (
            "{{ {'content': m.content} | tojson }}{{ m.content | tojson }}",
            '{"content": "hi"}"hi"{"content": null}null{"content": "4"}"4"',
        ),
        ("{% if m.tool_calls %}{{ m | tojson }}{{ 'content' in m }}{% endif %}", json.dumps(CALLS[1]) + "True"),
        # parts of a content, as GLM's and Qwen3-VL's templates write them
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}p{% endfor %}{% endif %};",
            "hi;;4;",
        ),
        ("{% if m['tool_calls'] is defined %}{{ m['content'] or 'calls' }}{% endif %}", "calls"),
    ],
)
def test_the_content_of_a_message_that_calls_tools_is_none_and_is_written_as_nothing(written, expected):
    template = "{% for m in messages %}" + written + "{% endfor %}"
    assert ChatTemplate(template, {}).render(CALLS) == expected


def test_a_null_among_the_arguments_of_a_call_is_written_as_by_transformers(reference):
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    chat = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    expected = reference.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert ChatTemplate(template, {}).render(chat) == expected


# how templates read the reasoning of earlier answers: most; gpt-oss; all that a message has
READS = (
    "{{ m.reasoning_content }};",
    "{{ m.thinking }};",
    "{{ m | tojson }}",
    "{% if m.reasoning is defined %}{{ m.reasoning }}{% endif %}",
)


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize(
    "keys",
    [
        {"reasoning": "why"},
        {"thinking": "why"},
        {"reasoning_content": "why"},
        {"reasoning": "a", "reasoning_content": "b"},
        {"thinking": "a", "reasoning": "b"},
        {"reasoning_content": None, "thinking": None, "reasoning": "c"},
        {"reasoning_content": "", "reasoning": "c"},
        {},
    ],
)
def test_reasoning_of_earlier_answers_is_given_under_the_names_of_transformers(reference, reads, keys):
    chat = [*HELLO, {"role": "assistant", "content": "because", **keys}, *HELLO]
    template = "{% for m in messages %}" + reads + "{% endfor %}"
    expected = reference.apply_chat_template(chat, chat_template=template, tokenize=False)
    assert ChatTemplate(template, {}).render(chat) == expected


@pytest.mark.parametrize("processor", ["none", "bos", "bos and eos"])
@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_tokenizer_json_alone_decides_the_special_tokens(folder, processor, add_bos_token):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos, eos = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    single = {"none": "$A", "bos": f"{bos} $A", "bos and eos": f"{bos} $A {eos}"}[processor]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(bos, 0), (eos, 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    change(folder / "tokenizer_config.json", add_bos_token=add_bos_token, tokenizer_class="LlamaTokenizerFast")
    expected = AutoTokenizer.from_pretrained(folder)("hello").input_ids
    assert load_tokenizer(folder).encode_prompts(["hello"]) == [expected]


def test_tokens_declared_only_in_the_config_are_known(folder):
    added = {"1024": {"content": "<extra>", "special": False}, "1025": {"content": "<end>", "special": True}}
    change(folder / "tokenizer_config.json", added_tokens_decoder=added, eos_token="<end>")
    change(folder / "generation_config.json", eos_token_id=None)
    change(folder / "config.json", eos_token_id=None)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <extra> b<end>"
    assert tokenizer.encode_prompts([text]) == [reference(text).input_ids]
    assert tokenizer.eos_token_ids == {reference.eos_token_id}
    assert tokenizer.decode(reference(text).input_ids) == "a <extra> b"
    assert tokenizer.vocab_size == 1026


FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
LEFT = {"content": "<extra>", **FLAGS, "lstrip": True, "special": True}
MORE_SETTINGS: dict[str, dict[str, object]] = {  # file -> content; 1024 and 1025 are the next ids
    "an older file": {"added_tokens.json": {"<extra>": 1024, "<end>": 1025}},
    "an older file in another order": {"added_tokens.json": {"<end>": 1025, "<extra>": 1024}},
    "a special token in the vocabulary": {"tokenizer_config.json": {"extra_special_tokens": ["our"]}},
    "further special tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<extra>", "<end>"]}},
    "a token that is no special one after all": {
        "tokenizer_config.json": {
            "extra_special_tokens": ["<extra>"],
            "added_tokens_decoder": {"1024": {"content": "<extra>", **FLAGS, "special": False}},
        }
    },
    "by their older name": {"special_tokens_map.json": {"additional_special_tokens": ["<extra>", "<end>"]}},
    "the older name in both files": {
        "tokenizer_config.json": {"additional_special_tokens": ["<extra>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<end>"]},
    },
    "the older name without tokens before the other file": {
        "tokenizer_config.json": {"additional_special_tokens": []},
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>"]},
    },
    "the newer name in both files": {
        "tokenizer_config.json": {"extra_special_tokens": ["<extra>"]},
        "special_tokens_map.json": {"extra_special_tokens": ["<end>"]},
    },
    "both names": {
        "tokenizer_config.json": {"extra_special_tokens": ["<end>"], "additional_special_tokens": ["<extra>"]}
    },
    "both names, one with names": {
        "tokenizer_config.json": {
            "extra_special_tokens": {"image_token": "<end>"},
            "additional_special_tokens": ["our"],
        }
    },
    "special by the map alone": {
        "added_tokens.json": {"<extra>": 1024, "<end>": 1025},
        "special_tokens_map.json": {"additional_special_tokens": ["<extra>"]},
    },
    "a name of the model's own code": {"tokenizer_config.json": {"image_token": "<end>"}},
    "such a name in both files": {
        "tokenizer_config.json": {"image_token": "<extra>"},
        "special_tokens_map.json": {"image_token": "<end>"},
    },
    "such a name with flags": {
        "special_tokens_map.json": {"image_token": {"content": "<extra>", **FLAGS, "lstrip": True}}
    },
    "of the model's own code": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<extra>"}}},
    "the older file first": {"special_tokens_map.json": {"eos_token": "<｜User｜>"}},
    "text under one name and an object under the one before": {
        "special_tokens_map.json": {"pad_token": "<extra>", "unk_token": LEFT}
    },
    "an object under one name and text under the one before": {
        "special_tokens_map.json": {"pad_token": LEFT, "unk_token": "<extra>"}
    },
    "an object by its name and text in the list": {
        "special_tokens_map.json": {"pad_token": LEFT, "additional_special_tokens": ["<extra>"]}
    },
    "text by its name and an object in the list": {
        "tokenizer_config.json": {
            "pad_token": "<extra>",
            "additional_special_tokens": [{"__type": "AddedToken", **LEFT}],
        }
    },
    "an object in the list": {"tokenizer_config.json": {"extra_special_tokens": [{"__type": "AddedToken", **LEFT}]}},
    "text in the config and an object in the older file": {
        "tokenizer_config.json": {"image_token": "<extra>"},
        "special_tokens_map.json": {"image_token": LEFT},
    },
    "other flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "2": {"content": "<｜User｜>", **FLAGS, "lstrip": True, "rstrip": True, "special": True},
                "3": {"content": "<｜Assistant｜>", **FLAGS, "special": False},
            }
        }
    },
}


@pytest.mark.parametrize("name", MORE_SETTINGS)
def test_tokens_and_flags_of_the_settings_are_those_of_transformers(folder, name):
    for file, values in MORE_SETTINGS[name].items():
        change(folder / file, **values)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    text = "a <extra> b<end> <｜User｜> c <｜Assistant｜>\nourour"
    assert tokenizer.encode_prompts([text]) == [reference(text).input_ids]
    assert tokenizer.named_tokens["eos_token"] == reference.eos_token
    ids = list(range(tokenizer.vocab_size))
    assert list(map(tokenizer.decode, ([token] for token in ids))) == reference.batch_decode(
        [[token] for token in ids], skip_special_tokens=True
    )


def test_other_flags_of_a_token_are_another_tokenizer(folder):
    digests = set()
    for flags in ({}, {"lstrip": True}, {"lstrip": True, "rstrip": True}):
        change(folder / "special_tokens_map.json", pad_token={"content": "<extra>", **FLAGS, **flags})
        digests.add(load_tokenizer(folder).digest)
    assert len(digests) == 3


def test_a_token_that_the_config_makes_special_is_left_out_of_answers(folder):
    table = json.loads((folder / "tokenizer.json").read_text())
    table["added_tokens"].append({"id": 1024, "content": "<end>", **FLAGS, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(table))
    assert load_tokenizer(folder).decode([1024]) == "<end>"
    change(folder / "tokenizer_config.json", eos_token="<end>")
    assert load_tokenizer(folder).decode([1024]) == ""
    assert AutoTokenizer.from_pretrained(folder).decode([1024], skip_special_tokens=True) == ""


def test_flags_of_tokenizer_json_go_before_the_older_file(folder):
    table = json.loads((folder / "tokenizer.json").read_text())
    table["added_tokens"].append({"id": 1024, "content": "<end>", **FLAGS, "lstrip": True, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(table))
    change(folder / "added_tokens.json", **{"<end>": 1024, "<extra>": 1025})
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode_prompts(["a <end> <extra>"]) == [reference("a <end> <extra>").input_ids]
    decoded = [tokenizer.decode([token]) for token in (1024, 1025)]
    assert decoded == [reference.decode([token], skip_special_tokens=True) for token in (1024, 1025)] == ["", "<extra>"]


def test_an_added_token_with_another_id_than_the_config_says_is_refused(folder):
    change(folder / "tokenizer_config.json", added_tokens_decoder={"1030": {"content": "<extra>", "special": False}})
    with pytest.raises(ModelError, match="give '<extra>' the id 1030, but it is 1024"):
        load_tokenizer(folder)


def test_decode_skips_special_tokens(sample, reference):
    ids = [0, *reference("hello there", add_special_tokens=False).input_ids, 1]
    assert sample.decode(ids) == "hello there"


# ---- the files of a model folder


def test_truncation_and_padding_of_the_file_are_off(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    plain = load_tokenizer(SAMPLE / "model")
    assert load_tokenizer(folder).encode_prompts(["a", "b c d e f g h"]) == plain.encode_prompts(["a", "b c d e f g h"])


def test_the_template_file_goes_before_the_config(folder):
    (folder / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(folder).chat_template().render(HELLO) == "from file"


NAMED = {"tool_use": "tools{{ tools | length }}{{ messages | length }}", "default": "plain{{ messages[0].content }}"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


def name_templates(folder: Path, named: dict[str, str], where: str) -> None:
    """Give a model folder named templates: as a list in its settings, or as files."""
    if where == "list":
        templates = [{"name": name, "template": text} for name, text in named.items()]
        change(folder / "tokenizer_config.json", chat_template=templates)
        return
    (folder / "additional_chat_templates").mkdir()
    for name, text in named.items():
        file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / file).write_text(text)


@pytest.mark.parametrize("where", ["list", "files"])
@pytest.mark.parametrize("tools", [None, TOOLS, []])
@pytest.mark.parametrize("names", [["tool_use", "default"], ["default"], ["rag", "default"], ["rag"], ["tool_use"]])
def test_the_template_for_chats_with_tools_is_the_one_of_transformers(folder, where, tools, names):
    name_templates(folder, {name: NAMED.get(name, "rag") for name in names}, where)
    tokenizer, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    variables = [{} if tools is None else {"tools": tools}]
    try:
        expected = reference.apply_chat_template(HELLO, tools=tools, return_dict=False, add_generation_prompt=True)
    except ValueError:
        others = "but chats without tools need" if names == ["tool_use"] else "but chats need"
        told = f"the chat templates of the model folder are called {names[0]}, {others} one called default; write "
        with pytest.raises(ModelError, match=told):
            tokenizer.encode_chats([HELLO], variables=variables)
        return
    assert tokenizer.encode_chats([HELLO], variables=variables) == [expected]


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 8, {1, 7}), ([7, 9], 8, {1, 7, 9}), (None, 8, {1, 8}), (None, [8, 9], {1, 8, 9}), (None, None, {1})],
)
def test_end_tokens_are_the_tokenizers_and_those_of_generation_config_or_config(folder, generation, config, expected):
    change(folder / "generation_config.json", eos_token_id=generation)
    change(folder / "config.json", eos_token_id=config)
    assert load_tokenizer(folder).eos_token_ids == expected


def test_end_tokens_of_a_model_of_text_and_images_are_in_its_part(folder):
    change(folder / "generation_config.json", eos_token_id=None)
    change(folder / "config.json", eos_token_id=None, text_config={"eos_token_id": [8, 9]})
    assert load_tokenizer(folder).eos_token_ids == {1, 8, 9}


def test_the_digest_follows_what_changes_prompts(folder):
    before = load_tokenizer(folder).digest
    change(folder / "tokenizer_config.json", model_max_length=5)
    assert load_tokenizer(folder).digest == before
    (folder / "chat_template.jinja").write_text("x")
    with_template = load_tokenizer(folder).digest
    change(folder / "generation_config.json", eos_token_id=[1, 2])
    with_end = load_tokenizer(folder).digest
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("y")
    assert len({before, with_template, with_end, load_tokenizer(folder).digest}) == 4


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\xff"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{,}"),
        ("generation_config.json", '{"eos_token_id": "one"}'),
        ("config.json", "not json"),
    ],
)
def test_a_broken_file_is_named(folder, file, content):
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    (folder / file).write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=file):
        load_tokenizer(folder)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"there is no .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_without_a_template_chats_are_a_model_error(folder):
    change(folder / "tokenizer_config.json", chat_template=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_prompts(["hello"])
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer.encode_chats([HELLO])


def test_an_invalid_template_is_a_model_error():
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% for %}", {})


# ---- templates and texts that misbehave


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no ' + messages[0].role) }}", "refuses the messages: no user"),
        ("{{ strftime_now('%Y') }}", "today's date"),
        ("{{ messages[0].missing.deep }}", "fails on the messages"),
        ("{{ messages.append(1) }}", "fails on the messages"),
        ("{{ ''.__class__.__mro__ }}", "fails on the messages"),
        ("{{ messages[7].role }}", "fails on the messages"),
        ("{{ lipsum() }}", "fails on the messages"),
        ("{% for i in range(10**9) %}x{% endfor %}", "fails on the messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on the messages"),
        ("{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}", f"more than {MAX_CHARS} characters"),
    ],
)
def test_a_template_that_fails_is_the_rows_error(template, told):
    with pytest.raises(ChatError) as failure:
        ChatTemplate(template, {}).render(HELLO)
    assert told in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_template_may_ask_whether_there_is_a_date():
    template = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}no date{% endif %}"
    assert ChatTemplate(template, {}).render(HELLO) == "no date"


def test_bad_chats_do_not_disturb_their_neighbours(sample):
    chats = [HELLO, [{"role": "narrator", "content": "x"}], HELLO]
    first, refused, last = sample.encode_chats(chats)
    assert first == last == sample.encode_chats([HELLO])[0]
    assert refused == "the chat template refuses the messages: there is no role narrator"


def test_a_text_that_cannot_be_encoded_does_not_disturb_its_neighbours(folder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}))  # has no token for unknown words
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").unlink()
    found = load_tokenizer(folder).encode_prompts(["a", "c", "b a", "\ud800"])
    assert [found[0], found[2]] == [[0], [1, 0]]
    assert found[1].startswith("the tokenizer cannot encode")
    assert found[3].startswith("the tokenizer cannot encode")


def test_a_text_far_beyond_the_window_is_refused_without_encoding_it(sample):
    texts = ["a", "word " * 2_000_000, "b"]
    short, refused, last = sample.encode_prompts(texts, 2048)
    assert [short, last] == sample.encode_prompts(["a", "b"])
    assert refused == "the prompt has 10000000 characters, more than fit into 2048 tokens"


@pytest.mark.parametrize("seed", range(5))
def test_batches_of_any_shape_encode_like_single_texts(sample, seed):
    rng = random.Random(seed)
    texts = ["ab " * rng.choice([0, 1, 10, 1000, 400_000]) for _ in range(20)]
    limit = 4000
    for text, ids in zip(texts, sample.encode_prompts(texts, limit), strict=True):
        if isinstance(ids, str):
            assert len(sample.encode_prompts([text])[0]) > limit
        elif len(text) < 10_000:
            assert ids == sample.encode_prompts([text])[0]


# ---- streaming


@pytest.mark.parametrize("seed", range(30))
def test_streamed_pieces_join_to_the_decoded_text(sample, seed):
    # random ids cut characters apart in every way; real text has emoji of several tokens
    rng = random.Random(seed)
    ids = [rng.randrange(sample.vocab_size) for _ in range(200)]
    if seed % 2:
        ids = sample.encode_prompts(["naïve ☃ 漢字 🏳️‍🌈 done" * 3])[0]
    stream = sample.stream()
    text = ""
    for place, token in enumerate(ids, start=1):
        text += stream.push(token)
        # only bytes at the end may become a character with those to come
        assert text == sample.decode(ids[:place]).rstrip("\ufffd")


@pytest.mark.parametrize("marks", [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_marks_of_tool_calls_are_shown_and_thinking_of_mistral_and_seed_is_found(folder, marks):
    texts = ("[TOOL_CALLS]", "[ARGS]", *marks)
    table = json.loads((folder / "tokenizer.json").read_text())
    first = load_tokenizer(folder).vocab_size
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    table["added_tokens"] += [{"id": first + place, "content": text, **flags} for place, text in enumerate(texts)]
    (folder / "tokenizer.json").write_text(json.dumps(table))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            change(folder / name, added_tokens_decoder=None)
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.token_id(text) for text in texts]
    called, args, begin, end = ids
    assert thinking_tokens(tokenizer) == (begin, end)
    answer = [begin, *tokenizer.encode_piece("so"), end, called, *tokenizer.encode_piece("now"), args]
    assert tokenizer.decode(answer) == "so[TOOL_CALLS]now[ARGS]"
    # who writes them in a message still writes control tokens
    assert tokenizer.control.first_in("x [TOOL_CALLS]") == "[TOOL_CALLS]"
