"""A job as an object: plan it, run it, read what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.api.process import CommandProcess, Progress
from batchinfer.config import JobConfig, job_of_table, load_job
from batchinfer.data.parquet import own_file
from batchinfer.finish.early import EarlyRows
from batchinfer.manifest import Manifest
from batchinfer.records import IncompleteRunError
from batchinfer.run.open_storage import storage_of
from batchinfer.run.planned import run_of
from batchinfer.run.storage import ALL_PARTS, Part
from batchinfer.rundir import RunDir, read_state

# A thread of Arrow's that lets go of bytes of Python while the caller's interpreter ends would abort the process.
WITHOUT_THREADS = {"use_threads": False}
SLICE_BYTES = 1 << 20  # of rows that are Python objects at a time: log-probabilities are 50 times as large

Start = Callable[[str, JobConfig, Progress | None], AbstractContextManager[CommandProcess]]


class Job:
    """A job on this machine, by the keys of a job file; relative paths count from the working folder.

    >>> job = batchinfer.Job(
    ...     {
    ...         "input": {"files": ["sample_data/prompts/part-00000.parquet"], "messages": "messages"},
    ...         "output": {"dir": "runs/api"},
    ...         "model": {"path": "sample_data/model", "dtype": "float32"},
    ...         "sampling": {"max_tokens": 2},
    ...     }
    ... )
    >>> job.plan()["rows"]
    130
    >>> job.run()
    >>> job.outputs().num_rows
    130
    >>> job.status()["activity"]
    'finished'
    >>> job.report()["output_tokens"] <= 260
    True

    Args:
        table: the parts with their keys, as in TOML.

    Raises:
        ConfigError: a key is missing, not known, or has a value that it cannot have.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.config: JobConfig = job_of_table(plain(table), Path("Job"), Path.cwd())
        self._start: Start = CommandProcess

    @classmethod
    def from_toml(cls, path: str | Path) -> Job:
        """The job of a job file; relative paths count from its folder.

        Raises:
            ConfigError: as of a table; or the file cannot be read.
        """
        return cls.of(load_job(path))

    @classmethod
    def of(cls, config: JobConfig, start: Start = CommandProcess) -> Job:
        """The job of keys that are checked already; `start` starts its commands."""
        job = cls.__new__(cls)
        job.config, job._start = config, start
        return job

    @property
    def folder(self) -> Path:
        """The run folder, which the commands take as well: `batchinfer report FOLDER`."""
        return storage_of(self.config).run.root

    def plan(self, *, progress: Progress | None = None) -> dict[str, Any]:
        """Check and tokenise every row and order the requests: `batchinfer plan`; a plan that is there stays.

        Returns:
            What the plan counts and predicts: plan/summary in `batchinfer schema --stats`.

        Raises:
            BatchinferError: the job, its input or its model cannot work; see records.py for the classes.
        """
        self._run("plan", progress)
        return dict(read_state(self._run_dir())["counts"])

    def run(self, *, progress: Progress | None = None) -> None:
        """Plan, compute and finish: `batchinfer run`. After an interrupt, a call with the same folder goes on.

        Rows that cannot be computed are rows with status 'error' and raise nothing.

        Args:
            progress: called in this thread with a title ("tokenise", "load", "work", "tokens", "finish"), how many are
                done, of how many; "load" counts bytes of weights, "work" requests.

        Raises:
            BatchinferError: the job, its input or its model cannot work, or its ranks fail.
            KeyboardInterrupt: what is finished is kept.
            InterruptedRunError: somebody has sent SIGTERM or SIGINT to the job's process; what is finished is kept.
        """
        self._run("run", progress)

    def rows(self, *, progress: Progress | None = None) -> Iterator[dict[str, Any]]:
        """Run, and give each output row once, in any order, as soon as it is durable (cluster.commit_seconds).

        With several shards rows are told apart by their ids. An iterator that is closed or forgotten stops the job.

        Raises:
            BatchinferError, KeyboardInterrupt, InterruptedRunError: as `run`.
        """
        given: set[tuple[int, int, int]] = set()  # (shard, row, sample)
        early = EarlyRows(RunDir(self.folder), self.config)
        with self._start("run", self.config, progress) as process:
            while not process.ended(within_s=0.1):
                for shard, table in early.new():
                    yield from _not_given(table, shard, given)
        for shard, file in self._output_files():
            for group in range(file.num_row_groups):
                yield from _not_given(file.read_row_group(group, **WITHOUT_THREADS), shard, given)

    def status(self) -> dict[str, Any]:
        """How far it is, also while another process runs it: `batchinfer status --json`.

        Raises:
            ConfigError, RunMismatchError: the folder holds no plan, or another job's.
        """
        from batchinfer.slurm.status import StatusReader
        from batchinfer.slurm.status_text import as_document

        return as_document(StatusReader(self._run_dir(may_be_planning=True), storage_of(self.config)).read())

    def outputs(self) -> pa.Table:
        """All output rows in input order, shard by shard.

        Raises:
            IncompleteRunError: the job is not finished.
            ConfigError, RunMismatchError: the folder holds no plan, or another job's; or an output file is damaged.
        """
        return pa.concat_tables([file.read(**WITHOUT_THREADS) for _, file in self._output_files()])

    def report(self) -> dict[str, Any]:
        """The figures: `batchinfer report --json`; "unfinished" says how much is done, and is None when all is.

        Raises:
            ConfigError, RunMismatchError: the folder holds no run, or another job's.
        """
        from batchinfer.commands.so_far import report_document

        return report_document(self._run_dir(*ALL_PARTS, may_be_planning=True).root)

    def _run(self, command: str, progress: Progress | None) -> None:
        with self._start(command, self.config, progress) as process:
            while not process.ended():
                pass

    def _run_dir(self, *parts: Part, may_be_planning: bool = False) -> RunDir:
        return run_of(self.config, "call plan() or run() first", *parts, may_be_planning=may_be_planning)

    def _output_files(self) -> Iterator[tuple[int, pq.ParquetFile]]:
        """(shard, its output file, compared with what was written as it is read)."""
        run = self._run_dir("outputs")
        state = read_state(run)
        if "finished" not in state:
            raise IncompleteRunError(f"{run.root} is not finished; call run(), which goes on where it stopped")
        manifest = Manifest(run.root, state["files"])
        for shard in state["shards"]:
            if shard["problem"] is None:
                path = run.output(shard["name"])
                with own_file(path), pa.PythonFile(manifest.open(path), mode="r") as file:
                    yield shard["index"], pq.ParquetFile(file, pre_buffer=False)


def plain(value: Any) -> Any:
    """A value as TOML would have it: paths are texts, tuples and arrays lists, all mappings dicts, numbers Python's."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's numbers and arrays
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _not_given(table: pa.Table, shard: int, given: set[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
    slice_rows = max(1, SLICE_BYTES * len(table) // max(1, table.nbytes))
    for first in range(0, len(table), slice_rows):
        rows = table.slice(first, slice_rows)
        keys = [(shard, *key) for key in zip(rows["row"].to_pylist(), rows["sample"].to_pylist(), strict=True)]
        if given.issuperset(keys):
            continue
        for key, row in zip(keys, rows.to_pylist(), strict=True):
            if key not in given:
                given.add(key)
                yield row
