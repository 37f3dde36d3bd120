"""The transports that are compared, one adapter each; its head says how its users use it."""

from __future__ import annotations

from bench.peers.faster_fifo_queue import FasterFifoQueue
from bench.peers.iceoryx2_slices import Iceoryx2, Iceoryx2Loaned
from bench.peers.inline_msgpack import InlineMsgpack
from bench.peers.multiprocessing_queue import MultiprocessingQueue
from bench.peers.peer import Peer
from bench.peers.pyzmq_multipart import PyzmqMultipart
from bench.peers.ray_store import RayStore
from bench.peers.shared_memory_segments import SharedMemorySegments
from bench.peers.shmring_busy_poll import ShmringBusyPoll
from bench.peers.shmring_copy import ShmringCopy
from bench.peers.shmring_in_place import ShmringInPlace
from bench.peers.spinning_ring import SpinningArena, SpinningRing
from bench.peers.torch_queue import TorchQueueByDescriptor, TorchQueueByName
from bench.peers.zenoh_shm import ZenohShm

__all__ = ["PEERS", "Peer"]

#: By name, in the order in which they are measured and shown. The first is what the others are compared with.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        ShmringCopy(),
        ShmringInPlace(),
        ShmringBusyPoll(),
        Iceoryx2(),
        Iceoryx2Loaned(),
        ZenohShm(),
        SpinningRing(),
        SpinningArena(),
        InlineMsgpack(),
        PyzmqMultipart(),
        FasterFifoQueue(),
        SharedMemorySegments(),
        TorchQueueByDescriptor(),
        TorchQueueByName(),
        MultiprocessingQueue(),
        RayStore(),
    )
}
