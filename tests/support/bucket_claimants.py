"""Workers that claim units of a run in a bucket, "compute" rows and commit them, in processes that may be killed.

    python bucket_claimants.py WORKER.json   {"endpoint", "uri", "folder", "num_units", "host", "is_calm", "request_s"}

Each unit has ROWS rows; each commit makes one more durable. Workers of one `host` see each other's processes, as on one
machine; those of several know of each other only what is in the bucket. Calm ones wait long for answers and give no
signs of life, so what they ask for does not depend on the time they take.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.faulty_store import Faults, faulty_store
from support.object_store import Server

ROOT = Path(__file__).parent.parent.parent
ROWS = 3
LEASE_S, BEAT_S = 2.0, 0.4


def work(options: dict[str, Any]) -> None:
    """Claim and compute until all units are done."""
    from batchinfer.controller import open_units
    from batchinfer.controller.open_units import OpenUnits
    from batchinfer.data import bucket
    from batchinfer.run import liveness
    from batchinfer.run.store import watch
    from batchinfer.run.store.bucket import BucketStorage
    from batchinfer.run.units.claims import UnitClaims
    from batchinfer.run.units.result_files import write_results

    bucket.REQUEST_S, bucket.FIRST_PAUSE_S, bucket.LONGEST_PAUSE_S = options["request_s"], 0.02, 0.1
    watch.LEASE_S, BucketStorage.beat_s = LEASE_S, BEAT_S
    if options["is_calm"]:
        bucket.REQUEST_S, watch.LEASE_S, BucketStorage.beat_s = 100.0, 1000.0, 1000.0
    open_units.FIRST_PAUSE_S = open_units.LONGEST_PAUSE_S = 0.2
    host = options["host"]
    if host is not None:
        liveness.socket = type("Other", (), {"gethostname": staticmethod(lambda: host)})  # type: ignore[assignment]
    storage = at(options)
    assert isinstance(storage, BucketStorage)
    units = OpenUnits(
        storage, [{"unit": unit, "num_requests": ROWS} for unit in range(options["num_units"])], start=None
    )
    with UnitClaims(storage) as claims:
        while not units.are_all_done(claims.completed):
            found = units.claim(claims, set())
            if found is None:
                time.sleep(0.05)
                continue
            claim = found[1]
            have = {row for path in claim.inherited for row in pq.read_table(path)["row"].to_pylist()}
            for number, row in enumerate(sorted(set(range(ROWS)) - have)):
                time.sleep(random.uniform(0, 0.02))
                table = pa.table({"unit": [claim.unit], "row": [row], "answer": [claim.unit * 1000 + row]})
                claims.add(claim, write_results(claim.folder, number, table))
            claims.complete(claim)


def at(options: dict[str, Any]) -> Any:
    """The storage; the folders that each worker works in are its own, as on nodes of a cluster."""
    from batchinfer.config import S3Config
    from batchinfer.run.store.bucket import BucketStorage

    storage = BucketStorage(options["uri"], S3Config(endpoint=options["endpoint"]), options["folder"])
    storage.run.root.mkdir(parents=True, exist_ok=True)
    return storage


class Workers:
    """Processes of this file, each of them started again when it was killed."""

    def __init__(
        self,
        endpoint: str,
        uri: str,
        folder: Path,
        *,
        num_units: int,
        rng: random.Random,
        is_calm: bool,
        request_s: float,
    ) -> None:
        self._common = {"endpoint": endpoint, "uri": uri, "num_units": num_units}
        self._common |= {"is_calm": is_calm, "request_s": request_s}
        self._folder, self._rng = folder, rng
        self._num_started = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        self.num_killed = 0

    def start(self) -> None:
        """One more."""
        number = self._num_started
        self._num_started += 1
        host = None if number % 2 else f"host-{number}"
        file = self._folder / f"worker-{number}.json"
        file.write_text(json.dumps({**self._common, "folder": str(self._folder / f"node-{number}"), "host": host}))
        path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
        log = open(self._folder / "workers.log", "ab")  # noqa: SIM115  (closed with the process)
        self.processes.append(
            subprocess.Popen([sys.executable, __file__, str(file)], env={**os.environ, "PYTHONPATH": path}, stderr=log)
        )
        log.close()

    def run(self, *, num_workers: int, num_kills: int, seconds: float, pause_s: float = 0.5) -> None:
        """Kill workers at random moments, start others in their place, until all is done."""
        deadline = time.monotonic() + seconds
        for _ in range(num_workers):
            self.start()
        while self.processes:
            assert time.monotonic() < deadline, (self._folder / "workers.log").read_text()
            time.sleep(self._rng.uniform(0, pause_s))
            ended = [process for process in self.processes if process.poll() is not None]
            assert all(process.returncode == 0 for process in ended), (self._folder / "workers.log").read_text()
            self.processes = [process for process in self.processes if process not in ended]
            if self.processes and self.num_killed < num_kills:
                process = self._rng.choice(self.processes)
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.processes.remove(process)
                self.num_killed += 1
                self.start()

    def end(self) -> None:
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait()


def mark_of(storage: Any, unit: int) -> dict[str, Any]:
    """Return the content of a unit's mark."""
    from batchinfer.checked_json import parse_json

    return parse_json(storage.bucket.read(f"done/{unit:06d}").data, "mark")


def disturbed(
    server: Server,
    folder: Path,
    name: str,
    faults: Faults,
    *,
    num_units: int,
    num_kills: int,
    num_workers: int = 3,
    seed: int = 0,
    pause_s: float = 0.5,
    is_calm: bool = False,
    request_s: float = 0.5,
) -> None:
    """Have units claimed by workers that are killed, in a store that fails, and check what they have done.

    request_s: how long they wait for a byte: less than faults.hold_s, more than a listing of all units takes.
    """
    rng = random.Random(seed)
    with faulty_store(server, faults) as url:
        uri = f"s3://runs/{name}"
        workers = Workers(url, uri, folder, num_units=num_units, rng=rng, is_calm=is_calm, request_s=request_s)
        try:
            workers.run(num_workers=num_workers, num_kills=num_kills, seconds=900, pause_s=pause_s)
        finally:
            workers.end()
        assert workers.num_killed == num_kills
    _check_all_done(server, folder, name, faults, num_units)


def _check_all_done(server: Server, folder: Path, name: str, faults: Faults, num_units: int) -> None:
    """Every unit has one mark, written once, whose files hold each of its rows once."""
    storage = at({"uri": f"s3://runs/{name}", "endpoint": server.endpoint, "folder": str(folder / "check")})
    marks = {unit: mark_of(storage, unit) for unit in range(num_units)}
    # created once, and never written over
    created = Counter(path for path in faults.written if "/done/" in path)
    assert created == {f"/runs/{name}/done/{unit:06d}": 1 for unit in range(num_units)}
    for unit, mark in marks.items():
        rows = []
        for number, (file, size) in enumerate(mark["files"].items()):
            target = folder / f"{unit}-{number}"
            assert storage.bucket.fetch(file, target)
            assert target.stat().st_size == size
            rows += pq.read_table(target).to_pylist()
        assert sorted(row["row"] for row in rows) == list(range(ROWS))
        assert all(row["answer"] == unit * 1000 + row["row"] for row in rows)


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text()))
