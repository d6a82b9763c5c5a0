"""Published figures to compare measured ones with, all from H800 GPUs; none of them is this project's.

deep_gemm   README of github.com/deepseek-ai/DeepGEMM at commit a6d97a1 (February 2025, NVCC 12.8). Later versions are
            faster: its README of 2026 says up to 1,550 TFLOP/s, without a table.
flash_mla   README of github.com/deepseek-ai/FlashMLA at commit 9241ae3: up to 660 TFLOP/s, or 3,000 GB/s where memory
            is the limit (CUDA 12.8).
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """TFLOP/s and GB/s of one shape."""

    tflops: float
    gb_s: float


# (groups, rows per group, columns, depth)
DENSE = {
    (1, 64, 2112, 7168): Published(206, 1688),
    (1, 64, 24576, 1536): Published(289, 2455),
    (1, 64, 32768, 512): Published(219, 2143),
    (1, 64, 7168, 16384): Published(336, 2668),
    (1, 64, 4096, 7168): Published(287, 2320),
    (1, 64, 7168, 2048): Published(295, 2470),
    (1, 128, 2112, 7168): Published(352, 1509),
    (1, 128, 24576, 1536): Published(535, 2448),
    (1, 128, 32768, 512): Published(358, 2103),
    (1, 128, 7168, 16384): Published(645, 2604),
    (1, 128, 4096, 7168): Published(533, 2221),
    (1, 128, 7168, 2048): Published(510, 2277),
    (1, 4096, 2112, 7168): Published(1058, 527),
    (1, 4096, 24576, 1536): Published(990, 786),
    (1, 4096, 32768, 512): Published(590, 1232),
    (1, 4096, 7168, 16384): Published(1358, 343),
    (1, 4096, 4096, 7168): Published(1304, 500),
    (1, 4096, 7168, 2048): Published(1025, 697),
}
CONTIGUOUS = {
    (4, 8192, 4096, 7168): Published(1297, 418),
    (4, 8192, 7168, 2048): Published(1099, 681),
    (8, 4096, 4096, 7168): Published(1288, 494),
    (8, 4096, 7168, 2048): Published(1093, 743),
}
MASKED = {
    (1, 1024, 4096, 7168): Published(1233, 924),
    (1, 1024, 7168, 2048): Published(925, 968),
    (2, 512, 4096, 7168): Published(1040, 1288),
    (2, 512, 7168, 2048): Published(916, 1405),
    (4, 256, 4096, 7168): Published(932, 2064),
    (4, 256, 7168, 2048): Published(815, 2047),
}
MLA_DECODE = Published(660, 3000)  # each at its best, not at once
