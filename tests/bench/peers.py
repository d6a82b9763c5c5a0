"""batchinfer against other engines on one machine: the same checkpoints, prompts and answer lengths, runs in turn.

Random-weight models (bench_models.py), or the sample model with its job, in bfloat16 (batchinfer also in fp8 when
asked), all cores. The peers are vLLM's CPU build (compiled; eager; with attention over latents; in int8, for whose
experts it needs AMX or an AMD processor; in float32, the only default where the processor has no AVX-512, since torch
multiplies bfloat16 at a hundredth of that rate there), transformers, llama.cpp (in bfloat16; in Q8_0, 8 bits) and
OpenVINO GenAI (weights in 8 bits; its converter refuses DeepSeek-V3's models). `make bench-peers`, `make bench-llama`
and `make bench-openvino` install them. A peer loads once and then waits, so that batchinfer and it run every workload
by turns and a drift of the machine meets both; with --fresh it is started anew for every turn, as OpenVINO always is,
whose prefix cache would know the prompts.

work     from the start of the first step to the end of the last, no loading: of batchinfer in a fresh process each
         time, of vLLM from its second run on (with --fresh: its first)
shell    from the start of a process to the last answer, for a model's first workload (with --fresh: for all); vLLM
         finds what it has compiled in an earlier process, llama.cpp a converted file. batchinfer's last answer stands
         in outputs/; its report comes after that, 0.1 to 0.2 s
ratio    the peer's seconds ÷ batchinfer's, median of the turns
memory   peak of the largest process; vLLM's holds 4 GB for KV

    python tests/bench/peers.py [--sizes tiny small release qwen3 qwen3-moe sample]
                                [--kinds shared shuffled unshared] [--rounds 3]
                                [--peers vllm vllm-float32 vllm-int8 vllm-eager vllm-mla transformers llama.cpp
                                 llama.cpp-q8 openvino] [--fresh] [--all]
                                [--dtype bfloat16 | fp8 | float32]
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
from platform import machine

sys.path.insert(0, str(Path(__file__).parents[1]))

import duckdb
from bench_models import GROUPED_SIZES, SIZES, TOKENIZER, make_int8_model, make_model, workload
from engine import run_once
from limits import gemm_flops, read_bytes_per_s
from peer_process import (
    ENVIRONMENT,
    GGUF_KINDS,
    PEERS,
    FreshPeer,
    OwnProcess,
    PeerProcess,
    compiled_folder,
    write_gguf,
    write_openvino,
)
from peer_server import Requests, write_workload

from batchinfer.records import ExitCode
from batchinfer_kernels.cpu.build import why_not
from batchinfer_kernels.cpu.instructions import processor_features
from support.jobs import batchinfer

DEMO = Path(__file__).parents[2] / "jobs" / "demo.toml"
# transformers' best for prompts of like length, for others
BATCH, OTHER_BATCH = {"tiny": (128, 16), "sample": (128, 128)}, (64, 8)
KINDS = ("shared", "shuffled", "unshared")


@dataclass(frozen=True)
class Compared:
    """One workload on batchinfer and a peer, turn by turn."""

    own_work_s: list[float]
    peer_work_s: list[float]
    own_shell_s: list[float]
    peer_shell_s: list[float]  # of the turns that started the peer
    own_bytes: int
    peer_bytes: int

    def row(self) -> str:
        return (
            f"{times(self.own_work_s, self.peer_work_s, 12)}{times(self.own_shell_s, self.peer_shell_s, 13)}"
            f"{self.own_bytes / 1e9:>13.1f}{self.peer_bytes / 1e9:>8.1f}"
        )


def times(own: list[float], peer: list[float], width: int) -> str:
    """Medians of both and of the ratios of the same turn; a peer's only start is held against batchinfer's median."""
    if not peer:
        return " " * (width + 18)
    own_s = own if len(own) == len(peer) else [statistics.median(own)]
    ratio = statistics.median(theirs / ours for ours, theirs in zip(own_s, peer, strict=True))
    return f"{statistics.median(own):>{width}.2f}{statistics.median(peer):>10.2f}{ratio:>8.2f}"


HEADER = (
    f"{'':<29}{'work s':>22}{'':>8}{'shell s':>23}{'':>8}{'memory GB':>21}\n{'workload':<16}{'peer':<13}"
    f"{'batchinfer':>12}{'peer':>10}{'ratio':>8}{'batchinfer':>13}{'peer':>10}{'ratio':>8}{'batchinfer':>13}{'peer':>8}"
)


def sample_requests(scratch: Path) -> Requests:
    """Prompts of the sample job, and how many tokens batchinfer answers each with."""
    run = scratch / "sample"
    ended = batchinfer("run", DEMO, "--set", f"output.dir={run}", "--set", "cluster.prefill_ranks=1")
    if ended.code not in (ExitCode.OK, ExitCode.ROW_ERRORS):
        sys.exit(ended.err)
    prompts, outputs = f"read_parquet('{run}/tokens/*.parquet')", f"read_parquet('{run}/stats/requests.parquet')"
    sql = f"""
        SELECT prompts.token_ids, completion_tokens FROM {outputs} JOIN {prompts} AS prompts USING (shard, row)
        WHERE completion_tokens > 0 ORDER BY shard, row, sample
    """
    return [(list(prompt), count) for prompt, count in duckdb.execute(sql).fetchall()]


def requests_of(size: str, kind: str, scratch: Path) -> Requests:
    """`workload`, or the sample job's; "shuffled" is the shared one in random order."""
    if size == "sample":
        return sample_requests(scratch)
    requests = workload(size, "shared" if kind == "shuffled" else kind)
    if kind == "shuffled":
        random.Random(0).shuffle(requests)
    return requests


def compare(
    peer: PeerProcess | FreshPeer,
    folder: Path,
    model: Path,
    requests: Requests,
    batch: int,
    num_rounds: int,
    dtype: str,
) -> Compared:
    """Run a workload by turns; the first one of a peer that stays runs once more before them.

    Args:
        folder: for the jobs and batchinfer's run.
        batch: transformers' batch size.
        dtype: batchinfer's; peers run in bfloat16 unless their names say otherwise.
    """
    job = folder / "requests.json"
    write_workload(job, requests, batch)
    started = [peer.run(job)] if isinstance(peer, PeerProcess) and peer.num_runs == 0 else []
    own_process, own, theirs = OwnProcess(), [], []
    for _ in range(num_rounds):
        own.append(run_once(folder, model, requests, own_process, dtype=dtype))
        theirs.append(peer.run(job))
    return Compared(
        own_work_s=[run["steps"] for run in own],
        peer_work_s=[work_s for work_s, _ in theirs],
        own_shell_s=[run["written"] for run in own],
        peer_shell_s=[shell_s for _, shell_s in (theirs if isinstance(peer, FreshPeer) else started)],
        own_bytes=own_process.peak_bytes,
        peer_bytes=peer.peak_bytes(),
    )


def compare_all(name: str, size: str, model: Path, options: argparse.Namespace) -> None:
    """Print a row per workload of a model on batchinfer and one peer."""
    peer_model = make_int8_model(model) if name == "vllm-int8" else model
    has_compiled = compiled_folder(name, size) / "complete"
    if name in ("vllm", "vllm-float32", "vllm-int8") and not has_compiled.exists():
        PeerProcess(name, size, peer_model).close()
        has_compiled.touch()
    if name in GGUF_KINDS:
        write_gguf(name, model)
    if name == "openvino":
        write_openvino(model)
    num_rounds = options.rounds or (1 if name == "transformers" else 3)
    start = FreshPeer if options.fresh or name == "openvino" else PeerProcess
    with tempfile.TemporaryDirectory() as scratch, contextlib.closing(start(name, size, peer_model)) as peer:
        print(f"{name}: {peer.versions}", flush=True)
        for kind in options.kinds if size != "sample" else ("job",):
            batch = BATCH.get(size, OTHER_BATCH)[kind == "unshared"]
            requests = requests_of(size, kind, Path(scratch))
            compared = compare(peer, Path(scratch), model, requests, batch, num_rounds, options.dtype)
            print(f"{size + ' ' + kind:<16}{name:<13}{compared.row()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"], choices=[*SIZES, *GROUPED_SIZES, "sample"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    is_quick = machine() != "x86_64" or "avx512f" in processor_features()  # torch in bfloat16
    peers = ["vllm", "transformers"] if is_quick else ["vllm-float32"]
    parser.add_argument("--peers", nargs="+", default=peers, choices=PEERS)
    parser.add_argument("--rounds", type=int, help="turns of each workload: three, of transformers one")
    parser.add_argument("--fresh", action="store_true", help="start the peer anew for every turn")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "fp8", "float32"], help="batchinfer's")
    parser.add_argument("--all", action="store_true", help="transformers with small, too: minutes per workload")
    options = parser.parse_args()
    if reason := why_not():  # also compiles, so that no turn has to
        print(f"batchinfer runs in plain PyTorch: {reason}")
    print(
        f"products {gemm_flops() / 1e9:,.0f} GFLOP/s, memory read {read_bytes_per_s() / 1e9:,.1f} GB/s; "
        f"{os.getloadavg()[0]:.1f} processes wanted a core in the minute before",
        flush=True,
    )
    print(f"\n{HEADER}", flush=True)
    for size in options.sizes:
        # always at the same path, by which vLLM finds what it has compiled
        model = TOKENIZER if size == "sample" else make_model(ENVIRONMENT / "models" / size, size)
        for name in options.peers:
            if name != "transformers" or size == "tiny" or options.all:
                compare_all(name, size, model, options)


if __name__ == "__main__":
    main()
