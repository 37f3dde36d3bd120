"""What the compiled ends ask of the code around them, which waits, fails and tells others.

An *end* does the work of every message and never waits. Whatever is rarer, it has its *shell* do. There are four ends, and so
four shells: :class:`ClientShell` is the :class:`~shmring.client.session.Session`, :class:`EngineShell` the
:class:`~shmring.ring.shell.Shell`, :class:`BroadcastShell` the :class:`~shmring.ring.workers.Workers`, and :class:`WorkerShell`
each kind of worker. This page is the boundary: an end calls nothing else (``tests/house/test_shells.py``), and mypy checks that
each shell has all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextvars import Context

    from shmring.core.compiled import (
        BaseClaim,
        BaseSubmission,
        ClientSlotRecord,
        Gathering,
        Home,
        Packed,
        Parcel,
        Placement,
        Submit,
        WorkerRecord,
    )
    from shmring.core.effects import ClientEffect, EngineEffect
    from shmring.errors import RemoteProtocolError
    from shmring.memory.bundles import Bundle
    from shmring.ring.frontend import Frontend

__all__ = ["BroadcastShell", "ClientShell", "EngineShell", "WorkerShell"]


class _Link(Protocol):
    """The connection of a client."""

    def poll(self) -> None:
        """Delivers what has come."""

    def queue(self, record: bytes) -> None:
        """Sends a record that found the ring full."""

    def published(self) -> None:
        """A record was written to the ring."""

    def violated(self, error: RemoteProtocolError) -> None:
        """The peer broke the rules."""

    def break_off(self, error: RemoteProtocolError) -> None:
        """The peer broke the rules, and is left after the call in which that was found."""

    def failed(self, error: BaseException) -> None:
        """This side has failed in the middle of a record."""

    def fail_soon(self, error: BaseException) -> None:
        """This side has failed with what the peer was to be told; told after the call."""


class ClientShell(Protocol):
    """The shell of a :class:`~shmring.core.compiled.ClientEnd`."""

    @property
    def home(self) -> Home: ...

    @property
    def link(self) -> _Link: ...

    def check_alive(self) -> None:
        """Raises the error that says why nothing can be sent, if that is so."""

    def check_readable(self) -> None:
        """Raises it if replies can't be read either."""

    def decoder(self, payload_type: Any) -> Any:
        """Returns the decoder of a type of replies."""

    def carry_out(self, effects: list[ClientEffect]) -> None:
        """Carries out effects of the book of slots in host memory."""

    def give_up(self, record: ClientSlotRecord) -> None:
        """A slot was acquired, and its caller does not get it."""

    def slot_is_viewed(self, record: ClientSlotRecord) -> None:
        """A slot was left that is kept until the last view of it has died."""

    def kept_slot_left(self, record: ClientSlotRecord) -> None:
        """A slot was left that the engine keeps."""

    def warn_of_views(self, record: ClientSlotRecord) -> None:
        """In debug mode: a slot was left while views of it live."""

    def flight_ended(self) -> None:
        """Fewer requests are in flight, and others wait for that."""

    def handle_message(self, record: bytes) -> None:
        """Any other message than replies and ends has come."""

    def abort(self, submission: BaseSubmission, error: Exception) -> None:
        """Aborts a request; its caller gets the error."""

    def reply_read(self, request_id: int) -> None:
        """A caller has read a reply that was copied out, and its request has not ended."""

    def release_replies(self, generations: Sequence[int]) -> None:
        """Replies were read, or dropped: their slots are free."""

    def expect_unread(self) -> None:
        """Replies lie in slots until they are read: those of dropped requests are to be found a while later."""


class _Replies(Protocol):
    """Replies that the end can't send at once."""

    def send_in_turn(self, claim: BaseClaim, packed: Packed, is_last: bool) -> Coroutine[Any, Any, None]: ...

    def send_local_nowait(self, claim: BaseClaim, packed: Packed) -> bool: ...


class EngineShell(Protocol):
    """The shell of an :class:`~shmring.core.compiled.EngineEnd`."""

    @property
    def home(self) -> Home: ...

    @property
    def replies(self) -> _Replies: ...

    def check_claiming(self) -> None:
        """Raises the error that says why nothing is claimed, if that is so."""

    def let_others_run(self) -> None:
        """The loop must have a turn before more requests are claimed."""

    def claim_on_device(self, client_id: int, submit: Submit) -> Placement:
        """A request has slots in device memory: returns where their tensors are made."""

    def release_on_device(self, client_id: int, submit: Submit, copying: bool) -> list[bool]:
        """Releases slots in device memory; returns which of a claim's slots drain."""

    def open_bundle(self, bundle: Bundle) -> Any:
        """Decodes the payload of a request of this process's own."""

    def claim_failed(self, claim: BaseClaim, error: Exception, *, breaks_rules: bool) -> None:
        """A request can't be claimed."""

    def refuse(self, claim: BaseClaim) -> None:
        """Raises the error that says why a request can't be answered any more."""

    def send_release(self, frontend: Frontend, generations: Sequence[int]) -> None:
        """Slots go back to their frontend."""

    def carry_out(self, effects: list[EngineEffect]) -> None:
        """Carries out effects of the book."""

    def call_soon(self, ours: Sequence[Callable[[], object]], callers: Sequence[tuple[Callable[[], object], Context]]) -> None:
        """Callbacks of claims run from the loop, outside of the ring's event; those of callers in their contexts."""

    def log_drain(self, submit: Submit) -> None:
        """In debug mode: a claim is released while views of it live."""


class BroadcastShell(Protocol):
    """The shell of a :class:`~shmring.core.compiled.FanOutEnd`."""

    @property
    def home(self) -> Home: ...

    def is_behind(self, parcel: Parcel) -> bool:
        """Whether a message that goes to one of its workers was to be sent before, and is not sent yet."""

    def send_in_turn(self, parcel: Parcel, timeout: float | None) -> Coroutine[Any, Any, None]:
        """Sends a message that has to wait, or takes long to copy."""

    def gather_in_turn(self, gathering: Gathering, parcel: Parcel, timeout: float | None) -> Coroutine[Any, Any, Any]:
        """Sends such a message, and waits for the replies within the same time."""

    def expects_replies(self, record: WorkerRecord) -> None:
        """A worker is to reply: its link stays awake, if the engine polls busily."""

    def worker_violated(self, record: WorkerRecord, error: RemoteProtocolError) -> None:
        """A worker's count in its ring can't be true."""

    def slots_are_kept(self) -> None:
        """Workers read slots of claims."""

    def look_again(self) -> None:
        """A message was sent beside those that wait, or not after all: who waits for memory or room looks again."""


class WorkerShell(Protocol):
    """The shell of a :class:`~shmring.core.compiled.WorkerEnd`."""

    @property
    def home(self) -> Home: ...

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """No reply to a message will come: the engine is told, in the thread that left it."""

    def fail_answer_later(self, sequence: int, error: BaseException) -> None:
        """No reply to a message will come, says a finaliser: on any thread, at any moment."""
