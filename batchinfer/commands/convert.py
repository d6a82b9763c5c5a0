"""A model rewritten so that ranks map it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.options import pass_stop

if TYPE_CHECKING:
    from batchinfer.stop import StopSignal


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "fp8", "int4"]),
    required=True,
    help="The model.dtype of the jobs that are to use it.",
)
@pass_stop
def convert(stop: StopSignal, model: Path, target: Path, dtype: str) -> None:
    """Write MODEL to the new folder DIR as the C++ operations hold it in a dtype.

    A job whose model.path is DIR gives the same answers as with MODEL, and its ranks map the files instead of packing
    the weights: it starts in the time that reading them takes, at once where they are in memory from before. DIR has
    the tokenizer and config.json, too. It is for processors, any that have the C++ operations; exit code 2 when there
    is no room for it.
    """
    from batchinfer.model.convert import convert_model
    from batchinfer.model.ops import Ops
    from batchinfer.progress import Progress
    from batchinfer.rank.load import BITS, DTYPES
    from batchinfer.records import InterruptedRunError

    ops = Ops.select("cpu", DTYPES[dtype], **BITS.get(dtype, {}))
    with Progress("convert", 0, "B", phase="converting") as progress:

        def told(num_read: int, num_bytes: int) -> None:
            if stop.requested:
                raise InterruptedRunError(f"stopped by a signal; {target} was not made")
            progress.set(num_read, num_bytes)

        num_bytes = convert_model(model, target, ops, dtype=DTYPES[dtype], name=dtype, told=told)
    click.echo(f"{target}: {num_bytes / 1e9:.2f} GB of weights in {dtype}; give it as model.path")
