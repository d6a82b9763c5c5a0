"""The interface that has an address."""

from __future__ import annotations

import subprocess
import sys

import pytest

from batchinfer.net.interface import interface_of
from support.networks import HAS_NETWORKS

SAY = "import sys; from batchinfer.net.interface import interface_of; print([interface_of(a) for a in sys.argv[1:]])"
MAKE = """
ip link set lo up
ip link add one type veth peer name two
ip addr add 192.0.2.7/24 dev one
ip -6 addr add 2001:db8::7/64 dev two nodad
exec "$@"
"""


def test_loopback_has_its_address_and_nobody_has_one_of_another_host():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.200") is None
    assert interface_of("2001:db8::200") is None


@pytest.mark.skipif(not HAS_NETWORKS, reason="needs root, `unshare` and `ip`, for a network of its own")
def test_each_interface_is_found_by_its_address():
    addresses = ["192.0.2.7", "2001:db8::7", "192.0.2.8"]
    command = ["unshare", "--net", "sh", "-ec", MAKE, "sh", sys.executable, "-c", SAY, *addresses]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "['one', 'two', None]"
