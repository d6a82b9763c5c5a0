"""The outputs as a Hugging Face dataset: the same files, vouched for, a card; it goes with the key that asks for it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from batchinfer.rundir import RunDir, read_state
from support.jobs import batchinfer, output_bytes, write_job, write_shard

SYSTEM = 'Be "brief" | now.'
DATA = [f"data/train-0000{place}-of-00002.parquet" for place in range(2)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two shards, one of them with a bad row, and one that cannot be read."""
    folder = tmp_path_factory.mktemp("dataset")
    chats = [[{"role": "user", "content": f"What is {row}?"}] for row in range(5)]
    write_shard(folder / "prompts" / "b.parquet", {"id": [3, 4], "m": chats[3:], "a|b": [[1.5], None]})
    write_shard(folder / "prompts" / "a" / "a.parquet", {"id": [0, 1, 2], "m": [*chats[:2], None], "a|b": [[0.5]] * 3})
    (folder / "prompts" / "z.parquet").write_bytes(b"nothing")
    job = write_job(
        folder,
        input={"files": ["prompts/**/*.parquet"], "prompt": None, "messages": "m", "system": SYSTEM},
        output={"push": "hf-folder", "keep_columns": ["a|b"]},
        sampling={"n": 2, "max_tokens": 4, "temperature": 0.5, "logprobs": 1},
    )
    ended = batchinfer("run", job)
    assert ended.code == 3, ended.err
    assert f"a Hugging Face dataset: {folder / 'run' / 'dataset'}; name the licence" in ended.err
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that goes on."""
    return shutil.copytree(finished, tmp_path / "run")


def card_of(run):
    """(the card's metadata, its text)."""
    _, metadata, text = (run / "dataset" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def dataset_bytes(run):
    return {str(path.relative_to(run / "dataset")): path.read_bytes() for path in (run / "dataset").rglob("*.*")}


def test_the_data_are_the_outputs_in_the_order_of_the_shards_and_take_no_room(finished):
    folder = finished / "dataset"
    assert set(dataset_bytes(finished)) == {"README.md", *DATA}
    for name, output in zip(DATA, ("a/a.parquet", "b.parquet"), strict=True):
        assert os.path.samefile(folder / name, finished / "outputs" / output)
    assert sum(pq.read_metadata(folder / name).num_rows for name in DATA) == 10


def test_the_card_says_where_the_data_are_what_they_hold_and_how_they_were_made(finished):
    metadata, text = card_of(finished)
    assert metadata["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}
    ]
    assert "license" not in metadata
    assert "# license: " in (finished / "dataset" / "README.md").read_text()
    assert (metadata["size_categories"], metadata["pretty_name"]) == (["n<1K"], "run")
    assert "\n# run\n" in text
    rows = [row for name in DATA for row in pq.read_table(finished / "dataset" / name).to_pylist()]
    generated = sum(row["completion_tokens"] for row in rows)
    prompts = sum(row["prompt_tokens"] for row in rows if row["sample"] == 0)
    for line in ("rows | 10", "rows with an answer | 8", "error rows | 2", f"prompt tokens | {prompts:,}"):
        assert f"| {line} |" in text
    assert f"| generated tokens | {generated:,} |" in text
    assert "| a\\|b | of the input |" in text
    assert "| text | generated text; null for an error row |" in text
    fingerprint = read_state(RunDir(finished))["fingerprint"]
    assert f"| digest of the weights | {fingerprint['model.weights']} |" in text
    settings = tomllib.loads(text.split("```toml\n")[1].split("```")[0])
    assert settings["sampling"]["temperature"] == 0.5
    assert settings["input"]["system"] == SYSTEM
    assert str(finished.parent) not in text


@pytest.mark.all  # make test: the card and the data, above
def test_datasets_reads_the_folder(finished):
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("the package datasets is not installed")
    program = (
        "import json, sys, datasets; found = datasets.load_dataset(sys.argv[1], cache_dir=sys.argv[2]); "
        "print(json.dumps([list(found), found['train'].num_rows, list(found['train']['id'])]))"
    )
    cache = finished.parent / "cache"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    command = [sys.executable, "-c", program, str(finished / "dataset"), str(cache)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    ids = [number for number in range(5) for _ in range(2)]
    assert json.loads(ended.stdout.splitlines()[-1]) == [["train"], 10, ids]


def test_kept_columns_that_datasets_cannot_read_are_refused_by_the_plan(tmp_path):
    columns = {
        "id": [1],
        "prompt": ["x"],
        "good": pa.array([{"a": [1]}]),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
        "deep": pa.array([[{"a": Decimal("1.5")}]], pa.list_(pa.struct([("a", pa.decimal32(5, 2))]))),
        "uuid": pa.array([b"0123456789abcdef"], pa.uuid()),
    }
    write_shard(tmp_path / "prompts" / "a.parquet", columns)
    planned = batchinfer(
        "plan", write_job(tmp_path, output={"push": "hf-folder", "keep_columns": ["good", "map", "deep", "uuid"]})
    )
    assert planned.code == 2
    assert "'map', which holds map<string, int64" in planned.err
    assert "'deep', which holds decimal32(5, 2), a type that Hugging Face's datasets cannot read" in planned.err
    assert "'uuid', which holds extension<arrow.uuid>" in planned.err
    assert "'good'" not in planned.err


def test_its_files_are_vouched_for_and_written_again(run):
    expected, outputs = dataset_bytes(run), output_bytes(run)
    assert batchinfer("verify", run).code == 0
    path = run / "dataset" / DATA[1]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + b" ")
    ended = batchinfer("verify", run)
    assert ended.code != 0
    assert f"dataset/{DATA[1]}" in ended.out + ended.err
    assert "writes all outputs again" in ended.out + ended.err
    for gone in (path, run / "dataset" / DATA[0], run / "dataset" / "README.md"):
        gone.unlink()
        ended = batchinfer("finish", run)
        assert ended.code == 3
        assert "was edited" not in ended.err
        assert (dataset_bytes(run), output_bytes(run)) == (expected, outputs)
    assert batchinfer("verify", run).code == 0


@pytest.mark.parametrize(
    "edited",
    [
        lambda card: card.replace(b"# license: which", b"license: cc-by-4.0 # which"),
        lambda card: card.rpartition(b"\n<!-- ")[0],
        lambda card: card + b"Thanks to all.\n",
        lambda card: b"---\nlicense: mit\n---\nMine, \xff\n",
    ],
    ids=["licence", "no last line", "more text", "another"],
)
def test_a_card_that_was_edited_stays_when_all_outputs_are_written_again(run, edited):
    card = run / "dataset" / "README.md"
    written = card.read_bytes()
    card.write_bytes(edited(written))
    assert batchinfer("verify", run).code == 0
    for again in ("not at all", "all"):
        if again == "all":
            (run / "outputs" / "b.parquet").unlink()
        ended = batchinfer("finish", run)
        assert ended.code == 3
        assert card.read_bytes() == edited(written)
        assert (f"{card} was edited (or an earlier version wrote it) and stays" in ended.err) == (again == "all")
    card.unlink()
    assert batchinfer("finish", run).code == 3
    assert card.read_bytes() == written


def test_the_folder_comes_and_goes_with_the_key_and_holds_nothing_else(run):
    expected = dataset_bytes(run)
    off = run.parent / "off.toml"
    text = (run / "job.toml").read_text()
    assert 'push = "hf-folder"\n' in text
    off.write_text(text.replace('push = "hf-folder"\n', ""))
    assert batchinfer("plan", off, "--set", f"output.dir={run}").code == 0
    assert batchinfer("finish", run).code == 3
    assert not (run / "dataset").exists()
    assert not [name for name in read_state(RunDir(run))["files"] if name.startswith("dataset/")]
    assert batchinfer("verify", run).code == 0
    (run / "dataset").mkdir()
    (run / "dataset" / "mine.txt").write_text("mine")
    assert batchinfer("finish", run).code == 3
    assert (run / "dataset" / "mine.txt").exists()
    off.write_text(text)
    assert batchinfer("finish", off, "--set", f"output.dir={run}").code == 3
    assert expected.items() <= dataset_bytes(run).items()


def test_without_the_key_an_edited_card_stays_alone(run):
    card = run / "dataset" / "README.md"
    card.write_text(card.read_text() + "Thanks to all.\n")
    edited = card.read_bytes()
    off = run.parent / "off.toml"
    off.write_text((run / "job.toml").read_text().replace('push = "hf-folder"\n', ""))
    ended = batchinfer("finish", off, "--set", f"output.dir={run}")
    assert ended.code == 3
    assert f"{card} was edited and stays" in ended.err
    assert dataset_bytes(run) == {"README.md": edited}
    assert batchinfer("verify", run).code == 0


def test_a_partial_dataset_is_made_whole_by_the_next_finish(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "units")
    shutil.rmtree(run / "done")
    shutil.rmtree(run / "outputs")
    assert batchinfer("finish", run, "--allow-partial").code == 3
    assert "| rows with an answer | 0 |" in card_of(run)[1]
    assert batchinfer("work", run).code == 0
    assert batchinfer("finish", run).code == 3
    assert "| rows with an answer | 8 |" in card_of(run)[1]
    for name in DATA:
        assert (run / "dataset" / name).read_bytes() == (finished / "dataset" / name).read_bytes()
