"""A layout for an offline job: found by search, each change explained by the GPU-hours that it saves.

Nobody waits for a single answer, so that only GPU-hours count: batches as large as memory, KV in FP8 if that pays, EP
sizes by the work, and prefill on GPUs that get all experts of a layer. Steps are assumed to be full, and all requests
to be known.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.config import JobConfig, checked
from batchinfer.model.config import ModelConfig
from batchinfer.model.page_format import BFLOAT16, FP8, PageFormat
from batchinfer.records import ConfigError
from batchinfer.sim.exchange import LATEST
from batchinfer.sim.hardware import accelerator
from batchinfer.sim.memory import kv_tokens_per_gpu
from batchinfer.sim.search import EP_SIZES, Rated, Rater
from batchinfer.sim.spec import WorkloadSpec
from batchinfer.sim.speeds import DEFAULTS, rater_of
from batchinfer.sim.steps import Unit
from batchinfer.sim.workload import HOUR_S, make_workload

MILLION = 1e6
# changes that are no layouts
AS_GIVEN, FULL, NEWER = "as given, for a server", "all units are full", f"DeepEP of {LATEST}"


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the layout, and the GPU-hours of a million requests with it and all changes before."""

    name: str
    reason: str
    prefill: Rated
    decode: Rated
    gpu_hours: float


def changes(
    rater: Rater,
    prefill: Unit,
    prefill_tokens: int,
    decode: Unit,
    requests_per_gpu: int,
    *,
    held_gpu_hours: float | None = None,
) -> list[Change]:
    """Return the way from a server's layout to the cheapest one of a job: the layout first, then each change that pays.

    Args:
        held_gpu_hours: of a million requests, while a server's nodes follow its load; None: not known.

    Raises:
        ConfigError: the layout does not fit onto the GPUs.
    """
    decoded = _rated(rater, "decode", decode, requests_per_gpu)
    given = rater.rate_arriving(rater.with_skew(prefill, prefill_tokens), prefill_tokens), decoded
    found = [_change(rater, AS_GIVEN, _sizes(*given), *given)]
    if held_gpu_hours is not None:
        held = "nodes follow the load of the day, in whole groups of units"
        found = [
            Change("as held by a server", held, *given, held_gpu_hours),
            replace(found[0], name=FULL, reason="work waits for nodes, and no node for work"),
        ]

    def add(name: str, reason: str, prefill: Rated, decode: Rated) -> None:
        """Append the change if it saves something."""
        change = _change(rater, name, reason, prefill, decode)
        if change.gpu_hours < found[-1].gpu_hours:
            found.append(change)

    known = _rated(rater, "prefill", prefill, prefill_tokens)
    add("prompts are known", "steps of equal tokens and attention, not those of prompts as they arrive", known, decoded)
    pages = BFLOAT16
    for name, next_pages, reason in (
        ("no latency target", BFLOAT16, "as many requests per GPU as KV memory holds"),
        ("KV in FP8", PageFormat(FP8), "more requests per GPU, slower attention"),
    ):
        unit = replace(decode, pages=next_pages)
        most = rater.requests_that_fit(kv_tokens_per_gpu(rater.model, unit, rater.gpu, rater.memory_reserve))
        rated = _rated(rater, "decode", unit, most)
        add(name, f"{reason}: {most}", found[-1].prefill, rated)
        pages = next_pages if found[-1].decode == rated else pages
    rated = rater.cheapest("decode", replace(decode, pages=pages))
    add("EP size of decode", f"fewer GPUs, more experts each: {_size(rated)}", found[-1].prefill, rated)
    rated = rater.cheapest("prefill", replace(prefill, pages=pages))
    add("EP size and step of prefill", f"prompts in fewer parts: {_size(rated)}", rated, found[-1].decode)
    if rater.model.num_moe_layers:
        rated = rater.cheapest("prefill", replace(prefill, pages=pages, gathered=True))
        reason = f"experts are copied to each GPU, no row travels: {_size(rated)}; on paper, ranks do not"
        add("experts gathered in prefill", reason, rated, found[-1].decode)
    if decode.release != LATEST:
        newer = replace(decode, pages=pages, release=LATEST)
        newer_prefill = replace(prefill, pages=pages, release=LATEST, gathered=found[-1].prefill.gathered)
        reason = "newer kernels, and the sizes that are best with them"
        add(NEWER, reason, rater.cheapest("prefill", newer_prefill), rater.cheapest("decode", newer))
    return found


def changes_table(found: list[Change]) -> list[list[str]]:
    """Return the lines of a table: change, layout or reason, GPU-hours of a million requests, factor of this change."""
    lines = []
    for before, change in zip([found[0], *found], found, strict=False):
        lines.append(
            [change.name, change.reason, f"{change.gpu_hours:.1f}", f"{before.gpu_hours / change.gpu_hours:.2f}x"]
        )
    last = found[-1]
    lines.append(["all", _sizes(last.prefill, last.decode), f"{last.gpu_hours:.1f}", f"{_factor(found):.2f}x"])
    of_layout = [change for change in found if change.name != NEWER]
    if of_layout[0].name != AS_GIVEN:
        of_layout = of_layout[1:]
    if len(of_layout) < len(found):
        lines.append(["layout alone", "full units, the same kernels", "", f"{_factor(of_layout):.2f}x"])
    return lines


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys of a job's [cluster] and [kv] that a search proposes."""

    mode: str
    prefill: Rated
    decode: Rated
    pages: PageFormat

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the job. Apart, the phase with less work waits for the other one, which is counted."""
        sizes = self.prefill.ep_size, self.decode.ep_size
        seconds = self.prefill.gpu_seconds / sizes[0], self.decode.gpu_seconds / sizes[1]
        if self.mode == "colocated":
            return sum(seconds) * sizes[0] / HOUR_S
        return max(seconds) * sum(sizes) / HOUR_S

    @property
    def sizes(self) -> str:
        """The layout in words."""
        kv = "FP8" if self.pages.is_fp8 else "BF16"
        return f"{self.mode}, {_sizes(self.prefill, self.decode)}, KV in {kv}"

    def keys(self) -> dict[str, dict[str, Any]]:
        """Return the job file's keys by table."""
        cluster = {
            "mode": self.mode,
            "prefill_ranks": self.prefill.ep_size,
            "decode_ranks": self.decode.ep_size,
            "redundant_experts": 0,
            "prefill_tokens": self.prefill.batch,
            "decode_requests": self.decode.batch,
        }
        return {"cluster": cluster, "kv": {"dtype": FP8 if self.pages.is_fp8 else "auto"}}


def job_layouts(rater: Rater, *, most_gpus: int | None) -> list[Layout]:
    """Return a job's layouts, the fewest GPU-hours first: one group of ranks, for both phases or apart.

    Args:
        most_gpus: of a group; None: as many as there are EP sizes.

    Raises:
        ConfigError: no layout fits.
    """
    experts = rater.model.n_routed_experts
    sizes = [
        size
        for size in (1, 2, 4, *EP_SIZES)
        if (most_gpus is None or size <= most_gpus) and (experts % size == 0 if experts else size == 1)
    ]
    formats = [BFLOAT16] + ([] if rater.model.attention.why_no_fp8_pages else [PageFormat(FP8)])
    found: list[Layout] = []
    for pages in formats:
        base = Unit(1, pages=pages)
        prefills, decodes = rater.by_size("prefill", base, sizes), rater.by_size("decode", base, sizes)
        for num_prefill, prefill in prefills.items():
            for num_decode, decode in decodes.items():
                if num_prefill == num_decode:
                    found.append(Layout("colocated", prefill, decode, pages))
                if most_gpus is None or num_prefill + num_decode <= most_gpus:
                    found.append(Layout("disaggregated", prefill, decode, pages))
    if not found:
        raise ConfigError(f"no layout of at most {most_gpus} GPUs holds the model; give more nodes")
    return sorted(found, key=lambda layout: layout.gpu_hours)


def simulated_job(job: JobConfig) -> JobConfig:
    """Return the job as the search takes it: in FP8, of which there are rates, on cluster.gpu or the published one."""
    cluster = job.cluster if job.cluster.gpu is not None else job.cluster.model_copy(update={"gpu": DEFAULTS.gpu})
    return job.model_copy(update={"cluster": cluster, "model": job.model.model_copy(update={"dtype": "fp8"})})


def planned_rater(run_folder: Path, job: JobConfig, model: ModelConfig) -> Rater:
    """Return the rater of a planned job's requests on its cluster.gpu.

    Args:
        job: see `simulated_job`.

    Raises:
        ConfigError: the plan holds no request.
    """
    assert job.cluster.gpu is not None
    work = make_workload(WorkloadSpec(plan=str(run_folder)), part_tokens=job.cluster.prefill_tokens)
    return rater_of(work, model, accelerator(job.cluster.gpu, None))


def planned_layouts(rater: Rater, job: JobConfig) -> list[Layout]:
    """Return the layouts for a planned job, the fewest GPU-hours first, on at most its cluster.nodes.

    Raises:
        ConfigError: no layout fits, or the model cannot be simulated.
    """
    nodes = job.cluster.nodes
    return job_layouts(rater, most_gpus=None if nodes is None else nodes * rater.gpu.gpus_per_node)


def own_layout(rater: Rater, job: JobConfig) -> Layout | None:
    """Return the layout of a job's own keys; None if it does not fit onto the GPUs."""
    cluster, pages = job.cluster, PageFormat.of(job)
    sizes = cluster.num_prefill_ranks, cluster.num_decode_ranks
    prefill, decode = (Unit(size, cluster.redundant_experts, pages=pages) for size in sizes)
    try:
        kv_tokens_per_gpu(rater.model, prefill, rater.gpu, rater.memory_reserve)  # only whether the weights fit
        kv_tokens = kv_tokens_per_gpu(rater.model, decode, rater.gpu, rater.memory_reserve)
        requests = min(cluster.decode_requests, rater.requests_that_fit(kv_tokens))
        if not requests:
            return None
        rated = rater.better("prefill", prefill, cluster.prefill_tokens), rater.better("decode", decode, requests)
    except ConfigError:
        return None
    return Layout(cluster.mode, *rated, pages)


def shares(rater: Rater, job: JobConfig, best: Layout) -> list[tuple[str, float | None]]:
    """Return the GPU-hours of a job's own keys, and with one change of `best` after another; None: does not fit."""
    keys = best.keys()
    cluster = keys["cluster"]
    ranks = {name: cluster[name] for name in ("mode", "prefill_ranks", "decode_ranks", "redundant_experts")}
    found, at = [("as in this job", own_layout(rater, job))], job
    for name, table, changed in (
        ("ranks", "cluster", ranks),
        ("kv.dtype", "kv", keys["kv"]),
        ("prefill_tokens", "cluster", {"prefill_tokens": cluster["prefill_tokens"]}),
        ("decode_requests", "cluster", {"decode_requests": cluster["decode_requests"]}),
    ):
        changed_table = getattr(at, table).model_copy(update=changed)
        if changed_table != getattr(at, table):
            at = at.model_copy(update={table: changed_table})
            found.append((name, own_layout(rater, at)))
    return [(name, None if layout is None else layout.gpu_hours) for name, layout in found]


def with_layout(job: JobConfig, layout: Layout, *, output: str) -> JobConfig:
    """Return the job with the layout's keys and another output folder, checked like any job.

    Raises:
        ConfigError: the job's other keys do not allow the layout.
    """
    document = job.model_dump(exclude_unset=True)
    for table, keys in {**layout.keys(), "output": {"dir": output}}.items():
        document[table] = {**document.get(table, {}), **keys}
    return checked(JobConfig, document, Path(output))


def _rated(rater: Rater, stage: Any, unit: Unit, batch: int) -> Rated:
    return rater.rate(stage, rater.with_skew(unit, batch), batch)


def _change(rater: Rater, name: str, reason: str, prefill: Rated, decode: Rated) -> Change:
    seconds = (prefill.gpu_seconds + decode.gpu_seconds) / len(rater.workload)
    return Change(name, reason, prefill, decode, seconds * MILLION / HOUR_S)


def _factor(found: list[Change]) -> float:
    return found[0].gpu_hours / found[-1].gpu_hours


def _sizes(prefill: Rated, decode: Rated) -> str:
    return (
        f"prefill EP{prefill.ep_size}, {prefill.batch:,} tokens per GPU; decode EP{decode.ep_size}, "
        f"{decode.batch} requests per GPU"
    )


def _size(rated: Rated) -> str:
    """Return EP size and batch per GPU."""
    return f"EP{rated.ep_size}, {rated.batch:,}"
