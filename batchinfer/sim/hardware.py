"""Accelerators and their links, from the makers' data sheets."""

from dataclasses import dataclass, replace

from batchinfer.records import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU of a node of eight, peaks without sparsity."""

    name: str
    fp8_flops: float  # FLOP/s
    bf16_flops: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    num_sms: int
    nvlink_bytes_per_s: float  # one direction
    network_bytes_per_s: float  # one direction, its own network card
    source: str
    gpus_per_node: int = 8


_CONNECTX7 = 50e9  # 400 Gbit/s, one card per GPU


_H100 = Accelerator(
    name="H100",
    fp8_flops=1979e12,
    bf16_flops=989e12,
    hbm_bytes_per_s=3.35e12,
    hbm_bytes=80e9,
    num_sms=132,
    nvlink_bytes_per_s=450e9,
    network_bytes_per_s=_CONNECTX7,
    source="NVIDIA H100 SXM data sheet; network: one ConnectX-7 of 400 Gbit/s per GPU",
)
ACCELERATORS = {
    gpu.name: gpu
    for gpu in (
        replace(
            _H100,
            name="H800",
            nvlink_bytes_per_s=200e9,
            source="NVIDIA H100 SXM data sheet with NVLink cut to 400 GB/s both ways; memory rate and BF16 peak as in "
            "FlashMLA's kernel notes (github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md); "
            "network: DeepEP's README (github.com/deepseek-ai/DeepEP)",
        ),
        _H100,
        replace(
            _H100,
            name="H200",
            hbm_bytes_per_s=4.8e12,
            hbm_bytes=141e9,
            source="NVIDIA H200 SXM data sheet; network: one ConnectX-7 of 400 Gbit/s per GPU",
        ),
        Accelerator(
            name="B200",
            fp8_flops=4500e12,
            bf16_flops=2250e12,
            hbm_bytes_per_s=8e12,
            hbm_bytes=180e9,
            num_sms=148,
            nvlink_bytes_per_s=900e9,
            network_bytes_per_s=_CONNECTX7,
            source="NVIDIA DGX B200 data sheet (per GPU, without sparsity); network: one ConnectX-7 of 400 Gbit/s per "
            "GPU. No kernel table is known for it: shares of the peaks are taken from the H800",
        ),
    )
}
REFERENCE = ACCELERATORS["H800"]  # the kernel tables were measured on it


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of this name.

    Raises:
        ConfigError: it is not known.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"gpu is {name!r}, which is not known; use one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
