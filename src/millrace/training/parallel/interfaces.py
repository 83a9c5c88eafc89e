"""The network interface that ranks on several hosts use.

gloo and NCCL choose one by the name of the host or by its kind, which is often a wrong one:
loopback, or the bridge of a container.
"""

import fcntl
import os
import socket
import struct

from millrace.cluster.address import own_address

SIOCGIFADDR = 0x8915  # the IPv4 address of an interface, see netdevice(7)
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def use_interface_to(host: str) -> None:
    """Use the interface on the route to another rank's host, unless the user has chosen one."""
    name = _interface_of(own_address(f"tcp://{host}:1"))
    if name is not None:
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def _interface_of(address: str) -> str | None:
    """None if no interface has it, as with IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
