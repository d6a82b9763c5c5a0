"""batchinfer beside other engines on one machine: the same checkpoints, prompts and answer lengths, runs taken in turn.

Random-weight models (bench_models.py) in bfloat16 (batchinfer also in fp8 when asked), all cores. The peers are vLLM's
CPU build (compiled and eager) and transformers; `make bench-peers` puts them into .venv-peers. A peer loads once and
then waits, so that batchinfer and it run every workload by turns and a drift of the machine meets both.

work     from the start of the first step to the end of the last, no loading: of batchinfer in a fresh process each
         time, of vLLM from its second run on
shell    from the start of a process to the last answer, for a model's first workload; vLLM finds what it has compiled
         in an earlier process
ratio    the peer's seconds ÷ batchinfer's
memory   peak of the largest process; vLLM's holds 4 GB for KV

    python tests/bench/peers.py [--sizes tiny small] [--kinds shared shuffled unshared] [--rounds 3]
                                [--peers vllm vllm-eager transformers] [--all] [--dtype bfloat16 | fp8]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_models import SIZES, make_model, workload
from engine import gemm_flops, read_bytes_per_s, run_once
from peer_process import ENVIRONMENT, PEERS, OwnProcess, PeerProcess, compiled_folder
from peer_server import Requests, write_workload

from batchinfer_kernels.cpu.build import why_not

BATCH = {"tiny": (128, 16), "small": (64, 8)}  # transformers' best for prompts of like length, for others
KINDS = ("shared", "shuffled", "unshared")


@dataclass(frozen=True)
class Compared:
    """One workload on batchinfer and a peer: medians, ratios of the same turn."""

    own_s: float
    peer_s: float
    ratio: float
    own_shell_s: float
    peer_shell_s: float | None  # only a peer's first workload has one
    own_bytes: int
    peer_bytes: int

    def row(self) -> str:
        shell = " " * 31
        if self.peer_shell_s is not None:
            shell = f"{self.own_shell_s:>13.2f}{self.peer_shell_s:>10.2f}{self.peer_shell_s / self.own_shell_s:>8.2f}"
        return (
            f"{self.own_s:>12.2f}{self.peer_s:>10.2f}{self.ratio:>8.2f}{shell}"
            f"{self.own_bytes / 1e9:>13.1f}{self.peer_bytes / 1e9:>8.1f}"
        )


HEADER = (
    f"{'':<29}{'work s':>22}{'':>8}{'shell s':>23}{'':>8}{'memory GB':>21}\n{'workload':<16}{'peer':<13}"
    f"{'batchinfer':>12}{'peer':>10}{'ratio':>8}{'batchinfer':>13}{'peer':>10}{'ratio':>8}{'batchinfer':>13}{'peer':>8}"
)


def requests_of(size: str, kind: str) -> Requests:
    """`workload`; "shuffled" is the shared one in random order."""
    requests = workload(size, "shared" if kind == "shuffled" else kind)
    if kind == "shuffled":
        random.Random(0).shuffle(requests)
    return requests


def compare(
    peer: PeerProcess, folder: Path, model: Path, requests: Requests, batch: int, num_rounds: int, dtype: str
) -> Compared:
    """Run a workload by turns; a peer's first one runs once more before them.

    Args:
        folder: for the jobs and batchinfer's run.
        batch: transformers' batch size.
        dtype: batchinfer's; peers run in bfloat16.
    """
    job = folder / "requests.json"
    write_workload(job, requests, batch)
    shell_s = peer.run(job)[1] if peer.num_runs == 0 else None
    own_process, own, walls = OwnProcess(), [], []
    for _ in range(num_rounds):
        own.append(run_once(folder, model, requests, own_process, dtype=dtype))
        walls.append(peer.run(job)[0])
    return Compared(
        own_s=statistics.median(run["steps"] for run in own),
        peer_s=statistics.median(walls),
        ratio=statistics.median(wall / run["steps"] for wall, run in zip(walls, own, strict=True)),
        own_shell_s=statistics.median(run["command"] for run in own),
        peer_shell_s=shell_s,
        own_bytes=own_process.peak_bytes,
        peer_bytes=peer.peak_bytes(),
    )


def compare_all(name: str, size: str, model: Path, kinds: list[str], num_rounds: int, dtype: str) -> None:
    """Print a row per workload of a model on batchinfer and one peer."""
    has_compiled = compiled_folder(name, size) / "complete"
    if name == "vllm" and not has_compiled.exists():
        PeerProcess(name, size, model).close()
        has_compiled.touch()
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(PeerProcess(name, size, model)) as peer:
        print(f"{name}: {peer.versions}", flush=True)
        folder = Path(scratch)
        for kind in kinds:
            batch = BATCH[size][kind == "unshared"]
            compared = compare(peer, folder, model, requests_of(size, kind), batch, num_rounds, dtype)
            print(f"{size + ' ' + kind:<16}{name:<13}{compared.row()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--peers", nargs="+", default=["vllm", "transformers"], choices=PEERS)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each workload; transformers has one")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "fp8"], help="batchinfer's")
    parser.add_argument("--all", action="store_true", help="transformers with small, too: minutes per workload")
    options = parser.parse_args()
    if reason := why_not():  # also compiles, so that no turn has to
        print(f"batchinfer runs in plain PyTorch: {reason}")
    print(
        f"bfloat16 products {gemm_flops() / 1e9:,.0f} GFLOP/s, memory read {read_bytes_per_s() / 1e9:,.1f} GB/s; "
        f"{os.getloadavg()[0]:.1f} processes wanted a core in the minute before",
        flush=True,
    )
    print(f"\n{HEADER}", flush=True)
    for size in options.sizes:
        # always at the same path, by which vLLM finds what it has compiled
        model = make_model(ENVIRONMENT / "models" / size, size)
        for name in options.peers:
            if name != "transformers":
                compare_all(name, size, model, options.kinds, options.rounds, options.dtype)
            elif size == "tiny" or options.all:
                compare_all(name, size, model, options.kinds, 1, options.dtype)


if __name__ == "__main__":
    main()
