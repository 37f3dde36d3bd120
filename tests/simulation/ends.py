"""What both ends do with every message, in plain Python: the model of :mod:`shmring.core.engine_end` and ``client_end``.

The compiled ends take compiled books only. These take any: the models of the books, which tests break on purpose, and pairs
of both. Records are the real ones, and so are payloads, regions and the slab. A test walks with the compiled ends and with
these, and compares every state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from shmring.core.client_book import ClientSlotRecord
from shmring.core.effects import EngineEffect, Released
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.held_slots import HeldSlots
from shmring.core.mapping import Mapping
from shmring.core.message_ring import RecordWriter
from shmring.core.messages import KEPT_LEASE_ID, SLOT_HEADER_NBYTES, SLOT_MAGIC, TENSOR_EXTENSION, SlotRef
from shmring.core.payload import Packed, Packer, write_done, write_reply, write_submit
from shmring.core.received import PayloadDecoder
from shmring.core.states import ClientSlot, RequestEvent
from shmring.core.views import Region, Regions
from shmring.core.wire import Content, Done, Reply, Submit, read_record, read_tensor_ref
from shmring.errors import RemoteProtocolError, StaleDescriptorError
from shmring.memory.tensors import make_decoder

__all__ = ["ClaimEnd", "ClientEnd", "EngineEnd", "FrontendEnd", "SubmissionEnd"]

_MAX_TENSORS = 16


def write_header(slab: Mapping, slot: SlotRef) -> None:
    """Puts a slot's header before it."""
    with memoryview(slab) as memory:
        memory[slot.offset : slot.offset + 24] = _header(slot)


def check_header(slab: Mapping, slot: SlotRef) -> None:
    """Compares a slot's header with its descriptor.

    Raises:
        StaleDescriptorError: they differ.
    """
    with memoryview(slab) as memory:
        if memory[slot.offset : slot.offset + 24] != _header(slot):
            raise StaleDescriptorError(f"the slot at {slot.offset} is not generation {slot.generation}")


def _header(slot: SlotRef) -> bytes:
    return SLOT_MAGIC + slot.generation.to_bytes(8, "little") + slot.nbytes.to_bytes(8, "little")


class Opened:
    """A payload's regions, opened with the first view of each."""

    def __init__(
        self, content: Content, key: int, regions: Regions, slab: Mapping, slots: Sequence[SlotRef] | None = None
    ) -> None:
        self.slots = content.slots if slots is None else slots
        self._content = content
        self._key = key
        self._regions = regions
        self._slab = slab
        self._opened: dict[int, Region] = {}  # by the number on the wire

    def decode(self) -> Any:
        """Returns the payload, its arrays in place."""
        return msgspec.msgpack.Decoder(ext_hook=self._view).decode(self._content.payload)

    def _view(self, code: int, data: memoryview) -> Any:
        ref = read_tensor_ref(bytes(data)) if code == TENSOR_EXTENSION else None
        if ref is None:
            raise RemoteProtocolError("an extension that is no tensor")
        number = ref.region or len(self.slots)
        if number not in self._opened:
            slot = self.slots[number - 1]
            key = (self._key, slot.generation)
            self._opened[number] = self._regions.open(self._slab, slot.offset + SLOT_HEADER_NBYTES, slot.nbytes, key)
        return np.ndarray(ref.shape, ref.dtype, self._opened[number].memory(), ref.offset)  # type: ignore[arg-type] # a buffer

    def is_viewed(self, index: int) -> bool:
        """Whether a view of a slot is alive."""
        return index + 1 in self._opened and self._opened[index + 1].is_viewed

    def leave(self, index: int) -> bool:
        """Leaves a slot; returns whether it is viewed."""
        region = self._opened.pop(index + 1, None)
        return region is not None and region.leave()


class FrontendEnd:
    """See :class:`shmring.core.engine_end.FrontendEnd`."""

    def __init__(self, end: EngineEnd, client_id: int) -> None:
        self.end = end
        self.client_id = client_id
        self.writer: RecordWriter | None = None
        self.link: Any = None

    def attach(self, writer: RecordWriter) -> None:
        self.writer = writer

    def detach(self) -> None:
        self.writer = None

    def take_record(self, record: bytes) -> None:
        message = read_record(record, _MAX_TENSORS, from_engine=False)
        if isinstance(message, Submit):
            self.end.submit(self, message)
        else:
            self.take_message(record)

    def take_message(self, record: bytes) -> None:
        raise NotImplementedError


class ClaimEnd:
    """See :class:`shmring.core.engine_end.ClaimEnd`."""

    end: EngineEnd
    frontend: FrontendEnd
    submit: Submit
    taken: tuple[SlotRef, ...]  # as the book has numbered them
    opened: Opened
    payload: Any = None
    released = False
    ended = False
    aborted = False

    @property
    def client_id(self) -> int:
        return self.frontend.client_id

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    def finish(self) -> None:
        if self.ended:
            self.end.shell.carry_out(self.release_slots())
        else:
            self.end.finish(self, None, None)

    def send_reply(self, reply: Packed, slot: SlotRef | None) -> bool:
        link = self.frontend.link
        if not link.can_write or self.frontend.writer is None:
            return False
        self.end.lend_reply(self, slot)
        if not write_reply(self.frontend.writer, reply, self.request_id, slot):
            raise AssertionError("the ring of a simulation is full")
        link.published()
        return True

    def finish_with(self, reply: Packed, slot: SlotRef | None) -> bool:
        self.end.lend_reply(self, slot)
        self.end.finish(self, reply, slot)
        return True

    def release_slots(self) -> list[EngineEffect]:
        effects, released = self.end.release(self)
        if released:
            self.end.shell.send_release(self.frontend, released)
        return effects

    def mark_ended(self, *, aborted: bool = False) -> list[Callable[[], object]]:
        self.ended = True
        self.aborted = self.aborted or aborted
        return []


class EngineEnd:
    """See :class:`shmring.core.engine_end.EngineEnd`."""

    def __init__(
        self,
        shell: Any,
        book: Any,
        regions: Regions,
        mapping: Mapping,
        decoder: PayloadDecoder,
        claim_type: type[ClaimEnd],
        *,
        epoch: int,
        **limits: object,
    ) -> None:
        self.shell = shell
        self.book = book
        self.epoch = epoch
        self.waiting: OrderedDict[tuple[int, int], ClaimEnd] = OrderedDict()
        self.claims: dict[tuple[int, int], ClaimEnd] = {}
        self.is_awaited = False
        self.is_open = True
        self._regions = regions
        self._slab = mapping
        self._claim_type = claim_type

    def submit(self, frontend: FrontendEnd, submit: Submit) -> None:
        if submit.epoch != self.epoch:
            raise RemoteProtocolError(f"request {submit.request_id} is of epoch {submit.epoch}, this is {self.epoch}")
        self.book.submit(frontend.client_id, submit.request_id, submit.content.slots)
        claim = self._claim_type()
        claim.end, claim.frontend, claim.submit = self, frontend, submit
        uses = (
            self.book.clients[frontend.client_id].requests[submit.request_id].generations
        )  # of what is kept, numbers of its own
        claim.taken = tuple(
            slot if slot.lease_id != KEPT_LEASE_ID else SlotRef(slot.lease_id, slot.offset, slot.nbytes, use)
            for slot, use in zip(submit.content.slots, uses, strict=True)
        )
        self.waiting[frontend.client_id, submit.request_id] = claim
        if self.is_awaited:
            self.shell.request_arrived()

    def forget_waiting(self, client_id: int, request_id: int) -> None:
        del self.waiting[client_id, request_id]

    def forget_claim(self, client_id: int, request_id: int) -> ClaimEnd | None:
        return self.claims.pop((client_id, request_id), None)

    def take_next(self) -> Any:
        while self.waiting:
            (client_id, request_id), claim = self.waiting.popitem(last=False)
            self.book.claim(client_id, request_id)
            claim.opened = Opened(claim.submit.content, client_id, self._regions, self._slab, claim.taken)
            try:
                for slot in claim.opened.slots:
                    if slot.lease_id != KEPT_LEASE_ID:  # there, the header is of who gave it
                        check_header(self._slab, slot)
                claim.payload = claim.opened.decode()
            except (RemoteProtocolError, StaleDescriptorError) as error:
                self.shell.take_up_failed(claim, error, breaks_rules=isinstance(error, RemoteProtocolError))
                continue
            self.claims[client_id, request_id] = claim
            return claim
        return None

    def lend_reply(self, claim: ClaimEnd, slot: SlotRef | None) -> None:
        if slot is not None:
            write_header(self._slab, slot)
            self.book.reply_sent(claim.client_id, slot.generation)

    def release(self, claim: ClaimEnd) -> tuple[list[EngineEffect], list[int]]:
        """Releases a claim's slots; returns what follows, and the generations of which its frontend is to be told."""
        if claim.released:
            return [], []
        claim.released, claim.payload = True, None
        slots = claim.opened.slots
        if not slots:
            return [], []
        viewed = {slot.generation for index, slot in enumerate(slots) if claim.opened.leave(index)}
        told: list[int] = []
        others: list[EngineEffect] = []
        for effect in self.book.release_slots(claim.client_id, [slot.generation for slot in slots], viewed):
            if isinstance(effect, Released):
                told += effect.generations
            else:
                others.append(effect)
        return others, told

    def finish(self, claim: ClaimEnd, reply: Packed | None, slot: SlotRef | None) -> None:
        claim.ended = True
        key = (claim.client_id, claim.request_id)
        self.forget_claim(*key)
        effects, released = self.release(claim)
        if self.book.end(*key, RequestEvent.FINISH):
            self._send_done(claim, tuple(released), reply, slot)
        elif released:
            self.shell.send_release(claim.frontend, released)
        if effects:
            self.shell.carry_out(effects)

    def _send_done(self, claim: ClaimEnd, released: tuple[int, ...], reply: Packed | None, slot: SlotRef | None) -> None:
        frontend = claim.frontend
        writer = frontend.writer
        if writer is None:
            return  # it has gone
        if not write_done(writer, claim.request_id, released, reply, slot):
            raise AssertionError("the ring of a simulation is full")
        frontend.link.published()  # whether or not there is room: an end can't wait


class SubmissionEnd:
    """See :class:`shmring.core.client_end.SubmissionEnd`."""

    end: ClientEnd
    request_id: int
    ended = False

    def __init__(self) -> None:
        self.replies: deque[Content] = deque()

    @property
    def has_reply(self) -> bool:
        return bool(self.replies)

    def take_reply(self, decoder: PayloadDecoder) -> Any:
        return self.end.decode_reply(self.replies.popleft())

    def give_up(self, error: Exception | None) -> None:
        if not self.ended:
            self.ended = True
            if error is not None:
                self.drop_replies()

    def drop_replies(self) -> None:
        while self.replies:
            self.end.shell.release_replies([slot.generation for slot in self.replies.popleft().slots])


class _Holding:
    """A slot that a caller holds: the models of records can't say whether they may be submitted."""

    def __init__(self, record: ClientSlotRecord) -> None:
        self.record = record

    def is_submittable(self) -> bool:
        return self.record.state in (ClientSlot.WRITING, ClientSlot.CACHED, ClientSlot.KEPT)


class _Held:
    """The slots that callers hold."""

    def __init__(self) -> None:
        self.slots = HeldSlots()

    def hold(self, record: ClientSlotRecord, address: int, nbytes: int) -> None:
        holding: Any = _Holding(record)
        self.slots.hold(holding, address, nbytes)

    def leave(self, address: int) -> None:
        self.slots.leave(address)


class ClientEnd:
    """See :class:`shmring.core.client_end.ClientEnd`."""

    def __init__(
        self,
        shell: Any,
        book: Any,
        regions: Regions,
        mapping: Mapping,
        packer: Packer,
        writer: RecordWriter,
        submission_type: type[SubmissionEnd],
        slot_type: type[Any],
        maker: object,
        dtypes: object,
        clock: Callable[[], float],
        *,
        epoch: int,
        reply_key: int,
        max_tensors: int,
        inline_nbytes: int,
        max_inflight: int,
        **limits: object,
    ) -> None:
        self.shell = shell
        self.book = book
        self.epoch = epoch
        self.held = _Held()
        self.pending: dict[int, SubmissionEnd] = {}
        self.in_flight = 0
        self.stale_releases = 0
        self._max_inflight = max_inflight
        self._clock = clock
        self._regions = regions
        self._slab = mapping
        self._packer = packer
        self._writer: RecordWriter | None = writer
        self._submission_type = submission_type
        self._reply_key = reply_key
        self._inline_nbytes = inline_nbytes
        self._last_id = 0
        self._decoder = make_decoder()

    def detach(self) -> None:
        self._writer = None

    def begin(self) -> bool:
        if self.in_flight >= self._max_inflight:
            return False
        self.in_flight += 1
        return True

    def leave(self) -> None:
        self.in_flight -= 1

    def submit_now(self, payload: object, name: str, most_nbytes: int) -> Any:
        packed, in_place = self.pack(payload)
        if packed.slot_nbytes > most_nbytes or not self.begin():
            return None
        sent = self.send_now(packed, in_place, name, None)
        if sent is None:
            self.leave()
        return sent

    def pack(self, payload: object) -> tuple[Packed, list[ClientSlotRecord]]:
        assert self._writer is not None
        packed = self._packer.pack(payload, self._inline_nbytes, self._writer.largest_record_nbytes, self.held.slots)
        holdings: list[Any] = self.held.slots.found
        return packed, [holding.record for holding in holdings]

    def content_address(self, slot: ClientSlotRecord) -> int:
        return self._slab.address + slot.start * BLOCK_NBYTES + SLOT_HEADER_NBYTES

    def send_now(self, packed: Packed, in_place: list[ClientSlotRecord], name: str, stream: object) -> Any:
        slot = self.book.acquire(packed.slot_nbytes, held=False) if packed.slot_nbytes else None
        if slot is None and packed.slot_nbytes:
            return None
        if slot is not None:
            packed.copy_into(self.content_address(slot))
        sent = self.send(packed, in_place, slot, name, stream)
        if sent is None and slot is not None:
            self.shell.give_up(slot)
        return sent

    def send(
        self, packed: Packed, in_place: list[ClientSlotRecord], slot: ClientSlotRecord | None, name: str, stream: object
    ) -> Any:
        if not self.shell.link.can_write or self._writer is None:
            return None
        if not all(_Holding(record).is_submittable() for record in in_place):
            return None
        submission = self._submission_type()
        self._last_id += 1
        submission.end, submission.request_id = self, self._last_id
        refs = [self.hand_over(record) for record in ([*in_place] if slot is None else [*in_place, slot])]
        self.pending[self._last_id] = submission
        if not write_submit(self._writer, packed, self.epoch, self._last_id, name, b"", tuple(refs)):
            raise AssertionError("the ring of a simulation is full")
        self.shell.link.published()
        return submission

    def hand_over(self, record: ClientSlotRecord) -> SlotRef:
        if record.lease is None:  # the engine keeps it, so it changes no hands
            return SlotRef(KEPT_LEASE_ID, record.start * BLOCK_NBYTES, record.nbytes, record.generation)
        self.book.submit(record)
        write_header(self._slab, record.ref())
        return record.ref()

    def decoder_of(self, reply_type: object) -> PayloadDecoder:
        return self._decoder

    def take_record(self, record: bytes) -> None:
        message = read_record(record, _MAX_TENSORS, from_engine=True)
        if isinstance(message, Reply):
            self._deliver(message.request_id, message.content)
        elif isinstance(message, Done):
            self._done(message)
        else:
            self.shell.take_message(record)

    def _done(self, done: Done) -> None:
        if done.released:
            effects, unknown = self.book.released(done.released, self._clock())
            self.stale_releases += unknown
            self.shell.carry_out(effects)
        if done.content is not None:
            self._deliver(done.request_id, done.content)
        self.forget(done.request_id).give_up(None)

    def forget(self, request_id: int) -> SubmissionEnd:
        submission = self.pending.pop(request_id, None)
        if submission is None:
            raise RemoteProtocolError(f"request {request_id} ended, which is not in flight")
        self.leave()
        return submission

    def _deliver(self, request_id: int, content: Content) -> None:
        submission = self.pending.get(request_id)
        if submission is None:
            raise RemoteProtocolError(f"a reply came to request {request_id}, which is not in flight")
        if submission.ended:
            self.shell.release_replies([slot.generation for slot in content.slots])
        else:
            submission.replies.append(content)

    def decode_reply(self, content: Content) -> Any:
        """Decodes a reply; its slot goes back when the last view of it dies."""
        opened = Opened(content, self._reply_key, self._regions, self._slab)
        for slot in opened.slots:
            check_header(self._slab, slot)
        reply = opened.decode()
        for index, slot in enumerate(opened.slots):
            if not opened.leave(index):
                self.shell.release_replies([slot.generation])
        return reply
