"""The host's time of a decode step on a GPU, measured on a CPU: the device's work takes no time here.

    python tests/bench/decode_host.py [--requests 256] [--prompt 1000] [--steps 300] [--profile] [--sampling JSON]

A rank's own loop runs with CUDA graphs as it does on a GPU: it votes, makes the step's tables, fills them up, copies
them to where a graph would read them, samples, takes the tokens in and reports. In place of a graph's replay and of the
operations on logits the same results come back at once: the letter "a" for each request. Starting a graph and kernels,
copies to and from a GPU, and the thread that sends messages are not in it. Times are those of the processor (user and
system), so a busy machine changes them little. Stop strings, structured outputs and penalties, for example:

    --sampling '{"stop": ["zzz"]}'   '{"structured_outputs": {"regex": "a*"}}'   '{"repetition_penalty": 1.1}'
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from batchinfer.config import SamplingConfig  # noqa: E402
from batchinfer.data.tokenizer import load_tokenizer  # noqa: E402
from batchinfer.kv.pages import pages_for  # noqa: E402
from batchinfer.model.fused.graphs import DecodeGraphs, Work  # noqa: E402
from batchinfer.model.moe import YieldPoint  # noqa: E402
from batchinfer.model.sampling import LogitOps  # noqa: E402
from batchinfer.model.step import StepOutput, StepTensors  # noqa: E402
from batchinfer.model.transformer import Transformer  # noqa: E402
from batchinfer.rank.context import RankContext  # noqa: E402
from batchinfer.rank.worker import RankWorker  # noqa: E402
from batchinfer.records import Request, RequestKey  # noqa: E402
from support.one_rank import Feed  # noqa: E402

MODEL = TESTS.parent / "sample_data" / "model"
_WARM_STEPS = 20


def replayed(work: Work) -> Work:
    """Record nothing: return the first step's output again and again."""
    output = work()
    return lambda: output


def points(model: Transformer, step: StepTensors, *_: Any) -> Generator[YieldPoint, None, StepOutput]:
    """Give the results of a step without computing it, in place of Transformer.points."""
    yield from ()
    counts = torch.zeros(model.num_moe_layers, model.config.n_routed_experts, dtype=torch.int64)
    return StepOutput(torch.zeros(len(step.logit_rows), model.config.vocab_size), counts)


TOKENIZER = load_tokenizer(MODEL)
(TOKEN,) = TOKENIZER.encode_piece("a")
LOGIT_OPS = LogitOps(
    argmax=lambda logits: (torch.full((len(logits),), TOKEN), torch.ones(len(logits), dtype=torch.bool)),
    draw=lambda logits, *_: torch.full((len(logits),), TOKEN),
    apply_token_bitmask=lambda logits, rows, allowed: None,
)


class Context(RankContext):
    """A rank's context with graphs, though its device is the CPU."""

    @cached_property
    def no_graphs(self) -> str | None:
        return None

    @cached_property
    def graphs(self) -> DecodeGraphs | None:
        return DecodeGraphs(self.num_pages, replayed, most_rows=self.decode_requests)


class TimedFeed(Feed):
    """Notes the processor's time after each decode step of all requests, and profiles them if asked to."""

    def __init__(self, requests: list[Request], *, profiles: bool) -> None:
        super().__init__(requests)
        self.times_s: list[float] = []
        self.profile = cProfile.Profile() if profiles else None

    def send(self, report: Any, num_running: int = 0) -> None:
        super().send(report, num_running)
        if report.record.kind == "decode" and num_running == self.num_requests:
            self.times_s.append(time.process_time())
            if len(self.times_s) == _WARM_STEPS and self.profile is not None:
                self.profile.enable()
        elif self.profile is not None:
            self.profile.disable()


def step_ms(
    num_requests: int, prompt_tokens: int, num_steps: int, asked: dict[str, Any], *, profiles: bool = False
) -> tuple[float, Any]:
    """Return the mean milliseconds of a decode step's host, and the profile if one was asked for.

    Args:
        asked: keys of the job's table [sampling].
    """
    model = Transformer.load(MODEL, dtype=torch.bfloat16, backend="reference")
    keys = {"temperature": 0.7, "top_p": 0.95, "ignore_eos": True, **asked}
    sampling = SamplingConfig(max_tokens=num_steps + _WARM_STEPS, **keys).to_sampling()
    requests = [
        Request(RequestKey(0, row, 0), 0, [row % 900 + 20] + [9] * (prompt_tokens - 1), sampling, row)
        for row in range(num_requests)
    ]
    num_pages = num_requests * (pages_for(prompt_tokens + sampling.max_tokens) + 1)
    feed = TimedFeed(requests, profiles=profiles)
    with (
        patch.object(Transformer, "points", points),
        patch.object(Transformer, "logit_ops", PropertyMock(return_value=LOGIT_OPS)),
    ):
        tokens = num_requests * prompt_tokens  # all prompts in one step
        context = Context(model, TOKENIZER, num_pages, prefill_tokens=tokens, decode_requests=num_requests)
        RankWorker(context).run(feed)  # type: ignore[arg-type]
    times_s = feed.times_s[_WARM_STEPS:]
    return 1e3 * (times_s[-1] - times_s[0]) / (len(times_s) - 1), feed.profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--sampling", type=json.loads, default={}, help="keys of [sampling], as a JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = options.requests, options.prompt, options.steps, options.sampling
    with torch.inference_mode():
        print(f"{options.requests} requests: {step_ms(*sizes)[0]:.2f} ms of the host a decode step", flush=True)
        if options.profile:
            pstats.Stats(step_ms(*sizes, profiles=True)[1]).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
