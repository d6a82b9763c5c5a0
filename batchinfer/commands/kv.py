"""The KV store on disk: stat, verify, gc, path."""

import json
import sys
from pathlib import Path

import click

from batchinfer.commands.options import json_option
from batchinfer.records import ExitCode
from batchinfer.sanitize import count_text


@click.group()
def kv() -> None:
    """Manage the KV store on disk.

    STORE is its folder, or a JOB.toml whose [kv] dir names it.
    """


_store_argument = click.argument("target", metavar="STORE", type=click.Path(path_type=Path))


@kv.command("stat")
@_store_argument
@json_option
def kv_stat(target: Path, as_json: bool) -> None:
    """Print a store's blocks by model, and the reads and writes of runs."""
    from batchinfer.kv_store.upkeep import describe_store, format_description, open_kv_store

    found = describe_store(open_kv_store(target))
    click.echo(json.dumps(found, indent=1) if as_json else format_description(found))


@kv.command("verify")
@_store_argument
@json_option
def kv_verify(target: Path, as_json: bool) -> None:
    """Compare every block with its checksum.

    Damaged files go to quarantine; exit code 3 if there are any.
    """
    from batchinfer.kv_store.upkeep import open_kv_store, verify_store

    found = verify_store(open_kv_store(target))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        for damaged in found["damaged"]:
            click.echo(f"{damaged['file']}: {damaged['reason']}")
        click.echo(f"{count_text(found['files'], 'file')} checked, {len(found['damaged'])} of them damaged")
    sys.exit(ExitCode.ROW_ERRORS if found["damaged"] else ExitCode.OK)


@kv.command("gc")
@_store_argument
@click.option("--max-bytes", metavar="SIZE", help="Evict until all files are below this, for example 500GB or 2TiB.")
@json_option
def kv_gc(target: Path, max_bytes: str | None, as_json: bool) -> None:
    """Delete leftovers and, with --max-bytes, the least useful blocks.

    Leftovers are files of killed runs. Live runs may continue.
    """
    from batchinfer.kv_store.upkeep import open_kv_store, parse_bytes, shrink_store

    found = shrink_store(open_kv_store(target), None if max_bytes is None else parse_bytes(max_bytes))
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(
            f"{count_text(found['evicted_files'], 'file')} with {count_text(found['evicted_bytes'], 'byte')} evicted; "
            f"the store has {found['bytes_after']:,} bytes now"
        )


@kv.command("path")
@_store_argument
@click.argument("block", required=False)
def kv_path(target: Path, block: str | None) -> None:
    """Print the folder of a store, or the file of BLOCK.

    BLOCK is the first 12 hex digits of a block's name, or more.
    """
    from batchinfer.kv_store.upkeep import find_block, open_kv_store

    store = open_kv_store(target)
    click.echo(str(store.root if block is None else find_block(store, block)))
