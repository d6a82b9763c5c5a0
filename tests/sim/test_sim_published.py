"""The simulator against published figures. Its constants come from tables of kernels and of routing, never from these.

Sources: DeepSeek's profile as reported by, and SGLang's own figures in, "Deploying DeepSeek with PD Disaggregation and
Large-Scale Expert Parallelism on 96 H100 GPUs" (lmsys.org blog, 5 May 2025); DeepSeek online: "DeepSeek-V3/R1 Inference
System Overview" (github.com/deepseek-ai/open-infra-index, Day 6). All are from February to May 2025, so DeepEP counts
with its table of February 2025. What is known of the workloads stands below; all else are the defaults of a spec.
"""

from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest

from batchinfer.model.config import load_model_config
from batchinfer.model.indexer_config import IndexerConfig
from batchinfer.model.page_format import BFLOAT16, PageFormat
from batchinfer.sim.dealing import Deals
from batchinfer.sim.hardware import ACCELERATORS
from batchinfer.sim.search import Rater, routing_skew
from batchinfer.sim.spec import ClusterSpec, WorkloadSpec
from batchinfer.sim.steps import Unit, decode_step, prefill_step
from batchinfer.sim.workload import Workload, make_workload
from support.model_configs import with_indexer

ROOT = Path(__file__).parents[2]
V3 = load_model_config(ROOT / "jobs" / "models" / "deepseek-v3")
DEFAULTS = ClusterSpec(nodes=1)
TOKENS_PER_GPU = 16384
NUM_STEPS = 4  # that prompts of one length fill
NUM_UNITS = 2  # dealt out by the balancers


@dataclass(frozen=True)
class Published:
    name: str
    stage: str
    gpu: str
    ep_size: int
    redundant: int
    batch: int  # prefill: new tokens per GPU; decode: requests per GPU
    kv_tokens: int  # prefill: prompt length; decode: KV length
    tokens_per_s_per_node: int
    is_balanced: bool = False  # routing that was made even
    is_online: bool = False  # prompts of the published day, dealt as they arrive; mean over its hours
    known: str = ""  # footnote on an input that was derived from the published rate
    reason: str = ""  # when the figure is off by more than 15 %


REAL_TEXTS, BATCH = "(a)", "(c)"  # footnotes of the table
PUBLISHED = [
    Published(
        "DeepSeek profile, prefill EP32, 4K prompts", "prefill", "H800", 32, 32, TOKENS_PER_GPU, 4096, 62_713, True
    ),
    Published("DeepSeek profile, decode EP128, batch 128, KV 4K", "decode", "H800", 128, 0, 128, 4096, 18_598, True),
    Published("SGLang, prefill EP32, 1K prompts", "prefill", "H100", 32, 32, TOKENS_PER_GPU, 1024, 57_674),
    Published("SGLang, prefill EP32, 2K prompts", "prefill", "H100", 32, 32, TOKENS_PER_GPU, 2048, 54_543),
    Published(
        "SGLang, prefill EP32, 4K prompts", "prefill", "H100", 32, 32, TOKENS_PER_GPU, 4096, 50_302, reason=REAL_TEXTS
    ),
    Published("SGLang, decode EP72, batch 256, KV 2,000", "decode", "H100", 72, 32, 256, 2000, 22_282),
    Published(
        "DeepSeek online, decode EP144, batch 88, KV 4,989", "decode", "H800", 144, 32, 88, 4989, 14_800, known=BATCH
    ),
    Published(
        "DeepSeek online, prefill EP32, 56.3 % hits",
        "prefill",
        "H800",
        32,
        32,
        TOKENS_PER_GPU,
        0,
        73_700,
        is_online=True,
    ),
]

# What is published of the day: tokens and KV length per output token.
DAY_INPUT, DAY_HITS, DAY_OUTPUT, DAY_KV = 608e9, 342e9, 168e9, 4989
# Only the shape of the lengths is not. It is taken from an hour of another online chat service, the conversation trace
# of Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces at a2a4b18, 12,031 requests): deviation of the
# prompt and of the answer lengths by their means; 39 % of the prompts begin with more than the block of 512 tokens
# that all share, and of their tokens 77 % hit. Prompts end at the 64K of DeepSeek's API (api-docs.deepseek.com, 2025).
PROMPT_DEVIATION, ANSWER_DEVIATION, HIT_DEPTH, LONGEST_PROMPT = 1.313, 0.729, 0.769, 65_536
# Day 6 also shows income and nodes by hour. The busiest hour brought $31,060 (22:00; read off the chart, whose bars
# add up to the $562,027 stated) on 278 nodes, so that over the day a node did this share of what it did then.
DAY_SHARE = (562_027 / (24 * 226.75)) / (31_060 / 278)


def sigma(deviation_by_mean: float) -> float:
    """Return the sigma of lognormal lengths with this deviation."""
    return sqrt(log(1 + deviation_by_mean**2))


def online_prompts() -> Workload:
    """Means follow from the day: an output token attends to its prompt and on average to half of a (long) answer."""
    per_answer = DAY_INPUT / DAY_OUTPUT
    mean_answer = DAY_KV / (per_answer + (1 + ANSWER_DEVIATION**2) / 2)
    return make_workload(
        WorkloadSpec(
            requests=20_000,
            prompt_tokens=per_answer * mean_answer,
            prompt_spread=sigma(PROMPT_DEVIATION),
            longest_prompt=LONGEST_PROMPT,
            output_tokens=mean_answer,
            output_spread=sigma(ANSWER_DEVIATION),
            hit_share=DAY_HITS / DAY_INPUT,
            hit_depth=HIT_DEPTH,
        )
    )


def equal_prompts(figure: Published) -> Workload:
    if figure.stage == "prefill":
        num, outputs = NUM_STEPS * figure.batch * figure.ep_size // figure.kv_tokens, 1
    else:
        num, outputs = figure.batch * figure.ep_size, 2
    prompts = np.full(num, figure.kv_tokens - (figure.stage == "decode"))
    return Workload(prompts, 0 * prompts, np.full(num, outputs), np.zeros(num))


def simulated(figure: Published) -> float:
    """Tokens per second and node of eight GPUs, hits included."""
    work = online_prompts() if figure.is_online else equal_prompts(figure)
    rater = Rater(
        workload=work,
        deals=Deals(work, NUM_UNITS),
        model=V3,
        gpu=ACCELERATORS[figure.gpu],
        memory_reserve=DEFAULTS.memory_reserve,
        disk_bytes_per_s=DEFAULTS.disk_bytes_per_s,
        expert_spread=0.0,
        seed=0,
    )
    unit = Unit(figure.ep_size, figure.redundant, release="2025-02")
    if not figure.is_balanced:
        unit = rater.with_skew(unit, figure.batch)
    if figure.is_online:
        rated = rater.rate_arriving(unit, figure.batch)
    else:
        rated = rater.rate(figure.stage, unit, figure.batch)
    tokens = work.prompt_tokens.sum() if figure.stage == "prefill" else (work.output_tokens - 1).sum()
    return 8 * float(tokens) / rated.gpu_seconds * (DAY_SHARE if figure.is_online else 1.0)


@pytest.fixture(scope="module")
def own():
    return {figure.name: simulated(figure) for figure in PUBLISHED}


def off_by(figure: Published, own: dict[str, float]) -> float:
    return own[figure.name] / figure.tokens_per_s_per_node - 1


def row_of_table(figure: Published, own: dict[str, float]) -> str:
    off = " ".join([f"{100 * off_by(figure, own):+.1f} %", *filter(None, (figure.reason, figure.known))])
    if figure.is_online:
        full = own[figure.name] / DAY_SHARE
        off += f", (b): x {DAY_SHARE:.3f}; without it {full:,.0f}, {full / figure.tokens_per_s_per_node - 1:+.1%}"
        off = f"{off[:-1]} %"
    return f"| {figure.name} | {figure.tokens_per_s_per_node:,} | {own[figure.name]:,.0f} | {off} |"


def test_the_simulator_against_published_figures(own):
    print()
    for figure in PUBLISHED:
        print(
            f"{figure.name:50} published {figure.tokens_per_s_per_node:7,}  simulated {own[figure.name]:9,.0f}  "
            f"{off_by(figure, own):+6.1%}  {figure.reason}{figure.known}"
        )
    off = [abs(off_by(figure, own)) for figure in PUBLISHED]
    assert sum(share <= 0.15 for share in off) >= 7
    assert max(off) <= 0.20
    for figure in PUBLISHED:
        assert bool(figure.reason) == (abs(off_by(figure, own)) > 0.15), figure.name


@pytest.mark.parametrize("page", ["docs/simulate.md"])
def test_the_table_of_published_figures_in_the_docs_is_what_is_simulated(own, page):
    text = (ROOT / page).read_text()
    for figure in PUBLISHED:
        assert row_of_table(figure, own) in text
    for figure in PUBLISHED:
        for footnote in filter(None, (figure.reason, figure.known)):
            assert f"\n{footnote} " in text
    without = [
        abs(own[figure.name] / (DAY_SHARE if figure.is_online else 1) / figure.tokens_per_s_per_node - 1)
        for figure in PUBLISHED
    ]
    assert sum(share <= 0.15 for share in without) == 7
    assert "Seven of eight are within 15 %, with and without the factor (b)." in text


def test_the_prompts_of_the_published_day_have_its_sums():
    work = online_prompts()
    assert work.cached_tokens.sum() / work.prompt_tokens.sum() == pytest.approx(DAY_HITS / DAY_INPUT, rel=0.01)
    assert work.prompt_tokens.sum() / work.output_tokens.sum() == pytest.approx(DAY_INPUT / DAY_OUTPUT, rel=0.02)
    assert work.mean_kv_tokens == pytest.approx(DAY_KV, rel=0.02)
    assert work.prompt_tokens.max() <= LONGEST_PROMPT


@dataclass(frozen=True)
class Later:
    """A figure of other GPUs and later software, simulated by tables of the H800 and data sheets alone."""

    name: str
    gpu: str
    ep_size: int
    redundant: int
    batch: int  # prefill: new tokens per GPU; decode: requests per GPU
    kv_tokens: float  # prefill: prompt length; decode: KV length
    tokens_per_s_per_gpu: float
    is_prefill: bool = False
    is_fp8: bool = True  # KV
    has_indexer: bool = False


# InferenceMAX, rows of silicon_sample.csv of aiconfigurator-core 0.12.0 (closed loop: batch / TPOT; lengths 0.9 of what
# is named; rows 536, 540, 538, 682, 650, 652, 626 and 272). SGLang on GB200: "Deploying DeepSeek on GB200 NVL72 with PD
# and Large Scale EP (Part II)" (lmsys.org, 25 September 2025), BF16 attention and FP8 experts. DeepSeek-V3.2: SGLang's
# nightly run of 8 January 2026 on eight B200 (github.com/sgl-project/sglang/issues/15025), 64 requests of 4,096 tokens:
# 2,392.6 tokens/s, time of prefill included.
LATER = [
    Later("TensorRT-LLM, decode EP8, batch 16, KV 1,382", "H200", 8, 0, 16, 1382, 16 / 34.82e-3),
    Later("TensorRT-LLM, decode EP8, batch 32, KV 1,382", "H200", 8, 0, 32, 1382, 32 / 39.90e-3),
    Later("TensorRT-LLM, decode EP8, batch 64, KV 1,382", "H200", 8, 0, 64, 1382, 64 / 48.59e-3),
    Later("TensorRT-LLM, decode EP8, batch 48, KV 1,382", "B200", 8, 0, 48, 1382, 48 / 31.99e-3),
    Later("SGLang, decode EP32, batch 64, KV 1,382", "GB200", 32, 0, 64, 1382, 64 / 20.90e-3),
    Later("SGLang, decode EP32, batch 128, KV 1,382", "GB200", 32, 0, 128, 1382, 128 / 26.64e-3),
    Later("TensorRT-LLM, decode EP16, batch 256, KV 4,608", "GB300", 16, 0, 256, 4608, 256 / 45.48e-3),
    Later("SGLang, decode EP32, batch 16, KV 7,834", "GB300", 32, 0, 16, 7834, 16 / 16.76e-3),
    Later("SGLang, prefill EP8, 2K prompts", "GB200", 8, 0, 16384, 2000, 18_471, is_prefill=True, is_fp8=False),
    Later("SGLang, V3.2, decode EP8, batch 8, KV 4,352", "B200", 8, 0, 8, 4352, 2392.6 / 8, has_indexer=True),
]
V32 = with_indexer(V3, IndexerConfig(64, 128, 2048, rope_interleave=False, sharing_layers=frozenset()))


def simulated_later(figure: Later) -> float:
    """Return tokens per second and GPU of equal requests, in the better of one and two micro-batches per step."""
    return max(simulated_schedule(figure, overlap=overlap) for overlap in (False, True))


def simulated_schedule(figure: Later, *, overlap: bool) -> float:
    model = V32 if figure.has_indexer else V3
    pages = PageFormat("fp8") if figure.is_fp8 else BFLOAT16
    plain = Unit(figure.ep_size, figure.redundant, overlap=overlap, pages=pages)
    rows = figure.batch / plain.micro_batches(model) * model.num_experts_per_tok
    unit = replace(plain, skew=routing_skew(rows, plain.slots_per_gpu(model), figure.ep_size))
    gpu, batch = ACCELERATORS[figure.gpu], float(figure.batch)
    if figure.is_prefill:
        step = prefill_step(batch, batch * figure.kv_tokens / 2, batch, batch / figure.kv_tokens, model, gpu, unit)
    else:
        step = decode_step(batch, batch * figure.kv_tokens, model, gpu, unit)
    return figure.batch / step.seconds


def test_later_published_figures_of_other_gpus_by_data_sheets_alone():
    text = (ROOT / "docs" / "simulate.md").read_text()
    print()
    for figure in LATER:
        own = simulated_later(figure)
        off = own / figure.tokens_per_s_per_gpu - 1
        print(f"{figure.name:50} published {figure.tokens_per_s_per_gpu:7,.0f}  simulated {own:9,.0f}  {off:+6.1%}")
        row = f"| {figure.name} | {figure.gpu} | {figure.tokens_per_s_per_gpu:,.0f} | {own:,.0f} | {100 * off:+.0f} % |"
        assert row in text
