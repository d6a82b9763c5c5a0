"""Bit equality of this rank's rows, alone and in any batch: given for C++, measured for plain PyTorch.

Reported once, when the model is loaded. On a GPU it is unknown: its libraries may split sums by the batch.
"""

import torch

from batchinfer.equal_rows import EqualRows
from batchinfer.host_info import matrix_library_mode, matrix_library_settings, processor_kind, processor_name
from batchinfer.model.row_computations import plain_computations
from batchinfer.model.transformer import Transformer
from batchinfer.rank.device import device_name
from batchinfer_kernels.cpu import build as cpu_build
from batchinfer_kernels.registry import AUTO
from batchinfer_kernels.row_check import why_rows_differ

_PLAIN = "reference"  # a backend, and how the names of its operations' modules begin


def equal_rows(model: Transformer, backend: str = AUTO) -> EqualRows:
    """Return whether rows of this model have equal bits in every batch, in this process with its number of threads.

    Args:
        backend: the backend with which the model was loaded, for the remedy.
    """
    kinds = model.kernels.split(", ")[0].split()
    if model.device.type != "cpu" or not (model.ops.has_fixed_sums or all(kind.startswith(_PLAIN) for kind in kinds)):
        processor = device_name(model.device) if model.device.type != "cpu" else processor_name()
        reason = "kernels for GPUs may split a row's sums by the other rows of the batch; this is not measured"
        return EqualRows(None, reason, processor, f"{processor}, {model.kernels}")
    if model.ops.has_fixed_sums:
        return EqualRows(True, None, f"{processor_name()} ({cpu_build.instructions().name})", model.kernels)
    computations = plain_computations(model)
    units = torch.backends.cpu.get_cpu_capability()
    settings = f"OMP_NUM_THREADS={torch.get_num_threads()} MKL_CBWR={matrix_library_mode()}"
    found = why_rows_differ(computations)
    return EqualRows(
        found is None,
        None if found is None else f"in plain PyTorch {found}; {_remedy(backend)}",
        f"{processor_name()} ({units})",
        f"plain PyTorch {torch.__version__} on {processor_kind()} with {settings}",
    )


def why_no_cpp(model: Transformer, backend: str) -> str | None:
    """Return why a model on a CPU runs in plain PyTorch although its backend is "auto"; None if it does not."""
    if model.device.type != "cpu" or backend != AUTO or model.ops.has_fixed_sums:
        return None
    return cpu_build.why_not()


def _remedy(backend: str) -> str:
    """Return the remedy for plain PyTorch whose bits depend on the batch."""
    if matrix_library_mode() and not matrix_library_settings():
        return "unset MKL_CBWR in the environment"
    if backend == _PLAIN:
        return 'set cluster.backend = "auto", which takes the C++ operations where it can'
    return f"the C++ operations, which are equal, cannot run here: {cpu_build.why_not()}"
