"""Which rank does what: the roles and expert-parallel groups of a job's ranks."""

from dataclasses import dataclass
from typing import Literal

from batchinfer.config import ClusterConfig

Role = Literal["both", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank: its number in the job, what it does, and its place among the ranks that share experts with it."""

    rank: int
    role: Role
    group_rank: int
    group_size: int

    @property
    def leader(self) -> int:
        """The first rank of the group, by its number in the job."""
        return self.rank - self.group_rank

    @property
    def runs_prefill(self) -> bool:
        return self.role != "decode"

    @property
    def runs_decode(self) -> bool:
        return self.role != "prefill"

    def exchange(self, cluster: ClusterConfig) -> str:
        """How rows travel in this rank's group, as `cluster.exchange` says.

        DeepEP's low-latency mode is for the few rows of decode; ranks for prefill alone take its normal mode.
        """
        if cluster.exchange == "deepep-low-latency" and not self.runs_decode:
            return "deepep-v1"
        return cluster.exchange

    def most_tokens(self, cluster: ClusterConfig) -> int:
        """The most tokens that this rank, and any other of its group, has in one step."""
        prefill = cluster.prefill_tokens if self.runs_prefill else 0
        return max(prefill, cluster.decode_requests if self.runs_decode else 0)


def rank_places(cluster: ClusterConfig) -> list[RankPlace]:
    """All ranks of the job in order.

    colocated       0 … R-1 do both, one group
    disaggregated   0 … P-1 prefill, P … P+D-1 decode, a group each
    """
    if cluster.mode == "colocated":
        return [RankPlace(rank, "both", rank, cluster.num_ranks) for rank in range(cluster.num_ranks)]
    num_prefill, num_decode = cluster.num_prefill_ranks, cluster.num_decode_ranks
    return [RankPlace(rank, "prefill", rank, num_prefill) for rank in range(num_prefill)] + [
        RankPlace(num_prefill + rank, "decode", rank, num_decode) for rank in range(num_decode)
    ]
