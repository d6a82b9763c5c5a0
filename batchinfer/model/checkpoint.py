"""The *.safetensors files of a model folder as one set of named tensors; weight_loading.py reads through it.

Files are memory-mapped and only the tensors asked for are touched, so a rank that holds a few experts of a 700 GB
checkpoint reads only those.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from batchinfer.model.families import Carrier
from batchinfer.model.headers import TensorHeaders, read_headers
from batchinfer.records import ModelError


class Checkpoint(TensorHeaders):
    """Named tensors over one or more files; a tensor's bytes are touched when it is read."""

    def __init__(self, headers: TensorHeaders, on_read: Callable[[int], None] | None = None):
        super().__init__(headers.folder, headers.infos)
        self._files: dict[Path, Any] = {}
        self._on_read, self._num_bytes = on_read, 0

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor as stored, possibly a view of the mapped file: copy it before keeping it.

        Raises:
            ModelError: the file can no longer be read.
        """
        info = self.info(name)
        path = info.path
        try:
            if path not in self._files:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            tensor = self._files[path].get_tensor(info.stored_name)
            if info.part is not None:
                tensor = tensor[info.part.matrix]
                tensor = tensor.t() if info.part.is_transposed else tensor
                tensor = tensor[info.part.first : info.part.end : info.part.step]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}.") from error
        if self._on_read is not None:
            self._num_bytes += info.num_bytes
            self._on_read(self._num_bytes)
        return tensor

    def unmap(self) -> None:
        """Close the files until the next read, so that mapped bytes no longer count as this process's memory."""
        self._files.clear()


def open_checkpoint(
    folder: Path, carrier: Carrier | None = None, on_read: Callable[[int], None] | None = None
) -> Checkpoint:
    """Read the headers of the folder's files; tensors are read when they are used.

    Args:
        carrier: as for headers.read_headers.
        on_read: called with the bytes of all tensors read so far.

    Raises:
        ModelError: see headers.read_headers.
    """
    return Checkpoint(read_headers(folder, carrier), on_read)
