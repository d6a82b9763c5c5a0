"""Accelerators and their links, from the makers' data sheets."""

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer.records import ConfigError
from batchinfer.sim.aiconfigurator import HINT, MeasuredRates, measured_rates, systems_folder

Rates = Literal["published", "measured"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, peaks without sparsity."""

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
    nvlink_gpus: int = 8  # GPUs that reach each other by NVLink
    rates: MeasuredRates | None = None  # of single operations; None: shares of the peaks as on the H800

    @property
    def rates_source(self) -> str:
        """The source of the rates of operations, for people."""
        if self.rates is not None:
            return self.rates.source
        if self.name == REFERENCE.name:
            return "published tables of the H800"
        return f"published tables of the H800, as shares of the peaks on the {self.name}'s data sheet"


_CONNECTX7 = 50e9  # 400 Gbit/s, one card per GPU
_CONNECTX8 = 100e9  # 800 Gbit/s

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
_B200 = Accelerator(
    name="B200",
    fp8_flops=4500e12,
    bf16_flops=2250e12,
    hbm_bytes_per_s=8e12,
    hbm_bytes=180e9,
    num_sms=148,
    nvlink_bytes_per_s=900e9,
    network_bytes_per_s=_CONNECTX7,
    source="NVIDIA DGX B200 data sheet (per GPU, without sparsity); network: one ConnectX-7 of 400 Gbit/s per GPU",
)
_GB200 = replace(
    _B200,
    name="GB200",
    fp8_flops=5000e12,
    bf16_flops=2500e12,
    hbm_bytes=186e9,
    gpus_per_node=4,
    nvlink_gpus=72,
    source="NVIDIA GB200 NVL72 data sheet (per GPU, without sparsity); network: one ConnectX-7 of 400 Gbit/s per GPU",
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
        _B200,
        replace(
            _B200,
            name="B300",
            hbm_bytes=288e9,
            network_bytes_per_s=_CONNECTX8,
            source="NVIDIA DGX B300 data sheet (per GPU, without sparsity); network: one ConnectX-8 of 800 Gbit/s",
        ),
        _GB200,
        replace(
            _GB200,
            name="GB300",
            hbm_bytes=288e9,
            network_bytes_per_s=_CONNECTX8,
            source="NVIDIA GB300 NVL72 data sheet (per GPU, without sparsity); network: one ConnectX-8 of 800 Gbit/s",
        ),
    )
}
REFERENCE = ACCELERATORS["H800"]  # the kernel tables were measured on it


def accelerator(name: str, rates: Rates | None = "published") -> Accelerator:
    """Return the accelerator of this name.

    Args:
        rates: "published": the tables of this package; "measured": those of aiconfigurator-core; None: measured ones if
            there are some for this accelerator.

    Raises:
        ConfigError: it is not known, or there are no measured rates of it.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"gpu is {name!r}, which is not known; use one of {', '.join(ACCELERATORS)}")
    gpu = ACCELERATORS[name]
    measured = None if rates == "published" else measured_rates(name)
    if rates == "measured" and measured is None:
        remedy = f"leave rates out: no table of the {name} is known" if systems_folder() else f"run: {HINT}"
        raise ConfigError(f'rates is "measured", but there are no measured rates of {name}; {remedy}')
    return gpu if measured is None else replace(gpu, rates=measured)
