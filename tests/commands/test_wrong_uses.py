"""Mistakes of new users as a table: each with its exit code and error sentence."""

import json
import shutil

import pyarrow as pa
import pytest

from support.jobs import Ended, batchinfer, write_job, write_shard
from support.openai_batches import DOCUMENTED
from support.paths import RANDOM_MODEL

CHAT = [[{"role": "user", "content": "Hello"}]] * 2
SHAREGPT = [[{"from": "human", "value": "Hello"}]] * 2
COLUMNS = {
    "id": [1, 2],
    "prompt": ["Hello", "there"],
    "chat": CHAT,
    "talk": SHAREGPT,
    "tokens": [[1, 2], [3]],
    "length": [1.5, 2.0],
    "how": [{"n": 1}, {"n": 1}],
    "half": pa.array([1.5, 2.5], pa.float16()),
}


def told(ended: Ended) -> list[str]:
    assert "Traceback" not in ended.err
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


def scored(file: str, column: str) -> dict:
    return {"input": {"files": [file], "choices": column}, "sampling": {"max_tokens": 0}}


JOBS = [
    # what the file says: the words of each line that it gets
    ({"sampling": {"max_tokens": None, "max_token": 4}}, ["max_tokens is missing; add it", "did you mean max_tokens?"]),
    ({"sampling": {"max_new_tokens": 4}}, ["sampling.max_new_tokens is not a known key; did you mean max_tokens?"]),
    ({"sampling": {"max_tokens": "8"}}, ["should be a valid integer; write it without quotes"]),
    ({"sampling": {"stop": 3}}, ["sampling.stop is 3, but it should be a valid list"]),
    ({"samplng": {"n": 2}}, ["samplng is not a known part; did you mean sampling?"]),
    ({"model": {"dtyp": "bfloat16"}}, ["model.dtyp is not a known key; did you mean dtype?"]),
    ({"model": {"dtype": "bf16"}}, ["did you mean bfloat16?"]),
    ({"model": {"max_tokens": 8}}, ["model.max_tokens is not a known key; it belongs into [sampling]"]),
    ({"output": {"dir": None, "folder": "run"}}, ["output.dir is missing; add it", "output.folder is not a known key"]),
    ({"input": {"files": "prompts/a.parquet"}}, ['should be a valid list; write ["prompts/a.parquet"]']),
    ({"input": {"files": ["prompt/*.parquet"]}}, ["no file matches"]),
    ({"input": {"promt": "prompt"}}, ["input.promt is not a known key; did you mean prompt?"]),
    ({"input": {"prompt": None}}, ["exactly one must be set, but the job sets none"]),
    ({"cluster": {"mode": "disagregated"}}, ["did you mean disaggregated?"]),
    # columns
    ({"input": {"prompt": "promt"}}, ["input.prompt names 'promt', which no input shard has", "did you mean prompt?"]),
    ({"input": {"prompt": "text"}}, ["the first shard has id, prompt, chat"]),
    ({"input": {"id": "idd"}}, ["input.id names 'idd', which no input shard has", "did you mean id?"]),
    ({"input": {"id": "question_number"}}, ['set input.id = "none" if rows have no ids']),
    ({"input": {"id": "length"}}, ["column 'length' is double, but must be text or integer"]),
    ({"input": {"sampling": "hwo"}}, ["did you mean how?"]),
    ({"output": {"keep_columns": ["lenght", "chta"]}}, ["did you mean length?", "did you mean chat?"]),
    ({"output": {"keep_columns": ["id"]}}, ["'id', which outputs have already"]),
    ({"input": {"prompt": "chat"}}, ['a list of structs with role and content: set input.messages = "chat" instead']),
    ({"input": {"prompt": "tokens"}}, ['a list of integers: set input.token_ids = "tokens" instead']),
    ({"input": {"prompt": "talk"}}, ['set input.format = "sharegpt" and input.messages = "talk" instead']),
    ({"input": {"prompt": "length"}}, ["must be text; column 'prompt' is: set input.prompt = \"prompt\""]),
    ({"input": {"prompt": None, "messages": "tokens"}}, ['set input.token_ids = "tokens" instead']),
    ({"input": {"prompt": None, "messages": "id"}}, ["is int64, but must be a list of structs"]),
    ({"input": {"prompt": None, "token_ids": "prompt"}}, ['it is text: set input.prompt = "prompt" instead']),
    ({"input": {"sampling": "length"}}, ["column 'length' is double, but must be a struct"]),
    (
        {"input": {"prompt": "promt", "id": "idd"}, "output": {"keep_columns": ["lenght"]}},
        ["did you mean id?", "did you mean prompt?", "did you mean length?"],
    ),
    # formats
    ({"input": {"format": "openai"}}, ["prompt does not go with format = 'openai', whose lines have it"]),
    ({"input": {"format": "openai", "prompt": None, "id": "id"}}, ["input.id does not go with format = 'openai'"]),
    ({"input": {"format": "openai", "prompt": None, "tools": "t"}}, ["tools does not go with format = 'openai'"]),
    ({"input": {"format": "open-ai", "prompt": None}}, ["did you mean openai?"]),
    ({"input": {"files": ["batch.jsonl"]}}, ['lines of an OpenAI batch: set input.format = "openai" instead']),
    ({"input": {"files": ["batch.jsonl"], "prompt": None, "messages": "messages"}}, ['input.format = "openai"']),
    ({"input": {"files": ["batch.jsonl"], "prompt": "body"}}, ['must be text; these are lines of an OpenAI batch']),
    # lines hold what they hold: all values of a column are of the wrong type, or no line is a request
    ({"input": {"files": ["a.jsonl"], "prompt": "id"}}, ["input.prompt: column 'id' is int64, but must be text"]),
    ({"input": {"files": ["a.jsonl"], "prompt": "tokens"}}, ['set input.token_ids = "tokens" instead']),
    ({"input": {"files": ["a.jsonl"], "prompt": "chat"}}, ['set input.messages = "chat" instead']),
    ({"input": {"files": ["a.jsonl"], "prompt": "talk"}}, ['input.format = "sharegpt" and input.messages = "talk"']),
    ({"input": {"files": ["a.jsonl"], "id": "length"}}, ["column 'length' is double, but must be text or integer"]),
    ({"input": {"files": ["a.jsonl"], "prompt": None, "token_ids": "prompt"}}, ['set input.prompt = "prompt" inst']),
    ({"input": {"files": ["a.csv"], "prompt": None, "token_ids": "prompt"}}, ['set input.prompt = "prompt" instead']),
    (scored("a.jsonl", "prompt"), ["column 'prompt' is string, but must be a list of texts"]),
    (scored("a.jsonl", "length"), ["column 'length' is double, but must be a list of texts"]),
    (scored("a.csv", "prompt"), ["column 'prompt' is string, but must be a list of texts"]),
    ({"input": {"files": ["a.jsonl"], "prompt": None, "messages": "prompt"}}, ['set input.prompt = "prompt" inst']),
    ({"input": {"files": ["a.jsonl"], "prompt": None, "messages": "tokens"}}, ['input.token_ids = "tokens" instead']),
    ({"input": {"files": ["a.jsonl"], "prompt": None, "messages": "talk"}}, ['input.format = "sharegpt" and input.m']),
    ({"input": {"files": ["a.jsonl"], "prompt": None, "messages": "length"}}, ["'length' holds a chat", "a number"]),
    ({"input": {"prompt": None, "messages": "prompt"}}, ['is text: set input.prompt = "prompt" instead']),
    ({"input": {"files": ["a.jsonl"], "format": "openai", "prompt": None}}, ["line 1: custom_id is missing; leave in"]),
    ({"input": {"format": "openai", "prompt": None}}, ["no line of the input is a request of an OpenAI batch"]),
    ({"input": {"files": ["empty.jsonl"]}}, ["the input has no rows and no columns", "empty.jsonl is empty"]),
    ({"input": {"files": ["a.csv"], "format": "jsonl"}}, ['with a key in it; it looks like CSV: set input.format']),
    ({"input": {"files": ["array.jsonl", "x.jsonl"], "prompt": "y"}}, ["the first shard has prompt"]),
    ({"input": {"files": ["array.jsonl"]}}, ["a JSON object with a key in it; it looks like one JSON array"]),
    ({"output": {"format": "json"}}, ["did you mean jsonl?"]),
    ({"output": {"push": "hf_folder"}}, ["did you mean hf-folder?"]),
    ({"output": {"format": "openai"}, "input": {"id": "none"}}, ["lines are answers by id, but rows have no ids"]),
    ({"output": {"format": "openai"}, "input": {"files": ["x.jsonl"]}}, ["but no input shard has a column 'id'; name"]),
    (
        {"output": {"format": "openai"}, "input": {"choices": "how"}, "sampling": {"max_tokens": 0}},
        ["but input.choices is set; use jsonl"],
    ),
    ({"output": {"format": "jsonl", "keep_columns": ["half"]}}, ["'half', which is halffloat, a type that output.f"]),
    # the model
    ({"model": {"path": "modle"}}, ["modle"]),
    ({"model": {"path": "a.csv"}}, ["a.csv is a file; give the folder that holds config.json"]),
    ({"model": {"path": "ggufs"}}, ["config.json does not exist; a model folder", "GGUF files are not read"]),
    ({"model": {"path": "ggufs/a.gguf"}}, ["a.gguf is a file; give the folder", "GGUF files are not read"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), JOBS, ids=[str(changes) for changes, _ in JOBS])
def test_a_wrong_job_ends_with_2_and_says_what_to_write(tmp_path, changes, words):
    write_shard(tmp_path / "prompts" / "a.parquet", COLUMNS)
    (tmp_path / "batch.jsonl").write_text(DOCUMENTED)
    rows = [
        {name: COLUMNS[name][row] for name in ("id", "prompt", "chat", "talk", "tokens", "length")} for row in (0, 1)
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "array.jsonl").write_text('[{"prompt": "Hello"}]')
    (tmp_path / "x.jsonl").write_text('{"prompt": "Hello"}')
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.csv").write_text("id,prompt\n1,Hello\n2,there\n")
    ended = batchinfer("plan", write_job(tmp_path, **changes))
    lines = told(ended)
    assert (ended.code, ended.out) == (2, ""), ended.err
    for word in words:
        assert any(word in line for line in lines), ended.err
    assert not (tmp_path / "run").exists()


def test_rows_of_some_shards_may_be_of_the_wrong_type(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"id": [1], "prompt": ["Hello"]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"id": [2], "prompt": [5]})
    ended = batchinfer("plan", write_job(tmp_path))
    assert ended.code == 0
    assert "b.parquet; the first: row 0: column 'prompt' is int64, but must be text" in ended.err


LINES = [
    # lines, keys of [input], and how many rows are bad: one is of the right kind, or none of a wrong one
    (['{"prompt": 5}', '{"prompt": "Hello"}'], {}, 1),
    (['{"prompt": null}', '{"prompt": ""}'], {}, 2),
    (['{"prompt": 5', '{"prompt": ""}'], {}, 2),
    (['{"prompt": "a"}', '{"prompt": "b", "id": 1.5}'], {}, 1),
    (['{"ids": "x"}', '{"ids": [1, 2]}'], {"prompt": None, "token_ids": "ids"}, 1),
    (
        ['{"chat": "Hello"}', '{"chat": [{"role": "user", "content": "Hello"}]}'],
        {"prompt": None, "messages": "chat"},
        1,
    ),
    (['{"chat": null}', '{"chat": []}'], {"prompt": None, "messages": "chat"}, 2),
    (['{"prompt": "x"}', '{"custom_id": "a", "method": "GET"}'], {"prompt": None, "format": "openai"}, 2),
]


@pytest.mark.parametrize(("rows", "inputs", "num_bad"), LINES, ids=[" ".join(rows) for rows, _, _ in LINES])
def test_lines_of_which_one_is_right_or_only_empty_are_planned(tmp_path, rows, inputs, num_bad):
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    ended = batchinfer("plan", write_job(tmp_path, input={"files": ["a.jsonl"], **inputs}))
    assert ended.code == 0, ended.err
    assert f"{num_bad} bad row{'s' if num_bad > 1 else ''} in" in ended.err


def test_chats_in_one_shard_leave_texts_in_another_to_its_rows(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"chat": ["Hello"]})
    write_shard(tmp_path / "prompts" / "b.parquet", {"chat": ['[{"role": "user", "content": "Hello"}]']})
    ended = batchinfer("plan", write_job(tmp_path, input={"prompt": None, "messages": "chat"}))
    assert ended.code == 0, ended.err
    assert "a.parquet; the first: row 0: chat is not valid JSON" in ended.err


def test_an_empty_shard_does_not_make_a_wrong_type_right(tmp_path):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": pa.array([], pa.string())})
    write_shard(tmp_path / "prompts" / "b.parquet", {"prompt": [5]})
    ended = batchinfer("plan", write_job(tmp_path))
    assert ended.code == 2
    assert "column 'prompt' is int64" in ended.err


@pytest.mark.parametrize(("ids", "warns"), [(None, True), ("none", False)])
def test_rows_may_have_no_ids_where_nobody_named_a_column(tmp_path, ids, warns):
    write_shard(tmp_path / "prompts" / "a.parquet", {"prompt": ["Hello"]})
    ended = batchinfer("plan", write_job(tmp_path, input={"id": ids}))
    assert ended.code == 0, ended.err
    assert ("a.parquet has no column 'id'; its rows have null ids" in ended.err) is warns
    assert batchinfer("plan", tmp_path / "run").code == 0  # its job.toml names no column either


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a planned run, an interrupted one and a finished one, each with its job file."""
    folder = tmp_path_factory.mktemp("runs")
    write_shard(folder / "prompts" / "a.parquet", {"id": [1, 2], "prompt": ["Hello", "there"]})
    for name in ("planned", "computed", "finished"):
        write_job(folder, name=f"{name}.toml", output={"dir": name})
    assert batchinfer("plan", folder / "planned.toml").code == 0
    assert batchinfer("plan", folder / "computed.toml").code == 0
    assert batchinfer("work", folder / "computed.toml").code == 0
    assert batchinfer("run", folder / "finished.toml").code == 0
    return folder


USES = [
    # a command in the folder of the runs, its exit code, and words of what it says
    ("report finished.toml", 0, "output rows"),
    ("report finished", 0, "output rows"),
    ("report planned", 0, "not finished: `batchinfer status planned`"),
    ("report planned.toml", 0, "unfinished (planned): 0 of 2 rows"),
    ("report computed", 0, "unfinished (computed): 2 of 2 rows"),
    ("report planned --json", 0, '"rows_planned": 2'),
    ("report planned --sql SELECT", 2, "--sql QUERY` asks the answers so far"),
    ("report planned finished", 0, "planned is unfinished (planned): 0 of 2 rows"),
    ("report prompts", 2, "is not a run folder"),
    ("report nowhere", 2, "there is no run folder"),
    ("report nowhere.toml", 2, "there is no job file at"),
    ("status finished.toml", 0, "finished"),
    ("status finished", 0, "finished"),
    ("verify finished.toml", 0, "0 of them damaged"),
    ("verify finished", 0, "0 of them damaged"),
    ("verify nowhere", 2, "there is no run folder"),
    ("verify prompts", 2, "is not a run folder"),
    ("plan planned", 0, "is planned already; going on with this plan"),
    ("plan finished --set sampling.max_tokens=3", 2, "or delete that folder, which loses the outputs of 2 rows"),
    ("plan computed --set sampling.max_tokens=3", 2, "or delete that folder, which loses the answers of 1 work unit"),
    ("plan prompts", 2, "is not a run folder"),
    ("run finished", 0, "output rows"),
    ("run nowhere", 2, "there is no run folder"),
    ("work finished", 0, ""),
    ("finish finished", 0, "2 rows in"),
    ("finish planned", 1, "is not done; run `batchinfer work"),
    ("peek finished.toml", 0, "finished: 2 of 2 requests are answered"),
    ("peek computed", 0, "computed: 2 of 2 requests are answered"),
    ("peek prompts", 2, "is not a run folder"),
    ("peek finished --follow --json", 2, "leave --sql and --json out"),
    ("peek finished --sql @nowhere.sql", 2, "cannot read the SQL file nowhere.sql"),
]


@pytest.mark.parametrize(("use", "code", "words"), USES, ids=[use for use, _, _ in USES])
def test_a_command_takes_a_job_file_or_a_run_folder_and_says_what_is_wrong_with_others(
    runs, monkeypatch, use, code, words
):
    monkeypatch.chdir(runs)
    ended = batchinfer(*use.split())
    assert ended.code == code, ended.err
    assert words in ended.out + ended.err
    assert "Traceback" not in ended.err


TEXTS = [
    ("path = models/tiny", "line 1 is 'path = models/tiny': invalid value; texts need quotes: path = \"models/tiny\""),
    ("path = models/tiny  # a folder", 'texts need quotes: path = "models/tiny"'),
    ("files = [data/a.csv]", "texts need quotes: files = [\"data/a.csv\"]"),
    ("a = 1\nmax_tokens = 4 tokens", "line 2 is 'max_tokens = 4 tokens': expected newline"),
    ("a = true\nb = truly", "line 2 is 'b = truly'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), TEXTS)
def test_a_line_that_is_not_toml_is_shown(tmp_path, text, words):
    (tmp_path / "job.toml").write_text(text)
    (line,) = told(batchinfer("run", tmp_path / "job.toml"))
    assert line.startswith(f"error: cannot read the job file {tmp_path}/job.toml: line ")
    assert words in line


@pytest.mark.parametrize(("name", "data"), [("a.parquet", b"PAR1\x80\xff"), ("a.jsonl", b'{"prompt": "x"}\n')])
def test_prompts_in_place_of_a_job_file(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    (line,) = told(batchinfer("run", tmp_path / name))
    assert f"{tmp_path / name} is not a job file" in line
    assert f"`batchinfer init {tmp_path / name} --model DIR` writes one" in line


def test_weights_that_git_lfs_has_not_fetched(tmp_path):
    model = shutil.copytree(RANDOM_MODEL, tmp_path / "model")
    weights = next(model.glob("*.safetensors"))
    weights.unlink()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1\n")
    write_shard(tmp_path / "prompts/a.parquet", {"id": [1], "prompt": ["x"]})
    (line,) = told(batchinfer("plan", write_job(tmp_path, model={"path": str(model)})))
    assert line.startswith(f"error: {weights} is a pointer of Git LFS, not the file itself; run `git lfs pull`")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A job file with a plan."""
    folder = tmp_path_factory.mktemp("planned")
    write_shard(folder / "prompts/a.parquet", {"id": [1, 2], "prompt": ["x", "y"]})
    job = write_job(folder)
    assert batchinfer("plan", job).code == 0
    return job


def test_a_job_file_in_place_of_a_spec(planned):
    (line,) = told(batchinfer("simulate", planned))
    assert f"`batchinfer plan {planned} --set cluster.gpu=H100`" in line


def test_price_takes_a_job_file_as_other_commands_do(planned):
    (line,) = told(batchinfer("price", "--run", planned))
    assert "is not finished" in line


def test_a_dry_run_notices_that_the_folder_is_another_jobs(planned):
    arguments = ("submit", planned, "--array", "2", "--dry-run")
    assert batchinfer(*arguments).code == 0
    ended = batchinfer(*arguments, "--set", "model.dtype=bfloat16")
    assert (ended.code, ended.out) == (2, "")
    assert "belongs to another job: model.dtype was float32 and is now bfloat16" in told(ended)[0]
    ended = batchinfer(*arguments, "--set", "cluster.gpu=H100")
    assert "this one was made without" in ended.err


def test_an_earlier_run_named_after_the_plan_was_made_is_no_reason_to_delete_anything(planned, runs):
    ended = batchinfer("plan", planned, "--learn-from", runs / "finished")
    assert (ended.code, "delete" in ended.err) == (0, False), ended.err
    assert "--learn-from, --expert-loads and --reuse count when a plan is made; this plan stays as it is" in ended.err


def test_status_names_the_command_that_goes_on(planned):
    run = planned.parent / "run"
    assert (
        f"planned, no worker yet; `batchinfer run {run}` computes and finishes it here" in batchinfer("status", run).out
    )
