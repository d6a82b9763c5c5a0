"""Eight processes on one KV store, some killed at random moments: no wrong byte, and never more than the bound."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from batchinfer.kv_store import store_dir
from batchinfer.kv_store.space_ledger import open_ledger
from batchinfer.kv_store.store_dir import StoreDir
from batchinfer.kv_store.upkeep import shrink_store, verify_store
from support.kv_stores import BLOCK_BYTES, FILE_BYTES, IDENTITY, open_store, total_bytes

TESTS = Path(__file__).parents[1]
NUM_PROCESSES = 8


def start_process(folder, max_bytes, seed, num_steps):
    command = [
        sys.executable,
        "-m",
        "support.kv_process",
        str(folder),
        str(max_bytes),
        str(seed),
        str(num_steps),
    ]
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


def test_a_store_that_another_process_makes_meanwhile_is_used(tmp_path, monkeypatch):
    """The other process writes marker and folders after this one missed the marker and before it lists the folder."""
    list_folder, made = os.listdir, []

    def with_another_process(folder):
        if not made:
            made.append(folder)
            open_store(folder).close()
        return list_folder(folder)

    monkeypatch.setattr(store_dir.os, "listdir", with_another_process)
    with closing(open_store(tmp_path / "kv")) as store:
        assert store.is_writable
    assert made == [tmp_path / "kv"]


def check_bound(folder, max_bytes):
    """Under the store's lock nothing is created or evicted; a file being renamed may be seen twice."""
    if not (folder / "used-bytes").exists():
        return
    with open_ledger(StoreDir(folder)) as ledger:
        total = total_bytes(folder)
        assert total <= max_bytes + NUM_PROCESSES * FILE_BYTES
        assert total <= ledger.used_bytes + NUM_PROCESSES * FILE_BYTES
        assert ledger.used_bytes <= max_bytes


@pytest.mark.parametrize("num_kills", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_eight_processes_share_a_store(tmp_path, num_kills):
    folder, max_bytes = tmp_path / "kv", 24 * FILE_BYTES
    rng = random.Random(1)
    # those that are killed would go on for ever
    num_steps = 10**9 if num_kills else 60
    seeds = iter(range(1000))
    running = [start_process(folder, max_bytes, next(seeds), num_steps) for _ in range(NUM_PROCESSES)]
    for number in range(num_kills):
        place = number % NUM_PROCESSES
        assert running[place].stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.0, 0.1))
        check_bound(folder, max_bytes)
        assert running[place].poll() is None, "it ended by itself: a byte was wrong"
        running[place].kill()
        running[place].wait()
        running[place].stdout.close()
        running[place] = start_process(folder, max_bytes, next(seeds), num_steps)
    while not num_kills and any(process.poll() is None for process in running):
        check_bound(folder, max_bytes)
        time.sleep(0.02)
    counters = [finish(process, is_killed=num_kills > 0) for process in running]
    check_bound(folder, max_bytes)
    if not num_kills:
        totals = {key: sum(each[key] for each in counters) for key in counters[0]}
        assert totals["hit_blocks"] > 0
        assert totals["evicted_files"] > 0
        assert totals["damaged_files"] == 0
    # whatever the dead left is cleared away, and what they had published is whole
    shrink_store(StoreDir(folder), None)
    assert list((folder / "writing").iterdir()) == []
    verified = verify_store(StoreDir(folder))
    assert verified["damaged"] == []
    assert verified["blocks"] > 0
    with open_ledger(StoreDir(folder)) as ledger:
        assert ledger.used_bytes == total_bytes(folder)


def finish(process, *, is_killed):
    if is_killed:
        assert process.poll() is None, "it ended by itself: a byte was wrong"
        process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    if is_killed:
        return {}
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_a_process_killed_in_the_middle_of_a_file_leaves_room_that_is_found_again(tmp_path):
    folder, max_bytes = tmp_path / "kv", 3 * FILE_BYTES
    open_store(folder).close()
    child = os.fork()
    if child == 0:
        with open_ledger(StoreDir(folder)) as ledger:
            descriptor, _ = ledger.create(FILE_BYTES, "killed")
            os.write(descriptor, bytes(BLOCK_BYTES))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with open_ledger(StoreDir(folder)) as ledger:
        assert ledger.used_bytes == FILE_BYTES
    assert len(list((folder / "writing").iterdir())) == 1
    store = open_store(folder, max_bytes=max_bytes)
    for number in range(4):
        chain = IDENTITY.chain([number] * 64)
        assert store.write(chain, 0, np.zeros((1, BLOCK_BYTES), np.uint8)) == 1
    assert list((folder / "writing").iterdir()) == []
    assert total_bytes(folder) == max_bytes
    store.close()
