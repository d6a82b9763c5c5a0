"""batchinfer.generate: its arguments, its results, and that it is `batchinfer run`."""

import doctest
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import batchinfer
from batchinfer.api import generation, job, model, prompts
from support.jobs import batchinfer as command
from support.jobs import output_bytes, question, write_job
from support.paths import RANDOM_MODEL, ROOT
from support.tiers import first_in_make_test

SETTINGS = {"model": RANDOM_MODEL, "dtype": "float32", "max_tokens": 8}
TEXTS = [question(number) for number in range(5)]
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]


def table_of(texts=TEXTS, **columns):
    return pa.table({"id": [f"q{number}" for number in range(len(texts))], "question": texts, **columns})


def kinds_of(data, others=("id",), **named):
    """Return the columns found in `data`, and its rows."""
    reader, columns = prompts.reader_of(data, named, set(others))
    ((kind, name),) = columns.items()
    return kind, name, reader.read_all().column(name).to_pylist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def run(folder):
    """The outputs of `batchinfer run` over the table, and its answers."""
    (folder / "prompts").mkdir()
    pq.write_table(table_of(), folder / "prompts" / "prompts.parquet")
    ended = command("run", write_job(folder, input={"prompt": "question"}, output={"keep_columns": ["question"]}))
    assert ended.code == 0, ended.err
    return folder / "run"


def test_outputs_are_those_of_the_command_to_the_byte(run, tmp_path):
    found = batchinfer.generate(
        table_of(), output={"dir": tmp_path / "run", "keep_columns": ["question"]}, prompt="question", **SETTINGS
    )
    assert output_bytes(tmp_path / "run") == output_bytes(run)
    assert found.equals(pq.read_table(run / "outputs" / "prompts.parquet"))
    assert found["row"].to_pylist() == [0, 1, 2, 3, 4]


def test_texts_are_users_messages_where_the_model_has_a_chat_template():
    chats = batchinfer.generate(CHATS, **SETTINGS)["text"].to_pylist()
    assert batchinfer.generate(TEXTS, **SETTINGS)["text"].to_pylist() == chats
    assert batchinfer.generate(table_of(), **SETTINGS)["text"].to_pylist() == chats
    assert batchinfer.generate(table_of(), user="question", **SETTINGS)["text"].to_pylist() == chats
    assert batchinfer.generate(table_of(), raw=True, **SETTINGS)["text"].to_pylist() != chats


def test_texts_go_as_they_are_to_a_model_without_a_chat_template(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(RANDOM_MODEL, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = {**SETTINGS, "model": model}
    expected = batchinfer.generate(TEXTS, raw=True, **SETTINGS)["text"]
    assert batchinfer.generate(TEXTS, **settings)["text"].equals(expected)


def test_a_list_of_texts_has_the_answers_of_a_table(run):
    found = batchinfer.generate(TEXTS, raw=True, **SETTINGS)
    assert found["text"].to_pylist() == pq.read_table(run / "outputs" / "prompts.parquet")["text"].to_pylist()
    assert found["id"].to_pylist() == [0, 1, 2, 3, 4]


def test_chats_of_a_list_and_of_a_table_have_the_same_answers():
    of_list = batchinfer.generate(CHATS, **SETTINGS)
    of_table = batchinfer.generate(pa.table({"chat": CHATS, "id": range(5)}), **SETTINGS)
    assert of_list.equals(of_table)
    assert set(of_list["status"].to_pylist()) == {"ok"}


def test_a_row_that_cannot_be_answered_is_an_error_row_at_its_place():
    found = batchinfer.generate([[5, 6, 7], [10**9], [8]], stream=True, sampling={"max_tokens": 2, "n": 2}, **{
        key: SETTINGS[key] for key in ("model", "dtype")
    })  # fmt: skip
    rows = {(row["row"], row["sample"]): row for row in found}
    assert [key for key in sorted(rows) if rows[key]["status"] == "error"] == [(1, 0), (1, 1)]
    assert len(rows) == 6
    assert rows[1, 0]["text"] is None
    assert "token" in rows[1, 0]["error"]


def test_nothing_in_is_nothing_out():
    assert batchinfer.generate([], **SETTINGS).num_rows == 0


@pytest.mark.all  # make test: lists of texts and of chats, above
@pytest.mark.parametrize(
    ("data", "kind"), [(TEXTS, "prompt"), (CHATS, "messages"), ([[1, 2], [], None], "token_ids"), ((), "prompt")]
)
def test_a_list_is_what_its_rows_are(data, kind):
    assert kinds_of(data)[:2] == (kind, kind)


@pytest.mark.all  # make test: lists of chats, above
def test_json_text_may_be_chats():
    assert kinds_of(['[{"role": "user", "content": "a"}]'], messages="chat")[:2] == ("messages", "chat")


@pytest.mark.all  # make test: test_plain_arrays
def test_numbers_and_arrays_of_numpy_are_those_of_python():
    rows = [np.array([1, 2], np.int32), [np.int64(3)], (4,)]
    assert kinds_of(rows) == ("token_ids", "token_ids", [[1, 2], [3], [4]])
    settings = generation.parts_of({"top_k": np.int64(3), "ignore_eos": np.True_, "stop_token_ids": np.array([5, 6])})
    assert settings["sampling"] == {"top_k": 3, "ignore_eos": True, "stop_token_ids": [5, 6]}
    assert [type(value) for value in settings["sampling"].values()] == [int, bool, list]


@pytest.mark.all  # make test: tables, below
def test_a_dataset_of_hugging_face_has_the_rows_that_it_shows():
    datasets = pytest.importorskip("datasets")
    shown = datasets.Dataset.from_dict(table_of().to_pydict()).select([3, 0])
    assert kinds_of(shown) == ("prompt", "question", [TEXTS[3], TEXTS[0]])
    assert kinds_of(shown.select([])) == ("prompt", "question", [])
    assert kinds_of(shown.to_iterable_dataset()) == ("prompt", "question", [TEXTS[3], TEXTS[0]])
    assert kinds_of(datasets.DatasetDict({"train": shown})) == ("prompt", "question", [TEXTS[3], TEXTS[0]])
    splits = datasets.DatasetDict({"train": shown, "test": shown})
    with pytest.raises(
        batchinfer.InputError, match=r"has the splits 'train' and 'test'; give one of them, for example data\['train'\]"
    ):
        prompts.reader_of(splits, {}, set())


@pytest.mark.all  # make test: a Dataset without a transform, above
def test_a_dataset_with_a_transform_is_refused_because_its_rows_are_others():
    datasets = pytest.importorskip("datasets")
    shown = datasets.Dataset.from_dict(table_of().to_pydict())
    upper = shown.with_transform(lambda rows: {"question": [text.upper() for text in rows["question"]]})
    for data in (upper, datasets.DatasetDict({"train": upper})):
        with pytest.raises(batchinfer.InputError, match=r"data has a transform .* give data\.map\(…\)"):
            prompts.reader_of(data, {}, set())
    assert kinds_of(upper.with_format(None))[2] == TEXTS
    assert kinds_of(shown.with_format("numpy"))[2] == TEXTS
    other = shown.add_column("note", TEXTS[::-1])
    assert kinds_of(other)[1:] == ("question", TEXTS)
    assert kinds_of(other.with_format(columns=["note"]))[1:] == ("note", TEXTS[::-1])
    assert kinds_of(other.with_format(columns=["note"], output_all_columns=True))[1:] == ("question", TEXTS)


@pytest.mark.all  # make test: lists, above
def test_a_column_of_a_dataset_is_a_list_of_its_values():
    datasets = pytest.importorskip("datasets")
    shown = datasets.Dataset.from_dict({"question": TEXTS, "chat": CHATS, "n": [[1]] * len(TEXTS)}).select([3, 0])
    assert kinds_of(shown["question"]) == ("prompt", "prompt", [TEXTS[3], TEXTS[0]])
    assert kinds_of(shown["chat"]) == kinds_of([CHATS[3], CHATS[0]])
    columns = {"question": shown["question"], "n": shown["n"]}
    assert kinds_of(columns, prompt="question") == ("prompt", "question", [TEXTS[3], TEXTS[0]])
    with pytest.raises(batchinfer.InputError, match=r"data is a IterableDataset, which holds no prompts; give list\("):
        prompts.reader_of(shown.to_iterable_dataset().map(lambda row: row), {}, set())


@pytest.mark.parametrize("kind", first_in_make_test(["table", "reader", "dataset", "pandas", "polars"]))
def test_tables_come_as_anybody_has_them(kind, tmp_path):
    table = table_of(task=[1] * 5)
    if kind == "dataset":
        pq.write_table(table, tmp_path / "a.parquet")
    data = {
        "table": lambda: table,
        "reader": table.to_reader,
        "dataset": lambda: ds.dataset(tmp_path / "a.parquet"),
        "pandas": lambda: pytest.importorskip("pandas") and table.to_pandas(),
        "polars": lambda: pytest.importorskip("polars").from_arrow(table),
    }[kind]()
    assert kinds_of(data) == ("prompt", "question", TEXTS)
    reader, _ = prompts.reader_of({"reader": table.to_reader()}.get(kind, data), {}, {"id"})
    prompts.write_shard(reader, tmp_path / "in" / "prompts.parquet", tmp_path / "run.json", None)
    config = write_job(tmp_path, input={"files": ["in/prompts.parquet"], "prompt": "question"})
    ended = command("plan", config)
    assert (ended.code, "5 in, 5 out, 0 bad" in ended.out) == (0, True), ended.err


@pytest.mark.all  # make test: tests/data/test_row_prompts.py
def test_a_template_has_the_texts_of_a_list_as_its_prompt():
    templated = batchinfer.generate(["ferry", "baker"], input={"template": "The {{ prompt }}"}, **SETTINGS)
    assert templated.equals(batchinfer.generate(["The ferry", "The baker"], raw=True, **SETTINGS))
    with pytest.raises(batchinfer.ConfigError, match="data is a list of token_ids; leave template out"):
        batchinfer.generate([[1]], input={"template": "The {{ prompt }}"}, **SETTINGS)


@pytest.mark.all  # make test: test_tables
def test_a_column_that_is_kept_holds_the_prompts_only_if_no_other_can():
    table = pa.table({"label": ["x"], "text": ["a"]})
    found = [
        prompts.reader_of(table.select(names), {}, set(), ["label"])[1] for names in (["label", "text"], ["label"])
    ]
    assert found == [{"prompt": "text"}, {"prompt": "label"}]


@pytest.mark.all  # make test: test_a_row_that_cannot_be_answered_is_an_error_row_...
def test_a_row_that_is_no_utf8_is_an_error_row():
    found = batchinfer.generate(["a\ud800", "The ferry"], **SETTINGS).to_pylist()
    assert [row["error"] for row in found] == ["prompt is not valid UTF-8", None]


@pytest.mark.all  # make test: tests/data/test_choice_columns.py
def test_rows_with_choices_come_whole():
    table = pa.table({"prompt": ["2 plus 3 is", "The ferry"], "choices": [[" 5", " 6"], [" sails", " 7", ""]]})
    settings = {**SETTINGS, "max_tokens": 0, "input": {"choices": "choices"}}
    rows = list(batchinfer.generate(table, stream=True, **settings))
    assert [(row["row"], row["status"]) for row in rows] == [(0, "ok"), (1, "error")]
    assert len(rows[0]["choice_logprobs"]) == 2


def test_columns_of_other_types_are_no_prompts():
    chats = [[{"role": "user", "content": "a"}]]
    assert kinds_of(pa.table({"chat": chats, "n": [1], "at": [[0.5]]}))[:2] == ("messages", "chat")
    assert kinds_of(pa.table({"ids": [[1, 2]], "n": [1]}))[:2] == ("token_ids", "ids")
    about = pa.array(['{"source": "web"}']).cast(pa.json_())
    assert kinds_of(pa.table({"text": ["x"], "about": about}))[:2] == ("prompt", "text")


WRONG = [
    ({"data": ["a"], "max_tokens": None}, "sampling.max_tokens is None"),
    ({"data": ["a"], "colour": 1}, "colour is no setting of generate()"),
    ({"data": ["a"], "temprature": 1}, "temprature is no setting of generate(); did you mean temperature?"),
    ({"data": ["a"], "temperature": "hot"}, "generate(): sampling.temperature is 'hot', but it should be"),
    ({"data": ["a"], "cluster": 2}, "cluster is 2, not a dict"),
    ({"data": ["a"], "cluster": {"ranks": 2}}, "cluster.ranks is not a known key"),
    ({"data": ["a"], "input": {"files": ["x"]}}, "input.files is set, but the rows of generate() are its data"),
    ({"data": ["a"], "output": {"dir": "gs://a/b"}}, "output.dir is a URI"),
    ({"data": ["a"], "token_ids": "x"}, "token_ids is 'x', but data is a list of prompt"),
    ({"data": ["a", [1]]}, "data holds rows of several kinds (prompt and token_ids)"),
    ({"data": ["a", 1.5]}, "row 1 of data is a float that is no prompt"),
    ({"data": [{"prompt": "a"}, "a"]}, "row 1 of data is a str, but other rows are dicts"),
    ({"data": [["a"]]}, "row 0 of data is a list that is no prompt"),
    ({"data": [[{"role": "user", "content": {1}}]]}, "data cannot be read as Arrow columns: Object of type set"),
    ({"data": [[2**70]]}, "data cannot be read as Arrow columns"),
    ({"data": 5}, "data is a int, which holds no prompts"),
    ({"data": iter(["a"])}, "which holds no prompts; give list(data)"),
    ({"data": ["a"], "raw": "no"}, "raw is 'no'; give True or False"),
    ({"data": ["a"], "stream": 1}, "stream is 1; give True or False"),
    ({"data": ["a"], "progress": "bar"}, "progress is 'bar'; give True, False, \"tqdm\", or a function"),
    ({"data": pa.table({"n": [1]})}, "no column of data holds texts, messages or token ids (it has n)"),
    ({"data": pa.table({"a": ["x"], "b": ["y"]})}, "several columns of data could hold the prompts; name one:"),
    ({"data": pa.table({"a": ["x"]}), "prompt": "b"}, "b"),
    ({"data": pa.table({"a": ["x"]}), "prompt": "a", "messages": "a"}, "exactly one must be set"),
    ({"data": ["a"], "model": "/nowhere"}, "there is no model folder /nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=[sentence[:30] for _, sentence in WRONG])
def test_a_wrong_use_is_one_sentence(arguments, sentence, tmp_path):
    with pytest.raises((batchinfer.ConfigError, batchinfer.InputError, batchinfer.ModelError)) as raised:
        batchinfer.generate(**{**SETTINGS, **arguments})
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_of_other_rows_or_settings_is_refused(tmp_path):
    batchinfer.generate(["a", "b"], output=tmp_path / "run", **SETTINGS)
    before = output_bytes(tmp_path / "run")
    with pytest.raises(batchinfer.RunMismatchError, match="was made for other rows than these"):
        batchinfer.generate(["a", "c"], output=tmp_path / "run", **SETTINGS)
    with pytest.raises(batchinfer.RunMismatchError, match=r"sampling\.top_k was 0 and is now 3"):
        batchinfer.generate(["a", "b"], output=tmp_path / "run", top_k=3, **SETTINGS)
    again = list(batchinfer.generate(["a", "b"], output=tmp_path / "run", stream=True, **SETTINGS))
    assert sorted(row["row"] for row in again) == [0, 1]
    assert output_bytes(tmp_path / "run") == before


def test_examples_of_the_documentation_are_true(monkeypatch, tmp_path):
    for name in ("sample_data", "jobs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for module in (generation, job, model):
        found = doctest.testmod(module, extraglobs={"batchinfer": batchinfer})
        assert (found.failed, found.attempted > 0) == (0, True)
    page = ROOT / "docs" / "python.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_importing_the_package_loads_nothing_large():
    code = (
        "import collections, sys, typing; before = set(sys.modules); import batchinfer; "
        "print(*set(sys.modules) - before)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in ended.stdout.split()}
    assert loaded == {"batchinfer"}


def test_the_package_says_what_it_has():
    assert {"generate", "Job", "Model", "BatchinferError", "__version__"} <= set(dir(batchinfer))
    assert batchinfer.ConfigError.__module__ == "batchinfer.records"
    assert (Path(batchinfer.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        _ = batchinfer.generat
