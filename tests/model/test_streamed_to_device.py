"""Models whose layers are streamed to a GPU, in Triton's interpreter: the logits of resident weights, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from batchinfer.model import device_stream
from batchinfer.model.convert import convert_model
from batchinfer.model.device_split import split_device_memory
from batchinfer.model.layer import DecoderLayer
from batchinfer.model.ops import Ops
from batchinfer.model.transformer import Transformer
from batchinfer.rank.load import BITS
from batchinfer.records import ModelError
from batchinfer_kernels.triton import probe
from support.paged_steps import PagedRequests
from support.paths import RANDOM_MODEL
from support.strict_streams import StrictStreams
from support.tiers import first_in_make_test
from support.triton_device import needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(not probe.interprets(), reason="Triton is not interpreted")]

DTYPES = ("fp8", "bfloat16", "int4")
MEMORY = {"host_bytes": 1 << 30, "fixed_bytes": 0, "least_kv_bytes": 1 << 20}
SLOT = 2 << 20


def memory(layer_bytes, end_bytes, **given):
    return split_device_memory(layer_bytes, **{"device_bytes": 1 << 30, "useful_kv_bytes": None} | MEMORY | given)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A function that returns the model converted for GPUs."""
    folder = tmp_path_factory.mktemp("converted")

    def of(dtype):
        if not (folder / dtype).exists():
            ops = Ops.select("triton", torch.bfloat16, **BITS.get(dtype, {}))
            told = lambda num_read, num_bytes: None  # noqa: E731
            convert_model(RANDOM_MODEL, folder / dtype, ops, dtype=torch.bfloat16, name=dtype, on_read=told)
        return folder / dtype

    return of


def load(folder, dtype, memory=None):
    return Transformer.load(folder, dtype=torch.bfloat16, backend="triton", memory=memory, **BITS.get(dtype, {}))


def logits_of(model):
    """The logits of two prompts and two further tokens: several sweeps where weights are streamed."""
    requests = PagedRequests(model, [torch.tensor([5, 7, 9]), torch.tensor([70])], max_new_tokens=2)
    requests.prefill([0, 1], [2])
    for token in (11, 12):
        for tokens in requests.tokens:
            tokens.append(token)
        requests.decode_step([0, 1])
    return torch.cat([requests.all_logits(0), requests.all_logits(1)])


@pytest.fixture(scope="module")
def resident():
    """A function that returns the logits of resident weights, computed once for each dtype."""
    found = {}

    def of(dtype):
        if dtype not in found:
            found[dtype] = logits_of(load(RANDOM_MODEL, dtype))
        return found[dtype]

    return of


@pytest.mark.parametrize("dtype", first_in_make_test(DTYPES))
@pytest.mark.parametrize("source", first_in_make_test(("disk", "a copy of the checkpoint")))
def test_logits_are_those_of_resident_weights(converted, resident, monkeypatch, dtype, source):
    """On strict stand-ins of CUDA's streams: a layer reads no slot before its copy, and no copy is too early."""
    expected = resident(dtype)
    gpu = StrictStreams(monkeypatch)
    monkeypatch.setattr(device_stream, "_HostCopies", lambda: device_stream._CudaCopies(torch.device("cpu")))
    if source == "disk":
        model = load(converted(dtype), dtype, partial(memory, host_bytes=2 * SLOT))
    else:
        model = load(RANDOM_MODEL, dtype, memory)
    try:
        real, slots = (
            DecoderLayer.points,
            {id(layer): model.stream.memory_of(number) for number, layer in enumerate(model.layers)},
        )

        def watched(layer, *given):
            gpu.compute_with(slots[id(layer)])
            return real(layer, *given)

        monkeypatch.setattr(DecoderLayer, "points", watched)
        assert torch.equal(logits_of(model), expected)
        assert not gpu.faults
        assert model.stream.num_bytes >= 4 * model.stream.split.sweep_bytes  # sweeps
    finally:
        model.stream.close()


@pytest.mark.slow
def test_layers_that_stay_on_the_device_and_a_converted_folder_without_a_stream_give_the_same(converted, resident):
    three_of_four = partial(memory, device_bytes=(4 << 20) + 3 * SLOT, useful_kv_bytes=0)
    for folder, given in ((RANDOM_MODEL, three_of_four), (converted("fp8"), three_of_four), (converted("fp8"), None)):
        model = load(folder, "fp8", given)
        assert torch.equal(logits_of(model), resident("fp8"))
        if given is not None:
            model.stream.close()


def test_a_checkpoint_that_does_not_fit_into_the_host_s_memory_is_told_to_convert():
    with pytest.raises(ModelError, match=r"run `batchinfer convert .* DIR --gpu"):
        load(RANDOM_MODEL, "bfloat16", partial(memory, host_bytes=2 * SLOT))


def test_a_folder_for_gpus_is_refused_by_the_c_operations(converted):
    with pytest.raises(ModelError, match=r"is converted for GPUs, which this job does not use; give the folder that"):
        Transformer.load(converted("bfloat16"), dtype=torch.bfloat16, backend="reference")


def test_fp8_weights_of_a_converted_folder_are_stored_as_they_are_held(converted):
    """A layer's file has the values and scales that the resident model holds, each at a multiple of 256 bytes."""
    from safetensors.torch import load_file

    held = load(RANDOM_MODEL, "fp8").weights.layers[2].mlp
    path = converted("fp8") / "layer-00002.safetensors"
    stored = load_file(Path(path))
    assert torch.equal(stored["mlp.gate_up_EFD.values"].view(torch.uint8), held.gate_up_EFD.values.view(torch.uint8))
    assert torch.equal(stored["mlp.gate_up_EFD.scales"], held.gate_up_EFD.scales)
    header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert header_bytes % 256 == 0
