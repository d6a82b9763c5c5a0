"""Names of KV blocks: hashes of everything that a block's content depends on.

key ──────┬────────────┬────────────┬─
tokens    │  0 .. 63   │ 64 .. 127  │ …
names   key ─> name 0 ─┴─> name 1 ──┴─> …     so two prompts share the names of their common whole blocks only

Where a model's requests have states, a state after a whole block is a chain of one block by itself, of another size.
Its name is a hash of the name of the block before it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
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
    numerics: str  # operations and model code that compute the same bits
    salt: str
    block_tokens: int
    num_layers: int
    latent_dim: int  # elements per token and layer: PageFormat.row_width; on average where layers differ
    own_bytes: int = 0  # of a block where layers differ, or of a state; 0: by the values above
    is_state: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"the KV store cannot hold {self.dtype!r}; use one of {', '.join(ELEMENT_BYTES)}")
        if self.block_tokens < PAGE_TOKENS or self.block_tokens % PAGE_TOKENS:
            raise ConfigError(f"kv.block_tokens is {self.block_tokens}, not a multiple of {PAGE_TOKENS}")

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Pages of a block, layers, tokens of a page, latent width: the order of values in a file; or its bytes."""
        if self.own_bytes:
            return (self.own_bytes,)
        return self.block_tokens // PAGE_TOKENS, self.num_layers, PAGE_TOKENS, self.latent_dim

    @property
    def block_bytes(self) -> int:
        return self.own_bytes or self.block_tokens * self.num_layers * self.latent_dim * ELEMENT_BYTES[self.dtype]

    @property
    def tokens_per_block(self) -> int:
        """Prompt tokens whose KV is in a block; a state has none."""
        return 0 if self.is_state else self.block_tokens

    def of_states(self, state_bytes: int) -> "KvIdentity":
        """Return the identity of the states that go with these blocks."""
        return replace(self, own_bytes=state_bytes, is_state=True)

    def name_of_state(self, block: bytes) -> bytes:
        """Return the name of the state after a block, given the block's name."""
        return hashlib.blake2b(block, key=self.digest, digest_size=NAME_BYTES).digest()

    @cached_property
    def digest(self) -> bytes:
        """The key of block names, [32]."""
        values = {**self._values, "layout_version": LAYOUT_VERSION}
        del values["model"]
        text = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES).digest()

    def describe(self) -> dict[str, Any]:
        """Return readable values for headers and listings; only a digest of the salt, which may be a secret."""
        values = {key: _label(value) if isinstance(value, str) else value for key, value in self._values.items()}
        salt = hashlib.blake2b(self.salt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return {**values, "salt": salt if self.salt else ""}

    @property
    def _values(self) -> dict[str, Any]:
        """The fields; those that most models do not need are left out, so that older blocks keep their names."""
        values = asdict(self)
        return {key: value for key, value in values.items() if value or key not in ("own_bytes", "is_state")}

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
