"""`Job`: planning, running and reading a job from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.api.answers import Answers
from batchinfer.api.display import Progress, check_progress
from batchinfer.api.job_keys import JobKeys
from batchinfer.api.plain_values import plain, with_schema
from batchinfer.api.process import CommandProcess
from batchinfer.api.settings import working_folder
from batchinfer.config import JobConfig, job_of_table, load_job
from batchinfer.data.parquet import own_file
from batchinfer.finish.early import EarlyRows
from batchinfer.manifest import Manifest
from batchinfer.records import IncompleteRunError
from batchinfer.run.planned import run_of
from batchinfer.run.store.interface import ALL_PARTS, Part
from batchinfer.run.store.open import storage_of
from batchinfer.rundir import RunDir, read_state

# An Arrow thread that releases Python bytes while the caller's interpreter ends would abort the process.
WITHOUT_THREADS = {"use_threads": False}
SLICE_BYTES = 1 << 20  # of rows converted to Python objects at a time, which may be 50 times larger (logprobs)

Start = Callable[[str, JobConfig, Progress], AbstractContextManager[CommandProcess]]


class Job:
    """A job on this machine, from the keys of a job file; paths are relative to the working folder.

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
        ConfigError: a key is missing, not known, or has an impossible value.
    """

    def __init__(self, table: JobKeys | Mapping[str, Any]) -> None:
        parts = plain(table)
        if isinstance(parts.get("sampling"), dict):
            parts["sampling"] = with_schema(parts["sampling"])
        self.config: JobConfig = job_of_table(parts, Path("Job"), working_folder())
        self._start: Start = CommandProcess

    @classmethod
    def from_toml(cls, path: str | Path) -> Job:
        """Return the job of a job file; paths in the file are relative to its folder.

        Raises:
            ConfigError: the file cannot be read, or a key is missing, not known, or has an impossible value.
        """
        return cls.of(load_job(path))

    @classmethod
    def of(cls, config: JobConfig, start: Start = CommandProcess) -> Job:
        """Return the job of a checked configuration; `start` starts its commands."""
        job = cls.__new__(cls)
        job.config, job._start = config, start
        return job

    @property
    def folder(self) -> Path:
        """The run folder, which is also an argument of commands: `batchinfer report FOLDER`."""
        return storage_of(self.config).run.root

    def plan(self, *, progress: Progress = True) -> dict[str, Any]:
        """Check and tokenise every row and order the requests, as `batchinfer plan`; an existing plan stays.

        Returns:
            The plan's counts and predictions: plan/summary in `batchinfer schema --stats`.

        Raises:
            BatchinferError: the job, its input or its model is wrong; see records.py for the classes.
        """
        self._run("plan", progress)
        return dict(read_state(self._run_dir())["counts"])

    def run(self, *, progress: Progress = True) -> None:
        """Plan, compute and finish, as `batchinfer run`; a call with the same folder continues an interrupted one.

        Rows that cannot be computed get the status 'error' and raise nothing.

        Args:
            progress: True: the command's bars on a terminal, a bar in a notebook, elsewhere a line now and then; False:
                nothing; "tqdm": bars everywhere; or a function, which is called in this thread with a title
                ("tokenise", "load", "work", "tokens", "finish"), the number done and the total; "load" counts bytes of
                weights, "work" requests.

        Raises:
            ConfigError: `progress` is none of these.
            BatchinferError: the job, its input or its model is wrong, or its ranks fail.
            KeyboardInterrupt: the call was interrupted; finished requests are kept.
            InterruptedRunError: the job's process got SIGTERM or SIGINT; finished requests are kept.
        """
        self._run("run", progress)

    def rows(self, *, progress: Progress = True) -> Iterator[dict[str, Any]]:
        """Run the job and yield each output row once, in any order, when it is durable (cluster.commit_seconds).

        Rows of several shards can only be distinguished by their ids. The job stops if the iterator is closed or
        garbage-collected.

        Raises:
            BatchinferError, KeyboardInterrupt, InterruptedRunError: as `run`.
        """
        check_progress(progress)
        return self._rows(progress)

    def _rows(self, progress: Progress) -> Iterator[dict[str, Any]]:
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
        """Return the job's progress, also if another process runs it, as `batchinfer status --json`.

        Raises:
            ConfigError, RunMismatchError: the folder has no plan, or another job's.
        """
        from batchinfer.status.status import StatusReader

        return asdict(StatusReader(self._run_dir(may_be_planning=True), storage_of(self.config)).read())

    def outputs(self) -> Answers:
        """Return all output rows in input order, shard by shard.

        Raises:
            IncompleteRunError: the job is not finished.
            ConfigError, RunMismatchError: the folder has no plan, or another job's; or an output file is damaged.
        """
        table: Answers = pa.concat_tables([file.read(**WITHOUT_THREADS) for _, file in self._output_files()])
        return table

    def report(self) -> dict[str, Any]:
        """Return the report's figures, as `batchinfer report --json`.

        The key "unfinished" has the progress of an unfinished job, and is None for a finished one.

        Raises:
            ConfigError, RunMismatchError: the folder has no run, or another job's.
        """
        from batchinfer.commands.so_far import report_document

        return report_document(self._run_dir(*ALL_PARTS, may_be_planning=True).root)

    def _run(self, command: str, progress: Progress) -> None:
        check_progress(progress)
        with self._start(command, self.config, progress) as process:
            while not process.ended():
                pass

    def _run_dir(self, *parts: Part, may_be_planning: bool = False) -> RunDir:
        return run_of(self.config, "call plan() or run() first", *parts, may_be_planning=may_be_planning)

    def _output_files(self) -> Iterator[tuple[int, pq.ParquetFile]]:
        """Yield (index of a shard, its output file); the file is compared with its checksum while it is read."""
        run = self._run_dir("outputs")
        state = read_state(run)
        if "finished" not in state:
            raise IncompleteRunError(f"{run.root} is not finished; call run(), which continues where the job stopped")
        manifest = Manifest(run.root, state["files"])
        for shard in state["shards"]:
            if shard["problem"] is None:
                path = run.output(shard["name"])
                with own_file(path), pa.PythonFile(manifest.open(path), mode="r") as file:
                    yield shard["index"], pq.ParquetFile(file, pre_buffer=False)


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
