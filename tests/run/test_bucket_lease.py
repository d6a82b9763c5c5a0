"""The lock of a run in a bucket: one at a time, and nobody waits for the dead."""

import threading

import pytest

from batchinfer.config import S3Config
from batchinfer.data.bucket import Bucket
from batchinfer.records import ConfigError
from batchinfer.run.store import bucket_lease, watch
from batchinfer.run.store.bucket_lease import LOCK, Lease, locked_in
from support.s3_servers import server_with

pytest.importorskip("obstore")


server = server_with("runs")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bucket_lease, "LOOK_S", 0.02)
    monkeypatch.setattr(bucket_lease, "BEAT_S", 0.1)


def at(server, name):
    return Bucket(f"s3://runs/{name}", S3Config(endpoint=server.endpoint))


def test_a_lock_is_held_by_one_and_given_back(server):
    here = at(server, "one")
    with (
        locked_in(here, doing="plan"),
        pytest.raises(ConfigError, match="plans or finishes s3://runs/one; wait for it"),
    ):
        locked_in(here, doing="plan this job").__enter__()
    with locked_in(here, doing="plan"):
        pass


def test_a_lock_whose_owner_is_silent_is_taken_over_and_the_owner_learns_of_it(server, monkeypatch, capsys):
    monkeypatch.setattr(watch, "is_dead", lambda _: False)
    monkeypatch.setattr(watch, "LEASE_S", 0.3)
    here = at(server, "silent")
    may_beat = threading.Event()
    silent = Lease(here, LOCK)
    plain = silent._beat
    silent._heart = threading.Thread(target=lambda: (may_beat.wait(), plain()), daemon=True)
    assert silent.take()
    with locked_in(here, doing="plan"):
        may_beat.set()
        silent._heart.join(timeout=10)
        assert silent.is_lost
    silent.end()
    assert "others have taken over" in capsys.readouterr().err


def test_a_dead_owner_of_this_machine_is_not_waited_for(server, monkeypatch):
    here = at(server, "dead")
    plain = bucket_lease.this_process
    monkeypatch.setattr(bucket_lease, "this_process", lambda: {**plain(), "pid": 2**22 - 1})
    here.create(LOCK, Lease(here, LOCK)._document(released=False))
    monkeypatch.setattr(bucket_lease, "this_process", plain)
    with locked_in(here, doing="plan"):
        pass
