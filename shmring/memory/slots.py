"""A frontend's slots in one memory of its engine: its leases there, the line for slots, and when slots and leases go back.

Theory of operation: :class:`Slots` is the asyncio shell around a :class:`~shmring.core.compiled.ClientBook`. A session has
one for each memory: :class:`HostSlots` for the slab, and :class:`~shmring.gpu.device_slots.DeviceSlots` for a slab on a GPU.
They differ in the type of a slot, and in the moment when a left slot is free. The work on every message does not come through
here: the :class:`~shmring.core.compiled.ClientEnd` and the book do it.

While callers wait, a timer says to the book when another moment has passed: it has no clock, and one caller's large slot may
have to wait for a process that has stopped.

Invariants: waiters are served as the book says, and one that is cancelled passes its turn on; after the session's end, nothing
is sent and no waiter is woken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from shmring.config import ClientConfig
from shmring.core.compiled import ClientBook, ClientEnd, ClientSlotRecord, Mapping
from shmring.core.effects import Acquired, ClientEffect
from shmring.core.geometry import ClientBookLimits, Geometry
from shmring.core.loggers import logger_of
from shmring.core.messages import HOST_MEMORY, FrontendMessage, LeaseGrant, LeaseReturn, Memory, Welcome
from shmring.errors import WouldBlock
from shmring.line import Place, WaitingLine, give
from shmring.memory.slab import Slab

__all__ = ["HostSlots", "Owner", "Slots"]

logger = logger_of("shmring.client")

_MOMENT_S = 1.0  # of which the book gives two to who can't be served, before smaller ones pass: slots come in milliseconds
_DRAIN_WARNING_S = 1.0  # a caller that waits this long while views keep slots is told so in the log


class _Link(Protocol):
    def send(self, message: FrontendMessage) -> None: ...

    def send_listed(self, make: type[LeaseReturn], numbers: Sequence[int]) -> None: ...


class Owner(Protocol):
    """The session whose slots these are."""

    loop: asyncio.AbstractEventLoop
    config: ClientConfig
    welcome: Welcome
    end: ClientEnd

    @property
    def link(self) -> _Link: ...

    @property
    def mapping(self) -> Mapping: ...

    def check_alive(self) -> None: ...

    def warn_of_views(self, record: ClientSlotRecord) -> None: ...


class Slots:
    """A session's slots in one memory. Lives in a loop.

    Args:
        owner: the session.
        memory: which one.
        first_block: where leases in it begin, in the engine's address space.
        nbytes: what is leased out from there on.

    Attributes:
        book: of the leases and the slots in them.
    """

    def __init__(self, owner: Owner, memory: Memory, *, first_block: int, nbytes: int) -> None:
        self._owner = owner
        self._loop = owner.loop
        self.book = ClientBook(
            ClientBookLimits(
                client_id=owner.welcome.client_id,
                leasable_nbytes=nbytes,
                max_leases=owner.welcome.max_leases,
                lease_nbytes=int(owner.config.lease_nbytes),
                lease_idle_s=owner.config.lease_idle_s,
                memory=memory,
                first_block=first_block,
            )
        )
        self._line: WaitingLine[ClientSlotRecord] = WaitingLine()
        self._left: dict[int, ClientSlotRecord] = {}  # by id: left by their caller, and still in use
        self._expiry: asyncio.TimerHandle | None = None
        self._moment: asyncio.TimerHandle | None = None  # while callers wait, and until the end of one moment more
        self._is_lost = False

    # -- what differs from one memory to another ---------------------------------------------------------------------------

    def hold(self, record: ClientSlotRecord, *, drain: bool) -> Any:
        """Hands an acquired slot to the caller.

        Args:
            record: of the slot.
            drain: whether it is kept, once it was left, until the last view of it has died.
        """
        raise NotImplementedError

    def statistics(self) -> dict[str, int]:
        """Returns the fields of :class:`~shmring.statistics.ClientStatistics` that are about this memory alone."""
        raise NotImplementedError

    def _lease_came(self, grant: LeaseGrant) -> None:
        """This lease is there from now on."""

    def _leases_left(self, lease_ids: Collection[int]) -> None:
        """These leases are about to go back."""

    def _expiry_planned(self, is_planned: bool) -> None:
        """There is a timer now for leases that have been empty for long; or none any more."""

    # -- acquiring -------------------------------------------------------------------------------------------------------

    async def acquire(self, nbytes: int, *, held: bool) -> ClientSlotRecord:
        """Waits in line for a slot."""
        slot = self.book.acquire(nbytes, held=held)
        if slot is not None:
            return slot
        place = self._line.enter()
        warning = self._loop.call_later(_DRAIN_WARNING_S, self._warn_of_draining, nbytes)
        self.carry_out(self.book.queue(place, nbytes, held=held))
        try:
            slot = await self._line.stay(place, self.give_up, self._gave_up_waiting)
        finally:
            warning.cancel()
            del place
        try:
            self._owner.check_alive()  # it may have been lost between the grant and now
        except BaseException:
            self.give_up(slot)
            raise
        return slot

    def _gave_up_waiting(self, place: Place[ClientSlotRecord]) -> None:
        # Also where the session has ended: the book lets go of the place, which holds its error, and that the caller's frames.
        self.carry_out(self.book.cancel(place))

    def _warn_of_draining(self, nbytes: int) -> None:
        if self.book.draining_nbytes():
            logger.warning(
                "waiting for %d bytes while %d bytes of slots that were left are kept by living views; del them, or leave "
                "the function that holds them",
                nbytes,
                self.book.draining_nbytes(),
            )

    def acquire_nowait(self, nbytes: int, *, held: bool, ask: bool = True) -> ClientSlotRecord:
        """Acquires a slot if it need not wait; otherwise asks for a lease, if it may, and raises WouldBlock."""
        slot = self.book.acquire(nbytes, held=held)
        if slot is None:
            raise self.no_space(nbytes, ask=ask)
        return slot

    def no_space(self, nbytes: int, *, ask: bool) -> WouldBlock:
        """Returns the error for a caller that does not wait, and asks for a lease, so that its next try may succeed."""
        if ask:
            self.carry_out(self.book.prefetch(nbytes))
        return WouldBlock(f"no {nbytes} bytes are free in this client's leases; request(), submit() and slot() wait for them")

    # -- going back --------------------------------------------------------------------------------------------------------

    def give_up(self, record: ClientSlotRecord) -> None:
        """Frees a slot that was acquired and is not in use."""
        self.carry_out(self.book.give_up(record, self._loop.time()))

    def views_gone(self, key: int) -> ClientSlotRecord:
        """A slot that was left is not used in this process any more; returns its record."""
        record = self._left.pop(key)
        self.carry_out(self.book.last_view_gone(record, self._loop.time()))
        return record

    def carry_out(self, effects: list[ClientEffect]) -> None:
        """Carries out the book's effects."""
        if self._is_lost:
            return  # the slab is unmapped, and whoever waited has been told
        for effect in effects:  # which grow: what follows from one comes after the others, as it did in the book
            if isinstance(effect, Acquired):
                if not give(effect.ticket, effect.slot):
                    effects += self.book.give_up(effect.slot, self._loop.time())
            elif isinstance(effect.message, LeaseReturn):
                self._leases_left(effect.message.lease_ids)
                self._owner.link.send_listed(LeaseReturn, effect.message.lease_ids)
            else:
                self._owner.link.send(effect.message)
        self._plan_expiry()
        if self._moment is None and self.book.waiting:
            self._moment = self._loop.call_later(_MOMENT_S, self._moment_passed)

    def _moment_passed(self) -> None:
        self._moment = None
        self.carry_out(self.book.moment_passed())

    def _plan_expiry(self) -> None:
        if self._expiry is None and (when := self.book.next_expiry()) is not None:
            self._expiry = self._loop.call_at(when, self._expire)
            self._expiry_planned(True)

    def _expire(self) -> None:
        self._expiry = None
        self._expiry_planned(False)
        self.carry_out(self.book.expire(self._loop.time()))

    # -- what the engine says ------------------------------------------------------------------------------------------------

    def granted(self, grant: LeaseGrant) -> None:
        """The engine lends a range of this memory.

        Raises:
            RemoteProtocolError: it is none.
        """
        effects = self.book.granted(grant, self._loop.time())
        self._lease_came(grant)
        self.carry_out(effects)

    def recalled(self, lease_ids: Collection[int]) -> None:
        """The engine wants leases back; those of other memories are ignored."""
        self.carry_out(self.book.recalled(lease_ids))

    def lose(self) -> list[Place[Any]]:
        """The session has ended; returns the futures that tasks wait for."""
        self._is_lost = True
        for timer in (self._expiry, self._moment):
            if timer is not None:
                timer.cancel()
        return [*self._line]


class HostSlots(Slots):
    """A session's slots in the slab.

    Args:
        owner: the session.
        slab: that is mapped.
    """

    def __init__(self, owner: Owner, slab: Slab) -> None:
        super().__init__(owner, HOST_MEMORY, first_block=Geometry.LEASABLE_START, nbytes=owner.welcome.leasable_nbytes)
        self._slab = slab
        self._writable: dict[int, tuple[int, int]] = {}  # the range of each lease, if only those are mapped

    def hold(self, record: ClientSlotRecord, *, drain: bool) -> Any:
        return self._owner.end.hold(record, drain)

    def statistics(self) -> dict[str, int]:
        book = self.book
        return {"leases": len(book.leases), "leased_nbytes": book.leased_nbytes, "free_nbytes": book.free_nbytes}

    def _expiry_planned(self, is_planned: bool) -> None:
        self._owner.end.expects_expiry = is_planned

    def left_viewed(self, record: ClientSlotRecord) -> None:
        """A slot was left that is kept until the last view of it has died."""
        self._left[id(record)] = record

    def _lease_came(self, grant: LeaseGrant) -> None:
        if self._owner.config.map_leased_only:
            self._slab.protect(grant.offset, grant.nbytes, readable=True, writable=True)
            self._writable[grant.lease_id] = (grant.offset, grant.nbytes)

    def _leases_left(self, lease_ids: Collection[int]) -> None:
        """These leases must not be written from now on; but another lease may lie where one of their slots was kept."""
        for lease_id in self._writable.keys() & set(lease_ids):
            offset, nbytes = self._writable.pop(lease_id)
            self._slab.protect(offset, nbytes, readable=True, writable=False)
            for start, length in self._writable.values():
                if start < offset + nbytes and offset < start + length:
                    self._slab.protect(start, length, readable=True, writable=True)
