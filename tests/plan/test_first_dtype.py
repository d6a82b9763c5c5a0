"""Choice of model.dtype by the checkpoint's dtype, free memory and fast dtypes of the machine."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchinfer.host_info import free_memory_bytes
from batchinfer.model.config import load_model_config
from batchinfer.model.weight_bytes import rank_bytes
from batchinfer.plan.first_dtype import Machine, choose_dtype, stored_dtype, this_machine
from support.hollow_weights import write_hollow_weights
from support.paths import RANDOM_MODEL


@pytest.fixture
def model(tmp_path):
    """The folder of a checkpoint that is stored like that."""

    def make(stored):
        shutil.copy(RANDOM_MODEL / "config.json", tmp_path)
        write_hollow_weights(tmp_path, stored)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("stored", "fits", "is_quick", "dtype", "why"),
    [
        ("F32", "float32", True, "float32", "the checkpoint's own"),
        ("F32", "bfloat16", True, "bfloat16", "answers may differ a little from those in float32"),
        ("F32", "fp8", True, "fp8", "float32 would take"),
        ("BF16", "float32", True, "bfloat16", "the checkpoint's own"),
        ("F16", "bfloat16", True, "bfloat16", "the checkpoint's own"),
        ("BF16", "fp8", True, "fp8", "bfloat16 would take"),
        ("BF16", "fp8", False, "fp8", "bfloat16 would take"),
        ("F8_E4M3", "float32", True, "fp8", "quicker than bfloat16 here"),
        ("F8_E4M3", "float32", False, "bfloat16", "8 bits, which is slow on this processor"),
        ("F8_E4M3", "fp8", False, "fp8", "bfloat16 would take"),
        ("BF16", "int4", True, "int4", "bfloat16 would take"),
        ("F8_E4M3", "int4", True, "int4", "fp8 would take"),
        ("BF16", None, True, "int4", "the smallest, but a rank takes"),
    ],
)
def test_without_a_gpu_it_is_the_first_that_fits(model, stored, fits, is_quick, dtype, why):
    folder = model(stored)
    config = load_model_config(folder)
    free = 1 << 20 if fits is None else rank_bytes(config, fits)
    chosen, reason = choose_dtype(folder, Machine(free, has_gpu=False, is_quick_in_8_bits=is_quick))
    assert (chosen, why in reason) == (dtype, True), reason
    assert "\n" not in reason


@pytest.mark.parametrize(("stored", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F8_E4M3", "fp8")])
def test_on_a_gpu_it_is_what_the_checkpoint_is_stored_in(model, stored, dtype):
    chosen, reason = choose_dtype(model(stored), Machine(1 << 20, has_gpu=True, is_quick_in_8_bits=True))
    assert (chosen, reason) == (dtype, "the dtype in which the checkpoint is stored")


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float32"), ("float16", "bfloat16")])
def test_a_checkpoint_is_stored_in_what_most_matrices_are(tmp_path, stored, dtype):
    tensors = {"a": np.zeros((2, 2), stored), "b": np.zeros((2, 2), stored), "bias": np.zeros(2, "float32")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == dtype


def test_scales_of_a_checkpoint_in_8_bits_do_not_count(tmp_path):
    scales = {f"{name}.weight_scale": np.zeros((2, 1), "float32") for name in "ab"}
    tensors = {f"{name}.weight": np.zeros((2, 2), "int8") for name in "ab"}
    save_file(tensors | scales | {"embedding": np.zeros((2, 2), "float32")}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == "fp8"


def test_this_machine_is_asked_for_its_memory():
    assert this_machine().free_bytes == pytest.approx(free_memory_bytes(), rel=0.5)
