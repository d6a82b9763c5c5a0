"""Settings of a call: their types are those of the job file; classes as schemas; names of other libraries."""

import dataclasses
import enum
import inspect
import json
import re
from typing import get_type_hints

import pydantic
import pytest
from typing_extensions import TypedDict

import batchinfer
from batchinfer.api import job_keys, settings
from batchinfer.config import JobConfig
from batchinfer.config.other_names import OTHER_NAMES, remedy_in_a_file, remedy_in_a_row
from batchinfer.config.sampling import JobSampling
from support import job_keys_types
from support.paths import RANDOM_MODEL


def test_every_key_of_a_job_has_its_type():
    wrong = "batchinfer/api/job_keys.py is stale; write it again: PYTHONPATH=tests python -m support.job_keys_types"
    assert job_keys_types.FILE.read_text() == job_keys_types.file_text(), wrong
    of_call = set(settings.Settings.__annotations__)
    assert of_call >= {*JobSampling.model_fields, *JobConfig.model_fields, "dtype"} - {"model"}
    of_model, of_settings = get_type_hints(job_keys.ModelKeys), get_type_hints(settings.ModelSettings)
    assert of_settings == {"dtype": of_model["dtype"], "cluster": job_keys.ClusterKeys, "kv": job_keys.KvKeys}


@pytest.mark.parametrize("use", [batchinfer.generate, batchinfer.Model.generate, batchinfer.Model])
def test_help_and_completion_in_notebooks_have_the_keys(use):
    of_model, of_call = {"dtype", "cluster", "kv"}, {*JobSampling.model_fields, "output", "progress", "stream"}
    expected = {batchinfer.Model: of_model, batchinfer.Model.generate: of_call}.get(use, of_model | of_call)
    parameters = inspect.signature(use).parameters
    assert expected <= parameters.keys()
    assert {parameters[key].kind for key in expected} == {inspect.Parameter.KEYWORD_ONLY}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Car(pydantic.BaseModel):
    colour: Colour
    seats: int | None = None


class Paint(pydantic.BaseModel, extra="forbid"):
    colour: Colour


@dataclasses.dataclass
class Garage:
    cars: list[Car]


class Place(TypedDict):
    name: str


@pytest.mark.parametrize("kind", [Car, Garage, Place, list[Car], Car | Garage])
def test_a_class_is_its_json_schema(kind):
    schema = pydantic.TypeAdapter(kind).json_schema()
    by_name = settings.parts_of({"structured_outputs": {"json": kind}})
    in_a_part = settings.parts_of({"sampling": {"structured_outputs": {"json": kind}}})
    assert by_name["sampling"] == in_a_part["sampling"] == {"structured_outputs": {"json": schema}}


def test_forms_that_are_none_are_left_out():
    """As of a class that has a field for each, turned into a dict."""
    parts = settings.parts_of({"structured_outputs": {"regex": "a+", "json": None, "choice": None}})
    assert parts["sampling"] == {"structured_outputs": {"regex": "a+"}}
    with pytest.raises(batchinfer.ConfigError, match="one of json, regex"):
        batchinfer.generate("a", model=RANDOM_MODEL, max_tokens=8, structured_outputs={"json": None})


def test_a_job_may_have_a_class_as_schema(tmp_path):
    parts = {
        "input": {"files": ["a.parquet"], "prompt": "p"},
        "output": {"dir": tmp_path / "run"},
        "model": {"path": RANDOM_MODEL},
        "sampling": {"max_tokens": 8, "structured_outputs": {"json": Car}},
    }
    structured = batchinfer.Job(parts).config.sampling.structured_outputs
    assert json.loads(structured["json"]) == Car.model_json_schema()


def test_answers_with_a_class_as_schema_are_objects_of_the_class():
    answers = batchinfer.generate(
        ["A car?", "Another?"], model=RANDOM_MODEL, dtype="float32", max_tokens=100, structured_outputs={"json": Paint}
    )
    assert answers["finish_reason"].to_pylist() == ["stop", "stop"]
    assert all(Paint.model_validate_json(text).colour in Colour for text in answers["text"].to_pylist())


class NoSchema:
    pass


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        (Car, 'not a dict; write structured_outputs={"json": Car}'),
        ({"json": NoSchema}, "of which no JSON schema can be made: "),
        ({"json": Car(colour=Colour.RED)}, "of which no JSON schema can be made: it is no class; "),
        ({"json": 5}, "structured_outputs.json is 5, of which no JSON schema can be made"),
        ({"regex": Car}, "structured_outputs.regex is "),
    ],
)  # fmt: skip
def test_what_is_no_schema_is_one_sentence(outputs, sentence):
    with pytest.raises(batchinfer.ConfigError) as raised:
        batchinfer.generate("A car?", model=RANDOM_MODEL, max_tokens=8, structured_outputs=outputs)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("guided_json", 'write structured_outputs={"json": schema}'),
        ("response_format", "structured_outputs="),
        ("tensor_parallel_size", 'cluster={"prefill_ranks": N}'),
        ("max_completion_tokens", "write max_tokens=N"),
        ("gpu_memory_utilization", 'cluster={"page_bytes": N}'),
        ("return_logprob", "write logprobs=N"),
        ("ebnf", 'write structured_outputs={"grammar": …}'),
        ("length_penalty", "there is no beam search"),
        ("device", 'cluster={"backend": "cpu"}'),
        ("system", 'give input={"system": …}'),
        ("template", 'give input={"template": …}'),
        ("tools", 'give input={"tools": …}'),
        ("keep_columns", 'give output={"keep_columns": …}'),
        ("prefill_ranks", 'give cluster={"prefill_ranks": …}'),
        ("dir", 'give output={"dir": …} or kv={"dir": …}'),
        ("sampling_seed", "write seed=N"),
        ("logprob_token_ids", "logprobs=N reports the N most likely tokens"),
        ("no_stop_trim", "write include_stop_str_in_output=True"),
        ("input_ids", "give the lists of token ids as the first argument"),
        ("top_a", "batchinfer has nothing of the kind"),
        ("no_repeat_ngram_size", "no rule forbids repeated words"),
        ("apply_chat_template", "raw=True gives them to the model as they are"),
        ("hf_token", "nothing is downloaded"),
        ("temprature", "did you mean temperature?"),
    ],
)
def test_names_of_other_libraries_and_of_parts_get_the_name_here(name, remedy):
    for use in (settings.parts_of, lambda given: batchinfer.Model(RANDOM_MODEL, **given)):
        with pytest.raises(batchinfer.ConfigError) as raised:
            use({name: 1})
        assert remedy in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({"seed": None}, "seed is None, but it should be a valid integer; leave it out for the default"),
        ({"stop": None}, "stop is None, but it should be a valid list; leave it out for the default"),
        ({"max_tokens": None}, "max_tokens is None, but it should be a valid integer"),
    ],
)
def test_values_that_mean_unset_in_vllm_get_what_to_write(given, end):
    with pytest.raises(batchinfer.ConfigError) as raised:
        batchinfer.generate(["a"], model=RANDOM_MODEL, **{"max_tokens": 4, **given})
    assert str(raised.value).endswith(end)


def test_hints_are_for_other_names_and_name_keys_that_exist():
    of_part = {part: settings._keys_of(part) for part in JobConfig.model_fields}
    known = {*settings.Settings.__annotations__, "model", *(key for keys in of_part.values() for key in keys)}
    assert set(OTHER_NAMES).isdisjoint(known)
    of_part["structured_outputs"] = set(job_keys.StructuredOutputs.__annotations__)
    for hint in OTHER_NAMES.values():
        assert set(re.findall(r"(\w+)=", hint)) <= known, hint
        for part, key in re.findall(r'(\w+)={"(\w+)"', hint):
            assert key in of_part[part], hint


def test_hints_in_files_are_toml_and_in_rows_json():
    of_files = {name: remedy_in_a_file(name) for name in OTHER_NAMES}
    of_rows = {name: remedy_in_a_row(name) for name in OTHER_NAMES}
    assert of_files["enable_thinking"].startswith("write input={chat_template_kwargs = {enable_thinking = true}}")
    assert of_rows["guided_json_object"] == 'write "structured_outputs": {"json_object": true}'
    assert of_rows["max_new_tokens"] == 'write "max_tokens": N'
    assert of_files["prompts"] is of_files["revision"] is of_rows["tensor_parallel_size"] is None
    assert not [hint for hint in of_files.values() if hint is not None and ('": ' in hint or "True" in hint)]
    assert not [hint for hint in of_rows.values() if hint is not None and ("=" in hint or "True" in hint)]
