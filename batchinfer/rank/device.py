"""The device of a rank: a GPU if the backend uses GPUs and there are any, else the CPU.

Each rank has a GPU for itself, unless rows travel through the host's memory (cluster.exchange = "shared"): then ranks
may outnumber the GPUs and share them.
"""

import torch

from batchinfer.records import ConfigError
from batchinfer_kernels.triton import probe as triton_probe

_CPU_BACKENDS = ("cpu", "reference")
SHARING = "shared"  # the exchange whose ranks may share a GPU


def rank_device(backend: str, local_rank: int, exchange: str = "auto") -> torch.device:
    """Choose a rank's device, make it the process's current one, and have float32 products computed in full precision.

    Args:
        backend: cluster.backend; "cpu" and "reference" keep to the CPU, and so does Triton's interpreter.
        local_rank: the rank's number among the ranks of this host, from 0.
        exchange: cluster.exchange.

    Raises:
        ConfigError: the host has fewer GPUs than ranks, which may not share them.
    """
    # NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which would shorten operands to 10 bits of mantissa
    torch.set_float32_matmul_precision("highest")
    is_interpreted = backend == "triton" and triton_probe.interprets()
    if backend in _CPU_BACKENDS or is_interpreted or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus and exchange != SHARING:
        raise ConfigError(
            f"rank {local_rank} of this host has no GPU for itself: the host has {num_gpus}, and NCCL and DeepEP "
            "connect no two ranks of one GPU; start at most one rank per GPU, set cluster.exchange to 'shared' (ranks "
            "share GPUs, and rows travel through the host's memory), or set cluster.backend to 'cpu' or 'reference'"
        )
    device = torch.device("cuda", local_rank % num_gpus)
    torch.cuda.set_device(device)
    return device


def ranks_per_gpu(exchange: str, num_local_ranks: int) -> int:
    """Return the largest number of ranks that share one GPU of this host; for a rank that computes on a GPU."""
    return -(-num_local_ranks // torch.cuda.device_count()) if exchange == SHARING else 1


def device_name(device: torch.device) -> str:
    """Return the device's name in statistics: "cpu", or the GPU's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
