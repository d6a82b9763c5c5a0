"""Where experts are to stand, from the tokens per expert that an earlier run counted. Called by the planner.

A planner has a minute, so it searches longer than the engine does after a first unit.
"""

# L mixture-of-experts layers, E experts

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np

from batchinfer.balance.expert_groups import group_loads, in_order
from batchinfer.balance.experts import place_experts
from batchinfer.config import ClusterConfig
from batchinfer.data.duck import read_parquet
from batchinfer.data.expert_tables import ExpertTables
from batchinfer.model.config import ModelConfig
from batchinfer.progress import note
from batchinfer.records import ConfigError
from batchinfer.rundir import RunDir

PHASES = ("prefill", "decode")


def counted_loads(folder: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    """Tokens per layer and expert, [L, E], of each phase, over all sessions of a run.

    Raises:
        ConfigError: no run folder, or nothing was counted, or the run's model has other experts.
    """
    run = RunDir(folder.absolute())
    if not run.run_json.exists():
        raise ConfigError(f"{folder} is not a run folder of batchinfer; name the output.dir of an earlier job")
    files = sorted((run.stats / "experts").glob("*.parquet"))
    if not files:
        raise ConfigError(f"{folder} has no counts of tokens per expert; name a run that has computed something")
    layers = mixture_layers(model)
    loads = {phase: np.zeros((len(layers), model.n_routed_experts)) for phase in PHASES}
    sql = f"SELECT phase, layer, expert, sum(tokens) FROM {read_parquet(*files)} GROUP BY ALL"
    try:
        with duckdb.connect() as connection:
            rows = connection.execute(sql).fetchall()
    except duckdb.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"cannot read the expert counts of {folder}: {reason}; name another run") from None
    counted = {(layer, expert) for _, layer, expert, _ in rows}
    expected = {(layer, expert) for layer in layers for expert in range(model.n_routed_experts)}
    if counted != expected:
        raise ConfigError(
            f"{folder} counted {len(counted):,} experts in all layers, but this job's model has {len(expected):,}; "
            "name a run of the same model"
        )
    for phase, layer, expert, tokens in rows:
        loads[phase][layers.index(layer), expert] = float(tokens)
    return loads


def plan_experts(
    cluster: ClusterConfig, model: ModelConfig, load_of_phase: dict[str, np.ndarray]
) -> list[ExpertTables]:
    """Placements of the groups that have several ranks; says how even each is."""
    groups = cluster.expert_groups
    if not groups:
        note("one rank holds all experts: the expert loads are not used")
        return []
    num_slots = model.n_routed_experts + cluster.redundant_experts
    planned = []
    for phase, load in group_loads(load_of_phase, groups).items():
        before = in_order(load, num_slots=num_slots, num_ranks=groups[phase])
        placement = place_experts(load, num_slots=num_slots, num_gpus=groups[phase], effort="high")
        tables = ExpertTables.of(
            phase,
            tuple(mixture_layers(model)),
            placement.expert_of_slot,
            placement.share_of_slot,
            load,
            placement.bound,
            groups[phase],
        )
        mean = before.gpu_load.mean(axis=1).sum() or 1.0
        ranks = "" if phase == "both" else f" ({phase} ranks)"
        note(
            f"experts placed{ranks}: busiest rank {tables.max_over_mean:.3f} times the mean, "
            f"{before.gpu_load.max(axis=1).sum() / mean:.3f} in order, at best {tables.bound_over_mean:.3f}"
        )
        planned.append(tables)
    return planned


def mixture_layers(model: ModelConfig) -> list[int]:
    """The decoder layers that mix experts."""
    return [layer for layer in range(model.num_hidden_layers) if model.is_moe_layer(layer)]
