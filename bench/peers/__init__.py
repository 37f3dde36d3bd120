"""The transports that are compared; the head of each adapter's file says how its users use it."""

from __future__ import annotations

from bench.peers.iceoryx2_slices import Iceoryx2, Iceoryx2Loaned
from bench.peers.peer import Peer, RequestPeer
from bench.peers.pyzmq_sockets import PyzmqMultipart, PyzmqRequest
from bench.peers.queues import FasterFifoQueue, MultiprocessingQueue, TorchQueue
from bench.peers.shmring_ring import ShmringBusyPoll, ShmringCopy, ShmringInPlace, ShmringRequest
from bench.peers.spinning_ring import SpinningArena, SpinningRing
from bench.peers.unix_stream import InlineMsgpack, InlineRequest, SharedMemorySegments

__all__ = ["BASELINE", "MEMCPY", "PEERS", "REQUEST_PEERS", "SEVERAL_CLIENTS", "Peer", "RequestPeer"]

_STREAMS: tuple[Peer, ...] = (
    ShmringCopy(), ShmringInPlace(), ShmringBusyPoll(), Iceoryx2(), Iceoryx2Loaned(), SpinningRing(), SpinningArena(),
    InlineMsgpack(), PyzmqMultipart(), FasterFifoQueue(), SharedMemorySegments(), TorchQueue(), MultiprocessingQueue(),
)  # fmt: skip
_REQUESTS: tuple[RequestPeer, ...] = (ShmringRequest(), InlineRequest(), PyzmqRequest())

#: By name, in the order in which they are measured and shown: those of streams, and those of requests.
PEERS: dict[str, Peer] = {peer.name: peer for peer in _STREAMS}
REQUEST_PEERS: dict[str, RequestPeer] = {peer.name: peer for peer in _REQUESTS}

#: shmring with several clients in one process.
SEVERAL_CLIENTS: dict[str, RequestPeer] = {peer.name: peer for peer in (ShmringRequest(32, 1), ShmringRequest(32, 32))}

#: What the others are compared with, in both.
BASELINE = _STREAMS[0].name
#: Beside the peers of streams: copies of as many bytes, in this process (:class:`bench.machine.Copies`).
MEMCPY = "memcpy"
