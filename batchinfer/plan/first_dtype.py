"""Choice of model.dtype for a checkpoint on this machine: fits into memory, keeps the values, and is fast."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from batchinfer.config.job import VALUE_BYTES
from batchinfer.host_info import free_memory_bytes, has_gpu, processor_field
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.quantization import FP8, INT8
from batchinfer.model.tensor_names import FP4_VALUES, SCALE_SUFFIX
from batchinfer.model.weight_bytes import rank_bytes

_STORED = {"F32": "float32", FP8: "fp8", INT8: "fp8"}
# flags in /proc/cpuinfo (x86-64 and Arm) of processors with 8-bit products in C++ (docs/cpu.md)
_QUICK = {"flags": {"avx2", "fma"}, "Features": {"asimddp"}}


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of this host that decide the dtype; a GPU's memory is not known without torch."""

    free_bytes: int
    has_gpu: bool
    is_quick_in_8_bits: bool  # on the processor


def this_machine() -> Machine:
    """Return the properties of this host."""
    is_quick = any(wanted <= set((processor_field(field) or "").split()) for field, wanted in _QUICK.items())
    return Machine(free_memory_bytes(), has_gpu(), is_quick)


def choose_dtype(model: Path, machine: Machine) -> tuple[str, str]:
    """Return model.dtype for one rank on this machine, and the reason in words.

    With a GPU: the dtype in which the checkpoint is stored. Without: the first dtype whose weights fit into free
    memory, from the stored dtype on to smaller ones. An FP8 checkpoint is widened if 8-bit products are slow.

    Raises:
        ModelError: the model's files cannot be read.
    """
    if (packed := read_packed(model)) is not None:
        return packed.dtype, "the dtype that the folder was converted to"
    stored = stored_dtype(model)
    if machine.has_gpu:
        return stored, "the dtype in which the checkpoint is stored"
    config = load_model_config(model)
    needed = {dtype: rank_bytes(config, dtype) for dtype in VALUE_BYTES if config.may_run_in(dtype)}
    if config.has_fp4_experts:
        del needed["int4"]  # as small, but rounded again
    order = list(needed)[list(needed).index(stored) :]
    if stored == "fp8" and not machine.is_quick_in_8_bits:
        order.insert(0, "bfloat16")
    chosen = next((dtype for dtype in order if needed[dtype] <= machine.free_bytes), order[-1])
    takes = f"a rank takes {_gb(needed[chosen])}, {_gb(machine.free_bytes)} of memory are free"
    if needed[chosen] > machine.free_bytes:
        return chosen, f"the smallest, but {takes}: free memory, or spread the ranks over several hosts"
    if chosen != order[0]:
        first = f"{order[0]} would take {_gb(needed[order[0]])}"
        return chosen, f"{takes} ({first}); answers may differ a little from those in {order[0]}"
    if chosen != stored:
        return chosen, f"the checkpoint is in 8 bits, which is slow on this processor; {takes}"
    if stored == "fp8":
        return chosen, f"the checkpoint is in 8 bits, quicker than bfloat16 here; {takes}"
    return chosen, f"the checkpoint's own; {takes}"


def stored_dtype(model: Path) -> str:
    """Return the dtype of most matrices in a checkpoint; bfloat16 if that is no dtype of a job.

    Raises:
        ModelError: the checkpoint's files cannot be read.
    """
    headers = read_headers(model)
    stored = Counter(
        "FP4" if name.endswith(FP4_VALUES) else headers.info(name).dtype
        for name in headers
        if len(headers.info(name).shape) > 1 and not name.endswith(SCALE_SUFFIX)
    )
    return _STORED.get(stored.most_common(1)[0][0] if stored else "", "bfloat16")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2g} GB" if num_bytes < 10**10 else f"{num_bytes / 1e9:,.0f} GB"
