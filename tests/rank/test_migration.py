"""The limit of KV that is on its way from one rank to others."""

import resource
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import torch

from batchinfer.config import PAGE_TOKENS
from batchinfer.kv.memory import KvMemory
from batchinfer.kv.transfer import write_transfer
from batchinfer.rank.main import _transfers
from batchinfer.rank.migration import KvMigration
from batchinfer.records import RequestKey


def test_prompts_wait_while_transfers_in_memory_hold_half_of_the_descriptors(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (6, 6))
    memory = KvMemory(torch.zeros(2, 4, PAGE_TOKENS, 8))
    context = SimpleNamespace(memory=memory, transfer_bytes=1 << 30, transfers=None)
    migration, log = KvMigration(context, Mock()), Mock(kv=lambda _: nullcontext())
    keys = [RequestKey(0, row, 0) for row in range(9)]
    requests = [SimpleNamespace(key=key, token_ids=[1], goes_on_after_prefill=True) for key in keys]
    sequences = [Mock(request=request, kv_tokens=2, pages=[0], state_slot=None) for request in requests]
    assert migration.num_fitting(requests) == 3
    migration.migrate_out(sequences[:2], log)
    assert migration.has_room
    assert migration.num_fitting(requests[2:]) == 1
    migration.migrate_out(sequences[2:3], log)
    assert not migration.has_room
    migration.free(keys[:1])
    assert migration.has_room
    migration.close()


def test_a_rank_that_is_started_again_meets_no_transfer_of_its_earlier_life(tmp_path):
    """One that the earlier life was writing when its folder was removed."""
    job, place = SimpleNamespace(output=SimpleNamespace(dir=str(tmp_path))), SimpleNamespace(rank=0)
    sent = [
        write_transfer(
            KvMemory(torch.zeros(2, 4, PAGE_TOKENS, 8)),
            [1],
            file=_transfers(job, tmp_path / "transfers", place) / "0-1-0.kv",
        )
        for _ in range(2)
    ]
    sent[0].close()
    assert [path.name for path in tmp_path.rglob("*.kv")] == ["0-1-0.kv"]
