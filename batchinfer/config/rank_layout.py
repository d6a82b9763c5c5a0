"""Roles and expert-parallel groups of a job's ranks."""

from dataclasses import dataclass
from typing import Literal

from batchinfer.config.cluster import ClusterConfig

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank: its number in the job, its role, and its number and the size of its expert-parallel group."""

    rank: int
    role: Role
    group_rank: int
    group_size: int

    @property
    def leader(self) -> int:
        """Number in the job of the first rank of this rank's group."""
        return self.rank - self.group_rank

    @property
    def runs_prefill(self) -> bool:
        return self.role != "decode"

    @property
    def runs_decode(self) -> bool:
        return self.role != "prefill"

    def exchange(self, cluster: ClusterConfig) -> str:
        """Return `cluster.exchange`, or DeepEP's normal mode where a prefill rank would use its low-latency mode.

        The low-latency mode is for the few rows of a decode step.
        """
        if cluster.exchange == "deepep-low-latency" and not self.runs_decode:
            return "deepep-v1"
        return cluster.exchange

    def most_tokens(self, cluster: ClusterConfig) -> int:
        """Return the largest number of tokens in one step of this rank, and of any rank of its group."""
        prefill = cluster.prefill_tokens if self.runs_prefill else 0
        return max(prefill, cluster.decode_requests if self.runs_decode else 0)


def rank_places(cluster: ClusterConfig) -> list[RankPlace]:
    """Return the job's ranks in order.

    colocated       0 … R-1 run prefill and decode; one group
    disaggregated   0 … P-1 run prefill, P … P+D-1 run decode; one group each
    """
    if cluster.mode == "colocated":
        return [RankPlace(rank, "both", rank, cluster.num_ranks) for rank in range(cluster.num_ranks)]
    num_prefill, num_decode = cluster.num_prefill_ranks, cluster.num_decode_ranks
    return [RankPlace(rank, "prefill", rank, num_prefill) for rank in range(num_prefill)] + [
        RankPlace(num_prefill + rank, "decode", rank, num_decode) for rank in range(num_decode)
    ]
