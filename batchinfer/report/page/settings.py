"""The settings of a run for its page: model, sampling, command, version and hosts, then other keys of the job."""

from typing import Any

from batchinfer.config import JobConfig
from batchinfer.records import ConfigError
from batchinfer.report.computed import Computed
from batchinfer.run.job_file import recorded_job
from batchinfer.run.store.interface import is_in_bucket
from batchinfer.rundir import RunDir

MAX_HOSTS = 4  # hosts that are named
NAMED = {"model.path", "model.dtype", "output.dir"}  # keys of the job in rows of their own


def read_settings(computed: Computed, run: RunDir, *, is_finished: bool) -> list[tuple[str, str]]:
    """Return names and values of a run's settings; keys of the job that have their defaults are left out.

    Args:
        computed: the run's tables.
        run: the run folder, or a temporary one with the figures so far of an unfinished run.
        is_finished: whether `run` is the run folder itself.
    """
    row = computed.one_row("run")
    held = computed.records(
        "SELECT node, command, max(num_ranks) AS num_ranks FROM nodes WHERE num_ranks > 0 GROUP BY ALL ORDER BY ALL"
    )
    hosts = [f"{one['node']} ({one['num_ranks']} rank{'s' if one['num_ranks'] > 1 else ''})" for one in held]
    more = f" and {len(hosts) - MAX_HOSTS:,} more" if len(hosts) > MAX_HOSTS else ""
    commands = sorted({one["command"] for one in held})
    job = _job(run)
    folder = str(run.root)
    if job is not None and (not is_finished or is_in_bucket(job.output.dir)):
        folder = job.output.dir
    settings = [
        ("model", row["model"]),
        ("dtype", row["dtype"]),
        ("command", "; ".join(f"batchinfer {command} {folder}" for command in commands)),
        ("version", f"batchinfer {row['version']}"),
        ("hosts", ", ".join(hosts[:MAX_HOSTS]) + more),
        ("processor", row["processor"]),
        ("numerics", row["numerics"]),
    ]
    if job is not None:
        settings.insert(2, ("sampling", _sampling(job)))
        settings += _changed_keys(job)
    return [(name, str(value)) for name, value in settings if value]


def _job(run: RunDir) -> JobConfig | None:
    """Return the job that the run folder records; None without one that can be read."""
    try:
        return recorded_job(run) if run.job.is_file() else None
    except ConfigError:
        return None


def _sampling(job: JobConfig) -> str:
    temperature = "greedy" if job.sampling.temperature == 0 else f"temperature {job.sampling.temperature:g}"
    others = job.sampling.model_dump(exclude_defaults=True, exclude={"max_tokens", "temperature", "defaults"})
    words = [f"max_tokens {job.sampling.max_tokens}", temperature, *(f"{name} {of}" for name, of in others.items())]
    return ", ".join(words)


def _changed_keys(job: JobConfig) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    parts: dict[str, Any] = job.model_dump(exclude_defaults=True, exclude={"sampling"})
    for part, keys in parts.items():
        found += [(f"{part}.{name}", _text(value)) for name, value in keys.items()]
    return [(name, value) for name, value in found if name not in NAMED]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
