"""The input shards: files and objects that match the job's patterns, and what their footers say."""

import glob
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.config import DEFAULT_S3, S3Config, is_uri
from batchinfer.data.parquet import DAMAGE, first_line
from batchinfer.data.stores import StoreFile, matching_objects
from batchinfer.records import ConfigError, InputError, RunMismatchError, Shard

MAGIC = b"PAR1"
INSPECTORS = 16  # files looked into at a time


def find_shards(patterns: list[str], exclude: Path | None = None, s3: S3Config = DEFAULT_S3) -> list[Shard]:
    """List the input files with what their footers say; a file that cannot be read is listed with its `problem`.

    Args:
        patterns: absolute paths, URIs or globs (`**` crosses folders); each file counts once, in the order of its path.
        exclude: the run folder, whose own files a wide pattern must not take for input.

    Raises:
        ConfigError: a pattern matches no file, names a folder, or two files would share one output file.
        StoreError: an object store does not answer or refuses to. An object that is damaged is listed like a file.
    """
    paths = _matching_files(patterns, exclude, s3)
    names = _output_names(paths)
    with ThreadPoolExecutor(max_workers=INSPECTORS) as pool:
        return list(pool.map(lambda index: _inspect(index, paths[index], names[index], s3), range(len(paths))))


def refuse_changed(shards: list[Shard], s3: S3Config) -> None:
    """Check that the shards are still what was planned: size and footer of a file, size and version of an object.

    Raises:
        RunMismatchError: one was replaced.
        InputError: a file is not there.
        StoreError: an object store does not answer or refuses to.
    """
    readable = [shard for shard in shards if shard.problem is None]
    with ThreadPoolExecutor(max_workers=INSPECTORS) as pool:
        for shard, is_same in zip(readable, pool.map(lambda shard: _is_same(shard, s3), readable), strict=True):
            if not is_same:
                raise RunMismatchError(
                    f"{shard.path} changed after it was planned; restore it, or plan into another output.dir"
                )


def _is_same(shard: Shard, s3: S3Config) -> bool:
    if is_uri(shard.path):
        with StoreFile(shard.path, s3) as source:
            return (source.size_bytes, source.version) == (shard.size_bytes, shard.version)
    if not os.path.lexists(shard.path):
        raise InputError(f"{shard.path} is not there (any more); restore it")
    found = _inspect(shard.index, shard.path, shard.name, s3)
    return (found.size_bytes, found.footer) == (shard.size_bytes, shard.footer)


# ---- names


def _matching_files(patterns: list[str], exclude: Path | None, s3: S3Config) -> list[str]:
    outside = f"{os.path.realpath(exclude)}{os.sep}" if exclude is not None else None
    path_of_file: dict[str, str] = {}
    for pattern in patterns:
        files = matching_objects(pattern, s3) if is_uri(pattern) else _matching_paths(pattern, outside)
        if not files:
            raise ConfigError(f"input.files: no file matches {pattern}; correct the path")
        for file in sorted(files):
            path_of_file.setdefault(file if is_uri(file) else os.path.realpath(file), file)
    return sorted(path_of_file.values())


def _matching_paths(pattern: str, outside: str | None) -> list[str]:
    # a path that exists is meant as it stands, even when it holds glob characters
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    files = [os.path.abspath(match) for match in matches if not os.path.isdir(match)]
    if matches and not files:
        raise ConfigError(f"input.files names the folder {matches[0]}; write {matches[0].rstrip('/')}/*.parquet")
    return [file for file in files if outside is None or not os.path.realpath(file).startswith(outside)]


def _output_names(paths: list[str]) -> list[str]:
    """The name of each shard's output file: its path below the folder that all shards share."""
    places = [_place(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(place) for place in places])
    path_of_name: dict[str, str] = {}
    for path, place in zip(paths, places, strict=True):
        name = os.path.relpath(place, folder)
        name = name if name.endswith(".parquet") else f"{name}.parquet"
        if not _is_utf8(name):
            raise ConfigError(f"the file name {path!r} is not valid UTF-8; rename the file")
        if name in path_of_name:
            raise ConfigError(f"{path_of_name[name]} and {path} would share the output file {name}; rename one of them")
        path_of_name[name] = path
    for name, path in path_of_name.items():
        clash = next((str(parent) for parent in Path(name).parents if str(parent) in path_of_name), None)
        if clash is not None:
            raise ConfigError(f"{path_of_name[clash]} and {path} need {clash} as file and folder; rename one of them")
    return list(path_of_name)


def _place(path: str) -> str:
    """A path, or a URI as if it were one: s3://bucket/a.parquet -> /bucket/a.parquet."""
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


# ---- footers


def _inspect(index: int, path: str, name: str, s3: S3Config) -> Shard:
    if is_uri(path):
        with StoreFile(path, s3) as source:
            shard = _described(Shard(index, path, name, source.size_bytes, "", 0), source)
            return replace(shard, version=source.version)
    unread = Shard(index, path, name, 0, "", 0)
    try:
        status = os.stat(path)
        unread = replace(unread, size_bytes=status.st_size)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        with open(path, "rb") as file:
            return _described(unread, file)
    except DAMAGE as error:
        return replace(unread, problem=first_line(error))


def _described(shard: Shard, file: IO[bytes] | StoreFile) -> Shard:
    """The shard with what its footer says, or with its problem."""
    try:
        footer = _read_footer(file, shard.size_bytes)
        with pq.ParquetFile(pa.PythonFile(file, mode="r")) as parquet:
            # the schema is asked for because a footer can be sound and hold types that Arrow does not know
            num_rows, _ = parquet.metadata.num_rows, parquet.schema_arrow
    except DAMAGE as error:
        return replace(shard, problem=first_line(error))
    return replace(shard, footer=hashlib.blake2b(footer, digest_size=16).hexdigest(), num_rows=num_rows)


def _read_footer(file: IO[bytes] | StoreFile, size_bytes: int) -> bytes:
    # file   PAR1 | data pages ... | footer | length of the footer (4 bytes) | PAR1
    if size_bytes == 0:
        raise ValueError("it is empty")
    head = file.read(4)
    file.seek(max(size_bytes - 8, 0))
    tail = file.read(8)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] == b"PARE":
        raise ValueError("it is an encrypted Parquet file")
    if head != MAGIC:
        raise ValueError("it is not a Parquet file")
    if tail[4:] != MAGIC or footer_bytes > size_bytes - 12:
        raise ValueError("its end is missing or damaged (a Parquet file ends with its footer)")
    file.seek(size_bytes - 8 - footer_bytes)
    return file.read(footer_bytes)
