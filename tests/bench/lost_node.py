"""The cost of a lost node: seconds until another worker has its unit, and tokens computed twice.

A worker is killed with all its ranks (SIGKILL) in the middle of the only unit of a job, while another one waits for
work: on the same host, which sees at once that the process is gone, or with another host's name, which has to wait for
the lease. The run folder is on a disk, or in a bucket of a server on this machine: moto's, or Ceph's gateway.

    python tests/bench/lost_node.py [--repeat N] [--server radosgw] [--only disk] [--only another]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent.parent))

from batchinfer.run.store import watch
from support.faults import descendants
from support.jobs import batchinfer, output_bytes, write_job, write_questions
from support.object_store import Server, s3_server
from support.rgw import gateway

COMMIT_S = 5.0
ROWS, TOKENS, AT_ONCE = 60, 48, 6
WAIT_S = 300.0
WORK = [sys.executable, "-c", "from batchinfer.program import program; program()", "work"]
ELSEWHERE = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh"]


@dataclass(frozen=True)
class Loss:
    """The observations of one kill; times are seconds since the kill."""

    taken_s: float
    back_s: float  # until as many requests are durable as the killed worker had begun
    done_s: float  # until the whole unit is done
    kept: int  # requests that were durable at the kill
    again: float  # requests' worth of tokens that were computed for nothing and then again


class Disk:
    """The run folder on a disk."""

    name, lease_s = "disk", watch.LEASE_S

    def __init__(self, folder: Path, job: Path) -> None:
        self.run = folder / "run"
        self.job, self.options = job, ["--set", f"output.dir={self.run}"]

    @property
    def folder(self) -> Path:
        """Return the folder with the statistics of the whole run."""
        return self.run

    def on(self, node: str) -> list[str]:
        return self.options

    def num_durable(self) -> int:
        return sum(pq.read_metadata(path).num_rows for path in self.run.glob("units/000000/[0-9]*/part-*.parquet"))

    def claim(self) -> str | None:
        return max((path.name for path in self.run.glob("units/000000/[0-9]*")), default=None)

    def is_done(self) -> bool:
        return (self.run / "done" / "000000").exists()

    def outputs(self) -> dict[str, bytes]:
        return output_bytes(self.run)


class InBucket:
    """The run folder in a bucket."""

    name, lease_s = "bucket", watch.LEASE_S

    def __init__(self, folder: Path, job: Path, server: Server) -> None:
        self.job, self._server, self._folder, self._key = job, server, folder, folder.name
        self._client = server.client()

    def on(self, node: str) -> list[str]:
        settings = {
            "output.dir": f"s3://runs/{self._key}",
            "output.work_dir": self._folder / node,
            "s3.endpoint": self._server.endpoint,
        }
        return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]

    @property
    def folder(self) -> Path:
        """The killed worker's copy, in which `finish` has run."""
        (found,) = (self._folder / "a").glob(f"*/{self._key}")
        return found

    def num_durable(self) -> int:
        found = self._server.objects("runs", f"{self._key}/units/000000")
        return sum(pq.read_metadata(pa.BufferReader(data)).num_rows for name, data in found.items() if "part-" in name)

    def claim(self) -> str | None:
        found = self._server.objects("runs", f"{self._key}/units/000000")
        return max((name.split("/")[0] for name in found), default=None)

    def is_done(self) -> bool:
        return self._object("done/000000") is not None

    def outputs(self) -> dict[str, bytes]:
        found = self._server.objects("runs", self._key)
        return {name: data for name, data in found.items() if name.startswith("outputs/")}

    def _object(self, name: str) -> bytes | None:
        try:
            return bytes(self._client.get_object(Bucket="runs", Key=f"{self._key}/{name}")["Body"].read())
        except self._client.exceptions.NoSuchKey:
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=2, help="kills of each kind")
    parser.add_argument("--server", choices=("moto", "radosgw"), default="moto", help="that has the bucket")
    parser.add_argument(
        "--only", action="append", default=[], choices=["disk", "bucket", "same", "another"], help="kinds or hosts"
    )
    options = parser.parse_args()
    kinds = [kind for kind in ("disk", "bucket") if kind in options.only] or ["disk", "bucket"]
    hosts = {"same": ("the same host", []), "another": ("another host", ELSEWHERE)}
    wanted = [hosts[name] for name in hosts if name in options.only] or list(hosts.values())
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(s3_server() if options.server == "moto" else gateway(scratch / "ceph"))
        server.make_bucket("runs")
        job, expected = _job(scratch)
        print(
            f"one unit of {ROWS} requests, {AT_ONCE} at once, commits every {COMMIT_S:g} s; medians of {options.repeat}"
        )
        names = f"{'lease s':>7} {'taken s':>8} {'back s':>7} {'done s':>7} {'kept':>5} {'again':>6}"
        print(f"{'run folder':<11} {'other worker on':<16} {names}")
        for kind in kinds:
            for where, prefix in wanted:
                found = list[Loss]()
                while len(found) < options.repeat:
                    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=scratch))
                    place = Disk(folder, job) if kind == "disk" else InBucket(folder, job, server)
                    if (loss := _lose(place, prefix, expected)) is not None:
                        found.append(loss)
                medians = [statistics.median(getattr(loss, name) for loss in found) for name in Loss.__annotations__]
                taken_s, back_s, done_s, kept, again = medians
                lease = f"{place.lease_s:g}"
                print(
                    f"{kind:<11} {where:<16} {lease:>7} {taken_s:>8.1f} {back_s:>7.1f} {done_s:>7.1f} {kept:>5.0f} "
                    f"{again:>6.1f}",
                    flush=True,
                )


def _job(scratch: Path) -> tuple[Path, dict[str, bytes]]:
    """The job, and the outputs of a calm run."""
    write_questions(scratch / "prompts", (ROWS,))
    cluster = {"backend": "reference", "decode_requests": AT_ONCE, "commit_seconds": COMMIT_S}
    job = write_job(scratch, cluster=cluster, sampling={"max_tokens": TOKENS, "ignore_eos": True})
    ended = batchinfer("run", job, "--set", f"output.dir={scratch / 'calm'}")
    assert ended.code == 0, ended.err
    return job, output_bytes(scratch / "calm")


def _lose(place: Disk | InBucket, prefix: list[str], expected: dict[str, bytes]) -> Loss | None:
    """Kill a worker and return the loss; None if the unit was done before, on a busy machine."""
    assert batchinfer("plan", place.job, *place.on("a")).code == 0
    first = _start([], place, "a")
    _wait(lambda: place.claim() == "0000")
    second = _start(prefix, place, "b")
    _wait(lambda: place.num_durable() >= ROWS // 3)
    kept = place.num_durable()
    for pid in [first.pid, *descendants(first.pid)]:
        os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    first.wait()
    if place.is_done():
        second.wait()
        return None
    taken_s = _wait(lambda: place.claim() != "0000") - killed_s
    durable = [(time.monotonic() - killed_s, kept)]

    def is_done() -> bool:
        durable.append((time.monotonic() - killed_s, place.num_durable()))
        return place.is_done()

    done_s = _wait(is_done) - killed_s
    assert second.wait() == 0
    ended = batchinfer("finish", place.job, *place.on("a"))
    assert ended.code == 0, ended.err
    assert place.outputs() == expected
    wasted = json.loads(batchinfer("report", place.folder, "--json").out)["wasted_tokens"]
    again = wasted / TOKENS
    back_s = next((at_s for at_s, count in durable if count >= kept + again), done_s)
    return Loss(taken_s, back_s, done_s, kept, again)


def _start(prefix: list[str], place: Disk | InBucket, node: str) -> subprocess.Popen[bytes]:
    command = [*prefix, *WORK, str(place.job), *place.on(node)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _wait(condition: Callable[[], bool]) -> float:
    """Wait for something; when it was so."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return time.monotonic()


if __name__ == "__main__":
    main()
