"""Format, compression and output name of an input file, by its name."""

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
_EXTENSION = re.compile(
    r"\.(parquet|jsonl|ndjson|csv|tsv|arrow|feather)$|\.(jsonl|ndjson|csv|tsv)(?:\.(gz|zst))$", re.IGNORECASE
)
# names of other files in folders of data: documents, descriptions of data sets and models, code, logs, checksums
_NO_DATA = re.compile(
    r"(readme|licen[cs]e|notice|copying|changelog|citation|requirements|makefile|dockerfile)\b.*"
    r"|(dataset_infos?|dataset_dict|state|metadata|croissant|config|generation_config|special_tokens_map"
    r"|(added_)?tokens|tokenizer|tokenizer_config|.*\.index)\.json"
    r"|.*\.(md|rst|html|pdf|png|jpe?g|gif|svg|webp|py|ipynb|sh|sbatch|toml|ya?ml|jinja|lock|log|out|err"
    r"|safetensors|model|tiktoken|crc|md5|sha[0-9]+)"
    r"|(md5|sha[0-9]+)sums?(\.txt)?",
    re.IGNORECASE,
)


def format_of(path: str, wanted: str | None) -> str:
    """Return the format of a file: parquet, jsonl, csv, arrow or openai.

    The format is `wanted` if given, else that of the extension, else parquet. (sharegpt is found by the extension.)

    Args:
        path: path of a file, or URI of an object.
        wanted: input.format.
    """
    if wanted is not None and wanted != "sharegpt":
        return wanted
    found = _EXTENSION.search(_plain(path))
    return _FORMATS[(found[1] or found[2]).lower()] if found else "parquet"


def extension_of(path: str) -> str:
    """Return the extension by which a file is data, with that of its compression: .jsonl.gz; "" if there is none."""
    found = _EXTENSION.search(_plain(path))
    return found[0] if found else ""


def is_of_lines(format: str) -> bool:
    """Return whether a format is one of lines, in which the types of columns depend on the job."""
    return format not in ("parquet", "arrow")


def is_data_file(name: str) -> bool:
    """Return whether a file in a folder of data is a shard, by its extension; hidden files are none."""
    return not name.startswith((".", "_")) and _EXTENSION.search(name) is not None


def is_overlooked(name: str) -> bool:
    """Return whether a file in a folder of data may be data, but is no shard by its extension."""
    return not name.startswith((".", "_")) and not is_data_file(name) and _NO_DATA.fullmatch(name) is None


def compression_of(path: str) -> str | None:
    """Return Arrow's name for the compression of a file of lines; None if the file is not compressed."""
    return {".gz": "gzip", ".zst": "zstd"}.get(re.sub(r".*(?=\.)", "", _plain(path)).lower())


def delimiter_of(path: str) -> str:
    """Return the delimiter of fields in a CSV or TSV file."""
    return "\t" if re.search(r"\.tsv(\.gz|\.zst)?$", _plain(path), re.IGNORECASE) else ","


def output_name(name: str) -> str:
    """Return the name of a shard's output file: x.jsonl.gz -> x.parquet."""
    return name if name.endswith(".parquet") else f"{_EXTENSION.sub('', name)}.parquet"


def _plain(path: str) -> str:
    return path.partition("::")[0]
