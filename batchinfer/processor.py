"""What this host says of its processor, and what Intel's matrix library has to be told because of it.

On Intel's processors, rows of plain PyTorch depend on their batch unless MKL is strict: it sums in another order for a
product of exactly 8 rows, say. On AMD's it keeps to one order by itself, and the same setting would take that away.
MKL reads it once, before its first product.
"""

from __future__ import annotations

import os
import platform

_INFO = "/proc/cpuinfo"
_STRICT_MKL = {"MKL_CBWR": "AVX2,STRICT"}


def processor_field(name: str) -> str | None:
    """What /proc/cpuinfo says under this name of the first processor; None where it does not (Linux on x86 does)."""
    try:
        with open(_INFO, encoding="utf-8") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
                if not line.strip():  # the end of the first one
                    break
    except OSError:
        pass
    return None


def processor_name() -> str:
    """The processor's name as its maker writes it."""
    return processor_field("model name") or platform.processor() or platform.machine() or "unknown"


def processor_kind() -> str:
    """Maker, family and model."""
    fields = [processor_field(name) for name in ("vendor_id", "cpu family", "model")]
    return "/".join(field for field in fields if field) or platform.machine()


def matrix_library_settings() -> dict[str, str]:
    """Environment variables for a process that is going to import torch; what the user has set goes before them."""
    return dict(_STRICT_MKL) if processor_field("vendor_id") == "GenuineIntel" else {}


def matrix_library_mode() -> str:
    """What this process's environment says of the order of MKL's sums, "" for nothing."""
    return os.environ.get("MKL_CBWR", "")


def set_up_matrix_library() -> None:
    """Give this process these variables, before it imports torch; what the user has set stays."""
    for name, value in matrix_library_settings().items():
        os.environ.setdefault(name, value)
