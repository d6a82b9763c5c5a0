"""The same rows as files of every format."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather

ROWS = [
    {
        "id": f"row {row}",
        "prompt": f'Line {row}, "quoted", é 你好\tand\nmore' if row % 3 else f"Question {row}?",
        "number": row * 10**12 if row % 7 else None,
        "share": row / 7,
        "is_odd": row % 2 == 1,
        "code": f"{row:04d}",
    }
    for row in range(1000)
]


def as_parquet(rows: list[dict], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def json_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_text(rows: list[dict], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def as_arrow(rows: list[dict], path: Path, new: Callable[..., Any] = pa.ipc.new_file) -> None:
    table = pa.Table.from_pylist(rows)
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=300)


FORMATS = {
    "in.parquet": as_parquet,
    "in.jsonl": lambda rows, path: path.write_bytes(json_lines(rows)),
    "in.jsonl.gz": lambda rows, path: path.write_bytes(gzip.compress(json_lines(rows))),
    "in.jsonl.zst": lambda rows, path: path.write_bytes(as_zstd(json_lines(rows))),
    "in.csv": lambda rows, path: path.write_bytes(csv_text(rows)),
    "in.csv.zst": lambda rows, path: path.write_bytes(as_zstd(csv_text(rows))),
    "in.tsv": lambda rows, path: path.write_bytes(csv_text(rows, "\t")),
    "in.tsv.gz": lambda rows, path: path.write_bytes(gzip.compress(csv_text(rows, "\t"))),
    "in.arrow": as_arrow,
    "in.stream.arrow": lambda rows, path: as_arrow(rows, path, pa.ipc.new_stream),
    "in.feather": lambda rows, path: feather.write_feather(pa.Table.from_pylist(rows), str(path)),
}
