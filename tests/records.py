"""Records as ``docs/protocol.md`` describes them, built by hand: for tests that send what no end of ours would."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from shmring.core.compiled import DTYPES, Content, Submit
from shmring.core.messages import Keep, SlotRef
from tests.model.inside import read_record


def tensor_extension(
    region: int = 0,
    offset: int = 0,
    nbytes: int = 12,
    dtype: int | str = "float32",
    shape: tuple[int, ...] = (3,),
    spelling: bytes = b"",
) -> Ext:
    """A tensor in a payload; by default three float32 inline.

    Args:
        dtype: torch's name, or the wire's number, or numpy's spelling; 0: ``spelling`` is.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        spelling, dtype = dtype.encode("ascii"), 0
    number = DTYPES.index(dtype) if isinstance(dtype, str) else dtype
    head = (
        region.to_bytes(2, "little") + bytes([number, len(shape)]) + offset.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    )
    return Ext(83, head + b"".join(extent.to_bytes(8, "little") for extent in shape) + spelling)


def slot_extension(lease_id: int = 1, offset: int = 4096, nbytes: int = 80, generation: int = 1 << 40) -> Ext:
    """A slot that a record names."""
    return Ext(82, b"".join(number.to_bytes(8, "little") for number in (lease_id, offset, nbytes, generation)))


def slot_header(generation: int, nbytes: int) -> bytes:
    """What stands before a slot's content in host memory."""
    return b"shmrslot" + generation.to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def submit_of(
    payload: object,
    copied: object = b"\0" * 12,
    slots: Sequence[Ext | SlotRef] = (),
    *,
    epoch: int = 0x1122334455667788,
    request_id: int = 7,
    name: str = "",
    fence: bytes = b"",
    lies_at: tuple[int, int] | None = None,
) -> bytes:
    """A submission.

    Args:
        payload: with tensors as :func:`tensor_extension`.
        copied: what the payload's tensors were copied to: bytes, a slot, or None.
        slots: further slots in which tensors of it lie.
        lies_at: offset and size of a payload that lies in the slot ``copied``; ``payload`` is None then.
    """
    described = [_slot(slot) for slot in slots]
    return msgspec.msgpack.encode([2, epoch, request_id, name, fence, described, _slot(copied), payload, *(lies_at or ())])


def content_of(
    payload: object,
    copied: object = None,
    slots: Sequence[Ext | SlotRef] = (),
    *,
    lies_at: tuple[int, int] | None = None,
    max_tensors: int = 4096,
) -> Content:
    """The content of a submission, as it is read; arguments as of :func:`submit_of`.

    Raises:
        RemoteProtocolError: it is refused.
    """
    message = read_record(submit_of(payload, copied, slots, lies_at=lies_at), max_tensors, from_engine=False)
    assert isinstance(message, Submit)
    return message.content


def keep_of(token: int, key: bytes, slot: SlotRef, is_copied: bool = False, for_one: bool = False) -> Keep:
    """Returns the message with which a client hands over a slot to be kept."""
    return Keep(token, key, slot.lease_id, slot.offset, slot.nbytes, slot.generation, is_copied, b"\xc0", for_one)


def reply_of(payload: object, copied: object = None, *, request_id: int = 1, lies_at: tuple[int, int] | None = None) -> bytes:
    """A reply; arguments as of :func:`submit_of`."""
    return msgspec.msgpack.encode([103, request_id, _slot(copied), payload, *(lies_at or ())])


def done_of(released: Sequence[int] = (), *, request_id: int = 1) -> bytes:
    """A request's end, without a last reply."""
    return msgspec.msgpack.encode([104, request_id, list(released)])


def _slot(slot: object) -> object:
    return slot_extension(slot.lease_id, slot.offset, slot.nbytes, slot.generation) if isinstance(slot, SlotRef) else slot


def in_slots(*tensors: tuple[int, int, str, tuple[int, ...]], inline: bytes = b"", slot_nbytes: int = 1 << 20) -> Content:
    """A content of tensors ``(region, offset, dtype, shape)`` in two slots of a slab."""
    payload = []
    for region, offset, dtype, shape in tensors:
        size = np.dtype(dtype if dtype != "bfloat16" else "int16").itemsize
        payload.append(tensor_extension(region, offset, int(np.prod(shape)) * size, dtype, shape))
    slots = (SlotRef(0, 4096, slot_nbytes, 1), SlotRef(0, 2 << 20, slot_nbytes, 2))
    return content_of(payload, inline, slots)
