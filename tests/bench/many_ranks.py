"""Costs that grow with the number of ranks, on a tiny model of 32 experts: 1 to 32 real processes on this machine.

Ranks share the machine's cores, so steps take the longer the more there are; what counts here is what each more rank
costs its controller and the machine:

    start       seconds until all ranks are ready
    memory      of a rank, private to it, with its model loaded
    descriptors of a rank, and of the controller
    controller  processor microseconds for one report of a step by one rank, all else that it does included
    messages    sent by the controller for each of these

    python tests/bench/many_ranks.py [--ranks 1,2,4,8,16,32,8+16] [--rows 400]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8,16,32,8+16", help="groups, separated by commas")
    parser.add_argument("--rows", type=int, default=400)
    options = parser.parse_args()
    from support.many_ranks import make_job, settings

    print("ranks  start s  MB/rank  descr./rank  contr.  reports  µs/report  sent/report")
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), num_rows=options.rows, max_tokens=24)
        for ranks in options.ranks.split(","):
            run = Path(folder) / ranks
            found = measure(job, run, [*settings(ranks), "--set", "cluster.decode_requests=8"])
            steps = f"read_parquet('{run}/stats/steps/*.parquet')"
            ((reports,),) = duckdb.execute(f"SELECT count(*) FROM {steps}").fetchall()
            print(
                f"{ranks:>5}  {found['start_s']:7.1f}  {found['rank_mb']:7.0f}  {found['rank_descriptors']:11d}"
                f"  {found['descriptors']:6d}  {reports:7d}  {1e6 * found['cpu_s'] / reports:9.0f}"
                f"  {found['sent'] / reports:11.2f}",
                flush=True,
            )


def measure(job: Path, run: Path, options: list[str]) -> dict[str, Any]:
    """Run the job in a process whose controller is watched."""
    target = run.with_suffix(".json")
    command = [sys.executable, __file__, "run", str(job), "--set", f"output.dir={run}", *options]
    environment = {**os.environ, "BENCH_FOUND": str(target)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(target.read_text())


def watched(target: Path) -> None:
    """Run the command with a controller that counts what it does."""
    from batchinfer import cli
    from batchinfer.controller.controller import Controller
    from batchinfer.controller.rank_start import RankStart
    from batchinfer.launch.rank_connections import RankConnections

    found: dict[str, Any] = {"sent": 0, "start_s": 0.0}
    run, start, send = Controller.run, RankStart.__call__, RankConnections.send

    def counted_send(self: RankConnections, rank: int, message: Any) -> None:
        found["sent"] += 1
        send(self, rank, message)

    def timed_start(self: RankStart) -> None:
        start(self)
        start_s = self._ranks.loaded_s - self._ranks.started_s
        found.update(start_s=start_s, sent=0, cpu_s=-time.process_time(), **_processes())

    def counted_run(self: Controller) -> None:
        run(self)
        found["cpu_s"] += time.process_time()
        target.write_text(json.dumps(found))

    Controller.run, RankStart.__call__, RankConnections.send = counted_run, timed_start, counted_send
    cli.main()


def _processes() -> dict[str, Any]:
    """Private memory and descriptors of this process's ranks: the median's; and its own descriptors."""
    from support.faults import ranks_of

    ranks = []
    for folder in (Path("/proc", str(pid)) for pid in ranks_of(os.getpid())):
        sizes = dict(line.split(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
        private_kb = sum(int(sizes[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
        ranks.append((private_kb / 1024, len(list((folder / "fd").iterdir()))))
    memory_mb, descriptors = sorted(ranks)[len(ranks) // 2]
    own = len(list(Path("/proc/self/fd").iterdir()))
    return {"rank_mb": memory_mb, "rank_descriptors": descriptors, "descriptors": own}


if __name__ == "__main__":
    if "BENCH_FOUND" in os.environ:
        watched(Path(os.environ["BENCH_FOUND"]))
    else:
        main()
