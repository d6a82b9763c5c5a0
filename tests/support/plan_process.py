"""A script that plans a tokenised run folder and prints time and memory as JSON.

python tests/support/plan_process.py FOLDER MEMORY_BYTES
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pyarrow as pa

from batchinfer.config import PAGE_TOKENS, SamplingConfig
from batchinfer.manifest import Manifest, file_checksums
from batchinfer.plan.plan_tables import write_plan
from batchinfer.plan.prefix.streamed import PrefixStream
from batchinfer.plan.requests import plan_requests, sampling_keys
from batchinfer.plan.rows import load_rows
from batchinfer.rundir import RunDir
from support.prompt_corpus import shards_of


def main(folder: Path, memory_bytes: int) -> None:
    run, sampling = RunDir(folder), SamplingConfig(max_tokens=100).to_sampling()
    shards = shards_of(run)
    manifest = Manifest(folder)
    for shard in shards:
        manifest.add(run.tokens(shard.index), file_checksums(run.tokens(shard.index)))
    seconds: dict[str, float] = {}
    with PrefixStream(run.plan_scratch, block_tokens=PAGE_TOKENS, memory_bytes=memory_bytes) as prefixes:
        started = time.monotonic()
        rows = load_rows(run, manifest, shards, sampling, prefixes.add)
        seconds["read and sort"] = time.monotonic() - started
        plan = prefixes.plan()
        seconds["merge"] = time.monotonic() - started - sum(seconds.values())
        planned = plan_requests(rows, plan)
        keys = sampling_keys(run, manifest, shards, rows, planned)
        seconds["requests"] = time.monotonic() - started - sum(seconds.values())
        disk_bytes = sum(file.stat().st_size for file in run.plan_scratch.glob("*"))
        write_plan(
            run,
            manifest,
            rows,
            planned,
            keys,
            prefixes.in_order(),
            num_ranks=1,
            block_tokens=PAGE_TOKENS,
            answer_lengths={},
            token_type=pa.uint32(),
        )
        seconds["merge and write"] = time.monotonic() - started - sum(seconds.values())
    # not getrusage: its maximum begins with that of the process that started this one
    peak_bytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    found = {
        "num_prompts": len(rows.row),
        "num_tokens": int(rows.num_tokens.sum()),
        "distinct_tokens": plan.distinct_tokens,
        "seconds": seconds,
        "cpu_s": time.process_time(),
        "peak_bytes": peak_bytes,
        "disk_bytes": disk_bytes,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
