"""[cluster] of a job file: number of ranks, and settings of their steps, memory and communication."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from batchinfer.config.part import Count, Part

SWEEP_STEPS = 16  # most steps of either kind that pass a streamed layer before the next layer
FREE_SHARE = 8  # prefill waits until this fraction (1/8) of the decode slots is free, so that its steps are not tiny
RankCount = Annotated[int, Field(ge=1, le=4096)]


class ClusterConfig(Part):
    """Ranks, their memory, and how often results become durable."""

    mode: Literal["colocated", "disaggregated"] = Field("colocated", description="same ranks for both phases, or apart")
    prefill_ranks: RankCount | None = Field(None, description="expert-parallel size of prefill")
    decode_ranks: RankCount | None = Field(None, description="expert-parallel size of decode (colocated: the same)")
    redundant_experts: int = Field(0, ge=0, le=65536, description="extra expert slots, over all ranks of a group")
    nodes: RankCount | None = Field(
        None,
        description="hosts that the ranks are spread over, evenly and in order; unset: by Slurm or the ranks",
    )
    overlap: Literal["auto"] | bool = Field(
        "auto",
        description="two micro-batches per step, one computes while the other's rows travel between ranks; auto: in "
        "prefill and in decode separately, if the ranks measure that it is faster; results stay the same",
    )
    speculate: Literal["auto", "off"] | None = Field(
        None,
        description="speculative decoding: draft tokens with the model's layer for multi-token prediction, verify them "
        "in the next step; results stay the same to the byte; auto: in steps where it was measured to be faster; unset:"
        " auto where weights are streamed, otherwise off",
    )
    backend: Literal["auto", "hopper", "hopper-invariant", "triton", "sdpa", "cpu", "reference"] = Field(
        "auto",
        description="kernels; `batchinfer doctor` lists those that run here; cpu: C++; on GPUs sdpa: as auto, but "
        "PyTorch's attention for prefill; hopper: as auto, but flash_mla splits decode steps freely, which is faster "
        "for few requests, but a request's last bits then depend on the other requests of its steps",
    )
    exchange: Literal["auto", "shared", "tls", "gloo", "nccl", "deepep", "deepep-v1", "deepep-low-latency"] = Field(
        "auto",
        description="how expert rows travel; auto: shared memory on one host, tls between hosts, nccl on GPUs; "
        "shared: of GPUs, too, copied to the host and back, and several ranks may share a GPU; "
        "deepep-low-latency is for decode, ranks that do prefill alone take deepep-v1",
    )
    graphs: Literal["auto", "off"] = Field(
        "auto",
        description="decode steps as CUDA graphs if GPU, exchange and operations support them; off: never, for drivers "
        "with which graphs fail; results stay the same",
    )
    collective_seconds: float = Field(
        300.0, gt=0, le=86400, description="a rank that does not answer for this long has failed"
    )
    page_bytes: Count | None = Field(None, description="KV page budget per rank in bytes; measured when unset")
    weights: Literal["auto", "resident", "stream"] = Field(
        "auto",
        description="stream: read the layers of a converted folder from its disk again for each sweep of many steps, "
        "for models larger than memory; results stay the same to the byte; on a GPU layers are copied there "
        "for each sweep, from the host's memory or a folder of convert --gpu; auto: on CPUs, if they do not fit",
    )
    memory_bytes: Count | None = Field(
        None,
        description="most memory of a rank on a CPU: weights, KV pages and steps; where weights are streamed to a GPU, "
        "most of the host's for weights; unset: what is free",
    )
    commit_seconds: float = Field(30.0, gt=0, le=86400, description="a finished request is durable within this time")
    prefill_tokens: int = Field(
        4096, ge=1, le=2**20, description="prompt tokens per prefill step and rank (long prompts are cut)"
    )
    decode_requests: int = Field(256, ge=1, le=2**16, description="requests that decode together on one rank")
    gpu: Literal["H800", "H100", "H200", "B200", "B300", "GB200", "GB300"] | None = Field(
        None, description="accelerator of each rank; the plan then predicts without an earlier run"
    )
    finish_hours: float | None = Field(
        None, gt=0, description="with gpu: the plan also reports the number of nodes that finish within this time"
    )

    @model_validator(mode="after")
    def _ranks_fit_the_mode(self) -> ClusterConfig:
        if self.mode == "disaggregated":
            for name in ("prefill_ranks", "decode_ranks"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name} is not set; disaggregated ranks need both prefill_ranks and decode_ranks")
        elif None not in (self.prefill_ranks, self.decode_ranks) and self.prefill_ranks != self.decode_ranks:
            raise ValueError(
                f"decode_ranks is {self.decode_ranks} and prefill_ranks {self.prefill_ranks}, but colocated ranks do "
                "both; make them equal, leave one out, or set mode = 'disaggregated'"
            )
        if self.finish_hours is not None and self.gpu is None:
            raise ValueError("finish_hours is set, but not gpu; name the gpu whose nodes are to be counted")
        return self

    @property
    def num_prefill_ranks(self) -> int:
        return self.prefill_ranks or self.decode_ranks or 1

    @property
    def num_decode_ranks(self) -> int:
        return self.decode_ranks or self.prefill_ranks or 1

    @property
    def drafts_tokens(self) -> bool:
        """Whether tokens are drafted where that pays; a token saved is a part of a sweep if weights are streamed."""
        return self.speculate == "auto" or (self.speculate is None and self.weights == "stream")

    @property
    def running_requests(self) -> int:
        """Number of requests that decode on one rank; streamed weights pass several decode steps in each sweep."""
        return self.decode_requests * (SWEEP_STEPS if self.weights == "stream" else 1)

    @property
    def waiting_tokens(self) -> int:
        """Number of prompt tokens that a rank is sent in advance: two steps, or two sweeps."""
        return 2 * self.prefill_tokens * (SWEEP_STEPS if self.weights == "stream" else 1)

    @property
    def expert_groups(self) -> dict[str, int]:
        """Number of ranks, if above 1, of each group that experts are spread over; keys: both, prefill, decode."""
        if self.mode == "colocated":
            groups = {"both": self.num_prefill_ranks}
        else:
            groups = {"prefill": self.num_prefill_ranks, "decode": self.num_decode_ranks}
        return {phase: num_ranks for phase, num_ranks in groups.items() if num_ranks > 1}

    def hosts_of(self, phase: str, nodes: int) -> list[str]:
        """Return the host of each rank of an expert group if all ranks are spread evenly and in order over `nodes`."""
        first = self.num_prefill_ranks if phase == "decode" else 0
        return [str(rank * nodes // self.num_ranks) for rank in range(first, first + self.expert_groups[phase])]

    @property
    def num_ranks(self) -> int:
        """Number of processes; colocated ranks do both phases."""
        both = self.num_prefill_ranks
        return both + self.num_decode_ranks if self.mode == "disaggregated" else both
