"""The store by which ranks meet: torch's groups form over it, and it listens at no port."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from batchinfer.parallel.group_store import GroupStore
from support.strangers import listening_ports

DEADLINE = timedelta(seconds=60)


def stores(number: int) -> list[GroupStore]:
    """Stores of a group, joined as by the controller."""
    made: list[GroupStore] = []

    def teller(rank: int):
        def tell(key: str, value: bytes) -> None:
            for other, store in enumerate(made):
                if other != rank:
                    store.learn(key, value)

        return tell

    made += [GroupStore(teller(rank)) for rank in range(number)]
    return made


def test_what_one_tells_all_know():
    first, second, third = stores(3)
    first.set("key", b"\x00\xff")
    second.set("word", "text")
    for store in (first, second, third):
        assert (store.get("key"), store.get("word")) == (b"\x00\xff", b"text")
        assert store.check(["key", "word"])
        assert not store.check(["key", "another"])


def test_what_is_not_told_yet_is_waited_for():
    first, second = stores(2)
    timer = threading.Timer(0.2, lambda: second.set("late", b"1"))
    timer.start()
    first.wait(["late"], DEADLINE)
    assert first.get("late") == b"1"
    first.set_timeout(timedelta(seconds=0.1))
    for wait in (
        lambda: first.get("never"),
        lambda: first.wait(["never"]),
        lambda: first.wait(["never"], DEADLINE / 600),
    ):
        with pytest.raises(RuntimeError):
            wait()


def test_a_group_of_torch_forms_over_it_and_nothing_else_listens(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    made = stores(3)
    before = listening_ports([os.getpid()])

    def work(rank: int) -> tuple[float, set[int]]:
        group = dist.ProcessGroupGloo(dist.PrefixStore("group", made[rank]), rank, 3, DEADLINE)
        total = torch.tensor([float(rank + 1)])
        group.allreduce([total]).wait()
        ports = listening_ports([os.getpid()]) - before
        group.barrier().wait()
        return total.item(), ports

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(work, range(3)))
    assert [total for total, _ in results] == [6.0] * 3
    assert all(len(ports) <= 3 for _, ports in results), "gloo's own, one for each rank"
