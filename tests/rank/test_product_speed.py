"""Speeds of products of a rank that streams its weights: each kind of layer runs, the last one for all that follow."""

import pytest

from batchinfer.config import load_job
from batchinfer.launch.product_speed import MeasuredSteps, measure_products
from batchinfer.model.convert import convert_model
from batchinfer.model.ops import Ops
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.stream_forecast import JobTokens
from batchinfer.rank import product_speed
from batchinfer.rank.load import DTYPES
from batchinfer.records import ConfigError
from support.compressed_models import published_tensors, random_model, write_compressed
from support.jobs import write_job
from support.paths import RANDOM_MODEL

pytestmark = pytest.mark.usefixtures("cpp")

TOKENS = JobTokens(num_requests=20, prompt=2000, new=1500, output=600, longest=30, kv=2600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed") / "model"
    ops = Ops.select("cpu", DTYPES["bfloat16"])
    convert_model(
        RANDOM_MODEL, folder, ops, dtype=DTYPES["bfloat16"], name="bfloat16", on_read=lambda done, total: None
    )
    return folder


def steps_of(folder):
    return MeasuredSteps(str(folder), "bfloat16", "auto", False, 200, 30, 5, 70)


def test_layers_of_a_kind_count_as_often_as_the_model_has_them(folder, monkeypatch):
    held = []

    def layers_s(model, stream, step, pages):
        held.append(len(model.layers) - 1)
        return [10.0, 2.0]

    monkeypatch.setattr(product_speed, "_layers_s", layers_s)
    monkeypatch.setattr(product_speed, "_head_s", lambda model, hidden_SD: float(len(hidden_SD)))
    prompts, outputs = product_speed.measure(read_packed(folder), steps_of(folder))
    assert set(held) == {2}  # one dense layer, and the first with experts; then three times that one
    assert prompts == pytest.approx(200 / (10 + 3 * 2 + 7))
    assert outputs == pytest.approx(5 / (10 + 3 * 2 + 5))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """A model of window layers (two), layers with chosen entries (two), and layers with wide entries (two)."""
    folder = tmp_path_factory.mktemp("compressed")
    changes = {"hidden_size": 64, "moe_intermediate_size": 32}
    write_compressed(folder / "model", published_tensors(random_model(**changes)), **changes)
    dtype = DTYPES["bfloat16"]
    ops = Ops.select("cpu", dtype)
    convert_model(
        folder / "model", folder / "packed", ops, dtype=dtype, name="bfloat16", on_read=lambda done, total: None
    )
    return folder / "packed"


def test_layers_of_each_attention_are_measured_and_counted(compressed, monkeypatch):
    monkeypatch.setattr(product_speed, "_layers_s", lambda model, stream, step, pages: [5.0, 7.0, 11.0])
    monkeypatch.setattr(product_speed, "_head_s", lambda model, hidden_SD: 1.0)
    prompts, outputs = product_speed.measure(read_packed(compressed), steps_of(compressed))
    assert (prompts, outputs) == pytest.approx((200 / 47, 5 / 47))


@pytest.mark.parametrize("name", ["folder", "compressed"])
def test_the_layers_run(name, request):
    folder = request.getfixturevalue(name)
    assert min(product_speed.measure(read_packed(folder), steps_of(folder))) > 0


def test_another_process_measures_them_and_its_error_is_one_sentence(folder, tmp_path):
    model = {"path": str(folder), "dtype": "bfloat16"}
    job = load_job(write_job(tmp_path, model=model, cluster={"weights": "stream"}))
    speeds = measure_products(job, TOKENS, num_at_once=20)
    assert min(speeds.prompt_tokens_per_s, speeds.output_tokens_per_s) > 0
    (folder / "layer-00000.safetensors").write_bytes(b"no layer")
    with pytest.raises(ConfigError, match=r"products of .* cannot be measured: .*layer-00000.safetensors has 8 bytes"):
        measure_products(job, TOKENS, num_at_once=20)
