"""One command on one machine and its times, as a row of stats/nodes."""

from __future__ import annotations

import os
import secrets
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from batchinfer.clock import unix_s
from batchinfer.config import ClusterConfig
from batchinfer.data.parquet import read_rows, table_writer
from batchinfer.data.schemas.statistics import STATS_NODES
from batchinfer.equal_rows import EqualRows
from batchinfer.host_info import node_name
from batchinfer.progress import note
from batchinfer.records import BatchinferError, ConfigError, DamagedFileError, InterruptedRunError
from batchinfer.run.heartbeat import Heartbeat, signs_of_life
from batchinfer.run.store.interface import Storage, put_statistics
from batchinfer.rundir import RunDir, read_state
from batchinfer.stop_signals import StopSignal


class Session:
    """Keeps one row of stats/nodes up to date from the process's start to its end, whatever the end is.

    The row says 'running' until the session closes, so a killed session is seen as one.
    """

    _sessions = 0  # of this process

    def __init__(self, command: str, stop: StopSignal) -> None:
        self._stop = stop
        self.command = command
        self.node = node_name()
        # the first session of a process began with it: starting Python and importing count as well
        self.start_s = unix_s() if Session._sessions else process_start_s()
        # not by the number of this process: another container on this node may have one of the same number
        self.name = f"{int(unix_s() * 1000):013d}-{self.node}-{secrets.token_hex(4)}"
        Session._sessions += 1
        self._cluster: ClusterConfig | None = None
        self._ranks = range(0)
        self.restarts = 0  # of the ranks, after one of them died
        self.moves = 0  # of running requests from one rank to another
        self.calibration_tokens = 0  # run before the first step
        self.placements = 0  # of experts while the ranks ran
        self.device: str | None = None
        self.equal_rows: EqualRows | None = None  # of the ranks; None: none has loaded
        self.first_prefill_s: float | None = None
        self._run: RunDir | None = None
        self._run_id: str | None
        self._storage: Storage
        self._heart: Heartbeat | None = None

    def attach(self, storage: Storage) -> None:
        """Start recording, once the run folder is known to be this job's."""
        self._storage, self._run = storage, storage.run
        self._run_id = _run_id(storage.run)
        self._heart = Heartbeat(storage, self.name, self.command)
        self._heart.start()  # before the row: a running session without a heartbeat file would count as unknown
        self.record("running")

    def hold_ranks(self, cluster: ClusterConfig, ranks: range) -> None:
        """Record that the command holds these ranks of the job on this node from now on."""
        self._cluster, self._ranks = cluster, ranks
        self.record("running")  # now: loading takes long, and the command may be killed during it

    def check_run(self) -> None:
        """Check that the run folder still holds the run that this session works for.

        Raises:
            ConfigError: it was deleted or moved, and may hold another run by now, which must not get these results.
        """
        if self._run is not None and self._is_gone(self._run):
            raise ConfigError(
                f"the run folder {self._run.root} was deleted, moved or replaced while this command worked in it; "
                "run the job again (if files are left in the folder, delete it first)"
            )

    def _is_gone(self, run: RunDir) -> bool:
        if self._storage.copy is not None:  # the run itself is in a bucket
            return False
        try:
            if run.session_stats("nodes", self.name).exists():  # written again, perhaps, while the folder was deleted
                return self._run_id is not None and not run.run_json.exists() and not run.job.exists()
            return _run_id(run) != self._run_id
        except (DamagedFileError, OSError):  # run.json is there; or the disk fails, which the next write tells
            return False

    def record(self, state: str) -> None:
        """Publish the row with the end set to now, unless the run is gone."""
        if self._run is None or self._is_gone(self._run):
            return
        row = {
            "session": self.name,
            "command": self.command,
            "node": self.node,
            "num_ranks": len(self._ranks),
            "first_rank": self._ranks.start,
            "mode": None if self._cluster is None else self._cluster.mode,
            "prefill_ranks": 0 if self._cluster is None else self._cluster.num_prefill_ranks,
            "decode_ranks": 0 if self._cluster is None else self._cluster.num_decode_ranks,
            "device": self.device,
            **asdict(self.equal_rows or EqualRows()),
            "restarts": self.restarts,
            "moves": self.moves,
            "calibration_tokens": self.calibration_tokens,
            "placements": self.placements,
            "start_s": self.start_s,
            "first_prefill_s": self.first_prefill_s,
            "end_s": unix_s(),
            "state": state,
        }
        with table_writer(self._run.session_stats("nodes", self.name), STATS_NODES.schema) as writer:
            writer.write_table(pa.Table.from_pylist([row], schema=STATS_NODES.schema))
        put_statistics(self._storage, self.name)
        if self._heart is not None:
            self._heart.beat()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._stop.requested and not isinstance(error, InterruptedRunError):
            # an interrupted library call may have raised its own error instead
            error = InterruptedRunError("stopped by a signal; run the same command to go on")
        try:
            if self._run is not None and self._run.root.is_dir():
                interrupted = isinstance(error, InterruptedRunError)
                self.record("interrupted" if interrupted else "failed" if error is not None else "done")
        except (BatchinferError, OSError) as unwritten:
            if error is None:
                raise
            # what ended the command decides on its exit code: after 75 a cluster starts it again
            note(f"warning: {unwritten}; the report does not know how this command ended")
        finally:
            if self._heart is not None:
                self._heart.stop()
        if isinstance(error, InterruptedRunError):
            raise error from None


def keep_last_signs(storage: Storage) -> None:
    """Set the end of killed sessions in stats/nodes to their last heartbeat.

    Their own rows end with the last commit, which may be much earlier.

    Raises:
        ConfigError: a file is damaged or cannot be written.
    """
    for session, sign in signs_of_life(storage.run).items():
        path = storage.run.session_stats("nodes", session)
        if sign.may_live or not path.exists():
            continue
        (row,) = read_rows(path)
        if row["state"] == "running" and row["end_s"] < sign.time_s:
            with table_writer(path, STATS_NODES.schema) as writer:
                writer.write_table(pa.Table.from_pylist([{**row, "end_s": sign.time_s}], schema=STATS_NODES.schema))
            put_statistics(storage, session)


def _run_id(run: RunDir) -> str | None:
    """Return the id in run.json, which a later run in the same folder does not have; None if there is no run.

    Raises:
        DamagedFileError: run.json is damaged.
    """
    return str(read_state(run).get("id")) if run.run_json.exists() else None


def process_start_s() -> float:
    """Return the Unix time when this process started; without /proc, when it imported this module."""
    try:
        # field 22 of stat, counted after the parenthesised name, is the start in clock ticks since boot
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _FIRST_LINE_S
    return unix_s() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


_FIRST_LINE_S = unix_s()
