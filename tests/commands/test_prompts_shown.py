"""Prompts as the model gets them: one by `plan --show`, and next to answers by `peek --prompts`."""

import json

import pytest

from batchinfer.data.tokenizer import load_tokenizer
from batchinfer.data.validate import PromptChecks
from support.jobs import batchinfer, question, write_job, write_shard
from support.paths import RANDOM_MODEL


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A job of chats in two shards; ids of the first shard are numbers, its third row has none, its fourth is bad."""
    folder = tmp_path_factory.mktemp("chats")
    texts = ["What is one?", "What is two?", "What is three?", None]
    write_shard(folder / "prompts" / "a.parquet", {"id": ["5", "x", None, "bad"], "text": texts})
    write_shard(folder / "prompts" / "b.parquet", {"id": ["q4", "q5"], "text": ["What is four?", "What is five?"]})
    return write_job(folder, input={"prompt": None, "user": "text", "system": "Be brief."}, sampling={"max_tokens": 4})


@pytest.mark.parametrize(("name", "text"), [("x", "two"), ("2", "three"), ("4", "four"), ("5", "one"), ("q5", "five")])
def test_a_prompt_by_id_or_number(chats, name, text):
    shown = batchinfer("plan", chats, "--show", name)
    assert shown.code == 0, shown.err
    head, _, prompt = shown.out.removesuffix("\n").partition("\n\n")
    assert prompt == f"<｜begin▁of▁sentence｜>Be brief.\n\n<｜User｜>What is {text}?<｜Assistant｜>"
    ids = load_tokenizer(RANDOM_MODEL).encode_piece(prompt)
    assert head.endswith(f": {len(ids):,} tokens")
    assert not (chats.parent / "run").exists(), "nothing is planned"


def test_only_the_batch_of_the_row_is_encoded(chats, monkeypatch):
    started = []
    start = PromptChecks.start
    monkeypatch.setattr(
        PromptChecks, "start", lambda self, batch, found: started.append(found is None) or start(self, batch, found)
    )
    assert batchinfer("plan", chats, "--show", "q5").code == 0
    assert started.count(True) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--show", "nobody"], "no row has the id 'nobody', and the 6 rows have the numbers 0 to 5"),
        (["--show", "6"], "no row has the id '6'"),
        (["--show", "bad"], "id bad is bad: "),
        (["--show", "x", "--again", "--reuse", "run"], "leave --again, --reuse out"),
    ],
)
def test_what_cannot_be_shown_is_named(chats, options, sentence):
    shown = batchinfer("plan", chats, *options)
    assert (shown.code, shown.out) == (2, "")
    assert sentence in shown.err


def test_prompts_next_to_answers(chats):
    run = chats.parent / "peeked"
    assert batchinfer("run", chats, "--set", f"output.dir={run}").code == 3
    rows = json.loads(batchinfer("peek", run, "--prompts", "--json").out)
    assert len(rows) == 5
    by_id = {row["id"]: row for row in rows}
    assert "What is four?" in by_id["q4"]["prompt"]
    shown = batchinfer("plan", chats, "--show", "q4").out
    assert shown.endswith(f"{by_id['q4']['prompt_tokens']} tokens\n\n{by_id['q4']['prompt']}\n")
    peeked = batchinfer("peek", run, "--prompts")
    assert peeked.code == 0
    assert peeked.out.count("--- answer") == 5
    assert by_id["q4"]["prompt"] in peeked.out
    assert batchinfer("peek", run, "--prompts", "--follow").code == 2


def test_long_prompts_are_cut_and_choices_belong_to_them(tmp_path):
    columns = {"id": ["a"], "prompt": [question(1) * 10], "choices": [["yes", "no, never"]]}
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    job = write_job(tmp_path, input={"choices": "choices"}, sampling={"max_tokens": 0})
    shown = batchinfer("plan", job, "--show", "a").out
    assert shown.count("times 2, roughly?") == 10
    assert "choice 1: " in shown
    assert shown.endswith("no, never\n")
    assert batchinfer("run", job).code == 0
    peeked = batchinfer("peek", job, "--prompts").out
    assert "characters left out; `batchinfer plan JOB --show ROW` prints all" in peeked
    assert "roughly?no, never" in peeked
