"""Kept content in a frontend: its payload, views of its slot, its pins, and the record of a slot that is in no lease.

This is not hot: a content is opened once each time it is found. The payload comes from the engine, which has checked it
(:func:`check_kept`).
"""

from libc.stdint cimport UINT64_MAX, uint64_t

from shmring.core.messages import KEPT_LEASE_ID
from shmring.core.states import ClientSlot
from shmring.errors import RemoteProtocolError


cdef Content _content_of(bytes payload, uint64_t offset, uint64_t nbytes, uint64_t generation, bint is_copied, Bounds bounds):
    cdef Content content = Content.__new__(Content)
    content.reserve_slots(1)
    content.slot_numbers.lease_id = KEPT_LEASE_ID
    content.slot_numbers.offset = offset
    content.slot_numbers.nbytes = nbytes
    content.slot_numbers.generation = generation
    content.slot_count = 1
    content.is_copied_to_slot = is_copied
    content.check_payload(payload, bounds)
    return content


def check_kept(content: Keep, max_tensors: int, max_values: int) -> None:
    """Checks the payload of content that is to be kept.

    Args:
        content: its payload is msgpack with an extension for each tensor, in its slot: region 0 if that is copied, else 1.
        max_tensors, max_values: how many tensors may be in it, and what its values may count.

    Raises:
        RemoteProtocolError: it is no payload of such a slot.
    """
    _content_of(content.payload, 0, content.nbytes, 0, content.is_copied, bounds_of(max_tensors, max_values))


def kept_slot(found: Found) -> ClientSlotRecord:
    """Returns the record of a slot that the engine keeps and that was not this client's.

    Args:
        found: the engine's message.
    """
    cdef ClientSlotRecord record = ClientSlotRecord.__new__(ClientSlotRecord)
    record.start, record.nbytes, record.generation = found.offset // BLOCK_NBYTES, found.nbytes, found.generation
    record.blocks = slot_blocks(record.nbytes)
    record.state_number = ClientSlot.KEPT
    return record


cdef class Pin:
    """Content that this client has pinned. Any thread may become a user of it (:meth:`ClientEnd.use_pinned`); only the loop uses
    the rest.

    Args:
        key: of the content.
        found: how the engine describes it.
        record: of its slot.
        address: of its content in this process.

    Attributes:
        key, found, record, address: as above.
        count: how often it is pinned at the engine.
        users: callers that hold it, and the caller of its slot until the slot is left.
        views: how many callers have left it but still have views.
        is_slots: whether the slot's holder has it among the held slots.
    """

    cdef readonly bytes key
    cdef readonly object found  # type: Found
    cdef readonly ClientSlotRecord record
    cdef readonly uint64_t address
    cdef public uint64_t count
    cdef readonly uint64_t users
    cdef public uint64_t views
    cdef public bint is_slots

    def __init__(self, bytes key not None, found: Found, ClientSlotRecord record not None, address: int) -> None:
        self.key, self.found, self.record, self.address = key, found, record, address

    def enter(self) -> None:
        """One more uses it."""
        self.users += 1

    def leave(self) -> None:
        """One uses it no more."""
        assert self.users, "a pin has no such user"
        self.users -= 1


cdef class KeptContent:
    """Kept content, as one caller sees it: its views, until they are left.

    Args:
        found: how the engine described it.
        key: the first number of its region's key.
        regions: these report the death of its last view.
        mapping: the slab's.
        max_tensors: in a payload.

    Raises:
        RemoteProtocolError: it is no content of the slab.
    """

    cdef ContentRegions _regions
    cdef bint _is_left

    def __init__(self, found: Found, key: int, Regions regions not None, Mapping mapping not None, max_tensors: int) -> None:
        cdef Content content
        if found.offset % BLOCK_NBYTES or found.offset + found.nbytes + BLOCK_NBYTES > mapping.mapped.nbytes:
            raise RemoteProtocolError(f"kept content at {found.offset} of {found.nbytes} bytes is not in the slab")
        bounds = bounds_of(max_tensors, UINT64_MAX)  # in 4 KiB, values can't count much
        content = _content_of(found.payload, found.offset, found.nbytes, found.generation, found.is_copied, bounds)
        self._regions = regions_of(content, key, regions, mapping)

    def decode(self, PayloadDecoder decoder not None):
        """Returns the payload, with its tensors viewed in place.

        Raises:
            msgspec.ValidationError: it is not of the decoder's type.
        """
        return decoder.decode(self._regions, None)

    def leave(self) -> bool:
        """Makes no further views; returns whether views are alive, whose death the regions will report. Call it once."""
        assert not self._is_left, "content is left once"
        self._is_left = True
        return self._regions.leave(0)
