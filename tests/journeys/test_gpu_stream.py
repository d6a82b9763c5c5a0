"""The script that streams layers to a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.cuda_stand_ins import needs_interpreter

GPU = Path(__file__).parents[1] / "gpu"


@needs_interpreter
def test_layers_from_host_and_disk_give_the_logits_of_resident_ones(tmp_path):
    out = tmp_path / "stream.jsonl"
    for _ in range(2):  # what the file has is not done again
        command = [sys.executable, GPU / "stream.py", "--rehearse", "--out", out]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["from host", "from disk"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["done"] for row in rows if "done" in row] == ["host", "disk"]
    assert all(row["row"]["figures"]["bytes"] > 0 for row in rows if "done" in row)
