"""The input shards: files and objects that match the job's patterns, with their rows counted."""

import glob
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa

from batchinfer.config import DEFAULT_S3, S3Config, is_uri
from batchinfer.data.folders import (
    files_in_folder,
    files_of_matches,
    folders_without_files,
    holds_data,
    objects_in_folder,
    without_run_folders,
)
from batchinfer.data.formats import arrow_ipc, line_rows, parquet_file
from batchinfer.data.formats.lines import HashedBytes
from batchinfer.data.formats.names import format_of, output_name
from batchinfer.data.parquet import DAMAGE
from batchinfer.data.patterns import matching_paths
from batchinfer.data.stores import StoreFile, matching_objects
from batchinfer.progress import note
from batchinfer.records import ConfigError, InputError, RunMismatchError, Shard
from batchinfer.sanitize import first_line

INSPECTORS = 16  # files looked into at a time
MOST_NAMED = 5  # files or folders, in a warning


def find_shards(
    patterns: list[str],
    exclude: Path | None = None,
    s3: S3Config = DEFAULT_S3,
    *,
    format: str | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    key: str = "input.files",
) -> list[Shard]:
    """List the input files with their rows counted; a file that cannot be read is listed with a `problem`.

    Args:
        patterns: absolute paths, folders, URIs or globs (`**` crosses folders); each file counts once, in the order of
            paths. Folders and `**` skip run folders that the pattern does not name, with a message.
        exclude: the job's run folder, whose files are never input.
        format: input.format.
        roles: uses of columns (see values.column_roles); in files of lines, only these columns get types.
        key: the setting or argument that has the patterns, for messages.

    Raises:
        ConfigError: a pattern matches no file, or two files would share one output file.
        StoreError: an object store does not answer, or refuses the request. A damaged object is listed with a problem.
    """
    paths = _matching_files(patterns, exclude, s3, key)
    names = _output_names(paths)
    found = [Shard(i, path, names[i], 0, "", 0, format=format_of(path, format)) for i, path in enumerate(paths)]
    return with_types(found, roles, s3)


def with_types(shards: list[Shard], roles: Mapping[str, str], s3: S3Config = DEFAULT_S3) -> list[Shard]:
    """Return the shards with types for these columns of files of lines (see `find_shards`)."""
    with ThreadPoolExecutor(max_workers=INSPECTORS) as pool:
        return list(pool.map(partial(_inspected, roles=roles, s3=s3), shards))


def refuse_changed(shards: list[Shard], s3: S3Config) -> None:
    """Check that no shard was replaced after it was planned.

    Compared are size and version of an object, and size and footer of a Parquet file. A file is then unchanged if its
    modification time is, else if all its bytes are: values of the same length leave a Parquet footer as it was.

    Raises:
        RunMismatchError: a shard was replaced.
        InputError: a file does not exist.
        StoreError: an object store does not answer, or refuses the request.
    """
    readable = [shard for shard in shards if shard.problem is None]
    with ThreadPoolExecutor(max_workers=INSPECTORS) as pool:
        for shard, same in zip(readable, pool.map(lambda shard: is_same(shard, s3), readable), strict=True):
            if not same:
                raise shard.changed()


def is_same(shard: Shard, s3: S3Config) -> bool:
    """Return whether a shard is the file or object that was planned, compared as in `refuse_changed`.

    Raises:
        InputError, StoreError: it cannot be read.
    """
    if is_uri(shard.path):
        with StoreFile(shard.path, s3) as source:
            return (source.size_bytes, source.version) == (shard.size_bytes, shard.version)
    if not os.path.lexists(shard.path):
        raise InputError(f"{shard.path} does not exist (any more); restore it")
    if shard.format == "parquet":
        found = _inspected(replace(shard, footer=""), {}, s3)
        return (found.size_bytes, found.footer) == (shard.size_bytes, shard.footer) and has_same_bytes(shard, found)
    try:
        status = os.stat(shard.path)
        if (status.st_size, status.st_mtime_ns) == (shard.size_bytes, shard.written_ns):
            return True
        with open(shard.path, "rb") as file:
            return status.st_size == shard.size_bytes and HashedBytes(file).digest() == shard.footer
    except OSError as error:
        raise InputError(f"{shard.path} cannot be read: {first_line(error)}; restore it") from None


def has_same_bytes(planned: Shard, found: Shard) -> bool:
    """Return whether a Parquet file with the planned footer has the planned values, too; True for other shards.

    Raises:
        InputError, RunMismatchError: as `with_content`.
    """
    is_known = planned.content != "" and planned.written_ns != found.written_ns
    return not is_known or with_content(found).content == planned.content


def with_content(shard: Shard) -> Shard:
    """Return a shard with the checksum and the date of its bytes, if it is a Parquet file.

    Raises:
        InputError: the file cannot be read.
        RunMismatchError: it is gone.
    """
    if shard.format != "parquet" or is_uri(shard.path):
        return shard
    try:
        with open(shard.path, "rb") as file:
            written_ns = os.fstat(file.fileno()).st_mtime_ns
            return replace(shard, written_ns=written_ns, content=HashedBytes(file).digest())
    except FileNotFoundError:
        raise RunMismatchError(f"{shard.path} does not exist (any more); restore it") from None
    except OSError as error:
        raise InputError(f"{shard.path} cannot be read: {first_line(error)}") from None


# ---- names


def _matching_files(patterns: list[str], exclude: Path | None, s3: S3Config, key: str) -> list[str]:
    own = os.path.realpath(exclude) if exclude is not None else None
    path_of_file: dict[str, str] = {}
    again: dict[str, None] = {}
    runs: set[str] = set()
    unread: set[str] = set()
    overlooked: dict[str, list[str]] = {}
    try:
        for pattern in patterns:
            if is_uri(pattern):
                files = _matching_uris(pattern, s3, unread, overlooked)
            else:
                found = _matching_paths(pattern, runs, unread, overlooked)
                files = [file for file in found if not _is_below(file, own)]
                if found and not files:
                    raise ConfigError(
                        f"{key}: what matches {pattern} is in the run folder {exclude}; choose another output.dir"
                    )
            if not files:
                raise ConfigError(f"{key}: no file matches {pattern}; correct the path")
            for file in sorted(files):
                real = file if is_uri(file) else os.path.realpath(file)
                if real in path_of_file:
                    again[path_of_file[real]] = None
                path_of_file.setdefault(real, file)
    finally:  # also if a pattern matches nothing else: perhaps the user wants the run folders' files
        if passed := sorted(run for run in runs if os.path.realpath(run) != own):
            one = f"{glob.escape(passed[0])}/outputs/*.parquet"
            note(f"{key} skips run folders; name one to read it, as in {one}: {_named(passed)}")
    # folders of an object store are named without a look inside: to list one could take an hour
    beside = folders_without_files(sorted(unread), path_of_file.values())
    if passed := [folder for folder in beside if is_uri(folder) or holds_data(folder)]:
        note(
            f"warning: {key} matches files and also folders, which are not read; name the folders to read them "
            f"too: {_named(passed)}"
        )
    read = set(path_of_file.values())
    warn_overlooked(
        {
            folder: [name for name in names if (path := f"{folder}{name}") not in read and not _is_below(path, own)]
            for folder, names in overlooked.items()
        }
    )
    if again:
        note(f"warning: {key} lists these files more than once; each is read once: {_named(list(again))}")
    return sorted(path_of_file.values())


def warn_overlooked(names_in: Mapping[str, list[str]]) -> None:
    """Warn of files that are not read because of their extensions; does nothing if there are none.

    Args:
        names_in: the files' names by the folder that input.files names.
    """
    folders = [folder.rstrip("/") for folder, names in names_in.items() if names]
    names = sorted(chain.from_iterable(names_in.values()))
    if not names:
        return
    which, are, do = ("file", "is", "its name does") if len(names) == 1 else ("files", "are", "their names do")
    note(
        f"warning: {len(names):,} {which} in {_named(folders)} {are} left out, as {do} not end as data files' do: "
        f"{_named(names)}"
    )


def _named(paths: list[str]) -> str:
    more = len(paths) - MOST_NAMED
    return f"{', '.join(paths[:MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"


def _is_below(file: str, folder: str | None) -> bool:
    return folder is not None and os.path.realpath(file).startswith(f"{folder}{os.sep}")


def _matching_uris(pattern: str, s3: S3Config, unread: set[str], overlooked: dict[str, list[str]]) -> list[str]:
    matches = matching_objects(pattern, s3)
    files = [match for match in matches if not match.endswith("/")]
    folders = [match for match in matches if match.endswith("/")]
    return files_of_matches(files, folders, partial(objects_in_folder, s3=s3, overlooked=overlooked), unread)


def _matching_paths(pattern: str, runs: set[str], unread: set[str], overlooked: dict[str, list[str]]) -> list[str]:
    # a path that exists is no pattern, even if it contains wildcards
    is_plain = os.path.lexists(pattern)
    matches = [pattern] if is_plain else without_run_folders(pattern, matching_paths(pattern), runs)
    matches = [os.path.abspath(match) for match in matches]
    folders = [f"{match}{os.sep}" for match in matches if os.path.isdir(match)]
    files = [match for match in matches if not os.path.isdir(match)]
    files_in = partial(files_in_folder, runs=runs, overlooked=overlooked)
    found = files_of_matches(files, folders, files_in, unread)
    return [os.path.abspath(file) for file in found]


def _output_names(paths: list[str]) -> list[str]:
    """Return the name of each shard's output file: its path relative to the common folder of all shards."""
    places = [_place(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(place) for place in places])
    path_of_name: dict[str, str] = {}
    for path, place in zip(paths, places, strict=True):
        name = os.path.relpath(place, folder)
        name = output_name(name)
        if not _is_utf8(path):
            raise ConfigError(f"the path {path!r} is not valid UTF-8; rename the file or its folder")
        if name in path_of_name:
            raise ConfigError(f"{path_of_name[name]} and {path} would share the output file {name}; rename one of them")
        path_of_name[name] = path
    for name, path in path_of_name.items():
        clash = next((str(parent) for parent in Path(name).parents if str(parent) in path_of_name), None)
        if clash is not None:
            raise ConfigError(f"{path_of_name[clash]} and {path} need {clash} as file and folder; rename one of them")
    return list(path_of_name)


def _place(path: str) -> str:
    """Return a path, or a URI in the form of a path: s3://bucket/a.parquet -> /bucket/a.parquet."""
    if not is_uri(path):
        return path
    names = path.partition("::")[0].partition("://")[2].lstrip("/").split("/")
    if {"", ".", ".."} & set(names):
        raise ConfigError(f"the name of the object {path} cannot be that of a file; rename the object")
    return f"/{'/'.join(names)}"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- a shard


def _inspected(shard: Shard, roles: Mapping[str, str], s3: S3Config) -> Shard:
    """Return the shard with rows, schema and checksum of its file, or with the problem of reading it."""
    if is_uri(shard.path):
        with StoreFile(shard.path, s3) as source:
            unread = replace(shard, size_bytes=source.size_bytes)
            found = _described(unread, pa.PythonFile(source, mode="r"), roles)
            return replace(found, version=source.version)
    try:
        status = os.stat(shard.path)
        shard = replace(shard, size_bytes=status.st_size)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        with pa.OSFile(shard.path) as file:
            found = _described(shard, file, roles)
    except DAMAGE as error:
        return replace(shard, problem=first_line(error))
    return replace(found, written_ns=status.st_mtime_ns)


def _described(shard: Shard, file: pa.NativeFile, roles: Mapping[str, str]) -> Shard:
    try:
        if shard.format == "parquet":
            return parquet_file.inspect(shard, file)
        if shard.format == "arrow":
            return arrow_ipc.inspect(shard, file)
        return line_rows.inspect(shard, file, roles)
    except DAMAGE as error:
        return replace(shard, problem=first_line(error))
