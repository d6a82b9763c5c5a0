"""The ranks of a model between its jobs: those that have left one rest, with the model loaded, until the next."""

from pathlib import Path

from batchinfer.config import ClusterConfig, JobConfig, ModelPart
from batchinfer.data.folder_state import FolderState, folder_state
from batchinfer.launch.rank_loader import RankLoader, join_message, open_local_ranks
from batchinfer.stop import StopSignal


class KeptRanks:
    """See module docstring; call `end` at last."""

    def __init__(self) -> None:
        self._ranks: RankLoader | None = None
        self._of: tuple[ModelPart, str, ClusterConfig, FolderState] | None = None

    def of_job(self, job: JobConfig, stop: StopSignal) -> RankLoader:
        """Ranks that rest or are being loaded; others than before if the job or the model's files are others."""
        wanted = (job.model, job.kv.dtype, job.cluster, folder_state(Path(job.model.path)))
        if self._ranks is None or wanted != self._of:
            self.end()
            self._ranks, self._of = open_local_ranks(job, stop), wanted
            self._ranks.group.keeps_ranks = True
        self._ranks.stop = stop
        self._ranks.load_ahead(join_message(job, {}))
        return self._ranks

    def end(self) -> None:
        """End all of them."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
