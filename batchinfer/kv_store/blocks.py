"""Names of KV blocks: hashes of everything that a block's content depends on.

key ──────┬────────────┬────────────┬─
tokens    │  0 .. 63   │ 64 .. 127  │ …
names   key ─> name 0 ─┴─> name 1 ──┴─> …     so two prompts share the names of their common whole blocks only
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from batchinfer.config import PAGE_TOKENS
from batchinfer.records import ConfigError

LAYOUT_VERSION = 2  # of block files and of the order of values in them
NAME_BYTES = 32
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}  # of rows in pages; of FP8 rows all are counted in bytes
SHORT_BYTES = 6  # of a name, enough to find a block by; whole names are compared when it is read
MAX_LABEL = 64  # characters of each readable value, so that a header has room for all of them


@dataclass(frozen=True)
class KvIdentity:
    """The facts that two computations must share before one may use the other's blocks.

    `model` is for people only: the same weights in another folder share their blocks.
    """

    model: str
    weights: str  # digest of the weight files
    config: str  # digest of config.json in canonical form
    dtype: str  # of a latent, a key of ELEMENT_BYTES
    numerics: str  # family of backends that compute the same bits
    salt: str
    block_tokens: int
    num_layers: int
    latent_dim: int  # elements per token and layer: PageFormat.row_width

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"the KV store cannot hold {self.dtype!r}; use one of {', '.join(ELEMENT_BYTES)}")
        if self.block_tokens < PAGE_TOKENS or self.block_tokens % PAGE_TOKENS:
            raise ConfigError(f"kv.block_tokens is {self.block_tokens}, not a multiple of {PAGE_TOKENS}")

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Pages of a block, layers, tokens of a page, latent width: the order of values in a file."""
        return self.block_tokens // PAGE_TOKENS, self.num_layers, PAGE_TOKENS, self.latent_dim

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.num_layers * self.latent_dim * ELEMENT_BYTES[self.dtype]

    @cached_property
    def digest(self) -> bytes:
        """The key of block names, [32]."""
        values = {**asdict(self), "layout_version": LAYOUT_VERSION}
        del values["model"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()

    def describe(self) -> dict[str, Any]:
        """Return readable values for headers and listings; only a digest of the salt, which may be a secret."""
        values = {key: _label(value) if isinstance(value, str) else value for key, value in asdict(self).items()}
        salt = hashlib.blake2b(self.salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return {**values, "salt": salt if self.salt else ""}

    def chain(self, token_ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """Return the names of the whole blocks of a prompt, in order.

        Args:
            token_ids: [num_tokens], each 0 .. 2**32 - 1; tokens after the last whole block have no name.
        """
        data = np.asarray(token_ids, dtype="<u4").tobytes()
        num_bytes = 4 * self.block_tokens
        keyed = hashlib.blake2b(key=self.digest, digest_size=NAME_BYTES)
        names, parent = [], self.digest
        for end in range(num_bytes, len(data) + 1, num_bytes):
            hasher = keyed.copy()
            hasher.update(parent + data[end - num_bytes : end])
            parent = hasher.digest()
            names.append(parent)
        return names


def _label(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text[:MAX_LABEL])
