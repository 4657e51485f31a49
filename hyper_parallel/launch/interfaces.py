"""The network interface that leads to where a world meets.

Note [Why an interface is chosen]
Gloo connects ranks through the address that the host's own name resolves to. Where it does not resolve, or resolves to
loopback (as in many containers), ranks on one host still meet, but those on two do not: one host fails with "connection
refused" and the other waits for ever. The address from which this host reaches the meeting place is the right one.
"""

from __future__ import annotations

import fcntl
import socket
import struct

__all__ = ["address_towards", "interface_of"]

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def address_towards(host: str, port: int) -> str:
    """The address of this host from which ``host`` is reached; nothing is sent."""
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ValueError(
            f"the ranks are to meet at {host!r}, a name that this host ({socket.gethostname()}) cannot resolve: "
            f"{error}; set MASTER_ADDR to an address, or enter the name in /etc/hosts"
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(there)
        except OSError as error:
            raise ValueError(
                f"the ranks are to meet at {host!r}, which this host ({socket.gethostname()}) has no route to: {error}"
            ) from None
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the interface with this address of IPv4; None where it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
            except OSError:  # It has no address of IPv4.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
