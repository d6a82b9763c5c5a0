"""Job files: defaults, checks, overrides, and that nothing a person can write ends in anything but a ConfigError."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batchinfer.config import JobConfig, dump_job, job_of_table, load_job
from batchinfer.records import ConfigError, sampling_from_json, sampling_to_json

VALID = {
    "input": {"files": ["in/*.parquet"], "id": "id", "prompt": "prompt"},
    "output": {"dir": "run", "keep_columns": ["task"]},
    "model": {"path": "model", "dtype": "float32"},
    "sampling": {"max_tokens": 16, "temperature": 0.5, "stop": ["\n\n"], "stop_token_ids": [7], "n": 2},
    "cluster": {"mode": "colocated", "prefill_ranks": 1, "overlap": False, "commit_seconds": 5.0},
    "kv": {"block_tokens": 128, "persist": "all"},
    "pricing": {"gpu_hour": 2.0},
}
SMALLEST = """
[input]
files = ["a.parquet"]
prompt = "text"
[output]
dir = "run"
[model]
path = "model"
[sampling]
max_tokens = 4
"""


def toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(char):08X}" for char in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


def write_job(folder: Path, table: dict) -> Path:
    path = folder / "job.toml"
    path.write_text("\n".join(f"{toml(key)} = {toml(value)}" for key, value in table.items()), encoding="utf-8")
    return path


def load_or_refuse(path: Path, overrides: tuple[str, ...] = ()) -> JobConfig | None:
    """The job, or None when it is refused in sentences of a line each; any other exception fails the test."""
    try:
        return load_job(path, overrides)
    except ConfigError as error:
        told = error.sentences
    assert told
    assert all(len(sentence.splitlines()) == 1 for sentence in told)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


def test_the_smallest_job_gets_the_documented_defaults(tmp_path):
    (tmp_path / "job.toml").write_text(SMALLEST)
    job = load_job(tmp_path / "job.toml")
    assert (job.input.id, job.input.prompt_kind, job.input.prompt_column) == ("id", "prompt", "text")
    assert job.model.dtype == "bfloat16"
    sampling = job.sampling.to_sampling()
    assert sampling.is_greedy
    assert (sampling.n, sampling.top_p, sampling.top_k, sampling.stop, sampling.logprobs) == (1, 1.0, 0, (), None)
    assert (job.cluster.mode, job.kv.block_tokens, job.pricing.gpu_hour) == ("colocated", 64, None)
    assert job.cluster.overlap == "auto"


def test_relative_paths_count_from_the_job_file(tmp_path):
    home = tmp_path / "a [odd] folder"
    home.mkdir()
    job = load_job(write_job(home, VALID))
    assert job.output.dir == str(home / "run")
    assert job.model.path == str(home / "model")
    # brackets of the folder must not act as a glob
    assert job.input.files == [str(tmp_path / "a [[]odd] folder" / "in/*.parquet")]


def test_a_folder_whose_name_is_not_utf_8_is_refused_where_paths_count_from_it(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"^input.files is below '.*caf\\udce9', which is not valid UTF-8; rename"):
        load_job(write_job(folder, VALID))
    table = {part: dict(keys) for part, keys in VALID.items()}
    table["input"]["files"], table["output"]["dir"] = [str(tmp_path / "*.parquet")], str(tmp_path / "run")
    table["model"]["path"] = str(tmp_path / "model")
    assert load_job(write_job(folder, table)).output.dir == str(tmp_path / "run")


def test_a_dumped_job_reads_back_the_same(tmp_path):
    table = copy.deepcopy(VALID)
    table["sampling"]["stop"] = ['quote " and \\', "tab\t", "\x7f", "snow ☃"]
    job = load_job(write_job(tmp_path, table))
    (tmp_path / "again.toml").write_text(dump_job(job), encoding="utf-8")
    assert load_job(tmp_path / "again.toml") == job


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "enum": ["\x7f", None]}}}


@pytest.mark.parametrize("tools", [[], "[ ]"])
def test_an_empty_list_of_tools_is_none(tmp_path, tools):
    table = {**VALID, "input": {"files": ["a.parquet"], "messages": "m", "tools": tools}}
    assert load_job(write_job(tmp_path, table)).input.tools is None


@pytest.mark.parametrize("form", [None, "openai"])
def test_null_in_variables_and_tools_is_written_as_json_text(tmp_path, form):
    keys = {"chat_template_kwargs": {"date": None, "levels": [1, None]}}
    keys |= {"format": "openai"} if form else {"messages": "m", "tools": [TOOL]}
    table = {**VALID, "input": {"files": ["a.jsonl"], **keys}}
    job = job_of_table(table, Path("Job"), tmp_path)
    (tmp_path / "again.toml").write_text(dump_job(job), encoding="utf-8")
    again = load_job(tmp_path / "again.toml")
    assert again == job
    assert again.input.model_dump(include=set(keys)) == keys


@pytest.mark.parametrize(
    ("written", "text"),
    [("2026-01-31", "2026-01-31"), ("2026-01-31T07:10:00Z", "2026-01-31T07:10:00+00:00"), ("07:10:00", "07:10:00")],
)
def test_a_date_of_toml_among_variables_is_its_text(tmp_path, written, text):
    table = {**VALID, "input": {"files": ["a.parquet"], "messages": "m"}}
    variables = f"{{ strftime_now = {written}, others = [{{ day = {written} }}] }}"
    found = load_job(write_job(tmp_path, table), (f"input.chat_template_kwargs={variables}",))
    assert found.input.chat_template_kwargs == {"strftime_now": text, "others": [{"day": text}]}


@pytest.mark.parametrize("text", ["[{]", '{"a": 1', "[" * 100_000, "\n [1"])
def test_json_text_that_is_none_is_no_column(tmp_path, text):
    table = {**VALID, "input": {"files": ["a.parquet"], "messages": "m", "tools": text}}
    with pytest.raises(ConfigError, match=r"input\.tools begins as JSON does, but is not valid JSON: "):
        load_job(write_job(tmp_path, table))


def test_set_takes_toml_values_and_bare_words(tmp_path):
    path = write_job(tmp_path, VALID)
    overrides = ["sampling.max_tokens=99", "model.dtype=bfloat16", 'sampling.stop=["x", "y"]', "output.dir = other"]
    job = load_job(path, overrides)
    assert (job.sampling.max_tokens, job.model.dtype, job.sampling.stop) == (99, "bfloat16", ["x", "y"])
    assert job.output.dir == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sampling.max_tokens=-1", "sampling.max_tokens"),
        ("sampling.max_tokens=0", "job.toml: sampling.max_tokens is 0, but nothing is scored"),
        ("sampling.max_tokens=16.0", "sampling.max_tokens"),
        ("sampling.max_tokens=true", "sampling.max_tokens"),
        ("sampling.temperature=nan", "sampling.temperature"),
        ("sampling.temperature=-1", "sampling.temperature"),
        ("sampling.top_p=0", "sampling.top_p"),
        ("sampling.stop=['']", "sampling.stop"),
        ("sampling.tempreature=1", "sampling.tempreature is not a known key"),
        ("smapling.n=1", "smapling is not a known part"),
        ("input.messages=m", "exactly one must be set"),
        ("input.files=[]", "input.files"),
        ("input.choices=c", "job.toml: sampling.max_tokens is 16, but a job with input.choices generates nothing"),
        ("output.keep_columns=['a', 'a']", "'a' twice"),
        ("model.dtype=float16", "model.dtype"),
        ("kv.block_tokens=100", "use 128"),
        ("kv.dtype=fp16", "job.toml: kv.dtype is 'fp16', but it should be 'auto' or 'fp8'"),
        ("kv.second_tier=/scratch", "job.toml: kv.second_tier names no folder in a bucket"),
        ("kv.second_tier=s3://bucket/kv", "job.toml: kv.second_tier is set, but not dir; name a folder on a disk"),
        ("cluster.decode_ranks=4", "decode_ranks is 4"),
        ("cluster.overlap=1", "cluster.overlap is 1, but it should be 'auto', true or false"),
        ("cluster.overlap=on", "cluster.overlap is 'on', but it should be 'auto', true or false"),
        ("cluster.graphs=on", "cluster.graphs is 'on', but it should be 'auto' or 'off'"),
        ("pricing.gpu_hour=-1", "pricing.gpu_hour"),
        ("n=1", "part.key=value"),
        ("sampling.n", "part.key=value"),
        ("sampling.stop=['a'", "not valid TOML"),
        ("sampling.n=" + "9" * 5000, "sampling.n"),
        ("sampling.max_new_tokens=1", "sampling.max_new_tokens is not a known key; did you mean max_tokens?"),
        ("smapling.n=1", "did you mean sampling?"),
        ("sampling.xyzzy=1", "remove it or use one of max_tokens, temperature"),
        ("input.max_tokens=1", "input.max_tokens is not a known key; it belongs into [sampling]"),
        ("sampling.guided_json={}", "guided_json is not a known key; write structured_outputs={json = schema}"),
        ("sampling.top_logprobs=2", "sampling.top_logprobs is not a known key; did you mean logprobs?"),
        ("cluster.max_num_seqs=8", "cluster.max_num_seqs is not a known key; write cluster={decode_requests = N}"),
        ("sampling.guided_json_object=true", "write structured_outputs={json_object = true}"),
        (
            "sampling.max_model_len=9",
            "max_model_len is not a known key; the window is that of the model; for the length",
        ),
        ("model.revision='x'", "model.revision is not a known key; remove it or use one of"),
        ("input.prompts='a'", "input.prompts is not a known key; did you mean prompt?"),
        ("model.dtype=bf16", "did you mean bfloat16?"),
        ("model.dtype=int8", "did you mean fp8?"),
        ("model.dtype=half", "did you mean bfloat16?"),
        ("cluster.mode=Colocated", "did you mean colocated?"),
        ("input.files=a.parquet", 'it should be a valid list; write ["a.parquet"]'),
        ("sampling.n='4'", "it should be a valid integer; write it without quotes"),
        ("sampling.structured_outputs={jsn='{}'}", "structured_outputs.jsn is not a known key; did you mean json?"),
    ],
)
def test_a_wrong_value_is_named(tmp_path, override, told):
    with pytest.raises(ConfigError) as failure:
        load_job(write_job(tmp_path, VALID), [override])
    assert told in str(failure.value)


def test_all_problems_are_told_each_in_a_sentence_of_its_own(tmp_path):
    table = copy.deepcopy(VALID)
    table["sampling"]["max_token"] = table["sampling"].pop("max_tokens")
    table |= {"outptu": table.pop("output"), "prompt": "p"}
    table["model"]["dtype"] = "int3"
    path = write_job(tmp_path, table)
    with pytest.raises(ConfigError) as failure:
        load_job(path)
    assert [sentence.removeprefix(f"{path}: ") for sentence in failure.value.sentences] == [
        "the part output is missing; add it as [output] with dir",
        "model.dtype is 'int3', but it should be 'float32', 'bfloat16', 'fp8', 'int4' or 'fp4'; did you mean int4?",
        "the key sampling.max_tokens is missing; add it",
        "sampling.max_token is not a known key; did you mean max_tokens?",
        "outptu is not a known part; did you mean output?",
        "prompt is not a known part; it belongs into [input]",
    ]


def test_a_value_that_fits_none_of_several_types_is_told_once(tmp_path):
    with pytest.raises(ConfigError) as failure:
        load_job(write_job(tmp_path, VALID), ["input.tools=5", "input.files=['', '']"])
    assert len(failure.value.sentences) == 2


def test_one_stop_string_is_a_list_of_one(tmp_path):
    assert load_job(write_job(tmp_path, VALID), ["sampling.stop=END"]).sampling.stop == ["END"]


def test_choices_take_one_sample_of_no_tokens(tmp_path):
    path = write_job(tmp_path, VALID)
    with pytest.raises(ConfigError, match=r"job.toml: sampling.n is 2, but .* generates nothing; set it to 1"):
        load_job(path, ["input.choices=c", "sampling.max_tokens=0"])
    job = load_job(path, ["input.choices=c", "sampling.max_tokens=0", "sampling.n=1"])
    assert (job.input.choices, job.sampling.max_tokens) == ("c", 0)


def test_max_tokens_has_no_silent_default(tmp_path):
    (tmp_path / "job.toml").write_text(SMALLEST.replace("max_tokens = 4", ""))
    with pytest.raises(ConfigError, match=r"sampling.max_tokens is missing"):
        load_job(tmp_path / "job.toml")


def test_a_job_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no job file at .*missing.toml"):
        load_job(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_job(tmp_path)


def test_sampling_survives_json(tmp_path):
    sampling = load_job(write_job(tmp_path, VALID)).sampling.to_sampling()
    assert sampling_from_json(sampling_to_json(sampling)) == sampling


# ---- whatever is written

fuzz = settings(
    max_examples=1000, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = (
    st.none().map(lambda _: {})
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
parts = st.sampled_from(list(VALID))
keys = st.sampled_from(
    sorted({key for part in VALID.values() for key in part} | {"messages", "token_ids", "dir", "seed"})
)


@st.composite
def mutated_jobs(draw):
    table = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        part = draw(parts)
        how = draw(st.sampled_from(["value", "value", "value", "drop part", "drop key", "replace part", "new key"]))
        if how == "drop part":
            table.pop(part, None)
        elif how == "replace part":
            table[part] = draw(values)
        elif isinstance(table.get(part), dict) and how == "drop key":
            table[part].pop(draw(keys), None)
        elif isinstance(table.get(part), dict):
            key = (
                draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)) if how == "new key" else draw(keys)
            )
            table[part][key] = draw(values)
    return table


@fuzz
@given(table=mutated_jobs())
def test_a_mutated_job_loads_or_is_refused(folder, table):
    job = load_or_refuse(write_job(folder, table))
    if job is not None:
        (folder / "dumped.toml").write_text(dump_job(job), encoding="utf-8")
        assert load_job(folder / "dumped.toml") == job


@fuzz
@given(content=st.binary(max_size=200) | st.text(alphabet="[]{}=\"\n.#abc012'\\", max_size=60).map(str.encode))
@example(content=b"a = " + b"[" * 5000)
@example(content=b"\xff\xfe")
@example(content=b"[input]\nfiles = 1979-05-27\n")
def test_random_bytes_as_a_job_are_refused(folder, content):
    path = folder / "random.toml"
    path.write_bytes(content)
    assert load_or_refuse(path) is None


@fuzz
@given(
    override=st.text(max_size=40) | st.builds("{}.{}={}".format, parts, keys, values.map(toml) | st.text(max_size=20))
)
@example(override="sampling.max_tokens=" + "9" * 5000)
@example(override="sampling.n=" + "[" * 5000)
@example(override="output.dir=\0")
def test_any_override_loads_or_is_refused(folder, override):
    load_or_refuse(write_job(folder, VALID), (override,))
