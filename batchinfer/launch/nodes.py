"""The share of a job's ranks that this process starts: all, or a part under `srun`, `torchrun` or another launcher.

A group over several processes meets through a small file in the run folder, or an object in an object store. The first
process, the group's controller, writes its address; the others (agent.py) read it and have their ranks connect there.
"""

import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

import msgspec

from batchinfer.checked_json import parse_json, publish_json
from batchinfer.progress import note
from batchinfer.records import BatchinferError, ConfigError, DamagedFileError, ExitCode, GroupEndedError
from batchinfer.run.store.interface import Storage
from batchinfer.stop_signals import StopSignal

Document = TypeVar("Document")
MEET_S = 600.0  # tasks of a job may start minutes apart
_LOOPBACK = "127.0.0.1"
ASK_S = 5.0  # between two checks whether the work is done
ANSWER_S = 10.0  # for the controller to answer a call
# addresses that no host has: this host only needs a route to them
_ELSEWHERE = ((socket.AF_INET, "10.255.255.255"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The share of one process in a group of processes that start ranks.

    index, count: number of this process and of all; index 0 is the controller.
    name: name of the group, equal in all its processes and unique among groups that use the run folder at a time.
    ranks: the ranks that this process starts.
    is_one_host: whether the whole group is on this host.
    """

    index: int
    count: int
    name: str
    ranks: range
    is_one_host: bool


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Address of a group's controller, and the credentials of the group."""

    host: str
    port: int
    credentials: str
    session: str  # of the controller


@dataclass(frozen=True, slots=True)
class _GroupEnd:
    """The error with which a group's controller has ended."""

    reason: str
    exit_code: int


def this_node(num_ranks: int) -> NodeShare:
    """Return this process's share, by the environment that its launcher set.

    The launcher is srun (one task per node), torchrun (one per rank), or another one (one per node), which sets
    BATCHINFER_GROUP, new for each start of the group, and BATCHINFER_GROUP_INDEX and BATCHINFER_GROUP_SIZE.

    Raises:
        ConfigError: the ranks do not spread evenly over the processes.
    """
    environment = os.environ
    if "TORCHELASTIC_RUN_ID" in environment:
        index, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        # Users rarely set --rdzv-id: concurrent groups differ by their rendezvous address. Restarts of one group may
        # have the same name, as torchrun counts failures on each host separately.
        name = _group_name("torchrun", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        if count != num_ranks:
            raise ConfigError(f"torchrun starts {count} processes, but the job has {num_ranks} ranks; make them equal")
        return NodeShare(index, count, name, range(index, index + 1), int(environment["LOCAL_WORLD_SIZE"]) == count)
    if "BATCHINFER_GROUP" in environment:
        name = environment["BATCHINFER_GROUP"]
        index, count = int(environment["BATCHINFER_GROUP_INDEX"]), int(environment["BATCHINFER_GROUP_SIZE"])
    else:
        # set by srun for each task, but not in the batch script itself
        count = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
        index = int(environment["SLURM_PROCID"]) if count > 1 else 0
        name = _group_name("slurm", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    if count == 1:
        return NodeShare(0, 1, "", range(num_ranks), True)
    if num_ranks % count:
        raise ConfigError(
            f"the job's {num_ranks} ranks do not spread evenly over {count} tasks; start one task per node, and make "
            "the number of ranks a multiple of the number of nodes"
        )
    share = num_ranks // count
    return NodeShare(index, count, name, range(index * share, (index + 1) * share), False)


def _group_name(starter: str, *variables: str) -> str:
    """Return a file name made of the environment variables that identify the group."""
    return re.sub(r"[^\w.-]", "_", "-".join([starter, *(os.environ.get(name, "0") for name in variables)]))


def refuse_several_processes(command: str) -> None:
    """Raise if a command that must run in one process was started in several.

    Raises:
        ConfigError: this process is one of several.
    """
    count = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if max(count, int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))) > 1:
        raise ConfigError(
            f"`batchinfer {command}` was started in several processes; run `batchinfer plan` once, then "
            "`batchinfer work` under srun or torchrun, then `batchinfer finish` once"
        )


def own_address() -> str:
    """Return an address of this host that other hosts can reach, IPv4 first; warn and return loopback if none."""
    for family, elsewhere in _ELSEWHERE:
        for address in (_address_of_name(family), _address_towards(family, elsewhere)):
            if address is not None and not (found := ip_address(address)).is_loopback and not found.is_link_local:
                return address
    note(
        f"warning: host {socket.gethostname()} has only loopback addresses: tasks of this group on other hosts cannot "
        "reach it; connect it to their network"
    )
    return _LOOPBACK


def _address_of_name(family: socket.AddressFamily) -> str | None:
    """Return the address of this host's name; None if it has none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
    except OSError:
        return None


def _address_towards(family: socket.AddressFamily, elsewhere: str) -> str | None:
    """Return the source address of packets to `elsewhere`, without sending any; None if there is no route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def announce(storage: Storage, node: NodeShare, point: MeetingPoint) -> Path:
    """Publish the controller's address for the other processes; return the file, to be deleted at the end."""
    path = storage.run.meeting(node.name)
    publish_json(path, asdict(point), mode=0o600)  # no other user may read the credentials
    storage.put(path)
    return path


def tell_end(storage: Storage, session: str, error: Exception) -> None:
    """Publish the error that ends the controller, for the other processes of the group, whose ranks end without one.

    Args:
        session: of the controller.
    """
    reason, code = f"{type(error).__name__}; its own log says where", ExitCode.INTERNAL
    if isinstance(error, BatchinferError):
        reason, code = str(error), error.exit_code
    path = storage.run.meeting(session)
    with suppress(BatchinferError, OSError):  # the error itself may be one of the disk
        publish_json(path, asdict(_GroupEnd(reason, code)))
        storage.put(path)


def told_end(storage: Storage, session: str) -> GroupEndedError | None:
    """Return the error with which a group's controller has ended, None if there is none.

    Raises:
        DamagedFileError: the controller's document about it is damaged.
    """
    path = storage.run.meeting(session)
    said = storage.get(path)
    if said is None:
        return None
    end = _parsed(said, path, _GroupEnd)
    return GroupEndedError(end.reason, end.exit_code)


def find_meeting_point(
    storage: Storage, node: NodeShare, stop: StopSignal, are_all_done: Callable[[], bool]
) -> MeetingPoint | None:
    """Wait for the controller's address and return it; return None after a signal, or if all units are done.

    An address at which no process answers is stale: a killed controller of an earlier start wrote it.

    Args:
        are_all_done: called now and then, as a controller that finds nothing to do does not announce itself.

    Raises:
        ConfigError: the controller did not announce itself in time, or another user wrote the file.
    """
    path = storage.run.meeting(node.name)
    deadline, ask_again_s = time.monotonic() + MEET_S, time.monotonic() + ASK_S
    told = None
    while (point := _announced(storage, path)) is None or not _answers(point):
        if stop.requested:
            return None
        if point is not None and point != told:
            note(
                f"warning: the first process of this group does not answer at {point.host}, port {point.port}; waiting "
                f"{MEET_S:g} s for it, or for one that is started in its place"
            )
            told = point
        if time.monotonic() > ask_again_s:
            if are_all_done():
                return None
            ask_again_s = time.monotonic() + ASK_S
        if time.monotonic() > deadline:
            where = "" if point is None else f", or cannot be reached at {point.host}, port {point.port}"
            raise ConfigError(
                f"the first process of this group did not announce itself in {storage.run.shown} for {MEET_S:g} s"
                + where
            )
        time.sleep(storage.look_s)
    return point


def _announced(storage: Storage, path: Path) -> MeetingPoint | None:
    """Return the address in the meeting's file; None if there is no file."""
    said = storage.get(path)
    if said is None:
        return None
    if storage.run.uri is None:  # in an object store its policy says who may write
        try:
            _refuse_others(path)
        except FileNotFoundError:  # the controller has just ended
            return None
    return _parsed(said, path, MeetingPoint)


def _parsed(data: bytes, path: Path, kind: type[Document]) -> Document:
    """Return the document in the bytes of a file.

    Raises:
        DamagedFileError: its checksum does not match, or its fields have other names or types.
    """
    try:
        return msgspec.convert(parse_json(data, path), kind)
    except msgspec.ValidationError as error:
        raise DamagedFileError(path, f"it is another document ({error})") from None


def _answers(point: MeetingPoint) -> bool:
    """Return whether a process with the credentials listens at this address."""
    from batchinfer.net.tls import call  # most runs are on one host

    try:
        call(point.host, point.port, point.credentials, ANSWER_S).shut_down()
    except OSError:
        return False
    return True


def _refuse_others(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} belongs to or is open to other users; remove it, and let no other user write in {path.parent}"
        )
