"""Names, shapes and formats of a model folder's tensors, from the headers of its *.safetensors files.

No torch here and no weight is read: the planner uses it, too. Formats that run code when loaded (pickle: *.bin, *.pt)
are never opened.
"""

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from batchinfer.config.model_folder import refuse_pointers
from batchinfer.model.config_reader import read_json_object
from batchinfer.model.families import Carrier
from batchinfer.model.stored_names import TensorInfo, own_names
from batchinfer.records import ModelError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILES = ("model.safetensors.index.json", "consolidated.safetensors.index.json")  # the other: Mistral's own
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorHeaders:
    """Tensor headers of a checkpoint by name in the language model."""

    def __init__(self, folder: Path, infos: dict[str, TensorInfo]):
        self.folder = folder
        self.infos = infos

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def info(self, name: str) -> TensorInfo:
        """Return shape, format and file of one tensor."""
        return self.infos[name]


def read_headers(folder: Path, carrier: Carrier | None = None) -> TensorHeaders:
    """Read the headers of model.safetensors, or of the shards in model.safetensors.index.json, or of all *.safetensors.

    Args:
        carrier: the model that holds the language model; tensors of its other parts are left out.

    Raises:
        ModelError: no such files (pickle formats are not read), a damaged file, an index that does not fit its
            shards, or a tensor that is in two files.
    """
    folder = Path(folder)
    index_path = next((folder / name for name in _INDEX_FILES if (folder / name).exists()), None)
    weight_map: dict[str, str] = {}
    if (folder / _SINGLE_FILE).exists():
        paths = [folder / _SINGLE_FILE]
    elif index_path is not None:
        weight_map = _read_weight_map(index_path)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(_no_files_message(folder))

    infos: dict[str, TensorInfo] = {}
    for path in paths:
        for name, info in _read_header(path).items():
            if weight_map.get(name, path.name) != path.name:
                continue  # the index gives this tensor to another shard
            if name in infos:
                raise ModelError(f"{folder}: tensor {name} is in {infos[name].path.name} and in {path.name}.")
            infos[name] = info
    for name, file_name in weight_map.items():
        if name not in infos:
            raise ModelError(f"{index_path} says that {file_name} holds {name}, but it does not.")
    if carrier is not None:
        infos = {
            name.removeprefix(carrier.prefix): info
            for name, info in infos.items()
            if not name.startswith(carrier.skipped)
        }
    return TensorHeaders(folder, own_names(infos))


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, are_names_unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map must be an object from tensor name to file name.")
    for name, file_name in weight_map.items():
        plain = isinstance(file_name, str) and Path(file_name).name == file_name
        if not plain or not file_name.endswith(".safetensors"):
            raise ModelError(f"{path}: weight_map gives {name} to {file_name!r}, not to a .safetensors file beside it.")
        if not (path.parent / file_name).is_file():
            raise ModelError(f"{path} names {file_name}, which does not exist.")
    return weight_map


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        file = safe_open(path, framework="np")
        infos = {}
        for name in file.keys():  # noqa: SIM118 - not a dict, it has no iterator
            entry = file.get_slice(name)
            infos[name] = TensorInfo(path, name, tuple(entry.get_shape()), str(entry.get_dtype()))
    except (SafetensorError, OSError) as error:
        refuse_pointers(path.parent)
        raise ModelError(f"{path} is damaged or not a safetensors file: {error}.") from error
    return infos


def _no_files_message(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        return f"{folder} holds {pickles[0]} but no *.safetensors; only safetensors is read, convert the model first."
    return f"{folder} holds no *.safetensors; only safetensors is read."
