"""A cable that delays every frame, for kernels without netem; started by Lab.delay(), in the switch's network.

    python long_cable.py WIRE BRIDGE MILLISECONDS

Takes WIRE, a host's cable that hangs in no bridge, and joins it to BRIDGE through an interface of its own. Frames
pass whole with the header in which the kernel says what it has left to do for them (virtio's): large ones stay large.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_FRAME = 70_000
_QUEUE_BYTES = 64 << 20
_ETH_P_ALL = 3
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_TUNSETIFF, _TUNSETVNETHDRSZ, _TUNSETOFFLOAD = 0x400454CA, 0x400454D8, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_VNET_HEADER = 10
_CHECKSUMS, _TCP4, _TCP6 = 1, 2, 4


def open_tap(name: str, bridge: str) -> int:
    """A new interface in the bridge, as a file that its frames are read from and written to."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CHECKSUMS | _TCP4 | _TCP6)
    subprocess.run(["ip", "link", "set", name, "master", bridge, "txqueuelen", "10000", "up"], check=True)
    return tap


def open_wire(name: str) -> socket.socket:
    """All frames that come through an interface, and a way out of it."""
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    wire.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    wire.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        wire.setsockopt(socket.SOL_SOCKET, option, _QUEUE_BYTES)
    wire.setblocking(False)
    wire.bind((name, _ETH_P_ALL))
    return wire


def carry(ends: tuple[int, int], delay_s: float) -> None:
    """Pass frames on between two ends, for ever."""
    late: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    other = dict(zip(ends, reversed(ends), strict=True))
    poll = select.epoll()
    for end in ends:
        poll.register(end, select.EPOLLIN)
    while True:
        due = min((queue[0][0] for queue in late.values() if queue), default=None)
        for end, _ in poll.poll(None if due is None else max(0.0, due - time.monotonic())):
            with contextlib.suppress(BlockingIOError):
                while True:
                    late[end].append((time.monotonic() + delay_s, os.read(end, _FRAME)))
        now = time.monotonic()
        for end, queue in late.items():
            while queue and queue[0][0] <= now:
                with contextlib.suppress(OSError):  # full, or going down: lost, as on any cable
                    os.write(other[end], queue.popleft()[1])


if __name__ == "__main__":
    _, wire, bridge, milliseconds = sys.argv
    ends = open_tap(f"long{wire}"[:15], bridge), open_wire(wire)
    print("ready", flush=True)
    try:
        carry((ends[0], ends[1].fileno()), float(milliseconds) / 1000)
    except OSError as error:
        if error.errno != errno.ENETDOWN:  # the host is gone
            raise
