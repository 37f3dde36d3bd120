"""The transports whose requests are compared, one adapter each; its head says how its users use it."""

from __future__ import annotations

from bench.request.peers.inline_request import InlineRequest
from bench.request.peers.peer import Peer
from bench.request.peers.pyzmq_request import PyzmqRequest
from bench.request.peers.queue_request import MultiprocessingRequest, TorchRequest
from bench.request.peers.shmring_request import ShmringRequest

__all__ = ["BASELINE", "PEERS", "Peer"]

_ALL: tuple[Peer, ...] = (
    ShmringRequest(), InlineRequest(), PyzmqRequest(), TorchRequest(), MultiprocessingRequest()
)  # fmt: skip

#: By name, in the order in which they are measured and shown.
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}

#: What the others are compared with.
BASELINE = _ALL[0].name
