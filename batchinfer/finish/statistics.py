"""Writing of stats/{requests,units,run}.parquet; controllers wrote steps, experts and nodes during the work."""

from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer import __version__
from batchinfer.clock import unix_s
from batchinfer.config import JobConfig
from batchinfer.data.duckdb_sql import read_parquet
from batchinfer.data.expert_tables import read_expert_tables
from batchinfer.data.parquet import own_file, table_writer
from batchinfer.data.schemas.internal import PREDICTIONS
from batchinfer.data.schemas.statistics import STATS_REQUESTS, STATS_RUN, STATS_UNITS
from batchinfer.finish.join import output_rows, query
from batchinfer.manifest import Manifest
from batchinfer.records import Shard
from batchinfer.run.units.counted import CountedUnit
from batchinfer.rundir import RunDir

GROUP_ROWS = 1 << 17  # rows per row group of stats/requests.parquet


def write_request_stats(
    connection: duckdb.DuckDBPyConnection,
    run: RunDir,
    shards: list[Shard],
    where: str = "true",
    manifest: Manifest | None = None,
) -> None:
    """Write stats/requests.parquet.

    Args:
        connection: a connection with the view `delivered`.
        where: SQL condition that selects rows.
        manifest: gets the checksum of the file.
    """
    readable = [shard for shard in shards if shard.problem is None]
    schema = STATS_REQUESTS.schema
    rows = connection.sql(
        f"SELECT {', '.join(schema.names)} FROM ({output_rows(run, readable)}) WHERE {where} "
        "ORDER BY shard, row, sample, choice"
    )
    with table_writer(run.stats_file("requests"), schema, scratch=run.finish_scratch, manifest=manifest) as writer:
        for batch in rows.to_arrow_reader(GROUP_ROWS):
            writer.write_batch(batch.cast(schema))


def write_unit_stats(
    connection: duckdb.DuckDBPyConnection, run: RunDir, counted: dict[int, CountedUnit], manifest: Manifest
) -> None:
    """Write stats/units.parquet, and its checksum to the manifest."""
    claim_rows = [
        {"unit": number, "claim": unit.claim.name, "num_claims": unit.num_claims} for number, unit in counted.items()
    ]
    claim_schema = pa.schema([STATS_UNITS.schema.field(name) for name in ("unit", "claim", "num_claims")])
    connection.register("claims", pa.Table.from_pylist(claim_rows, schema=claim_schema))
    rows = connection.sql(query("units", units=read_parquet(run.units))).to_arrow_table()
    with table_writer(run.stats_file("units"), STATS_UNITS.schema, manifest=manifest) as writer:
        writer.write_table(rows.select(STATS_UNITS.schema.names).cast(STATS_UNITS.schema))


def write_run_stats(
    run: RunDir,
    job: JobConfig,
    shards: list[Shard],
    counts: dict[str, Any],
    equality: dict[str, Any],
    manifest: Manifest | None = None,
) -> None:
    """Write stats/run.parquet, the last file of a run: for the report, a run with this file is finished.

    Args:
        manifest: gets the checksum of the file.
    """
    row = {
        "run": run.root.name,
        "version": __version__,
        "model": job.model.path,
        "dtype": job.precision,
        "finished_s": unix_s(),
        "num_shards": len(shards),
        "unreadable_shards": sum(shard.problem is not None for shard in shards),
        "input_rows": counts["input_rows"],
        "rows": counts["rows"],
        "distinct_tokens": counts["distinct_tokens"],
        "replicated_tokens": _replicated_tokens(run),
        "predicted_computed_tokens": counts["computed_tokens"],
        **{f"predicted_{name}": counts[name] for name, _, _ in PREDICTIONS},
        **_expert_prediction(run),
        **equality,
        **job.pricing.model_dump(),
    }
    with table_writer(run.stats_file("run"), STATS_RUN.schema, manifest=manifest) as writer:
        writer.write_table(pa.Table.from_pylist([row], schema=STATS_RUN.schema))


def _expert_prediction(run: RunDir) -> dict[str, float | None]:
    """Return the expected balance of experts' work, by the placement of the plan or of a controller."""
    tables = read_expert_tables(run).values()
    tokens = sum(float(group.load_of_slot.sum()) for group in tables)
    if not tokens:
        return {"predicted_expert_max_over_mean": None, "predicted_expert_bound": None}
    weighted = [(float(group.load_of_slot.sum()) / tokens, group) for group in tables]
    return {
        "predicted_expert_max_over_mean": sum(weight * group.max_over_mean for weight, group in weighted),
        "predicted_expert_bound": sum(weight * group.bound_over_mean for weight, group in weighted),
    }


def _replicated_tokens(run: RunDir) -> int:
    """Return the prompt tokens that ok rows computed again on purpose; stats/requests has 0 for duplicates."""
    path, total = run.stats_file("requests"), 0
    with own_file(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["status", "replicated_tokens"]):
            delivered = pc.equal(batch["status"], "ok")
            total += pc.sum(batch["replicated_tokens"].filter(delivered)).as_py() or 0
    return total
