"""One weight stored as 4-bit integers, unpacked: value = integer × the scale of its output and its group of inputs."""

# N outputs, M inputs, G groups of m inputs that share a scale

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchinfer_kernels.reference.group_scaled import GROUP, GroupScaled

_MIDDLE = 8  # what is added to symmetric integers, so that they are stored from 0 to 15
_ONES = 0x11111111
# AWQ's "gemm" packs outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on: where each output stands.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight [N, M] less its zero points."""

    values_NM: torch.Tensor  # int8, from -15 to 15
    scale_NG: torch.Tensor  # float32
    group_M: torch.Tensor | None = None  # int64, each input's group; None: m after m

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [N, M]: integer × scale, multiplied in float32 and rounded once."""
        values = self.values_NM.float()
        if self.group_M is not None:
            return values.mul_(self.scale_NG[:, self.group_M]).to(dtype)
        values_NGm = values.unflatten(1, (self.scale_NG.shape[1], -1))
        return values_NGm.mul_(self.scale_NG[:, :, None]).flatten(1).to(dtype)

    def in_groups(self) -> GroupScaled | None:
        """Return the same integers in groups of 32, scales rounded to bfloat16; None if they do not fit that form."""
        group = self.values_NM.shape[1] // self.scale_NG.shape[1]
        least, most = self.values_NM.aminmax()
        if group % GROUP or self.group_M is not None or least < -_MIDDLE or most >= _MIDDLE:
            return None
        even, odd = (self.values_NM + _MIDDLE).view(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
        return GroupScaled(even | odd << 4, self.scale_NG.bfloat16().repeat_interleave(group // GROUP, dim=1))


def from_compressed_tensors(words_NW: torch.Tensor, scale_NG: torch.Tensor, group: int) -> Integers:
    """Unpack integers of pack_to_int32: four bits each, from the lowest on, hold a value from -8 to 7 plus 8.

    Args:
        words_NW: int32, W = ceil(M / 8); bits after the last value are not read.
        scale_NG: float32.
        group: m.
    """
    values_NM = _nibbles(words_NW).flatten(1)[:, : scale_NG.shape[1] * group]
    return Integers(values_NM.view(torch.int8) - _MIDDLE, scale_NG)


def from_awq(words_MW: torch.Tensor, zeros_GW: torch.Tensor, scale_GN: torch.Tensor) -> Integers:
    """Unpack AutoAWQ's "gemm": words of eight outputs of one input, W = N / 8; zero points packed unchanged.

    Args:
        words_MW, zeros_GW: int32.
        scale_GN: float32.
    """
    places = torch.tensor(_AWQ_PLACES)
    values_NM = _nibbles(words_MW)[..., places].flatten(1).t()
    return _less_zeros(values_NM, _nibbles(zeros_GW)[..., places].flatten(1).t(), scale_GN.t().contiguous())


def from_gptq(
    words_WN: torch.Tensor,
    zeros_GV: torch.Tensor,
    scale_GN: torch.Tensor,
    *,
    zero_shift: int,
    group_M: torch.Tensor | None = None,
) -> Integers:
    """Unpack GPTQ: words of eight inputs of one output, W = M / 8; words of zero points less the shift, V = N / 8.

    Args:
        words_WN, zeros_GV: int32.
        scale_GN: float32.
        group_M: int64, in 0 .. G - 1; one that is in order counts as None.
    """
    values_NM = _nibbles(words_WN).transpose(0, 1).flatten(1)
    # added to whole words, as GPTQ subtracted it from whole words: a zero point of 0 has borrowed from its neighbour
    zero_NG = _nibbles(zeros_GV + zero_shift * _ONES).flatten(1).t()
    num_inputs = values_NM.shape[1]
    group = num_inputs // len(scale_GN)
    if group_M is not None and torch.equal(group_M, torch.arange(num_inputs) // group):
        group_M = None
    return _less_zeros(values_NM, zero_NG, scale_GN.t().contiguous(), group_M)


def _less_zeros(
    values_NM: torch.Tensor, zero_NG: torch.Tensor, scale_NG: torch.Tensor, group_M: torch.Tensor | None = None
) -> Integers:
    signed, zero = values_NM.contiguous().view(torch.int8), zero_NG.contiguous().view(torch.int8)
    if group_M is not None:
        return Integers(signed - zero[:, group_M], scale_NG, group_M)
    return Integers((signed.unflatten(1, (zero.shape[1], -1)) - zero[:, :, None]).flatten(1), scale_NG)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return [..., 8] uint8 of int32: four bits each, from the lowest on."""
    pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))  # the lowest byte first, as in the file
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
