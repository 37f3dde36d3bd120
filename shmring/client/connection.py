"""A client's connection to one of its engines, as its users see it."""

from __future__ import annotations

from shmring.client.attachment import Attachment
from shmring.core.messages import Welcome
from shmring.core.states import ClientSlot
from shmring.errors import ShmringError
from shmring.statistics import ClientStatistics
from shmring.uncopied import uncopied

__all__ = ["EngineConnection"]


class EngineConnection:
    """A client's connection to one of its engines, and to the next one of that name. From :attr:`shmring.Client.engines`.

    Attributes:
        name: of the engine.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.name = attachment.name
        self._attachment = attachment

    def __repr__(self) -> str:
        return f"<EngineConnection {self.name!r}, {'attached' if self.connected else 'not attached'}>"

    __reduce_ex__ = uncopied("it is a part of its client; connect in the new process")

    @property
    def connected(self) -> bool:
        """Whether the engine is attached now."""
        return self._attachment.session is not None

    @property
    def client_id(self) -> int:
        """How the engine that is attached now numbers this client (``Claim.client_id`` there); 0: none is."""
        session = self._attachment.session  # once: another thread may ask (shmring.threads)
        return 0 if session is None else session.welcome.client_id

    @property
    def epoch(self) -> int:
        """Which life of the engine is attached now; 0: none is."""
        session = self._attachment.session
        return 0 if session is None else session.welcome.epoch

    @property
    def kept_nbytes(self) -> int:
        """How much the engine that is attached now may keep (``RingConfig.kept_nbytes``); 0: nothing, or none is attached."""
        session = self._attachment.session
        return 0 if session is None else session.welcome.kept_nbytes

    @property
    def _welcome(self) -> Welcome | None:
        """For a gateway: what the engine that is attached now takes."""
        session = self._attachment.session
        return None if session is None else session.welcome

    @property
    def _draining(self) -> bool:
        """For clients in a cluster: whether the engine that is attached now ends what it has, and new requests should go to
        others."""
        session = self._attachment.session
        return session is not None and session.load.draining

    @property
    def lost_error(self) -> ShmringError | None:
        """Why the last engine went away, as far as it is known; None if none has."""
        return self._attachment.lost_error

    @property
    def copies(self) -> int:
        """How many tensors were copied for sending so far. It is in :meth:`statistics` too, which costs far more."""
        session = self._attachment.session
        return self._attachment.counters.copies + (0 if session is None else session.end.copies)

    def _holds(self, payload: object) -> bool:
        """For clients in a cluster: whether tensors of a payload lie in slots that callers hold at this engine.

        Raises:
            TypeError, CapacityError: the payload can't be sent.
        """
        session = self._attachment.session
        return session is not None and session.find_held(payload) is not None

    def statistics(self) -> ClientStatistics:
        """Returns gauges of the present state, and counters since the start.

        Raises:
            ClosedError: the client belongs to the process that forked this one.
        """
        self._attachment.home.check_process()
        session = self._attachment.session
        counters = self._attachment.counters if session is None else self._attachment.counters.with_those_of(session.end)
        memories = session.slots if session is not None else ()
        books = [slots.book for slots in memories]
        return ClientStatistics(
            connected=session is not None,
            epoch=self.epoch,
            client_id=self.client_id,
            slots_writing=sum(book.count(ClientSlot.WRITING) for book in books),
            slots_submitted=sum(book.count(ClientSlot.SUBMITTED) for book in books),
            slots_cached=sum(book.count(ClientSlot.CACHED) for book in books),
            slots_draining=sum(book.count(ClientSlot.DRAINING) for book in books),
            waiting=sum(book.waiting for book in books),
            in_flight=len(session.end.pending) if session is not None else 0,
            reply_slots_held=session.reply_slots_held if session is not None else 0,
            kept_pins=len(session.kept) if session is not None else 0,
            **counters.as_dict(),
            **{field: count for slots in memories for field, count in slots.statistics().items()},
        )
