"""The bytes of a layer's file that one rank streams: all of them, or all but the routed experts of other ranks.

file   | header | attention, … | gate and up of experts 0 1 2 3 | down of experts 0 1 2 3 | norms, … |
slot   | attention, … | gate and up of 2 3 | down of 2 3 | norms, … |

Direct reads begin and end at multiples of DIRECT_BYTES, in the file and in memory. So a piece lies as far beyond such a
multiple in the slot as in the file, and what is read around it goes to memory that nothing else uses. Experts that do
not follow each other in the file do in the slot: the edges of such pieces are copied.

No torch here, as the planner uses it, too.
"""

# L layers, E routed experts

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from batchinfer.model.config import ModelConfig
from batchinfer.model.packed_folder import EXPERT_TENSORS, PackedFolder
from batchinfer.records import ModelError

DIRECT_BYTES = 4096


class Block(NamedTuple):
    """Bytes that are read at once; they may be read directly only up to multiples of DIRECT_BYTES around them."""

    file_start: int
    slot_start: int
    num_bytes: int
    is_direct: bool = True  # else it is read elsewhere and copied


class Piece(NamedTuple):
    """Bytes that follow each other in the file and in the slot."""

    file_start: int
    slot_start: int
    num_bytes: int
    is_apart: bool = True  # nothing else is between the multiples of DIRECT_BYTES around it in the slot

    def blocks(self, most_bytes: int) -> Iterator[Block]:
        """Yield the piece in blocks of `most_bytes`, a multiple of DIRECT_BYTES."""
        shift, end = self.slot_start - self.file_start, self.file_start + self.num_bytes
        first, last = self.file_start - self.file_start % DIRECT_BYTES, end  # of the bytes that are read directly
        if not self.is_apart:
            first = end if shift % DIRECT_BYTES else min(_up(self.file_start), end)
            last = max(first, end - end % DIRECT_BYTES)
        for begin, stop, is_direct in ((self.file_start, first, False), (first, last, True), (last, end, False)):
            for start in range(begin, stop, most_bytes):
                yield Block(start, start + shift, min(most_bytes, stop - start), is_direct)


class LayerPieces(NamedTuple):
    """The pieces of a layer's file, and the bytes of a slot that holds them.

    starts: of each tensor in the slot; None: as in the file.
    """

    pieces: tuple[Piece, ...]
    num_bytes: int
    starts: Mapping[str, int] | None = None


def whole_file(num_bytes: int) -> LayerPieces:
    """Return a file's first bytes as one piece."""
    return LayerPieces((Piece(0, 0, num_bytes),), num_bytes)


def layers_of_rank(
    packed: PackedFolder, config: ModelConfig, expert_ids: Sequence[Sequence[int]] | None
) -> list[LayerPieces]:
    """Return [L] the pieces that a rank reads of each layer's file.

    Args:
        expert_ids: of the rank's slots, per MoE layer; None: all in order.

    Raises:
        ModelError: a file cannot be read, or is damaged.
    """
    layers = range(config.num_hidden_layers)
    if expert_ids is None:
        return [whole_file(packed.layer_bytes(layer)) for layer in layers]
    of_layer = dict(zip(config.moe_layers, expert_ids, strict=True))
    return [
        _own_pieces(packed.layer(layer), of_layer[layer])
        if layer in of_layer
        else whole_file(packed.layer_bytes(layer))
        for layer in layers
    ]


def _own_pieces(path: Path, expert_ids: Sequence[int]) -> LayerPieces:
    """Return the pieces of a file without the routed experts that are not among these."""
    try:
        with open(path, "rb") as file:
            first = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(first - 8))
        header.pop("__metadata__")
        tensors = sorted((*entry["data_offsets"], name, entry["shape"]) for name, entry in header.items())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} cannot be streamed: {error}; convert the model again") from None
    pieces: list[Piece] = []
    starts: dict[str, int] = {}
    end = 0  # of what is in the slot
    run: int | None = None  # where the piece began to which further tensors belong
    for start, stop, name, shape in tensors:
        if name not in EXPERT_TENSORS:
            if run is None:
                run, end = first + start, _up(end) + (first + start) % DIRECT_BYTES
                pieces.append(Piece(run, end, 0))
            pieces[-1] = pieces[-1]._replace(num_bytes=first + stop - run)
            starts[name] = pieces[-1].slot_start + first + start - run
            end = pieces[-1].slot_start + pieces[-1].num_bytes
            continue
        run, each = None, (stop - start) // shape[0]
        begins = [0, *(at + 1 for at, (one, other) in enumerate(pairwise(expert_ids)) if other != one + 1)]
        base = _up(end) + (first + start + expert_ids[0] * each) % DIRECT_BYTES
        for at, after in pairwise([*begins, len(expert_ids)]):
            from_file = first + start + expert_ids[at] * each
            pieces.append(Piece(from_file, base + at * each, (after - at) * each, is_apart=len(begins) == 1))
        starts[name], end = base, base + len(expert_ids) * each
    return LayerPieces(tuple(pieces), _up(end), starts)


def _up(num_bytes: int) -> int:
    return -(-num_bytes // DIRECT_BYTES) * DIRECT_BYTES
