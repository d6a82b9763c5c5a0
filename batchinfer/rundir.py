"""The paths of a run folder, and the content of its run.json."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.records import InputError, Shard
from batchinfer.sanitize import count_text

LINE_FILES = {"parquet": (), "jsonl": (".jsonl",), "openai": (".jsonl", ".errors.jsonl")}  # by output.format
CLAIM = "claim.json"  # in the folder of a claim
LAUNCHERS = ("slurm", "k8s", "ray")  # each has a folder with records of its submissions
DELETE_STATISTICS = "delete it: statistics do without it"  # remedy for damaged statistics of a session


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run folder.

    job.toml  run.json  tokens/<shard>.parquet   plan/{units,requests,duplicates,summary,experts}.parquet
    units/<unit>/<claim>/{claim.json,part-<number>-<digest>.parquet}   done/<unit>   work/workers/<token>
    quarantine/…   damaged files, by the path that they had
    outputs/<name>.parquet, and .jsonl, .errors.jsonl by output.format   dataset/{README.md,data/} by output.push
    stats/{requests,units,run}.parquet   stats/{steps,experts,nodes,kv}/<session>*.parquet
    published.json  work/sessions/<session>.json
    {slurm,k8s,ray}/<submission>.json  slurm/{goal,follower}.json  ray/{wanted,tasks}.json  {slurm,ray}/*.log
    """

    root: Path
    uri: str | None = None  # of the run folder in an object store, of which `root` is this node's copy

    @property
    def shown(self) -> str:
        return self.uri or str(self.root)

    @property
    def job(self) -> Path:
        return self.root / "job.toml"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def requests(self) -> Path:
        return self.root / "plan" / "requests.parquet"

    @property
    def duplicates(self) -> Path:
        return self.root / "plan" / "duplicates.parquet"

    @property
    def units(self) -> Path:
        return self.root / "plan" / "units.parquet"

    @property
    def summary(self) -> Path:
        return self.root / "plan" / "summary.parquet"

    @property
    def experts(self) -> Path:
        return self.root / "plan" / "experts.parquet"

    @property
    def plan_scratch(self) -> Path:
        """Sorted token ids of an unfinished plan; deleted when the plan is complete."""
        return self.root / "plan" / ".sorted"

    @property
    def outputs(self) -> Path:
        return self.root / "outputs"

    @property
    def dataset(self) -> Path:
        """The outputs as a Hugging Face dataset."""
        return self.root / "dataset"

    @property
    def stats(self) -> Path:
        return self.root / "stats"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def lock(self) -> Path:
        return self.root / "plan.lock"

    @property
    def work(self) -> Path:
        """Files that only running processes need."""
        return self.root / "work"

    @property
    def finish_scratch(self) -> Path:
        return self.root / "work" / "finish"

    @property
    def published(self) -> Path:
        """The record of files that `finish` has copied to output.publish."""
        return self.root / "published.json"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def goal(self) -> Path:
        """The deadline and cost limit of a submitted run."""
        return self.slurm / "goal.json"

    def heartbeat(self, session: str) -> Path:
        """Return the path of a session's heartbeat; the file is deleted when the session ends."""
        return self.root / "work" / "sessions" / f"{session}.json"

    def kv_transfers(self, session: str) -> Path:
        """Return the folder of KV on its way between hosts; it is deleted by the command that sends."""
        return self.root / "work" / f"transfers-{session}"

    def meeting(self, group: str) -> Path:
        """Return the file through which a group's processes on several nodes find each other."""
        return self.root / "work" / f"meeting-{group}.json"

    @property
    def quarantine(self) -> Path:
        """Damaged files that were moved aside."""
        return self.root / "quarantine"

    def tokens(self, shard: int) -> Path:
        return self.root / "tokens" / f"{shard:05d}.parquet"

    def token_checksums(self, shard: int) -> Path:
        """Return the path of a token file's checksums, for resuming an interrupted plan; later run.json has them."""
        return self.root / "tokens" / f"{shard:05d}.json"

    @property
    def unit_folders(self) -> Path:
        return self.root / "units"

    @property
    def done_marks(self) -> Path:
        """The folder with one file per finished unit: a single listing shows all of them."""
        return self.root / "done"

    def unit(self, unit: int) -> Path:
        return self.unit_folders / f"{unit:06d}"

    def claim(self, unit: int, claim: str) -> Path:
        return self.unit(unit) / claim

    def done(self, unit: int) -> Path:
        return self.done_marks / f"{unit:06d}"

    def output(self, shard_name: str) -> Path:
        return self.outputs / shard_name

    def stats_file(self, table: str) -> Path:
        return self.stats / f"{table}.parquet"

    def step_journal(self, session: str) -> Path:
        """Return the path of the steps that a session has not committed yet."""
        return self.stats / "steps" / f"{session}.journal"

    def session_stats(self, table: str, session: str, part: int | None = None) -> Path:
        return self.stats / table / f"{session}{'' if part is None else f'-{part:05d}'}.parquet"


def launcher_folder(run: RunDir, launcher: str) -> Path:
    """Return the folder of a launcher's submissions and its tasks' logs."""
    return run.root / launcher


def worker_lease(run: RunDir, token: str) -> Path:
    """Return the lease of a worker that holds units, which is gone when the worker has ended."""
    return run.work / "workers" / token


def send_lock(run: RunDir) -> Path:
    """Return the path of the lock held while tasks are sent or ended."""
    return run.root / "send.lock"


def follower_record(run: RunDir) -> Path:
    """Return the path of the record of the command that adjusts the number of tasks on Slurm."""
    return run.slurm / "follower.json"


def submission_records(run: RunDir, launchers: Sequence[str] = LAUNCHERS) -> list[Path]:
    """Return the records of all submissions to clusters by these launchers."""
    return [path for name in launchers for path in sorted(launcher_folder(run, name).glob("[0-9]*.json"))]


def is_run_folder(folder: str) -> bool:
    """Return whether a folder holds a run; its files are not input of a job that does not name it."""
    return all(os.path.isfile(path) for path in (RunDir(Path(folder)).run_json, RunDir(Path(folder)).job))


def was_planned(run: RunDir) -> bool:
    """Return whether a plan was begun in this folder; the folder then has run.json, unless that was lost."""
    return run.job.exists() and any(path.exists() for path in (run.run_json, run.lock, run.unit_folders))


def output_files(run: RunDir, shard_name: str, form: str) -> list[Path]:
    """Return the files of a shard's outputs by output.format: the Parquet file, then the files of lines."""
    table = run.output(shard_name)
    return [table, *(table.with_suffix(suffix) for suffix in LINE_FILES[form])]


def read_state(run: RunDir) -> dict[str, Any]:
    """Return the content of run.json.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    return read_json(run.run_json, "state", "shards", remedy=replan_remedy(run.root))


def shards_to_state(shards: list[Shard]) -> dict[str, Any]:
    """Return the keys of run.json that list the shards. Shards with the same schema share one text."""
    key_of_schema: dict[str, str] = {}
    entries = [
        {**asdict(shard), "schema": key_of_schema.setdefault(shard.schema, str(len(key_of_schema)))} for shard in shards
    ]
    return {"shards": entries, "schemas": {key: schema for schema, key in key_of_schema.items()}}


def shards_of_state(state: dict[str, Any]) -> list[Shard]:
    """Return the shards that run.json lists. Earlier versions wrote the schema itself into the shard's entry."""
    schemas = state.get("schemas", {})
    return [Shard(**{**entry, "schema": schemas.get(entry["schema"], entry["schema"])}) for entry in state["shards"]]


def check_no_bad_rows(run: RunDir) -> None:
    """Check that a plan has no bad row and no unreadable shard, as --strict requires.

    Raises:
        InputError: the plan has one; the message names the first unreadable shard.
    """
    state = read_state(run)
    unreadable = [shard["path"] for shard in state["shards"] if shard["problem"] is not None]
    num_bad = state.get("counts", {}).get("bad_rows", 0)
    if unreadable or num_bad:
        named = f" ({unreadable[0]})" if unreadable else ""
        raise InputError(
            f"the plan in {run.root} holds {count_text(num_bad, 'bad row')} and "
            f"{count_text(len(unreadable), 'unreadable shard')}{named}; "
            "correct the input and plan into another output.dir, or go on without --strict"
        )


def replan_remedy(root: Path) -> str:
    """Return the remedy for a damaged file of a plan."""
    return f"`batchinfer plan --again {root}` plans again and keeps all computed results"


def refinish_remedy(root: Path) -> str:
    """Return the remedy for a damaged file that `finish` wrote."""
    return f"`batchinfer finish {root}` writes all outputs again"
