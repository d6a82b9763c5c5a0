"""Folders of data: which files in them are shards (Hugging Face's layouts)."""

import bisect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from batchinfer.config import S3Config
from batchinfer.data.formats.names import is_data_file, is_overlooked
from batchinfer.data.patterns import UnreadableFolderError, walk_folders
from batchinfer.data.stores import WILDCARDS, StoreFile, objects_below
from batchinfer.records import ConfigError
from batchinfer.rundir import is_run_folder

_ESCAPED = re.compile(r"\[([*?[])\]")  # an escaped wildcard
_SAVED = "state.json"  # in a dataset that save_to_disk wrote


def files_in_folder(folder: str, runs: set[str], overlooked: dict[str, list[str]]) -> list[str]:
    """Return the data files in a folder and below, of all splits; of a saved dataset only the files in its list.

    Args:
        runs: run folders below the folder are added here; their files are left out.
        overlooked: names of files that may be data, but have another extension, are added here, by the folder.

    Raises:
        ConfigError: no file is found, or the list of a saved dataset or a folder below cannot be read.
    """
    others = overlooked.setdefault(folder, [])
    names = _data_files(folder, _names_below(folder, runs), lambda name: Path(folder, name).read_bytes(), others)
    return [os.path.join(folder, name) for name in names]


def files_of_matches(
    files: list[str], folders: list[str], files_in: Callable[[str], list[str]], unread: set[str]
) -> list[str]:
    """Return the input files of a pattern: the files that it matches, else the data files in the matched folders.

    Args:
        files, folders: the pattern's matches; each folder ends with a slash.
        files_in: returns the data files in a folder and below.
        unread: if there are files, matched folders that contain none of them are added here.
    """
    if not files:
        return [file for folder in folders for file in files_in(folder)]
    unread.update(folders_without_files(folders, files))
    return files


def holds_data(folder: str) -> bool:
    """Return whether a folder contains data files, at any depth; files in run folders do not count.

    A folder that cannot be listed counts as containing some.
    """
    try:
        return len(files_in_folder(folder, set(), {})) > 0
    except UnreadableFolderError:
        return True
    except ConfigError:
        return False


def folders_without_files(folders: Iterable[str], files: Iterable[str]) -> list[str]:
    """Return the folders (each with a slash at its end) that contain none of the files, at any depth."""
    in_order = sorted(files)
    places = ((folder, bisect.bisect(in_order, folder)) for folder in folders)
    return [folder for folder, at in places if at == len(in_order) or not in_order[at].startswith(folder)]


def without_run_folders(pattern: str, matches: list[str], runs: set[str]) -> list[str]:
    """Return the matches of a pattern without run folders and without files that `**` found in run folders.

    Files in a run folder that the pattern names without wildcards stay.

    Args:
        runs: the run folders left out are added here.
    """
    parts = pattern.split(os.sep)
    named = takewhile(lambda part: not WILDCARDS.search(_ESCAPED.sub("", part)), parts)
    top = os.path.abspath(_ESCAPED.sub(r"\1", os.sep.join(named)) or os.sep)
    is_inside = {top: False, os.sep: False}  # by folder; a folder named without wildcards is meant

    def is_in_run(path: str) -> bool:
        if path not in is_inside:
            if is_run_folder(path):
                runs.add(path)
            is_inside[path] = path in runs or ("**" in parts and is_in_run(os.path.dirname(path)))
        return is_inside[path]

    return [match for match in matches if not is_in_run(os.path.abspath(match))]


def objects_in_folder(uri: str, s3: S3Config, overlooked: dict[str, list[str]]) -> list[str]:
    """Return the URIs of the data files in a folder of an object store, at any depth (see `files_in_folder`).

    Raises:
        ConfigError: no file is found, or the list of a saved dataset cannot be read.
        StoreError: the store does not answer, or refuses the request.
    """
    uri_of = objects_below(uri, s3)
    others = overlooked.setdefault(uri, [])
    return [uri_of[name] for name in _data_files(uri, uri_of, lambda name: _read_object(uri_of[name], s3), others)]


def _data_files(folder: str, names: Iterable[str], read: Callable[[str], bytes], others: list[str]) -> list[str]:
    """Return the names of the files that are shards, sorted.

    Args:
        names: all files in the folder and below, relative to the folder.
        read: returns the content of a file, given its name.
        others: names of files that may be data are added here.
    """
    names_in: dict[str, list[str]] = {}
    for name in names:
        place, slash, last = name.rpartition("/")
        if not any(map(_is_hidden, place.split("/"))):
            names_in.setdefault(f"{place}{slash}", []).append(last)
    files: list[str] = []
    for below, found in names_in.items():
        is_saved = _SAVED in found
        shards = _saved_files(folder, f"{below}{_SAVED}", read) if is_saved else filter(is_data_file, found)
        files += (f"{below}{name}" for name in shards)
        others += (f"{below}{name}" for name in found if not is_saved and is_overlooked(name))
    if not files:
        raise ConfigError(
            f"the folder {folder} holds no *.parquet, *.jsonl, *.ndjson, *.csv, *.tsv or *.arrow; write the files' "
            f"names, as in {folder.rstrip('/')}/*.parquet"
        )
    return sorted(files)


def _names_below(folder: str, runs: set[str]) -> Iterator[str]:
    for place, folders, names in walk_folders(folder, _is_hidden):
        found = {name for name in folders if is_run_folder(os.path.join(place, name))}
        runs |= {os.path.abspath(os.path.join(place, name)) for name in found}
        folders[:] = [name for name in folders if name not in found]
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in names)


def _is_hidden(folder: str) -> bool:
    return folder.startswith((".", "_"))


def _saved_files(folder: str, name: str, read: Callable[[str], bytes]) -> list[str]:
    try:
        return [os.path.basename(entry["filename"]) for entry in json.loads(read(name))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {folder.rstrip('/')}/{name}, the list of a saved dataset's files: {error}; name the files "
            "themselves"
        ) from None


def _read_object(uri: str, s3: S3Config) -> bytes:
    with StoreFile(uri, s3) as file:
        return file.read()
