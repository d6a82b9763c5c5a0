"""model.dtype for a checkpoint on this machine: what fits, keeps what the checkpoint says, and is quick; and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from batchinfer.config.job import VALUE_BYTES
from batchinfer.host_info import free_memory_bytes, has_gpu, processor_field
from batchinfer.model.config import load_model_config
from batchinfer.model.headers import read_headers
from batchinfer.model.packed_folder import read_packed
from batchinfer.model.weight_bytes import rank_bytes

_STORED = {"F32": "float32", "F8_E4M3": "fp8"}
# of processors for which 8-bit products are in C++, as /proc/cpuinfo of x86-64 and of Arm says it (docs/cpu.md)
_QUICK = {"flags": {"avx2", "fma"}, "Features": {"asimddp"}}


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides on this host; of a GPU's memory nothing is known before torch is there."""

    free_bytes: int
    has_gpu: bool
    is_quick_in_8_bits: bool  # on the processor


def this_machine() -> Machine:
    """The host of this process."""
    is_quick = any(wanted <= set((processor_field(field) or "").split()) for field, wanted in _QUICK.items())
    return Machine(free_memory_bytes(), has_gpu(), is_quick)


def choose_dtype(model: Path, machine: Machine) -> tuple[str, str]:
    """(model.dtype, why) for one rank on this machine.

    Without a GPU the weights have to fit into the free memory: of what the checkpoint is stored in and what takes less,
    the first that fits. FP8 checkpoints stay in 8 bits where these are quick, else they are widened.

    Raises:
        ModelError: the model's files cannot be read.
    """
    if (packed := read_packed(model)) is not None:
        return packed.dtype, "what the folder was converted to"
    stored = stored_dtype(model)
    if machine.has_gpu:
        return stored, "what the checkpoint is stored in"
    config = load_model_config(model)
    needed = {dtype: rank_bytes(config, dtype) for dtype in VALUE_BYTES}
    order = list(needed)[list(needed).index(stored) :]
    if stored == "fp8" and not machine.is_quick_in_8_bits:
        order.insert(0, "bfloat16")
    chosen = next((dtype for dtype in order if needed[dtype] <= machine.free_bytes), order[-1])
    takes = f"it takes {_gb(needed[chosen])} of the {_gb(machine.free_bytes)} that is free here"
    if needed[chosen] > machine.free_bytes:
        return chosen, f"the smallest, but {takes}: free memory, or spread the ranks over several hosts"
    if chosen != order[0]:
        first = f"{order[0]} would take {_gb(needed[order[0]])}"
        return chosen, f"{takes}, {first}; answers may differ a little from those in {order[0]}"
    if chosen != stored:
        return chosen, f"the checkpoint is in fp8, which is slow on this processor; {takes}"
    if stored == "fp8":
        return chosen, f"the checkpoint is in fp8, quicker than bfloat16 here; {takes}"
    return chosen, f"what keeps the checkpoint's values and fits: {takes}"


def stored_dtype(model: Path) -> str:
    """What most matrices of a checkpoint are stored in, and bfloat16 for what no dtype of a job is.

    Raises:
        ModelError: its files cannot be read.
    """
    headers = read_headers(model)
    stored = Counter(headers.info(name).dtype for name in headers if len(headers.info(name).shape) > 1)
    return _STORED.get(stored.most_common(1)[0][0] if stored else "", "bfloat16")


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2g} GB" if num_bytes < 10**10 else f"{num_bytes / 1e9:,.0f} GB"
