"""Every path in a run folder, and what its run.json says."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.checked_json import read_json
from batchinfer.records import InputError, Shard

LINE_FILES = {"parquet": (), "jsonl": (".jsonl",), "openai": (".jsonl", ".errors.jsonl")}  # by output.format
LAUNCHERS = ("slurm", "k8s", "ray")  # each has a folder of what was sent to its clusters
DELETE_STATISTICS = "delete it: statistics do without it"  # what to do when a session's are damaged


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run folder.

    job.toml  run.json  tokens/<shard>.parquet   plan/{units,requests,duplicates,summary,experts}.parquet
    units/<unit>/<claim>/{lease.json,claim.json,part-<number>-<digest>.parquet}   done/<unit>
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
        """Sorted token ids of a plan that is being made; gone when it is complete."""
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
        """What only living processes need."""
        return self.root / "work"

    @property
    def finish_scratch(self) -> Path:
        return self.root / "work" / "finish"

    @property
    def published(self) -> Path:
        """What `finish` has put where output.publish says."""
        return self.root / "published.json"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def goal(self) -> Path:
        """When a submitted run is to end and what it may cost."""
        return self.slurm / "goal.json"

    def heartbeat(self, session: str) -> Path:
        """A session's sign of life; gone when it has ended."""
        return self.root / "work" / "sessions" / f"{session}.json"

    def kv_transfers(self, session: str) -> Path:
        """KV on its way between hosts; gone with the command that sends it."""
        return self.root / "work" / f"transfers-{session}"

    def meeting(self, group: str) -> Path:
        """Where a group of processes on several nodes meets."""
        return self.root / "work" / f"meeting-{group}.json"

    @property
    def quarantine(self) -> Path:
        """Damaged files that were set aside."""
        return self.root / "quarantine"

    def tokens(self, shard: int) -> Path:
        return self.root / "tokens" / f"{shard:05d}.parquet"

    def token_checksums(self, shard: int) -> Path:
        """The checksums of a token file until run.json has them: a plan that was interrupted goes on with it."""
        return self.root / "tokens" / f"{shard:05d}.json"

    @property
    def unit_folders(self) -> Path:
        return self.root / "units"

    @property
    def done_marks(self) -> Path:
        """One file per unit that is done, all in one folder: a single listing tells which are."""
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
        """Steps that a session has not committed yet."""
        return self.stats / "steps" / f"{session}.journal"

    def session_stats(self, table: str, session: str, part: int | None = None) -> Path:
        return self.stats / table / f"{session}{'' if part is None else f'-{part:05d}'}.parquet"


def launcher_folder(run: RunDir, launcher: str) -> Path:
    """What was sent to a cluster by one of LAUNCHERS, and what its tasks said."""
    return run.root / launcher


def send_lock(run: RunDir) -> Path:
    """Held by who sends or ends tasks."""
    return run.root / "send.lock"


def follower_record(run: RunDir) -> Path:
    """Which command stays and sets the number of tasks on Slurm."""
    return run.slurm / "follower.json"


def submission_records(run: RunDir, launchers: Sequence[str] = LAUNCHERS) -> list[Path]:
    """The records of all that was ever sent to clusters, by these launchers."""
    return [path for name in launchers for path in sorted(launcher_folder(run, name).glob("[0-9]*.json"))]


def is_run_folder(folder: str) -> bool:
    """Whether a folder holds a run; its files are no data of a job that does not name it."""
    return all(os.path.isfile(path) for path in (RunDir(Path(folder)).run_json, RunDir(Path(folder)).job))


def was_planned(run: RunDir) -> bool:
    """Whether a plan was begun in this folder, which has run.json unless that was lost."""
    return run.job.exists() and any(path.exists() for path in (run.run_json, run.lock, run.unit_folders))


def output_files(run: RunDir, shard_name: str, form: str) -> list[Path]:
    """The files of a shard's outputs by output.format: the Parquet file, then those of lines."""
    table = run.output(shard_name)
    return [table, *(table.with_suffix(suffix) for suffix in LINE_FILES[form])]


def read_state(run: RunDir) -> dict[str, Any]:
    """What run.json says.

    Raises:
        DamagedFileError: it is missing or damaged.
    """
    return read_json(run.run_json, "state", "shards", remedy=plan_again(run.root))


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


def refuse_bad_rows(run: RunDir) -> None:
    """What --strict means once a plan is made: no bad row and no unreadable shard in it.

    Raises:
        InputError: the plan holds one; the message names the first unreadable shard.
    """
    state = read_state(run)
    unreadable = [shard["path"] for shard in state["shards"] if shard["problem"] is not None]
    num_bad = state.get("counts", {}).get("bad_rows", 0)
    if unreadable or num_bad:
        named = f" ({unreadable[0]})" if unreadable else ""
        raise InputError(
            f"the plan in {run.root} holds {num_bad} bad rows and {len(unreadable)} unreadable shards{named}; "
            "correct the input and plan into another output.dir, or go on without --strict"
        )


def plan_again(root: Path) -> str:
    """What to do when a file of a plan is damaged."""
    return f"`batchinfer plan --again {root}` makes it anew and keeps what is computed"


def finish_again(root: Path) -> str:
    """What to do when a file that `finish` wrote is damaged."""
    return f"`batchinfer finish {root}` writes all outputs again"
