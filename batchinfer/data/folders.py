"""Folders of data: which files in them are shards (Hugging Face's layouts), and what their names say of all rows."""

import json
import os
import re
from collections.abc import Iterator
from urllib.parse import unquote

from batchinfer.data.formats.names import is_data_file
from batchinfer.records import ConfigError

_PARTITION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_SAVED = "state.json"  # of a dataset that was written by its save_to_disk


def files_in_folder(folder: str) -> list[str]:
    """The data files in a folder and those below, all splits; of a saved dataset those that it consists of.

    Raises:
        ConfigError: there are none, or the list of a saved dataset cannot be read.
    """
    files = sorted(_files(folder))
    if not files:
        raise ConfigError(
            f"input.files names the folder {folder}, which holds no *.parquet, *.jsonl, *.csv, *.tsv or *.arrow; "
            f"write the files' names, as in {folder.rstrip('/')}/*.parquet"
        )
    return files


def partition_values(path: str) -> dict[str, str | None]:
    """What folders of the form key=value in a path say of all rows of a file, as Hive lays out partitions."""
    found = [_PARTITION.fullmatch(part) for part in path.partition("::")[0].split("/")[:-1]]
    return {match[1]: None if match[2] == _NULL else unquote(match[2]) for match in found if match is not None}


def _files(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        if _SAVED in names:
            yield from (os.path.join(place, name) for name in _saved_files(os.path.join(place, _SAVED)))
        else:
            yield from (os.path.join(place, name) for name in names if is_data_file(name))


def _saved_files(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [os.path.basename(entry["filename"]) for entry in json.load(file)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {path}, the list of a saved dataset's files: {error}; name the files themselves"
        ) from None
