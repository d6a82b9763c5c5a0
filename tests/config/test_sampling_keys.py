"""Sampling keys of a job file and of its rows: refused values and their error sentences."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest

from batchinfer.config import SamplingConfig, dump_job, load_job
from batchinfer.records import ConfigError, sampling_from_json, sampling_to_json
from support.jobs import batchinfer, outputs, question, write_job, write_shard
from support.paths import RANDOM_MODEL

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WRONG: list[tuple[dict, str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
    ({"frequency_penalty": -3.0}, "frequency_penalty is -3.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens = 16"),
    ({"bad_words": [""]}, "bad_words[0] is empty"),
    ({"bad_words": ["a", " \n"]}, "bad_words holds ' \\n', white space alone"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias 'x' is not a token id"),
    ({"logit_bias": {"7": 101.0}}, "logit_bias the bias of token 7 is 101; it may be -100 to 100"),
    ({"logit_bias": {"7": 1.0, "07": 2.0}}, "logit_bias names a token twice"),
    ({"logit_bias": {"999999": 1.0}}, "logit_bias names token 999999, but the model has ids 0 to"),
    (
        {"stop_token_ids": [5, 999999], "min_tokens": 2},
        "stop_token_ids names token 999999, but the model has ids 0 to 1023 only; leave it out",
    ),
    ({"structured_outputs": {}}, "must be set, not none"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "must be set, not regex and choice"),
    ({"structured_outputs": {"jsn": "{}"}}, "structured_outputs.jsn is not a known key; did you mean json?"),
    ({"structured_outputs": {"json": "{"}}, "json cannot be used: Expecting property name"),
    ({"structured_outputs": {"json": "[1]"}}, "json cannot be used: the schema is not a JSON object"),
    ({"structured_outputs": {"json": {"type": "objekt"}}}, "json cannot be used: Invalid type: objekt"),
    ({"structured_outputs": {"json": {"not": {}}}}, 'json cannot be used: Unimplemented keys: ["not"]'),
    ({"structured_outputs": {"regex": "(a"}}, "regex cannot be used: at 1(8): invalid regex"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is empty"),
    ({"structured_outputs": {"grammar": "start: nobody"}}, 'unknown name: "nobody"'),
    ({"structured_outputs": {"json_object": False}}, "json_object may only be true"),
    ({"defaults": "vllm"}, "defaults is 'vllm'"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
def test_what_a_job_cannot_ask_for_is_refused_before_anything_is_planned(tmp_path, wrong, said):
    write_shard(tmp_path / "prompts" / "p.parquet", {"id": [1], "prompt": ["x"]})
    ended = batchinfer("plan", write_job(tmp_path, sampling={"max_tokens": 16, **wrong}))
    assert ended.code == 2
    (sentence,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert said in sentence
    assert len(sentence) < 500
    assert not list(tmp_path.glob("run/plan/*.parquet"))


def test_all_keys_survive_the_journey_to_the_ranks(tmp_path):
    sampling = {
        "max_tokens": 16,
        "bad_words": ["a", "b c"],
        "logit_bias": {"5": -1.5, "17": 100.0},
        "structured_outputs": {"json": SCHEMA},
        "min_tokens": 3,
        "include_stop_str_in_output": True,
    }
    job = load_job(write_job(tmp_path, sampling=sampling))
    (tmp_path / "again.toml").write_text(dump_job(job))
    again = load_job(tmp_path / "again.toml")
    assert again.sampling == job.sampling
    record = job.sampling.to_sampling()
    assert type(job).model_validate_json(job.model_dump_json()).sampling.to_sampling() == record
    assert sampling_from_json(sampling_to_json(record)) == record
    assert record.logit_bias == ((5, -1.5), (17, 100.0))
    assert record.structured == ("json", json.dumps(SCHEMA))


def test_all_tokens_are_top_k_0_or_as_vllm_writes_it_minus_1():
    assert SamplingConfig(max_tokens=1, top_k=-1) == SamplingConfig(max_tokens=1, top_k=0)
    with pytest.raises(ValueError, match="greater than or equal to -1"):
        SamplingConfig(max_tokens=1, top_k=-2)


def test_pairs_of_a_map_column_are_biases():
    assert SamplingConfig(max_tokens=1, logit_bias=[(5, 1.0), (6, 2.0)]).logit_bias == {"5": 1.0, "6": 2.0}
    with pytest.raises(ValueError, match="names a token twice"):
        SamplingConfig(max_tokens=1, logit_bias=[(5, 1.0), (5, 2.0)])


class TestDefaultsOfTheModel:
    @pytest.fixture
    def model(self, tmp_path):
        return shutil.copytree(RANDOM_MODEL, tmp_path / "model")

    def load(self, folder, **sampling):
        path = write_job(folder, model={"path": "model"}, sampling={"max_tokens": 9, **sampling})
        return load_job(path).sampling

    def test_they_hold_where_the_job_says_nothing(self, model):
        found = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1, "max_new_tokens": 5}
        (model / "generation_config.json").write_text(json.dumps(found))
        assert self.load(model.parent).temperature == 0.0
        sampling = self.load(model.parent, defaults="generation_config", top_p=0.5)
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.5, 20, 9)
        assert sampling.defaults is None  # written out

    @pytest.mark.parametrize(("found", "temperature"), [({"do_sample": True}, 1.0), ({"top_p": 0.9}, 0.0)])
    def test_a_file_that_says_to_draw_has_temperature_1_if_it_names_none(self, model, found, temperature):
        (model / "generation_config.json").write_text(json.dumps(found))
        assert self.load(model.parent, defaults="generation_config").temperature == temperature
        assert self.load(model.parent, defaults="generation_config", temperature=0.5).temperature == 0.5

    def test_a_file_that_cannot_be_used_is_named(self, model):
        (model / "generation_config.json").write_text('{"top_p": 7}')
        with pytest.raises(ConfigError, match=r"sampling.defaults: top_p in .*generation_config.json cannot be used"):
            self.load(model.parent, defaults="generation_config")
        (model / "generation_config.json").unlink()
        with pytest.raises(
            ConfigError, match=r"sampling.defaults wants .*generation_config.json, which cannot be read"
        ):
            self.load(model.parent, defaults="generation_config")


WRONG_ROWS: list[dict] = [
    *(wrong for wrong, _ in WRONG if not {"defaults", "json"} & {*wrong, *wrong.get("structured_outputs", ())}),
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": '{"type": "objekt"}'}},
    {"structured_outputs": {"json": '{"not": {}}'}},
    {"structured_outputs": {"json": ""}},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"temperature": 1e9},
    {"max_tokens": 0},
    {"n": 0},
    {"top_p": 0.0},
    {"top_k": -2},
    {"min_p": 2.0},
    {"logprobs": -1},
    {"stop": [""]},
    {"stop_token_ids": [-3]},
    {"min_tokens": -1},
]
STRUCTURED = pa.struct(
    [
        ("json", pa.string()),
        ("regex", pa.string()),
        ("choice", pa.list_(pa.string())),
        ("grammar", pa.string()),
        ("json_object", pa.bool_()),
    ]
)
HOW = pa.struct(
    [
        *((name, pa.float64()) for name in ("temperature", "top_p", "min_p")),
        *((f"{name}_penalty", pa.float64()) for name in ("presence", "frequency", "repetition")),
        *((name, pa.int64()) for name in ("max_tokens", "min_tokens", "n", "top_k", "logprobs")),
        ("stop", pa.list_(pa.string())),
        ("bad_words", pa.list_(pa.string())),
        ("stop_token_ids", pa.list_(pa.int64())),
        ("logit_bias", pa.map_(pa.string(), pa.float64())),
        ("structured_outputs", STRUCTURED),
    ]
)


def test_rows_with_wrong_settings_are_error_rows_and_the_others_right(tmp_path):
    wrong = [how for how in WRONG_ROWS if "jsn" not in how.get("structured_outputs", ())]
    how = [*wrong, *[None] * (100 - len(wrong))]
    how = [
        {**row, "logit_bias": list(row["logit_bias"].items())} if row and "logit_bias" in row else row for row in how
    ]
    assert len(wrong) >= 30
    prompts = [question(row) for row in range(100)]
    write_shard(tmp_path / "prompts" / "p.parquet", {"id": [*range(100)], "prompt": prompts, "how": pa.array(how, HOW)})
    job = write_job(tmp_path, input={"id": "id", "sampling": "how"}, sampling={"max_tokens": 16})
    ended = batchinfer("run", job)
    assert ended.code == 3, ended.err
    assert "Traceback" not in ended.err
    (rows,) = outputs(tmp_path / "run").values()
    assert [row["status"] for row in rows] == ["error"] * len(wrong) + ["ok"] * (100 - len(wrong))
    for row, asked in zip(rows, wrong, strict=False):
        assert row["error"].startswith(f"how.{next(iter(asked))}"), row["error"]
