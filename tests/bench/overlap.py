"""The gain by two micro-batches per step: tokens/s of whole steps, of steps in halves, and by the ranks' own choice.

Two ranks of one core each take prefill and decode steps together, over the engine's own exchange. They are on two hosts
or on one; a host is a network namespace of this machine, and the link between both has the rate and the latency that
is asked for (support/networks.py). This needs root.

A shape is a model of random weights: the more experts take a token, the more rows travel for the same computing. Ways
take turns step by step, so that what else runs on the machine disturbs all of them alike; the figures are medians.
`moving` is the time in which rows move, without waiting for the other rank, by the time left of a whole step; `hidden`
the share of moving under which a rank computes, in steps in halves.

    python tests/bench/overlap.py [--rounds 20] [--links tls:1 gloo:0.2 tls:1:0.005 shared] [--shapes alike more less]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from bench_models import make_model  # noqa: E402

from batchinfer.config import PAGE_TOKENS  # noqa: E402
from batchinfer.model.step import PrefillSpan, StepHalves, StepInput  # noqa: E402
from batchinfer.model.transformer import Transformer  # noqa: E402
from batchinfer.net.credentials import make_credentials  # noqa: E402
from batchinfer.parallel.mesh import Mesh, Seat  # noqa: E402
from batchinfer.parallel.placement import Placement  # noqa: E402
from batchinfer.parallel.row_format import RowFormat  # noqa: E402
from batchinfer.parallel.spans import SpanLog  # noqa: E402
from batchinfer.parallel.tls_exchange import Meeting  # noqa: E402
from batchinfer.rank.overlap_rule import MeasuredOverlap  # noqa: E402
from batchinfer.rank.step_vote import StepVote, agree  # noqa: E402
from support.networks import ADDRESSES, HAS_TWO_HOSTS, two_hosts  # noqa: E402

LINKS = ["shared", *(f"{exchange}:{rate}" for exchange in ("tls", "gloo") for rate in (0.2, 1, 10)), "tls:1:0.002"]
WHOLE, HALVES, CHOSEN = "whole", "halves", "chosen"
PORT = 29_511
TIMEOUT_S = 120.0
LAYERS, NUM_EXPERTS = 9, 16  # the first layer is dense
PROMPTS, PROMPT_TOKENS = 4, 128  # of a prefill step
REQUESTS, CONTEXT_TOKENS = 256, 128  # of a decode step


class Shape(NamedTuple):
    """The parameters that set the time of moving rows relative to computing a token."""

    experts_per_token: int
    expert_width: int


# at 1 Gbit/s rows of "alike" move for about as long as a core computes, of "more" for longer, of "less" for less long
SHAPES = {"alike": Shape(8, 320), "more": Shape(14, 64), "less": Shape(2, 768)}


class Link(NamedTuple):
    """The way that rows travel; the rate in Gbit/s, None: through the memory of one host."""

    exchange: str
    rate: float | None = None
    latency_s: float = 0.0

    @classmethod
    def of(cls, text: str) -> Link:
        exchange, *numbers = text.split(":")
        return cls(exchange, *map(float, numbers))


@dataclass(frozen=True)
class Seconds:
    """One step on one rank."""

    step: float
    comm: float
    wait: float
    hidden: float
    in_pairs: bool


# --- a rank -----------------------------------------------------------------------------------------------------------


def pages_of(first: int, count: int) -> torch.Tensor:
    """[count, pages of a request] for requests from number `first` on; each has room for a token more."""
    each = max(PROMPT_TOKENS, CONTEXT_TOKENS) // PAGE_TOKENS + 1
    return torch.arange(first * each, (first + count) * each).view(count, each)


def step_of(kind: str, first: int, count: int, generator: torch.Generator) -> StepInput:
    """Prompts that run whole, or one token of requests with a context."""
    table = pages_of(first, count)
    if kind == "decode":
        positions = torch.full((count,), CONTEXT_TOKENS)
        rest: dict[str, Any] = {"page_table": table, "kv_tokens": positions + 1, "logit_rows": torch.arange(count)}
        slots = table[:, CONTEXT_TOKENS // PAGE_TOKENS] * PAGE_TOKENS + CONTEXT_TOKENS % PAGE_TOKENS
    else:
        positions = torch.arange(PROMPT_TOKENS).repeat(count)
        table = table[:, : PROMPT_TOKENS // PAGE_TOKENS]
        slots = (table[:, :, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()
        starts = range(0, count * PROMPT_TOKENS, PROMPT_TOKENS)
        spans = (PrefillSpan(at, PROMPT_TOKENS, PROMPT_TOKENS, pages) for at, pages in zip(starts, table, strict=True))
        rest = {"prefill": tuple(spans), "logit_rows": torch.tensor([at + PROMPT_TOKENS - 1 for at in starts])}
    tokens = torch.randint(8, 500, (len(positions),), generator=generator)
    return StepInput(tokens=tokens, positions=positions, slots=slots, **{"prefill": (), **rest})


class Rank:
    """A rank with its share of the experts, which takes steps in any way."""

    def __init__(self, folder: Path, seat: Seat, address: str) -> None:
        store = dist.TCPStore(address, PORT, seat.size, seat.rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
        self.mesh = Mesh.join(seat, store, torch.device("cpu"))
        placements = [Placement.in_order(NUM_EXPERTS, seat.size)] * (LAYERS - 1)
        config = json.loads((folder / "config.json").read_text())
        sizes = {"hidden": config["hidden_size"], "topk": config["num_experts_per_tok"]}
        most = max(REQUESTS, PROMPTS * PROMPT_TOKENS)
        dispatchers = self.mesh.dispatchers(placements, RowFormat("bfloat16"), max_tokens=most, **sizes)
        self.model = Transformer.load(
            folder,
            dtype=torch.bfloat16,
            dispatchers=dispatchers,
            expert_ids=[placement.experts_of_rank(seat.rank) for placement in placements],
        )
        self.pages = self.model.new_pages(pages_of(0, REQUESTS).numel())
        self.generator = torch.Generator().manual_seed(seat.rank)
        self.overlap = MeasuredOverlap()

    def turn(self, kind: str, way: str) -> Seconds:
        """Agree with the other rank on a step of this kind, and take it."""
        vote = StepVote(prefill=kind == "prefill", decode=kind == "decode", fills_both_halves=True)
        in_pairs = agree(self.mesh, vote, overlap=self.overlap if way == CHOSEN else way == HALVES).in_pairs
        count = REQUESTS if kind == "decode" else PROMPTS
        parts = [(0, count // 2), (count // 2, count - count // 2)] if in_pairs else [(0, count)]
        steps = [step_of(kind, *part, self.generator) for part in parts]
        log, start_s = SpanLog(), time.perf_counter()
        self.model.forward(StepHalves(*steps) if in_pairs else steps[0], self.pages, log=log)
        step_s = time.perf_counter() - start_s
        if way == CHOSEN:
            self.overlap.measure(sum(len(step.tokens) for step in steps), step_s, log)
        hidden_s, wait_s = log.hidden_communication_s() or 0.0, log.waiting_s() or 0.0
        return Seconds(step_s, log.communication_s(), wait_s, hidden_s, in_pairs)


def run_rank(options: dict[str, Any]) -> None:
    """Take the steps of one link, and print their seconds."""
    torch.set_num_threads(1)
    one_host, rank = options["one_host"], options["rank"]
    meeting = None if one_host else Meeting(options["addresses"][rank], options["credentials"])
    seat = Seat(rank, 2, options["exchange"], one_host, TIMEOUT_S, meeting)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with torch.inference_mode():
        of_rank = Rank(Path(options["model"]), seat, options["addresses"][0])
        for kind in ("prefill", "decode"):
            for way in (WHOLE, HALVES):  # memory is taken, connections find their pace
                of_rank.turn(kind, way)
            turns: dict[str, list[dict[str, Any]]] = {WHOLE: [], HALVES: [], CHOSEN: []}
            for _ in range(options["rounds"]):
                for way, seconds in turns.items():
                    seconds.append(asdict(of_rank.turn(kind, way)))
            found[kind] = turns
    of_rank.mesh.agree([0])
    print(json.dumps(found), flush=True)
    of_rank.mesh.close()
    os._exit(0)  # without waiting for threads of the exchange


# --- both ranks -------------------------------------------------------------------------------------------------------


def measure(model: Path, link: Link, rounds: int) -> dict[str, dict[str, list[Seconds]]]:
    """The steps of rank 0 by kind and way; the other rank takes the same ones at the same time."""
    cores = sorted(os.sched_getaffinity(0))
    options = {"model": str(model), "exchange": link.exchange, "rounds": rounds, "one_host": link.rate is None}
    options |= {"addresses": ADDRESSES, "credentials": make_credentials()}
    network: Any = nullcontext() if link.rate is None else two_hosts(link.rate, latency_s=link.latency_s)
    with network as hosts:
        if hosts is None:
            options["addresses"] = ("127.0.0.1",) * 2
        ranks = []
        for rank in range(2):
            command = ["taskset", "--cpu-list", str(cores[rank % len(cores)]), sys.executable, __file__, "--rank"]
            command = command if hosts is None else hosts[rank].command(*command)
            ranks.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert ranks[-1].stdin is not None
            ranks[-1].stdin.write(json.dumps({**options, "rank": rank}) + "\n")
            ranks[-1].stdin.flush()
        said = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a rank failed")
    found = json.loads(said[0].splitlines()[-1])
    return {
        kind: {way: [Seconds(**step) for step in steps] for way, steps in ways.items()} for kind, ways in found.items()
    }


def line_of(kind: str, ways: dict[str, Sequence[Seconds]]) -> str:
    """The figures of one kind of step."""
    whole_s, halves_s, chosen_s = (
        statistics.median(step.step for step in ways[way]) for way in (WHOLE, HALVES, CHOSEN)
    )
    tokens = 2 * (REQUESTS if kind == "decode" else PROMPTS * PROMPT_TOKENS)
    moving = statistics.median((step.comm - step.wait) / (step.step - step.comm) for step in ways[WHOLE])
    hidden = statistics.median(step.hidden / (step.comm - step.wait) for step in ways[HALVES])
    in_pairs = statistics.mean(step.in_pairs for step in ways[CHOSEN])
    return (
        f"{kind:<8} {moving:6.2f} {tokens / whole_s:14,.0f} {whole_s / halves_s:7.2f} {hidden:7.0%}"
        f" {whole_s / chosen_s:8.2f} {in_pairs:9.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--links", nargs="+", default=LINKS, help="exchange[:Gbit/s[:seconds of latency]]")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    if not HAS_TWO_HOSTS:
        sys.exit("hosts on this machine need root, and the programs ip, tc, unshare and nsenter")
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    print(f"{names[0].partition(':')[2].strip()}; medians of {options.rounds} turns; ratios are to whole steps")
    print("shape  link         steps    moving  whole, tok/s  halves  hidden     auto  in halves    load")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.shapes:
            shape = SHAPES[name]
            sizes = {"num_experts_per_tok": shape.experts_per_token, "moe_intermediate_size": shape.expert_width}
            sizes |= {"num_hidden_layers": LAYERS, "n_routed_experts": NUM_EXPERTS, "intermediate_size": 1024}
            sizes |= {"vocab_size": 512, "n_group": 1, "topk_group": 1}
            model = make_model(Path(scratch) / name, "small", **sizes)
            for link in options.links:
                for kind, ways in measure(model, Link.of(link), options.rounds).items():
                    line = line_of(kind, ways)
                    print(f"{name:<6} {link:<12} {line} {os.getloadavg()[0]:11.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        run_rank(json.loads(sys.stdin.readline()))
    else:
        main()
