"""The TOML file of `batchinfer simulate`: schema, defaults and checks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from batchinfer.config import checked, read_toml
from batchinfer.config.part import Part
from batchinfer.records import ConfigError
from batchinfer.sim.exchange import LATEST, Release
from batchinfer.sim.hardware import Rates

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
OF_ANY_REQUESTS = {"plan", "expert_spread", "seed"}  # keys of [workload] that count with the requests of a plan, too
Count = Annotated[int, Field(ge=1, le=2**31)]
EpSize = Annotated[int, Field(ge=1, le=4096)]


class ModelSpec(Part):
    path: str = Field(description="folder with config.json; weights are not needed")


class WorkloadSpec(Part):
    """Requests: of a planned run, or described by means and spreads."""

    plan: str | None = Field(
        None,
        description="run folder that `batchinfer plan` has written; then nothing else here but expert_spread and seed",
    )
    requests: Count | None = Field(None, description="how many")
    prompt_tokens: Positive | None = Field(None, description="mean length of a prompt")
    output_tokens: Positive | None = Field(None, description="mean length of an answer")
    prompt_spread: float = Field(0.0, ge=0, le=4, description="sigma of the lognormal lengths; 0: all alike")
    output_spread: float = Field(0.0, ge=0, le=4, description="the same for answers")
    longest_prompt: Count | None = Field(None, description="longer prompts are as long as this")
    hit_share: Share = Field(0.0, description="share of prompt tokens that are in a cache")
    hit_depth: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="share of a prompt that hits, of those that do; unset: all prompts hit alike"
    )
    arrival: Literal["at once", "day"] = Field(
        "at once", description='"day": over 24 h, most at noon, fewest at midnight'
    )
    peak_over_mean: float = Field(1.0, ge=1, le=2, description='arrivals at noon by the mean, for arrival = "day"')
    expert_spread: float = Field(0.0, ge=0, le=4, description="sigma of the experts' lognormal loads; 0: all alike")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _either_plan_or_numbers(self) -> WorkloadSpec:
        numbers = ("requests", "prompt_tokens", "output_tokens")
        missing = [name for name in numbers if getattr(self, name) is None]
        if self.plan is None and missing:
            raise ValueError(f"{missing[0]} is missing; describe the requests with {', '.join(numbers)}, or give plan")
        described = [name for name in WorkloadSpec.model_fields if name in self.model_fields_set - OF_ANY_REQUESTS]
        if self.plan is not None and described:
            raise ValueError(f"plan and {described[0]} are both given; keep one of them")
        if self.hit_depth is not None and self.hit_depth < self.hit_share:
            raise ValueError(f"hit_depth is {self.hit_depth}, below hit_share {self.hit_share}; give at least that")
        return self


class PrefillSpec(Part):
    ep_size: EpSize = Field(32, description="GPUs of a prefill unit")
    redundant_experts: int = Field(32, ge=0, le=4096)
    tokens_per_gpu: Count = Field(16384, description="new tokens per GPU and step")
    part_tokens: Count = Field(4096, description="prompts with more new tokens are prefilled in parts of this size")


class DecodeSpec(Part):
    ep_size: EpSize = Field(144, description="GPUs of a decode unit")
    redundant_experts: int = Field(32, ge=0, le=4096)
    requests_per_gpu: Count | None = Field(None, description="unset: as many as the KV memory holds, up to 256")


class ClusterSpec(Part):
    gpu: str = Field("H800", description="H800, H100, H200, B200, B300, GB200 or GB300")
    rates: Rates | None = Field(
        None, description="of operations; unset: measured ones where batchinfer[tables] has them, else published ones"
    )
    nodes: Count | None = Field(None, description="nodes there are; unset: as many as finish_hours asks for")
    finish_hours: Positive | None = Field(None, description="also say how many nodes finish by then")
    exchange: Release = Field(LATEST, description="release of DeepEP whose table counts")
    memory_reserve: Share = Field(0.1, description="share of a GPU's memory that neither weights nor KV may take")
    disk_bytes_per_s: Positive = Field(5e9, description="per node, for KV read from disk")
    max_wait_s: float = Field(60.0, ge=0, description="longest wait of a request for a prefill step to fill up")
    release_after_s: float = Field(600.0, ge=0, description="idle time after which a unit releases its nodes")

    @model_validator(mode="after")
    def _nodes_or_time(self) -> ClusterSpec:
        if self.nodes is None and self.finish_hours is None:
            raise ValueError("nodes is missing; give nodes, or finish_hours to learn how many it takes")
        return self


class DaySpec(Part):
    """A day of a whole cluster, of which the requests of [workload] are a sample."""

    input_tokens: Positive = Field(description="prompt tokens of the day, cached ones too")
    load_by_hour: list[Annotated[float, Field(ge=0)]] = Field(
        min_length=24, max_length=24, description="load of each hour, in any unit; nodes follow it"
    )

    @model_validator(mode="after")
    def _has_load(self) -> DaySpec:
        if not sum(self.load_by_hour):
            raise ValueError("load_by_hour holds no load; give 24 numbers of which one at least is above 0")
        return self


class PricingSpec(Part):
    file: str = Field(description="price list (jobs/prices/*.toml)")


class Spec(Part):
    """A simulated cluster and its workload."""

    model: ModelSpec
    workload: WorkloadSpec
    cluster: ClusterSpec
    prefill: PrefillSpec = PrefillSpec()
    decode: DecodeSpec = DecodeSpec()
    day: DaySpec | None = None
    pricing: PricingSpec | None = None

    @model_validator(mode="after")
    def _day_has_nodes(self) -> Spec:
        if self.day is not None and (self.cluster.nodes is None or self.cluster.finish_hours is not None):
            raise ValueError("day needs cluster.nodes, and no cluster.finish_hours: say how many nodes there are")
        return self

    @model_validator(mode="after")
    def _arrives_once(self) -> Spec:
        given = [f"workload.{name}" for name in ("arrival", "peak_over_mean") if name in self.workload.model_fields_set]
        if self.day is not None and given:
            raise ValueError(f"day.load_by_hour says when the work arrives; leave {' and '.join(given)} out")
        if "workload.peak_over_mean" in given and self.workload.arrival != "day":
            raise ValueError(f'{given[-1]} is given without arrival = "day"; add that, or leave peak_over_mean out')
        return self


def load_spec(path: Path) -> Spec:
    """Read and check a spec; relative paths in it count from its folder.

    Raises:
        ConfigError: one sentence with the file, the key, the value and the remedy.
    """
    path = Path(path)
    table = read_toml(path, "spec")
    if "input" in table:
        raise ConfigError(
            f"{path} is a job file, and simulate takes a spec such as jobs/simulate_day.toml; to predict the job on a "
            f"GPU: `batchinfer plan {shlex.quote(str(path))} --set cluster.gpu=H100`"
        )
    spec = checked(Spec, table, path)
    folder = path.absolute().parent
    update: dict[str, Part] = {"model": ModelSpec(path=str(folder / spec.model.path))}
    if spec.workload.plan is not None:
        update["workload"] = spec.workload.model_copy(update={"plan": str(folder / spec.workload.plan)})
    if spec.pricing is not None:
        update["pricing"] = PricingSpec(file=str(folder / spec.pricing.file))
    return spec.model_copy(update=update)
