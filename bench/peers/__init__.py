"""The transports that are compared, one adapter each; its head says how its users use it."""

from __future__ import annotations

from bench.peers.inline_msgpack import InlineMsgpack
from bench.peers.peer import Peer
from bench.peers.shmring_copy import ShmringCopy
from bench.peers.shmring_in_place import ShmringInPlace
from bench.peers.torch_queue import TorchQueue

__all__ = ["PEERS", "Peer"]

#: By name, in the order in which they are measured and shown. The first is what the others are compared with.
PEERS: dict[str, Peer] = {peer.name: peer for peer in (ShmringCopy(), ShmringInPlace(), InlineMsgpack(), TorchQueue())}
