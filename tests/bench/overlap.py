"""When two micro-batches per step pay: tokens/s with `cluster.overlap` true, false and "auto", by turns.

Two ranks of one core each, either on two hosts or on one. The hosts are two network namespaces of this machine
(support/networks.py): the link between them has the rate and the latency that is asked for. Needs root.

A shape is a model of random weights: the more experts take a token, the more rows travel for the same computing. Speed
is that of steps alone: tokens of both ranks by the seconds of their steps, prefill and decode apart, medians over the
rounds. `moving` is what rows move (without waiting for the other rank) by what is left of the step, both measured with
overlap false; `hidden` the share of moving under which the rank computed, with overlap true.

    python tests/bench/overlap.py [--rounds 3] [--links tls:1 gloo:0.2 tls:1:0.005 shared] [--shapes alike more less]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import make_model  # noqa: E402

from support.jobs import write_job, write_shard  # noqa: E402
from support.networks import HAS_TWO_HOSTS, Host, two_hosts  # noqa: E402

WAYS: tuple[bool | str, ...] = (True, False, "auto")
LINKS = ["shared", *(f"{exchange}:{rate}" for exchange in ("tls", "gloo") for rate in (0.2, 1, 10)), "tls:1:0.002"]


class Shape(NamedTuple):
    """A model by its layers' sizes, and the work of each rank."""

    experts_per_token: int
    expert_width: int
    prompt_tokens: int = 256
    requests: int = 64
    max_tokens: int = 24


SHAPES = {"alike": Shape(4, 512), "more": Shape(8, 128), "less": Shape(2, 1024)}
LAYERS = 5


class Link(NamedTuple):
    """How rows travel; the rate in Gbit/s, None: through the memory of one host."""

    exchange: str
    rate: float | None = None
    latency_s: float = 0.0

    @classmethod
    def of(cls, text: str) -> Link:
        exchange, *numbers = text.split(":")
        return cls(exchange, *map(float, numbers))


@dataclass(frozen=True)
class Speeds:
    """One run, or the medians of several: tokens/s by kind of step, and how its communication was spent."""

    tokens_per_s: dict[str, float]
    moving: dict[str, float]  # seconds, by those of the steps without communication
    hidden: dict[str, float]
    in_pairs: dict[str, float]  # share of steps

    @classmethod
    def of(cls, run: Path) -> Speeds:
        sql = f"""
            SELECT kind, sum(new_tokens) / sum(duration_s) * count(DISTINCT rank) AS tokens_per_s,
                   sum(comm_s - wait_comm_s) / sum(duration_s - comm_s) AS moving,
                   sum(hidden_comm_s) / sum(comm_s - wait_comm_s) AS hidden,
                   avg(micro_batches) - 1 AS in_pairs
            FROM read_parquet('{run}/stats/steps/*.parquet') GROUP BY kind
        """
        rows = duckdb.execute(sql).fetchall()
        return cls(*({row[0]: float(row[column]) for row in rows} for column in (1, 2, 3, 4)))

    @classmethod
    def median(cls, runs: Sequence[Speeds]) -> Speeds:
        def middle(name: str) -> dict[str, float]:
            of_runs = [getattr(run, name) for run in runs]
            return {kind: statistics.median(values[kind] for values in of_runs) for kind in of_runs[0]}

        return cls(*map(middle, ("tokens_per_s", "moving", "hidden", "in_pairs")))


def write_bench_job(folder: Path, shape: Shape) -> Path:
    """Prompts of random tokens, all different, for two ranks."""
    sizes = {"num_hidden_layers": LAYERS, "num_experts_per_tok": shape.experts_per_token, "n_routed_experts": 16}
    sizes |= {"moe_intermediate_size": shape.expert_width, "vocab_size": 512, "n_group": 1, "topk_group": 1}
    model = make_model(folder / "model", "small", **sizes)
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, 512, (2 * shape.requests, shape.prompt_tokens)).tolist()
    write_shard(folder / "prompts" / "a.parquet", {"token_ids": pa.array(prompts)})
    return write_job(
        folder,
        input={"prompt": None, "token_ids": "token_ids"},
        model={"path": str(model), "dtype": "bfloat16"},
        sampling={"max_tokens": shape.max_tokens, "ignore_eos": True},
        cluster={"prefill_ranks": 2, "prefill_tokens": 2048, "decode_requests": shape.requests},
    )


def run_job(job: Path, link: Link, way: bool | str, hosts: Sequence[Host] | None) -> Speeds:
    """Run the job once; every run of it has the same outputs."""
    run = job.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    settings = {"cluster.exchange": link.exchange, "cluster.overlap": str(way).lower()}
    sets = [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]
    if hosts is None:
        _finish([_batchinfer(["run", str(job), *sets])])
        return Speeds.of(run)
    _finish([_batchinfer(["plan", str(job), *sets])])
    group = {"BATCHINFER_GROUP": uuid.uuid4().hex, "BATCHINFER_GROUP_SIZE": "2"}
    cores = sorted(os.sched_getaffinity(0))
    _finish(
        [
            _batchinfer(
                ["work", str(run)],
                host.command("taskset", "--cpu-list", str(cores[index % len(cores)])),
                **group,
                BATCHINFER_GROUP_INDEX=str(index),
            )
            for index, host in enumerate(hosts)
        ]
    )
    _finish([_batchinfer(["finish", str(run)])])
    return Speeds.of(run)


def _batchinfer(arguments: list[str], prefix: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "batchinfer", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _finish(processes: list[subprocess.Popen[str]]) -> None:
    for process, said in [(process, process.communicate()[0]) for process in processes]:
        if process.returncode:
            sys.exit(f"{process.args}: {said}")


def measure(job: Path, link: Link, rounds: int) -> dict[bool | str, Speeds]:
    """All ways by turns."""
    runs: dict[bool | str, list[Speeds]] = {way: [] for way in WAYS}
    network: Any = nullcontext() if link.rate is None else two_hosts(link.rate, latency_s=link.latency_s)
    with network as hosts:
        for _ in range(rounds):
            for way in WAYS:
                runs[way].append(run_job(job, link, way, hosts))
    return {way: Speeds.median(of_way) for way, of_way in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", nargs="+", default=LINKS, help="exchange[:Gbit/s[:seconds of latency]]")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    if not HAS_TWO_HOSTS:
        sys.exit("hosts on this machine need root, and the programs ip, tc, unshare and nsenter")
    model_name = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    print(f"{model_name.partition(':')[2].strip()}, load {os.getloadavg()[0]:.1f}; medians of {options.rounds} rounds")
    print("shape  link             steps    moving  off, tokens/s     on   auto (in pairs)  hidden")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.shapes:
            job = write_bench_job(Path(scratch) / name, SHAPES[name])
            for link in options.links:
                found = measure(job, Link.of(link), options.rounds)
                on, off, auto = (found[way] for way in WAYS)
                for kind in ("prefill", "decode"):
                    base = off.tokens_per_s[kind]
                    print(
                        f"{name:<6} {link:<16} {kind:<8} {off.moving[kind]:6.2f} {base:14,.0f}"
                        f" {on.tokens_per_s[kind] / base:6.2f} {auto.tokens_per_s[kind] / base:6.2f}"
                        f" ({auto.in_pairs[kind]:4.0%})      {on.hidden[kind]:6.0%}",
                        flush=True,
                    )
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
