"""The resources of a run's tasks on Ray."""

import math
from dataclasses import dataclass

from batchinfer.config import JobConfig
from batchinfer.records import ConfigError
from batchinfer.submit.submission import check_group


@dataclass(frozen=True, slots=True)
class Shape:
    """Options of `submit --to ray`."""

    nodes_per_group: int = 1
    gpus_per_node: int | None = None  # None: no GPU
    cpus: str | None = None  # per node; None: 1
    # URL of the cluster's dashboard; None: RAY_API_SERVER_ADDRESS, else this machine's
    address: str | None = None
    endpoint: str | None = None  # of the object store with the run folder; None: a disk, or the nodes' own setting

    def bundles(self) -> list[dict[str, float]]:
        """Return the resources that a placement group reserves, per node."""
        node = {"CPU": float(self.cpus or 1)}
        if self.gpus_per_node:
            node["GPU"] = float(self.gpus_per_node)
        return [dict(node) for _ in range(self.nodes_per_group)]


def check_shape(job: JobConfig, shape: Shape) -> None:
    """Check the options before anything is planned or submitted.

    Raises:
        ConfigError: --cpus is no positive number, or the ranks do not spread over the nodes.
    """
    try:
        cpus = float(shape.cpus or 1)
    except ValueError:
        cpus = math.nan
    if not 0 < cpus < math.inf:
        raise ConfigError(f"--cpus is {shape.cpus!r}; on Ray it is a number of processors, for example 16")
    check_group(job.cluster, shape.nodes_per_group, shape.gpus_per_node)
