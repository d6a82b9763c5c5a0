"""Weights of a checkpoint by name, widened from what they are stored in: floats, FP8 blocks, packed 4-bit integers."""

# N rows of a weight (out), M columns (in), G groups of m columns that share a scale

import math

import torch

from batchinfer.model.checkpoint import Checkpoint
from batchinfer.model.config import ModelConfig
from batchinfer.model.tensor_names import INT4_SCALE_SUFFIX, INT4_SHAPE_SUFFIX, PACKED_SUFFIX, SCALE_SUFFIX
from batchinfer.records import ModelError
from batchinfer_kernels import registry
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.group_scaled import GROUP, GroupScaled


class StoredWeights:
    """One weight at a time; what it gives is not to be kept, since it may be a view of a mapped file."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        self._checkpoint = checkpoint
        self._fp8_block, self._int4_group = config.fp8_block, config.int4_group or 0  # the headers fit them
        self._dequantize = registry.select("dequantize_fp8_block")

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the weight, however it is stored."""
        if name + PACKED_SUFFIX not in self._checkpoint:
            return self._checkpoint.info(name).shape
        num_rows, num_groups = self._checkpoint.info(name + INT4_SCALE_SUFFIX).shape
        return num_rows, num_groups * self._int4_group

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A weight in this dtype: value × scale, multiplied in float32 and rounded once.

        Raises:
            ModelError: the file cannot be read any more, or its scales or its shape cannot be right.
        """
        if name + PACKED_SUFFIX in self._checkpoint:
            return widen_int4(*self._packed(name), self._int4_group, dtype)
        stored = self._checkpoint.read(name)
        if stored.dtype == torch.float8_e4m3fn:
            return self._dequantize(stored, self._block_scale(name), dtype, self._fp8_block)
        return stored.to(dtype)

    def read_blocks(self, name: str) -> BlockScaled | None:
        """A weight that is stored in FP8 bit for bit, None where it is stored otherwise."""
        if name + SCALE_SUFFIX not in self._checkpoint:
            return None
        return BlockScaled(self._checkpoint.read(name), self._block_scale(name))

    def read_groups(self, name: str) -> GroupScaled | None:
        """A weight that is stored in groups of 32 (or a multiple), value by value; None where it is stored otherwise.

        Scales are rounded to bfloat16, which Kimi's are stored in.
        """
        if name + PACKED_SUFFIX not in self._checkpoint or self._int4_group % GROUP:
            return None
        packed, scale_NG = self._packed(name)
        values = packed.contiguous().view(torch.uint8)  # the lowest byte first, as in the file; whole groups
        return GroupScaled(values, scale_NG.bfloat16().repeat_interleave(self._int4_group // GROUP, dim=1))

    def _block_scale(self, name: str) -> torch.Tensor:
        """A scale for each block of a weight, the same for all where the weight has one."""
        scale = self._scale(name + SCALE_SUFFIX)
        if scale.numel() != 1 or self._fp8_block is None:
            return scale
        grid = [-(-size // block) for size, block in zip(self.shape(name), self._fp8_block, strict=True)]
        return scale.reshape(1, 1).expand(grid).contiguous()

    def _scale(self, name: str) -> torch.Tensor:
        """Scales in float32, which holds all that they are stored in."""
        scale = self._checkpoint.read(name).float()
        least, most = (bound.item() for bound in scale.aminmax())  # NaN where one is
        if not 0 <= least <= most < math.inf:
            path = self._checkpoint.info(name).path
            raise ModelError(f"{path}: {name} is from {least:g} to {most:g}, but a scale is finite and not negative.")
        return scale

    def _packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Values in 4 bits and their scales in float32."""
        said, shape = self._checkpoint.read(name + INT4_SHAPE_SUFFIX).tolist(), list(self.shape(name))
        if said != shape:
            path = self._checkpoint.info(name + INT4_SHAPE_SUFFIX).path
            raise ModelError(
                f"{path}: {name}{INT4_SHAPE_SUFFIX} says {said}, but the weight that is packed is {shape}."
            )
        return self._checkpoint.read(name + PACKED_SUFFIX), self._scale(name + INT4_SCALE_SUFFIX)


def widen_int4(packed: torch.Tensor, scale_NG: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Value × its group's scale, [N, G * group], multiplied in float32 and rounded once to `dtype`.

    Args:
        packed: [N, ceil(G * group / 8)] int32: four bits each, from the lowest on, are a value from -8 to 7 plus 8, as
            compressed-tensors packs them (pack_to_int32); bits behind the last value are not read.
        scale_NG: float32.
        group: columns side by side that share a scale.
    """
    num_rows, num_groups = scale_NG.shape
    pairs = packed.contiguous().view(torch.uint8)  # the lowest byte first, as in the file
    values_NM = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(num_rows, -1)[:, : num_groups * group]
    values_NGm = values_NM.unflatten(1, (num_groups, group)).float().sub_(8)
    return values_NGm.mul_(scale_NG[:, :, None]).flatten(1).to(dtype)
