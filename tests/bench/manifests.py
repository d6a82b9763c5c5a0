"""Share of a job's time that checksums of its files take: `python tests/bench/manifests.py [ROWS]`."""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from batchinfer import checked_json, manifest
from batchinfer.run.units import result_files
from support.jobs import batchinfer, write_job, write_shard
from support.paths import SAMPLE_MODEL


class Stopwatch:
    """Seconds in the functions that it is put around, each moment counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            started, self._depth = time.perf_counter(), self._depth + 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - started

        return timed


def main(num_rows: int) -> None:
    watch = Stopwatch()
    for holder, name in (
        (manifest.VerifiedFile, "read"),
        (manifest.VerifiedFile, "check"),
        (manifest.ChecksummedWriter, "write"),
        (checked_json, "_checksum"),
        (result_files, "damage"),
    ):
        setattr(holder, name, watch.around(getattr(holder, name)))
    with tempfile.TemporaryDirectory() as folder:
        rows = range(num_rows)
        prompts = {"id": list(rows), "prompt": [f"Question {row}: what is {row} times 3?" for row in rows]}
        write_shard(Path(folder) / "prompts" / "a.parquet", prompts, row_group_size=5000)
        job = write_job(Path(folder), model={"path": str(SAMPLE_MODEL)}, sampling={"max_tokens": 4})
        started = time.perf_counter()
        assert batchinfer("run", job).code == 0
        wall_s = time.perf_counter() - started
    print(
        f"{num_rows:,} short rows: {wall_s:.1f} s, of which reading and writing what checksums go over, and the "
        f"checksums, {watch.seconds * 1e3:.1f} ms, {watch.seconds / wall_s:.3%}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
