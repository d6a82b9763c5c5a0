"""Layers of DeepSeek-V3 streamed to one Hopper GPU, from the host's memory and from disk, beside resident ones.

    python tests/gpu/stream.py [--out FILE] [--scratch FOLDER]
    python tests/gpu/stream.py --rehearse     on the CPU, a tiny model, Triton's interpreter, no times

Eight layers of one rank's share of the prefill unit in FP8 (5 GB), 16,384 tokens in prompts of 4,096. Parts, in this
order; FILE keeps those that are done:

    host     a pinned copy of all layers; the layers go through a ring of slots on the GPU
    disk     files that are read past the page cache into three pinned slots, and from there as above

Each part has the seconds of a sweep of copies alone, of products alone and of both, and the share of the slower of the
first two that both take. Logits must be those of resident layers, to the byte. Exit codes as of slice.py.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
from accelerator import Accelerator, rehearse, unusable, why_no_hopper  # noqa: E402
from supervised import read_record, write_line  # noqa: E402

if TYPE_CHECKING:
    from batchinfer.model.device_stream import DeviceStream

OK, FAILED, UNUSABLE = 0, 1, 2
HOST, DISK = "host", "disk"
_NUM_LAYERS, _RUNS = 8, 3


class Case:
    """The resident layers, a step, and what it gives."""

    def __init__(self, accelerator: Accelerator) -> None:
        from share import DEEPSEEK_V3, PREFILL, TINY, Share, config_of
        from steps import prefill_step

        self.accelerator, is_tiny = accelerator, accelerator.is_rehearsal
        values = TINY | {"num_hidden_layers": 4} if is_tiny else DEEPSEEK_V3 | {"num_hidden_layers": _NUM_LAYERS}
        self.share = Share(PREFILL, config_of(values), accelerator.device)
        num_prompts, num_tokens = (1, 5) if is_tiny else (4, 4096)
        self.step = prefill_step(self.share, num_prompts, num_tokens)
        self.pages = self.share.model.new_pages(num_prompts * -(-num_tokens // 64))
        self.logits = self.resident()

    def resident(self) -> torch.Tensor:
        """The logits of resident layers."""
        from batchinfer.model.step import StepTensors
        from batchinfer.parallel.overlap import run_to_end
        from batchinfer.parallel.spans import MicroBatchSpans, SpanLog

        step, spans = StepTensors.of(self.step, self.accelerator.device), MicroBatchSpans(SpanLog())
        return run_to_end(self.share.model.points(step, self.pages, spans)).logits

    def seconds(self, run: Any) -> float | None:
        """The median of a few runs; None in a rehearsal."""
        if self.accelerator.is_rehearsal:
            run()
            return None
        found = []
        for _ in range(_RUNS):
            self.accelerator.wait()
            started_s = time.monotonic()
            run()
            self.accelerator.wait()
            found.append(time.monotonic() - started_s)
        return statistics.median(found)


def do_part(part: str, case: Case, folder: Path) -> dict[str, Any]:
    """Run one part; return its line of the file."""
    from batchinfer.model.device_stream import DeviceStream, HostLayers, pinned_memory
    from batchinfer.model.memory_split import MemorySplit, slot_size
    from batchinfer.model.packed_files import Layout, MappedParts, bytes_of, kinds_of, lay_out, write_parts
    from batchinfer.model.sweeps import run_sweep
    from batchinfer.model.transformer import Transformer
    from batchinfer.model.weight_stream import WeightStream, slot_memory
    from batchinfer.model.weights import LayerWeights
    from batchinfer.parallel.spans import SpanLog

    share, device = case.share, case.accelerator.device
    new_memory = slot_memory if case.accelerator.is_rehearsal else pinned_memory
    layouts, files, copies = [], [], []
    for number, layer in enumerate(share.weights.layers):
        if part == DISK:
            files.append(folder / f"layer-{number}")
            write_parts(files[-1], layer, aligned=True)
            layouts.append(Layout.read(files[-1]))
        else:
            layout, tensors = lay_out(layer, aligned=True)
            copies.append(new_memory(slot_size(layout.size)))
            for name, tensor in tensors:
                start, end = layout.entries[name]["data_offsets"]
                copies[-1][start:end] = bytes_of(tensor).numpy().data
            layouts.append(layout)
    sizes, ring = [layout.size for layout in layouts], 3 if len(layouts) > 4 else 2
    slots = tuple(number % ring for number in range(len(sizes)))
    split = MemorySplit(slots, (slot_size(max(sizes)),) * ring, kv_bytes=0, sweep_bytes=sum(sizes))
    source = WeightStream(files, split, new_memory) if part == DISK else HostLayers(copies, range(len(sizes)))
    stream = DeviceStream(source, sizes, split, device)
    try:
        kinds = kinds_of(share.config)
        layers = tuple(
            MappedParts(layout, stream.memory_of(number), folder).take(LayerWeights, kinds)
            for number, layout in enumerate(layouts)
        )
        weights = replace(share.weights, layers=layers, stream=stream)
        model = Transformer(share.config, weights, [share.dispatcher] * share.config.num_moe_layers, share.ops)

        def streamed() -> torch.Tensor:
            (swept,) = run_sweep(model, stream, [case.step], case.pages, [SpanLog()])
            return swept.output.logits

        is_equal = bool(torch.equal(streamed(), case.logits)) and bool(torch.equal(streamed(), case.logits))
        copies_s = case.seconds(lambda: _pass(stream, len(sizes)))
        products_s, both_s = case.seconds(case.resident), case.seconds(streamed)
    finally:
        stream.close()
        for file in files:
            file.unlink()
    text = f"from {part}: {sum(sizes) / 1e9:.3g} GB per sweep"
    figures = {"bytes": sum(sizes), "copies_s": copies_s, "products_s": products_s, "both_s": both_s}
    if copies_s is not None:
        figures["share"] = max(copies_s, products_s) / both_s
        text += (
            f"; copies alone {copies_s:.3f} s ({sum(sizes) / 1e9 / copies_s:.1f} GB/s), products alone "
            f"{products_s:.3f} s, both {both_s:.3f} s: {figures['share']:.0%} of the limit"
        )
    return {"text": text, "failure": "" if is_equal else "logits are not those of resident layers", "figures": figures}


def _pass(stream: DeviceStream, num_layers: int) -> None:
    for _ in range(num_layers):
        stream.wait()
        stream.release()


def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns its exit code."""
    parser = argparse.ArgumentParser(description="Stream layers to one GPU.")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU in Triton's interpreter, a tiny model")
    parser.add_argument("--out", type=Path, help="JSON lines as parts are done; what the file has is not done again")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to read from (6 GB); unset: a temporary one")
    parser.add_argument("--minutes", type=float, help="taken as the other scripts take it; the parts are short")
    options = parser.parse_args(arguments)
    if options.rehearse:
        rehearse()
    elif (reason := why_no_hopper()) is not None:
        print(unusable(reason), file=sys.stderr)
        return UNUSABLE
    accelerator, code = Accelerator(torch.device("cpu" if options.rehearse else "cuda")), OK
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder, torch.inference_mode():
        path = options.out or Path(folder) / "stream.jsonl"
        record, machine = read_record(path), accelerator.describe()
        if record.header is None:
            write_line(path, machine=machine)
        elif record.header["machine"] != machine:
            print(f"{path} has results of another machine or of other versions; name another file.", file=sys.stderr)
            return UNUSABLE
        case = None
        for part in (HOST, DISK):
            if part in record.left({HOST: 0, DISK: 0}):
                try:
                    case = case or Case(accelerator)
                    if part == DISK and shutil.disk_usage(folder).free < 8 * 10**9 and not options.rehearse:
                        raise OSError(f"{folder} has not the 8 GB that this part needs; name another --scratch")
                    row = do_part(part, case, Path(folder))
                except Exception as error:  # the other part goes on
                    row = {"text": part, "failure": f"{type(error).__name__}: {error}"}
                write_line(path, done=part, row=row)
            else:
                row = record.done[part]["row"]
            print(row["text"], flush=True)
            if row["failure"]:
                print(f"{part}: FAILED {row['failure']}", flush=True)
                code = FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())
