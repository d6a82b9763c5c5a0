"""The agent of a node in a larger group: starts its ranks and keeps them running; the controller is on another node."""

import time
from collections.abc import Callable
from dataclasses import fields

import pyarrow.parquet as pq

from batchinfer.data.parquet import own_file, sealed_table
from batchinfer.equal_rows import EqualRows
from batchinfer.launch.local_ranks import LocalRanks
from batchinfer.launch.nodes import NodeShare, find_meeting_point, told_end
from batchinfer.progress import note
from batchinfer.records import InterruptedRunError
from batchinfer.run.session import Session
from batchinfer.run.store.interface import Storage
from batchinfer.stop_signals import StopSignal

POLL_S = 0.2
CONTROLLER_GONE = 5  # starts in a row in which no rank found the controller, after which the agent asks itself
LEAVE_S = 90.0  # after a signal, for the controller to end the ranks


def serve_node(
    storage: Storage, session: Session, stop: StopSignal, node: NodeShare, are_all_done: Callable[[], bool]
) -> None:
    """Run this node's ranks until the controller ends them; return if all units are done before it announces itself.

    Args:
        are_all_done: whether all units of the whole run are done.

    Raises:
        InterruptedRunError: a signal came, or the controller is gone.
        GroupEndedError: the controller ended with an error.
    """
    stop.graceful = True
    point = find_meeting_point(storage, node, stop, are_all_done)
    if point is None:
        if stop.requested:
            raise InterruptedRunError("stopped by a signal before the group had met")
        return
    ranks = LocalRanks(node.ranks, controller=point, one_host=node.is_one_host)
    try:
        _keep_running(ranks, storage, node, stop)
    finally:
        stop.graceful = False
        ranks.kill()
        _copy_session_stats(storage, session, point.session)
    if stop.requested:
        raise InterruptedRunError("stopped; the group's controller has committed what was finished")
    if (error := told_end(storage, point.session)) is not None:
        raise error


def _keep_running(ranks: LocalRanks, storage: Storage, node: NodeShare, stop: StopSignal) -> None:
    """Restart this node's ranks whenever one has failed; the controller and the other agents restart theirs."""
    deadline = float("inf")
    num_failed = 0
    while True:
        start_s = time.monotonic()
        ranks.start()
        while not (ended := ranks.ended()):
            if stop.requested and deadline == float("inf"):
                deadline = time.monotonic() + LEAVE_S  # the controller got the signal, too
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)
        # if one rank has left, all leave; if one has failed, the others notice
        ranks.wait(POLL_S * 50)
        if ranks.all_ended_well() or storage.get(storage.run.meeting(node.name)) is None:
            return
        for rank, how in ended.items():
            note(f"warning: rank {rank} {how}; starting this node's ranks again")
        ranks.kill()
        num_failed = num_failed + 1 if time.monotonic() - start_s < 60 else 0
        if num_failed >= CONTROLLER_GONE and not ranks.can_reach_controller():
            raise InterruptedRunError("the group's controller is gone; run the same command to go on")


def _copy_session_stats(storage: Storage, session: Session, controller: str) -> None:
    """Copy the group's time of the first step, device and bit equality from the controller's session."""
    path = storage.run.session_stats("nodes", controller)
    said = storage.get(path)
    if said is not None:
        with own_file(path):
            (row,) = pq.read_table(sealed_table(said)).to_pylist()
        session.first_prefill_s, session.device = row["first_prefill_s"], row["device"]
        session.equal_rows = EqualRows(**{field.name: row[field.name] for field in fields(EqualRows)})
