"""Checks of a task's group of nodes: whether the job's ranks spread over the nodes and can exchange rows."""

from batchinfer.config import ClusterConfig
from batchinfer.config.rank_layout import rank_places
from batchinfer.records import ConfigError


def check_group(cluster: ClusterConfig, nodes: int, gpus_per_node: int | None) -> None:
    """Check that the ranks fit on the nodes of a task, before anything is planned or submitted.

    Args:
        nodes: number of nodes of a task.
        gpus_per_node: None for the launcher's default, which is not checked.

    Raises:
        ConfigError: the ranks do not spread evenly over the nodes, lack GPUs, or cannot exchange rows between nodes.
    """
    num_ranks = cluster.num_ranks
    if num_ranks % nodes:
        raise ConfigError(
            f"the job's {num_ranks} ranks do not spread evenly over {nodes} nodes; change --nodes-per-group or the "
            "ranks in [cluster]"
        )
    ranks_per_node = num_ranks // nodes
    for place in rank_places(cluster):
        if cluster.exchange == "shared" and place.rank // ranks_per_node != place.leader // ranks_per_node:
            raise ConfigError(  # shared memory reaches no other node
                f"cluster.exchange is 'shared', but ranks {place.leader} and {place.rank} share experts and are on "
                "different nodes; use 'auto', or change --nodes-per-group"
            )
    if gpus_per_node is not None and ranks_per_node > gpus_per_node:
        raise ConfigError(
            f"{ranks_per_node} ranks per node need as many GPUs, but --gpus-per-node is {gpus_per_node}; change one of "
            "them"
        )
