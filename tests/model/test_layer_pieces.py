"""The bytes of a layer's file that one of several ranks reads: its own experts and all else, each at its place."""

import json
import os
from pathlib import Path

import pytest

from batchinfer.model import weight_stream
from batchinfer.model.layer_pieces import DIRECT_BYTES, layers_of_rank
from batchinfer.model.memory_split import slot_size, split_memory
from batchinfer.model.packed_folder import EXPERT_TENSORS, PackedFolder, layer_name
from batchinfer.model.weight_stream import WeightStream

NUM_EXPERTS, NUM_LAYERS = 6, 3


class Config:
    """Of a model whose first layer is dense."""

    num_hidden_layers, moe_layers = NUM_LAYERS, range(1, NUM_LAYERS)


def write_folder(folder: Path, expert_bytes: tuple[int, int]) -> PackedFolder:
    """Write random tensors in the order of a converted layer: attention, experts, norms."""
    for layer in range(NUM_LAYERS):
        sizes = {"attention.q": 10_000, "attention.out": 64}
        if layer:
            sizes |= {name: NUM_EXPERTS * size for name, size in zip(EXPERT_TENSORS, expert_bytes, strict=False)}
        sizes |= {"mlp_norm": 100, "input_norm": 28}
        header, end = {"__metadata__": {}}, 0
        for name, size in sizes.items():
            shape = [NUM_EXPERTS, size // NUM_EXPERTS] if name in EXPERT_TENSORS else [size]
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end := end + size]}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        (folder / layer_name(layer)).write_bytes(len(text).to_bytes(8, "little") + text + os.urandom(end))
    return PackedFolder(folder, "bfloat16", 1, "", {p.name: p.stat().st_size for p in folder.iterdir()})


def tensors_of(path: Path) -> dict[str, bytes]:
    content = path.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:first])
    del header["__metadata__"]
    return {name: content[slice(*(first + at for at in entry["data_offsets"]))] for name, entry in header.items()}


# whole multiples of what is read directly; not; less than that
@pytest.mark.parametrize("expert_bytes", [(8192, 4096), (8192 + 64, 5000), (192, 64)], ids=["even", "odd", "tiny"])
@pytest.mark.parametrize("ids", [[0, 1, 2], [3, 4, 5], [4, 0, 1], [5, 2, 5, 0], [2]])
@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "buffered"])
def test_a_slot_has_a_ranks_experts_in_order_and_all_other_tensors(tmp_path, monkeypatch, expert_bytes, ids, is_direct):
    if not is_direct:
        monkeypatch.setattr(weight_stream, "_open", lambda path: (os.open(path, os.O_RDONLY), False))
    monkeypatch.setattr(weight_stream, "BLOCK_BYTES", 8192)
    packed = write_folder(tmp_path, expert_bytes)
    layers = layers_of_rank(packed, Config, [ids, ids[::-1]])
    sizes = [layer.num_bytes for layer in layers]
    memory = {"memory_bytes": 3 * slot_size(max(sizes)), "fixed_bytes": 0, "least_kv_bytes": 0, "useful_kv_bytes": 0}
    files = [packed.layer(number) for number in range(NUM_LAYERS)]
    stream = WeightStream(files, split_memory(sizes, **memory), layers=layers)
    try:
        for number in [*range(NUM_LAYERS)] * 3:
            stream.wait()
            slot, starts = stream.memory_of(number), stream.starts_of(number)
            assert (starts is None) == (number == 0)
            if starts is None:
                assert bytes(slot[: sizes[0]]) == files[0].read_bytes()
            for name, start in (starts or {}).items():
                wanted = tensors_of(files[number])[name]
                if name in EXPERT_TENSORS:
                    each = len(wanted) // NUM_EXPERTS
                    wanted = b"".join(wanted[one * each : (one + 1) * each] for one in [ids, ids[::-1]][number - 1])
                assert bytes(slot[start : start + len(wanted)]) == wanted, (number, name)
            stream.release()
    finally:
        stream.close()


def test_other_ranks_experts_are_not_read(tmp_path):
    packed = write_folder(tmp_path, (8192, 4096))
    whole = layers_of_rank(packed, Config, None)
    for ids, num_pieces in (([0, 1], 5), ([3, 4, 5], 5), ([5, 0], 7)):
        for layer in range(1, NUM_LAYERS):
            found = layers_of_rank(packed, Config, [ids, ids])[layer]
            read = sum(piece.num_bytes for piece in found.pieces)
            without = sum(len(tensor) for name, tensor in tensors_of(packed.layer(layer)).items() if "_E" not in name)
            assert read == without + len(ids) * (8192 + 4096)
            assert len(found.pieces) == num_pieces - 1
            assert found.num_bytes <= read + 2 * DIRECT_BYTES * len(found.pieces)
    assert [layer.num_bytes for layer in whole] == [packed.layer_bytes(layer) for layer in range(NUM_LAYERS)]
    assert layers_of_rank(packed, Config, [[0, 1]] * 2)[0] == whole[0]
