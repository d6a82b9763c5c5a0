"""A model folder that `batchinfer convert` wrote, by its manifest; no torch here, as the planner uses it, too.

    packed.json                 dtype, layout, size and checksum of each file; written last
    ends.safetensors            embedding, norm and head
    layer-00000.safetensors …   one per layer
    mtp.safetensors             the layer for multi-token prediction, where the model has one
    config.json, tokenizer.json …   as in the folder that it was made from

Weights are in the order in which the C++ operations read them, the same on all processors, so ranks map them; or, if
the folder is made for GPUs, in the form in which those hold them, so that a layer's file is copied there as it is.
"""

from dataclasses import dataclass
from pathlib import Path

from batchinfer.checked_json import read_json
from batchinfer.records import DamagedFileError, ModelError

MANIFEST = "packed.json"
LAYOUT = 2  # version of panels (cpu/csrc/pack.cpp) and files (packed_files.py): raise it when either changes
ENDS = "ends.safetensors"
MTP = "mtp.safetensors"
# tensors [E, …] of a layer with routed experts, of which a rank may hold a part
EXPERT_FIELDS = ("gate_up_EFD", "down_EDF", "gate_up_bias_EF", "down_bias_ED")
EXPERT_TENSORS = tuple(f"mlp.{field}" for field in EXPERT_FIELDS)


@dataclass(frozen=True, slots=True)
class PackedFolder:
    """The manifest of a converted folder. `source` is the folder that was converted, `sizes` bytes by file name.

    for_gpus: whether it is made for GPUs, else for the C++ operations on CPUs.
    """

    folder: Path
    dtype: str
    layout: int
    source: str
    sizes: dict[str, int]
    for_gpus: bool = False

    @property
    def has_mtp(self) -> bool:
        """Whether the folder has the layer for multi-token prediction."""
        return MTP in self.sizes

    @property
    def end_bytes(self) -> int:
        """The size of embedding, norm and head."""
        return self.sizes[ENDS]

    def layer(self, number: int) -> Path:
        """Return the file of a layer."""
        return self.folder / layer_name(number)

    def layer_bytes(self, number: int) -> int:
        """Return the size of a layer's file."""
        return self.sizes[layer_name(number)]

    def check(self, dtype: str) -> None:
        """Raise if a job of this dtype cannot map the folder.

        Raises:
            ModelError: made for another dtype or by another version, or a file is missing or of another size.
        """
        again = f"run `batchinfer convert {self.source} DIR --dtype {dtype}{' --gpu' if self.for_gpus else ''}`"
        if self.layout != LAYOUT:
            raise ModelError(
                f"{self.folder} was converted to layout {self.layout}, this version reads {LAYOUT}; {again}"
            )
        if self.dtype != dtype:
            raise ModelError(f"{self.folder} was converted to {self.dtype}, but model.dtype is {dtype!r}; {again}")
        for name, size in self.sizes.items():
            path = self.folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
                raise ModelError(f"{path} {what}; {again}")


def layer_name(number: int) -> str:
    """Return the name of a layer's file."""
    return f"layer-{number:05d}.safetensors"


def read_packed(folder: Path) -> PackedFolder | None:
    """Return the manifest of a converted folder, None of any other.

    Raises:
        ModelError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        found = read_json(path, "dtype", "layout", "source", "files")
        sizes = {str(name): int(file["bytes"]) for name, file in found["files"].items()}
        source, for_gpus = str(found["source"]), bool(found.get("for_gpus", False))
        return PackedFolder(folder, str(found["dtype"]), int(found["layout"]), source, sizes, for_gpus)
    except (DamagedFileError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is damaged ({error}); convert the model again") from None
