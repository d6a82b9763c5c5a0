"""What the name of an input file says: its format, its compression, and how its outputs are called."""

import re

_FORMATS = {
    "parquet": "parquet",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "csv": "csv",
    "tsv": "csv",
    "arrow": "arrow",
    "feather": "arrow",
}
_EXTENSION = re.compile(r"\.(parquet|jsonl|ndjson|csv|tsv|arrow|feather)$|\.(jsonl|ndjson|csv|tsv)(?:\.(gz|zst))$")


def format_of(path: str, wanted: str | None) -> str:
    """parquet, jsonl, csv, arrow or openai: what the job says, or else the extension; Parquet when that says nothing.

    Args:
        path: of a file, or the URI of an object.
        wanted: input.format.
    """
    if wanted is not None and wanted != "sharegpt":
        return wanted
    found = _EXTENSION.search(_plain(path))
    return _FORMATS[found[1] or found[2]] if found else "parquet"


def is_of_lines(format: str) -> bool:
    """Whether shards of a format are files of lines, whose columns have the types that the job needs."""
    return format not in ("parquet", "arrow")


def is_data_file(name: str) -> bool:
    """Whether a file in a folder of data is one of its shards, by its extension."""
    return not name.startswith((".", "_")) and _EXTENSION.search(name) is not None


def compression_of(path: str) -> str | None:
    """What a file of lines is compressed with, in Arrow's words; None: it is plain."""
    return {".gz": "gzip", ".zst": "zstd"}.get(re.sub(r".*(?=\.)", "", _plain(path)))


def delimiter_of(path: str) -> str:
    """What stands between two fields of a file that is read as CSV."""
    return "\t" if re.search(r"\.tsv(\.gz|\.zst)?$", _plain(path)) else ","


def output_name(name: str) -> str:
    """What the outputs of a shard are called: x.jsonl.gz -> x.parquet."""
    return name if name.endswith(".parquet") else f"{_EXTENSION.sub('', name)}.parquet"


def _plain(path: str) -> str:
    return path.partition("::")[0]
