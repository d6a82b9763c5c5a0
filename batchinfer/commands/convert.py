"""`convert`: a model folder rewritten in a form that ranks map into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchinfer.commands.options import pass_stop, verbosity_options

if TYPE_CHECKING:
    from batchinfer.stop_signals import StopSignal


@click.command()
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "fp8", "int4", "fp4"]),
    required=True,
    help="The model.dtype of the jobs that will use DIR.",
)
@click.option(
    "--gpu",
    is_flag=True,
    help="Write the form of GPUs, whose weights are streamed from DIR; needs a GPU or Triton's interpreter.",
)
@verbosity_options
@pass_stop
def convert(stop: StopSignal, model: Path, target: Path, dtype: str, gpu: bool) -> None:
    """Write MODEL to DIR in the layout that loads at once on CPUs.

    A job whose model.path is DIR gives the same answers as with MODEL, but its ranks map the files instead of packing
    the weights. It starts in the time that reading the files takes, or at once if they are in the page cache. DIR has
    the tokenizer and config.json, too. DIR is for CPUs, any that have the C++ operations; with --gpu it is for GPUs
    instead. Exit code 2 if the disk has no room for it.
    """
    import torch
    from tqdm import tqdm

    from batchinfer.model.convert import convert_model
    from batchinfer.model.ops import Ops
    from batchinfer.progress import Progress
    from batchinfer.rank.device import rank_device
    from batchinfer.rank.load import BITS, DTYPES
    from batchinfer.records import ConfigError, InterruptedRunError, ModelError

    backend, device = "cpu", torch.device("cpu")
    if gpu:
        if dtype == "float32":
            raise ConfigError(
                "GPUs multiply float32 in plain PyTorch, which no converted folder is for; use another dtype"
            )
        backend, device = "triton", rank_device("triton", 0)
    try:
        ops = Ops.select(backend, DTYPES[dtype], device=device, **BITS.get(dtype, {}))
    except ModelError as error:
        if not gpu:
            raise
        reason = str(error).rstrip(".")
        raise ConfigError(f"{reason}; --gpu needs a machine with a GPU, or TRITON_INTERPRET=1, which is slow") from None
    with Progress("convert", 0, "B", phase="converting") as progress:

        def told(num_read: int, num_bytes: int) -> None:
            if stop.requested:
                raise InterruptedRunError(f"stopped by a signal; {target} was not made")
            progress.set(num_read, num_bytes)

        num_bytes = convert_model(model, target, ops, dtype=DTYPES[dtype], name=dtype, on_read=told, device=device)
    click.echo(f"{target}: {tqdm.format_sizeof(num_bytes, 'B')} of weights in {dtype}; give it as model.path")
