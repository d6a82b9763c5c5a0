"""Ranks that stay between the jobs of one model: after a job they wait, with the model loaded, for the next."""

from pathlib import Path

from batchinfer.config import ClusterConfig, JobConfig, ModelPart
from batchinfer.data.folder_state import FolderState, folder_state
from batchinfer.launch.host_memory import decided
from batchinfer.launch.rank_loader import RankLoader, decide_weights, join_message, open_local_ranks
from batchinfer.stop_signals import StopSignal


class KeptRanks:
    """The ranks of the latest job's model; call `end` at last."""

    def __init__(self) -> None:
        self._ranks: RankLoader | None = None
        self._of: tuple[ModelPart, str, ClusterConfig, FolderState] | None = None

    def load_for(self, job: JobConfig, stop: StopSignal) -> RankLoader:
        """Return loaded or loading ranks for a job; start new ones if model, cluster or the model's files changed."""
        wanted = (job.model, job.kv.dtype, job.cluster, folder_state(Path(job.model.path)))
        if self._ranks is None or wanted != self._of:
            self.end()
            self._ranks, self._of = open_local_ranks(decide_weights(job), stop), wanted
            self._ranks.group.keeps_ranks = True
        self._ranks.stop = stop
        self._ranks.load_ahead(join_message(decided(job, self._ranks.weights), {}))
        return self._ranks

    def end(self) -> None:
        """End all kept ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
