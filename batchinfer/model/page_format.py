"""The format of KV pages, by the job's kv.dtype: the bytes of a token, for all code that counts them."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.config import VALUE_BYTES, JobConfig
from batchinfer.model.config import ModelConfig
from batchinfer.records import ConfigError

FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Pages of a job.

    dtype: "float32" or "bfloat16", of every value; or "fp8": latents in E4M3 with a float32 scale per 128 values, the
        rotary key in bfloat16 (`reference/fp8_pages.py` of the kernels).
    """

    dtype: str

    @classmethod
    def of(cls, job: JobConfig) -> PageFormat:
        """Return the page format that the job asks for."""
        if job.kv.dtype == FP8:
            return cls(FP8)
        return cls("float32" if job.model.dtype == "float32" else "bfloat16")

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    def check(self, model: ModelConfig) -> None:
        """Raise if a model's pages cannot have this format.

        Raises:
            ConfigError: with the reason of the model's attention.
        """
        if not self.is_fp8:
            return
        reason = model.attention.why_no_fp8_pages
        if reason is not None:
            raise ConfigError(f'kv.dtype is "fp8", but {reason}; leave kv.dtype out')

    def row_width(self, model: ModelConfig) -> int:
        """Return the elements of a token's row in one layer: values, or bytes in FP8."""
        return model.attention.fp8_row_bytes if self.is_fp8 else model.attention.row_width

    def bytes_per_token(self, model: ModelConfig) -> int:
        """Return the page bytes of one token over all layers (40,016 for the 671B model in FP8, 70,272 in bfloat16)."""
        if not self.is_fp8:
            return model.kv_bytes_per_token(VALUE_BYTES[self.dtype])
        return model.num_hidden_layers * self.row_width(model)


def block_tokens(job: JobConfig, model: ModelConfig) -> int:
    """Return the tokens of a block in the KV store: whole entries of all layers, at least kv.block_tokens."""
    unit = model.attention.unit_tokens
    return -(-job.kv.block_tokens // unit) * unit


def check_kv(job: JobConfig, model: ModelConfig) -> None:
    """Raise if the KV of a model cannot be held as the job asks.

    Raises:
        ConfigError: with the reason.
    """
    PageFormat.of(job).check(model)


BFLOAT16 = PageFormat("bfloat16")
