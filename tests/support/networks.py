"""Networks of a test's own: whether there can be any, and two hosts on this machine with a link of a given rate.

A host is a network namespace with a host name of its own; both see the same files. The link is a pair of network
devices. Its rate is kept by the kernel (tc, token bucket filter, in each direction). A link with latency is a pair of
TUN devices, between which a process here carries each packet and holds it for that time: the kernels at hand have no
netem. All of it ends with the processes that hold it.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

HAS_NETWORKS = (
    all(map(shutil.which, ("ip", "unshare")))
    and not subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode
)
HAS_TWO_HOSTS = HAS_NETWORKS and all(map(shutil.which, ("tc", "nsenter")))

DEVICE, ADDRESSES = "wire", ("10.213.7.1", "10.213.7.2")
BURST_S, LONGEST_QUEUE = 5e-4, "200ms"  # of the token bucket: what may leave at once, what may wait
LEAST_BURST_BYTES = 80_000  # a packet of the largest size has to fit
MTU = 9000
RELAYED_MTU = 60_000  # few large packets: a process here carries each one


@dataclass(frozen=True)
class Host:
    """One of two hosts; `process` holds its namespaces."""

    process: subprocess.Popen[bytes]
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that runs `arguments` on this host."""
        return ["nsenter", "--net", "--uts", "--target", str(self.process.pid), "--", *arguments]

    def run(self, *arguments: str) -> None:
        """Run a command on this host and wait for its end.

        Raises:
            CalledProcessError: it failed.
        """
        subprocess.run(self.command(*arguments), check=True, capture_output=True)


@contextmanager
def two_hosts(gigabits_per_s: float, *, latency_s: float = 0.0) -> Iterator[Sequence[Host]]:
    """Yield two hosts that reach each other over a link of this rate in each direction; needs root.

    Args:
        latency_s: time for which each packet is held on its way.
    """
    with ExitStack() as stack:
        hosts = [stack.enter_context(_host(f"host-{number}", address)) for number, address in enumerate(ADDRESSES)]
        if latency_s:
            stack.enter_context(_relay(hosts, latency_s))
        else:
            ends = [["name", DEVICE, "netns", str(host.process.pid)] for host in hosts]
            subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        burst = max(LEAST_BURST_BYTES, round(gigabits_per_s * 1e9 / 8 * BURST_S))
        for host in hosts:
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", DEVICE)
            host.run("ip", "link", "set", "dev", DEVICE, "mtu", str(RELAYED_MTU if latency_s else MTU), "up")
            host.run("ip", "route", "add", "default", "dev", DEVICE)
            rate = ["rate", f"{gigabits_per_s}gbit", "burst", str(burst), "latency", LONGEST_QUEUE]
            host.run("tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *rate)
        yield hosts


@contextmanager
def _host(name: str, address: str) -> Iterator[Host]:
    held = ["sh", "-ec", f"hostname {name}; echo; exec sleep infinity"]
    with subprocess.Popen(["unshare", "--net", "--uts", *held], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("no namespaces for a host: unshare failed")
            yield Host(process, address)
        finally:
            process.kill()


@contextmanager
def _relay(hosts: Sequence[Host], latency_s: float) -> Iterator[None]:
    """A process that joins both hosts by a pair of TUN devices."""
    command = [sys.executable, __file__, str(latency_s), *(str(host.process.pid) for host in hosts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("no relay between the hosts: it failed")
            yield
        finally:
            process.kill()


# --- the relay's own process ------------------------------------------------------------------------------------------

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def _tun_of(pid: int, number: int) -> int:
    """A TUN device in the network of that process; returns its file, which stays usable from here."""
    name = f"tun{os.getpid()}x{number}"[:15]
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "netns", str(pid), "name", DEVICE], check=True)
    return file


def _carry(files: Sequence[int], latency_s: float) -> None:
    """Carry packets from each device to the other, each when it has been held for this time; never returns."""
    held: deque[tuple[float, int, bytes]] = deque()  # due times ascend: all are held equally long
    poller = select.poll()
    for file in files:
        poller.register(file, select.POLLIN)
    other = dict(zip(files, reversed(files), strict=True))
    while True:
        now_s = time.monotonic()
        while held and held[0][0] <= now_s:
            _, file, packet = held.popleft()
            with suppress(OSError):  # the device is not up yet, or its queue is full: packets may get lost
                os.write(file, packet)
        wait_s = held[0][0] - now_s if held else 1.0
        if wait_s > 0 and not poller.poll(0 if wait_s < 1e-3 else 1000 * wait_s - 1):
            continue
        due_s = time.monotonic() + latency_s
        for file in files:
            with suppress(BlockingIOError):
                while True:
                    held.append((due_s, other[file], os.read(file, RELAYED_MTU)))


if __name__ == "__main__":
    ends = [_tun_of(int(pid), number) for number, pid in enumerate(sys.argv[2:])]
    print(flush=True)
    _carry(ends, float(sys.argv[1]))
