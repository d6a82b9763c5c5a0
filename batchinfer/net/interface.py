"""The network interface that has an address, as gloo takes interfaces to listen at."""

import fcntl
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7); the address stands behind name, family and port
_ADDRESS = slice(20, 24)
_ADDRESSES_V6 = Path("/proc/net/if_inet6")  # a line for each: 32 digits, four numbers, the interface


def interface_of(address: str) -> str | None:
    """Return this host's interface whose first IPv4 address, or IPv6 address, is this one; None if none is."""
    wanted = ip_address(address)
    if wanted.version == 6:
        lines = [line.split() for line in _ADDRESSES_V6.read_text().splitlines()] if _ADDRESSES_V6.exists() else []
        return next((line[-1] for line in lines if int(line[0], 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none of IPv4
                if fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))[_ADDRESS] == wanted.packed:
                    return name
    return None
