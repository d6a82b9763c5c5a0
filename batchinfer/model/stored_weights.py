"""Weights of a checkpoint by name, widened from their stored form: floats, FP8 blocks, 4-bit integers."""

import math

import torch

from batchinfer.model.checkpoint import Checkpoint
from batchinfer.model.config import ModelConfig
from batchinfer.model.integer_forms import PER_WORD, IntegerForm
from batchinfer.model.integers import Integers, from_awq, from_compressed_tensors, from_gptq
from batchinfer.model.quantization import FP8_BLOCK
from batchinfer.model.tensor_names import FP4_GROUP, FP4_SCALES, FP4_VALUES, SCALE_SUFFIX
from batchinfer.records import ModelError
from batchinfer_kernels import registry
from batchinfer_kernels.reference.block_scaled import BlockScaled
from batchinfer_kernels.reference.fp4 import Fp4Scaled
from batchinfer_kernels.reference.group_scaled import GroupScaled

_E8M0_NAN = 255


class StoredWeights:
    """Reader of single weights; do not keep a result, as it may be a view of a mapped file."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        self._checkpoint = checkpoint
        self._fp8_block, self._form = config.fp8_block, config.integers  # the headers fit them
        self._dequantize = registry.select("dequantize_fp8_block")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the weight, however it is stored."""
        form = self._form_of(name)
        if name + FP4_SCALES in self._checkpoint:
            num_out, num_groups = self._checkpoint.info(name + FP4_SCALES).shape
            return num_out, num_groups * FP4_GROUP
        if form is None:
            return self._checkpoint.info(name).shape
        scales, values = (self._checkpoint.info(form.part(name, kind)).shape for kind in ("scales", "values"))
        if form.method == "compressed-tensors":
            return scales[0], scales[1] * form.group
        return scales[1], values[0] * (PER_WORD if form.method == "gptq" else 1)

    def read(self, name: str, dtype: torch.dtype, *, finite: bool = False) -> torch.Tensor:
        """Return a weight in this dtype: value × scale, multiplied in float32 and rounded once.

        Args:
            finite: refuse a weight that is not finite.

        Raises:
            ModelError: the file cannot be read any more, or its scales or its shape cannot be right.
        """
        weight = self._read(name, dtype)
        if finite and not weight.isfinite().all():
            raise self._wrong(name, "holds a value that is not finite; fetch the file again")
        return weight

    def _read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        form = self._form_of(name)
        if form is not None:
            return self._integers(form, name).widened(dtype)
        if name + FP4_VALUES in self._checkpoint:
            return self.read_fp4(name).plain(dtype)
        stored = self._checkpoint.read(name)
        if stored.dtype in (torch.float8_e4m3fn, torch.int8):
            rows, columns = self._fp8_block or FP8_BLOCK
            block = rows, min(columns, stored.shape[1])
            return self._dequantize(stored, self._block_scale(name), dtype, block)
        return stored.to(dtype)

    def read_blocks(self, name: str) -> BlockScaled | None:
        """Return a weight that is stored in FP8 in blocks bit for bit, None if it is stored otherwise."""
        if name + SCALE_SUFFIX not in self._checkpoint or self._fp8_block != FP8_BLOCK:
            return None
        return BlockScaled(self._checkpoint.read(name), self._block_scale(name))

    def read_fp4(self, name: str) -> Fp4Scaled:
        """Return a weight that is stored in MXFP4, bit for bit.

        Raises:
            ModelError: the weight is stored otherwise, or a scale is not finite.
        """
        if name + FP4_VALUES not in self._checkpoint:
            raise self._wrong(name, 'is not stored in FP4, which model.dtype = "fp4" needs')
        pairs, exponents = (self._checkpoint.read(name + part).view(torch.uint8) for part in (FP4_VALUES, FP4_SCALES))
        if (exponents == _E8M0_NAN).any():
            raise self._wrong(name + FP4_SCALES, "holds a scale that is not finite; fetch the file again")
        return Fp4Scaled(pairs.flatten(1), exponents)

    def read_groups(self, name: str) -> GroupScaled | None:
        """Return a weight in groups of 32 with its stored integers; None if it is not stored as integers that fit.

        Scales are rounded to bfloat16, in which Kimi's checkpoints store them.
        """
        form = self._form_of(name)
        return None if form is None else self._integers(form, name).in_groups()

    def _form_of(self, name: str) -> IntegerForm | None:
        return self._form if self._form is not None and self._form.is_stored(name, self._checkpoint) else None

    def _integers(self, form: IntegerForm, name: str) -> Integers:
        words = self._checkpoint.read(form.part(name, "values"))
        scale = self._scale(form.part(name, "scales"), signed=True)  # AutoRound's are of either sign
        if form.method == "compressed-tensors":
            self._check_shape(form.part(name, "shape"), self.shape(name))
            return from_compressed_tensors(words, scale, form.group)
        zeros = self._checkpoint.read(form.part(name, "zeros"))
        if form.method == "awq":
            return from_awq(words, zeros, scale)
        group_M = self._groups(form.part(name, "groups"), len(scale))
        return from_gptq(words, zeros, scale, zero_shift=form.zero_shift, group_M=group_M)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise if the stored shape of a packed weight contradicts its scales."""
        said = self._checkpoint.read(name).tolist()
        if said != list(shape):
            raise self._wrong(name, f"says {said}, but the weight that is packed is {list(shape)}")

    def _groups(self, name: str, num_groups: int) -> torch.Tensor | None:
        """Return [M] int64, each input's group; None if the checkpoint has no such tensor."""
        if name not in self._checkpoint:
            return None
        group_M = self._checkpoint.read(name).long()
        least, most = (bound.item() for bound in group_M.aminmax())
        if not 0 <= least <= most < num_groups:
            raise self._wrong(name, f"is from {least} to {most}, but there are {num_groups} groups")
        return group_M

    def _block_scale(self, name: str) -> torch.Tensor:
        """Return a scale for each block of a weight, the same for all blocks if the weight has a single scale."""
        scale = self._scale(name + SCALE_SUFFIX)
        if scale.numel() != 1 or self._fp8_block is None:
            return scale
        grid = [-(-size // block) for size, block in zip(self.shape(name), self._fp8_block, strict=True)]
        return scale.reshape(1, 1).expand(grid).contiguous()

    def _scale(self, name: str, *, signed: bool = False) -> torch.Tensor:
        """Return scales in float32, which holds every stored form exactly."""
        scale = self._checkpoint.read(name).float()
        least, most = (bound.item() for bound in scale.aminmax())  # NaN where one is
        if not (math.isfinite(least) and math.isfinite(most) and (signed or least >= 0)):
            needs = "finite" if signed else "finite and not negative"
            raise self._wrong(name, f"is from {least:g} to {most:g}, but a scale is {needs}")
        return scale

    def _wrong(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self._checkpoint.info(name).path}: {name} {what}.")
