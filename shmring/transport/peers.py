"""What the kernel says of the process at the other end of a Unix socket (``SO_PEERCRED``)."""

from __future__ import annotations

import socket
import struct

__all__ = ["describe_peer", "peer_credentials", "peer_pid"]

_CREDENTIALS = struct.Struct("3i")


def peer_credentials(peer: socket.socket) -> tuple[int, int]:
    """Returns the pid and the uid of the process that connected, or that listens where this socket has connected.

    The pid is 0 if it can't be seen from this process namespace.
    """
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_pid(peer: socket.socket) -> int:
    """Returns the pid of the process at the other end of a Unix socket; 0: it can't be seen from this process namespace."""
    return peer_credentials(peer)[0]


def describe_peer(peer: socket.socket) -> str:
    """Describes the process at the other end of a Unix socket, for logs."""
    try:
        pid, uid = peer_credentials(peer)
    except OSError as error:
        return f"an unknown process ({error})"
    return f"process {pid} of uid {uid}"
