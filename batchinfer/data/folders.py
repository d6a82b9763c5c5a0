"""Folders of data: which files in them are shards (Hugging Face's layouts)."""

import bisect
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from batchinfer.config import S3Config
from batchinfer.data.formats.names import is_data_file
from batchinfer.data.patterns import UnreadableFolderError, each_folder
from batchinfer.data.stores import WILDCARDS, StoreFile, objects_below
from batchinfer.records import ConfigError
from batchinfer.rundir import is_run_folder

_ESCAPED = re.compile(r"\[([*?[])\]")  # of a pattern: a letter that stands for itself
_SAVED = "state.json"  # of a dataset that was written by its save_to_disk


def files_in_folder(folder: str, runs: set[str]) -> list[str]:
    """The data files in a folder and those below, all splits; of a saved dataset those that it consists of.

    Args:
        runs: gets the run folders below it, whose files are not among these.

    Raises:
        ConfigError: there are none, the list of a saved dataset cannot be read, or a folder below cannot be.
    """
    names = _data_files(folder, _names_below(folder, runs), lambda name: Path(folder, name).read_bytes())
    return [os.path.join(folder, name) for name in names]


def files_or_folders(
    files: list[str], folders: list[str], files_in: Callable[[str], list[str]], unread: set[str]
) -> list[str]:
    """What a pattern stands for that matches these: the files, or those in the folders where it matches no file.

    Args:
        folders: each ends with a slash.
        files_in: the data files in one of them and below.
        unread: gets the folders beside files that hold none of these files.
    """
    if not files:
        return [file for folder in folders for file in files_in(folder)]
    unread.update(without_files(folders, files))
    return files


def holds_data(folder: str) -> bool:
    """Whether data files are, or may be, in a folder or below it, those in run folders left out."""
    try:
        return len(files_in_folder(folder, set())) > 0
    except UnreadableFolderError:
        return True
    except ConfigError:
        return False


def without_files(folders: Iterable[str], files: Iterable[str]) -> list[str]:
    """The folders, each with a slash at its end, in which and below which none of the files is."""
    in_order = sorted(files)
    places = ((folder, bisect.bisect(in_order, folder)) for folder in folders)
    return [folder for folder, at in places if at == len(in_order) or not in_order[at].startswith(folder)]


def outside_runs(pattern: str, matches: list[str], runs: set[str]) -> list[str]:
    """Of what matches a pattern, all but run folders, and what its ** finds in run folders that it does not name.

    Args:
        runs: gets these run folders.
    """
    parts = pattern.split(os.sep)
    named = takewhile(lambda part: not WILDCARDS.search(_ESCAPED.sub("", part)), parts)
    top = os.path.abspath(_ESCAPED.sub(r"\1", os.sep.join(named)) or os.sep)
    is_inside = {top: False, os.sep: False}  # by folder; what is named without wildcards is meant

    def is_in_run(path: str) -> bool:
        if path not in is_inside:
            if is_run_folder(path):
                runs.add(path)
            is_inside[path] = path in runs or ("**" in parts and is_in_run(os.path.dirname(path)))
        return is_inside[path]

    return [match for match in matches if not is_in_run(os.path.abspath(match))]


def objects_in_folder(uri: str, s3: S3Config) -> list[str]:
    """The same of a folder in an object store: the URIs of its objects.

    Raises:
        ConfigError: as `files_in_folder`.
        StoreError: the store does not answer, or refuses to.
    """
    uri_of = objects_below(uri, s3)
    return [uri_of[name] for name in _data_files(uri, uri_of, lambda name: _read_object(uri_of[name], s3))]


def _data_files(folder: str, names: Iterable[str], read: Callable[[str], bytes]) -> list[str]:
    """Of the files in and below a folder those that are shards.

    Args:
        names: from the folder on.
        read: the content of one of them.
    """
    names_in: dict[str, list[str]] = {}
    for name in names:
        parts = name.split("/")
        if not any(map(_is_hidden, parts[:-1])):
            names_in.setdefault("/".join(parts[:-1]), []).append(parts[-1])
    files: list[str] = []
    for place, found in names_in.items():
        below = f"{place}/" if place else ""
        is_saved = _SAVED in found
        shards = _saved_files(folder, f"{below}{_SAVED}", read) if is_saved else filter(is_data_file, found)
        files += (f"{below}{name}" for name in shards)
    if not files:
        raise ConfigError(
            f"input.files names the folder {folder}, which holds no *.parquet, *.jsonl, *.ndjson, *.csv, *.tsv or "
            f"*.arrow; write the files' names, as in {folder.rstrip('/')}/*.parquet"
        )
    return sorted(files)


def _names_below(folder: str, runs: set[str]) -> Iterator[str]:
    for place, folders, names in each_folder(folder, _is_hidden):
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
