"""dataset/: the outputs as a dataset of the Hugging Face hub, by output.push = "hf-folder".

dataset/README.md                            the card; the user names its licence
dataset/data/train-00000-of-00002.parquet    the first file of outputs/ by another name: a hard link, no copy
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import xxhash

from batchinfer.config import JobConfig, dump_parts
from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.schemas.outputs import OUTPUT_TABLES
from batchinfer.manifest import Manifest
from batchinfer.progress import note
from batchinfer.records import Shard
from batchinfer.rundir import RunDir
from batchinfer.whole_files import cannot_write, publish_text, sync_folder

# https://huggingface.co/docs/hub/datasets-cards: size_categories
_SIZES = (
    *((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M")),
    *((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B")),
)
_COUNTS = """
SELECT count(*) AS rows, count_if(status = 'ok') AS "rows with an answer", count_if(status = 'error') AS "error rows",
       coalesce(sum(prompt_tokens) FILTER (sample = 0), 0)::BIGINT AS "prompt tokens",
       coalesce(sum(completion_tokens), 0)::BIGINT AS "generated tokens"
FROM {files}
"""


def write_dataset(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    manifest: Manifest,
    job: JobConfig,
    shards: Sequence[Shard],
    weights: str,
) -> None:
    """Make dataset/ from the files in outputs/; remove an earlier dataset/ if output.push is not set.

    Args:
        manifest: has the checksums of outputs/, and gets those of the dataset's data. The card is not in it, because
            users edit the card; an edited card is kept, with a note.
        weights: digest of the model's weights.

    Raises:
        ConfigError: the folder cannot be written.
    """
    links = dataset_files(run, shards) if job.output.push is not None else {}
    earlier = [path for path in manifest if path.is_relative_to(run.dataset)]
    for path in earlier:
        manifest.remove(path)
    if not links:
        if earlier and _is_edited(card_of(run)):
            shutil.rmtree(run.dataset / "data", ignore_errors=True)
            note(f"{card_of(run)} was edited and stays; the data folder next to it is removed")
        elif earlier:
            shutil.rmtree(run.dataset, ignore_errors=True)
        return
    for target, source in links.items():
        _link(source, target)
        manifest.add(target, manifest[source])
    if _is_edited(card_of(run)):
        edited = f"{card_of(run)} was edited (or an earlier version wrote it) and stays"
        note(f"{edited}; for one with the counts of now delete it and run `batchinfer finish {run.root}`")
    else:
        publish_text(card_of(run), _signed(_card(connection, list(links.values()), job, weights)))


def card_of(run: RunDir) -> Path:
    """Return the path of the dataset's card."""
    return run.dataset / "README.md"


def dataset_files(run: RunDir, shards: Sequence[Shard]) -> dict[Path, Path]:
    """Return the dataset's data files in the order of the shards, each with its file in outputs/."""
    sources = [run.output(shard.name) for shard in shards if shard.problem is None]
    data = run.dataset / "data"
    return {data / f"train-{place:05d}-of-{len(sources):05d}.parquet": file for place, file in enumerate(sources)}


def _link(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        os.link(source, temporary)
        temporary.rename(target)
        temporary.unlink(missing_ok=True)  # rename does nothing if both names are the same file
        sync_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None


# ---- the card


def _is_edited(card: Path) -> bool:
    try:
        found = card.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise cannot_write(card, error) from None
    return found != _signed(found.rpartition(_WRITTEN)[0])


def _signed(text: str) -> str:
    """Return the card with a last line that reveals later edits by a digest."""
    return f"{text}{_WRITTEN}{xxhash.xxh3_64_hexdigest(text.encode())} -->\n"


def _card(connection: duckdb.DuckDBPyConnection, files: list[Path], job: JobConfig, weights: str) -> str:
    found = connection.execute(_COUNTS.format(files=read_parquet(*files)))
    counts = dict(zip((name for name, *_ in found.description or []), found.fetchall()[0], strict=True))
    meaning = {column.name: column.doc for table in OUTPUT_TABLES for column in table.columns}
    columns = {name: meaning.get(name, "of the input") for name in pq.read_schema(files[0]).names}
    columns |= dict.fromkeys(job.output.keep_columns, "of the input")
    title = _cell(Path(job.output.dir).name)
    return _CARD.format(
        name=json.dumps(title),
        title=title,
        size=next((word for end, word in _SIZES if counts["rows"] < end), "100B<n<1T"),
        model=_cell(Path(job.model.path).name),
        dtype=job.precision,
        weights=weights,
        counts="\n".join(f"| {name} | {count:,} |" for name, count in counts.items()),
        columns="\n".join(f"| {_cell(name)} | {_cell(text)} |" for name, text in columns.items()),
        settings=dump_parts(_settings(job)),
    )


def _settings(job: JobConfig) -> dict[str, Any]:
    """Return the settings that determine answers, without the names of folders and files."""
    return {
        "input": job.input.model_dump(exclude_none=True, exclude={"files"}),
        "output": {"reasoning": job.output.reasoning},
        "sampling": job.sampling.model_dump(exclude_none=True),
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_WRITTEN = "\n<!-- Written by batchinfer, which keeps a card that was edited. Digest of what is above: "
_CARD = """\
---
# license: which one the answers have is yours to say, as https://huggingface.co/docs/hub/repositories-licenses names it
pretty_name: {name}
size_categories:
- {size}
tags:
- synthetic
- batchinfer
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# {title}

Answers of {model}, computed by batchinfer.

| what | count |
|---|---|
{counts}

## Model

| what | |
|---|---|
| name | {model} |
| dtype | {dtype} |
| digest of the weights | {weights} |

## Columns

| column | meaning |
|---|---|
{columns}

## Settings

The same settings, model and rows give the same answers.

```toml
{settings}```
"""
