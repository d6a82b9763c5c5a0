"""Token texts in every column of log-probabilities, if output.token_texts is set."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest

from batchinfer.data.schemas.table import LOGPROBS, LOGPROBS_WITH_TEXTS
from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.finish.outputs import TokenTexts
from support.jobs import batchinfer, output_bytes, outputs, write_job, write_shard
from support.paths import RANDOM_MODEL


def entry(token, *top):
    return {"token_id": token, "logprob": -1.0, "top": [{"token_id": one, "logprob": -2.0} for one in top]}


def named(entry):
    if entry is None:
        return None
    top = entry["top"] and [{**one, "token": f"<{one['token_id']}>"} for one in entry["top"]]
    return {**entry, "token": None if entry["token_id"] is None else f"<{entry['token_id']}>", "top": top}


def test_every_column_of_log_probabilities_gets_texts_and_each_id_is_decoded_once():
    asked = []

    def decode(token):
        asked.append(token)
        return f"<{token}>"

    texts = TokenTexts(decode)
    rows = [
        [[entry(5, 6, 7), entry(6)], None, [], [entry(5)]],
        # of prompts: nothing is known of their first token
        [None, [None, entry(8, 5)], [entry(None)], [{"token_id": 7, "logprob": None, "top": None}, entry(5)]],
        [[], [], None, None],
    ]
    columns = {f"column {place}": pa.array(lists, LOGPROBS) for place, lists in enumerate(rows)}
    whole = pa.RecordBatch.from_pydict({"row": pa.array(range(4)), **columns})
    for batch in (whole, whole.slice(1, 2), whole.slice(4)):
        found = texts.add(batch)
        assert found.column("row") == batch.column("row")
        for name in columns:
            assert found.schema.field(name).type == LOGPROBS_WITH_TEXTS
            assert found.column(name).to_pylist() == [
                None if one is None else [named(token) for token in one] for one in batch.column(name).to_pylist()
            ]
    assert sorted(asked) == [5, 6, 7, 8]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same job without and with texts; one of three rows asks for no log-probabilities, one is bad."""
    folder = tmp_path_factory.mktemp("texts")
    how = pa.array([{"logprobs": number} for number in (3, None, 0, 1)], pa.struct([("logprobs", pa.int32())]))
    write_shard(folder / "prompts" / "a.parquet", {"prompt": ["one", "two", "three", None], "how": how})
    for name, output in {"without": {}, "with": {"token_texts": True}}.items():
        job = write_job(
            folder,
            name=f"{name}.toml",
            input={"sampling": "how"},
            output={"dir": name, "keep_columns": ["how"], **output},
            sampling={"max_tokens": 40, "temperature": 1.0},
        )
        assert batchinfer("run", job).code == 3
    return folder


def test_tokens_have_their_texts_and_nothing_else_is_changed(runs):
    decode = load_tokenizer(RANDOM_MODEL)._tokenizer.decode
    without, found = outputs(runs / "without")["a.parquet"], outputs(runs / "with")["a.parquet"]
    assert [row["logprobs"] is None for row in found] == [False, True, False, True]
    for row in found:
        for token in row["logprobs"] or []:
            for one in (token, *token["top"]):
                assert one.pop("token") == decode([one["token_id"]], skip_special_tokens=False)
    assert found == without


def test_texts_show_special_tokens_and_bytes_of_no_whole_character():
    tokenizer = load_tokenizer(RANDOM_MODEL)
    texts = [tokenizer.decode([token], with_special=True) for token in (2, tokenizer.vocab_size + 9)]
    assert texts == ["<｜User｜>", ""]
    euro = tokenizer.encode_piece("€")
    assert len(euro) > 1
    assert {tokenizer.decode([token], with_special=True) for token in euro} == {"\ufffd"}


def test_runs_with_and_without_texts_are_reported_together(runs):
    sql = "SELECT DISTINCT run, token.token IS NULL AS x FROM (SELECT run, unnest(logprobs) AS token FROM outputs)"
    ended = batchinfer("report", runs / "with", runs / "without", "--json", "--sql", f"{sql} ORDER BY run")
    assert json.loads(ended.out) == [{"run": "with", "x": False}, {"run": "without", "x": True}]


def test_texts_are_not_of_another_tokenizer_than_the_plans(tmp_path):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["one"]})
    job = write_job(
        tmp_path, model={"path": str(model)}, output={"token_texts": True}, sampling={"max_tokens": 4, "logprobs": 1}
    )
    assert batchinfer("plan", job).code == batchinfer("work", job).code == 0
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace('"special": true', '"special": false', 1))
    ended = batchinfer("finish", job)
    assert ended.code == 2
    assert "belongs to another job: tokenizer and template was" in ended.err
    (model / "tokenizer.json").write_text(text)
    assert batchinfer("finish", job).code == 0
    assert output_bytes(tmp_path / "run")


def test_texts_without_log_probabilities_are_refused(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["one"]})
    ended = batchinfer("plan", write_job(tmp_path, output={"token_texts": True}))
    assert ended.code == 2
    assert "job.toml: output.token_texts is set, but no row has logprobs; set sampling.logprobs" in ended.err
