"""What goes between nodes for a request: small ones and small replies as bytes, larger ones as objects of Ray.

Ray serialises each argument of a call, and pickles what is neither bytes nor a number. So a call that takes a bundle and four
arguments costs the cluster 1.4 times the CPU of a call that takes bytes (64 KB: 3.2 and 2.3 ms). Above :data:`SMALL_NBYTES`,
Ray would put the bytes into its object store by itself; a bundle there is moved without pickling its tensors.

A frame is the length of its head (8 bytes, little-endian), the head in msgpack, and the buffers of its bundles. Each of these
begins at a multiple of 16 bytes, as the frame itself does, so that any dtype can be viewed in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shmring.integrations.ray.directory import Load
from shmring.memory.bundles import Bundle
from shmring.request_options import EngineOptions

__all__ = ["SMALL_NBYTES", "Call", "Outcome", "Sent", "size_of", "to_call", "to_frame", "to_outcome", "to_sent"]

SMALL_NBYTES = 100_000  # Ray sends smaller arguments and results along with a call

_ALIGNMENT = 16


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request, without its payload.

    Attributes:
        client: as it has entered.
        number: of the request; a client uses each once.
        told: what the engine is told beside it.
        left_s: how long it may take; None: as long as it does.
    """

    client: str
    number: int
    told: EngineOptions
    left_s: float | None


#: What an engine answers: replies, why no more will come, and what the engine has to do then.
Outcome = tuple[list[Bundle], Exception | None, Load]

#: The same on its way.
Sent = bytes | Outcome

#: Of a bundle in a frame: its payload and its offsets, and how many bytes each buffer has.
_Shape = tuple[bytes, tuple[int, ...], list[int]]

_calls = msgspec.msgpack.Decoder(tuple[Call, list[_Shape]])
_loads = msgspec.msgpack.Decoder(tuple[Load, list[_Shape]])


def size_of(bundle: Bundle) -> int:
    """Returns the bytes of a bundle, its payload and its buffers."""
    return bundle.nbytes + len(bundle.payload)


def to_frame(head: Call | Load, bundles: Sequence[Bundle]) -> bytes:
    """Returns a frame of bundles, which are copied."""
    buffers = [memoryview(buffer) for bundle in bundles for buffer in bundle.buffers]
    shapes = [(bundle.payload, bundle.offsets, [memoryview(buffer).nbytes for buffer in bundle.buffers]) for bundle in bundles]
    encoded = msgspec.msgpack.encode((head, shapes))
    parts: list[Any] = [len(encoded).to_bytes(8, "little"), encoded]
    at = 8 + len(encoded)
    for buffer in buffers:
        gap = -at % _ALIGNMENT
        parts += (bytes(gap), buffer)
        at += gap + buffer.nbytes
    return b"".join(parts)


def _from_frame(frame: bytes, decoder: msgspec.msgpack.Decoder[tuple[Any, list[_Shape]]]) -> tuple[Any, list[Bundle]]:
    """Returns the head of a frame, and its bundles, whose buffers are views of it."""
    view = memoryview(frame)
    at = 8 + int.from_bytes(view[:8], "little")
    head, shapes = decoder.decode(view[8:at])
    bundles = []
    for payload, offsets, sizes in shapes:
        buffers = []
        for nbytes in sizes:
            at += -at % _ALIGNMENT
            buffers.append(view[at : at + nbytes])
            at += nbytes
        bundles.append(Bundle(payload, offsets, *buffers))
    return head, bundles


def to_call(frame: bytes, bundle: Bundle | None) -> tuple[Call, Bundle]:
    """Returns a request that has come, and its payload, which travels in the frame or beside it."""
    call, bundles = _from_frame(frame, _calls)
    return call, bundles[0] if bundle is None else bundle


def to_sent(replies: list[Bundle], error: Exception | None, load: Load) -> Sent:
    """Returns an outcome as it travels."""
    if error is None and sum(map(size_of, replies)) < SMALL_NBYTES:
        return to_frame(load, replies)
    return replies, error, load


def to_outcome(sent: Sent) -> Outcome:
    """Returns an outcome that has come."""
    if isinstance(sent, bytes):
        load, replies = _from_frame(sent, _loads)
        return replies, None, load
    return sent
