"""The engine's side towards its workers: how workers join and part, and messages that wait.

Theory of operation: :class:`Workers` is the asyncio shell around the :class:`~shmring.core.compiled.FanOutEnd`, as
:class:`~shmring.ring.shell.Shell` is around the :class:`~shmring.core.compiled.EngineEnd`. A message that finds memory, place
and room is sent there, at once. Another message, or one that takes long to copy, stands in line here, and no message to one
of its workers overtakes it. So each worker gets its messages in the order of the calls, and no message waits for a worker to
which it does not go. A sender that is cancelled passes its turn on.

An engine that waits for workers says so in their pages or rings, and they ring it. Otherwise they do not ring. The slots of
claims are an exception: frontends wait for them, and this engine does not. So this file looks at them a moment after such a
message was sent and after each bell, and asks the workers that still read them to ring.

A worker ends by the end of its connection, by :meth:`Workers.drop`, by its process's death, or by breaking the rules. In each
case it gets no more messages. Messages that it has not left come back when its page says so, or when the kernel says that its
process is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from shmring.core.compiled import (
    WORKER_PAGE_NBYTES,
    BaseClaim,
    EngineEnd,
    FanOutBook,
    FanOutEnd,
    Gathering,
    JoinedWorker,
    Mapping,
    Parcel,
    WorkerRecord,
)
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.loggers import logger_of
from shmring.core.messages import (
    PROTOCOL_VERSION,
    AnswerFailed,
    AnswerPart,
    Join,
    RankTaken,
    Refused,
    WorkerWelcome,
    decode_worker_message,
)
from shmring.core.printable import printable, printable_lines
from shmring.door import count_of, ranks_of, timeout_of
from shmring.errors import RemoteProtocolError, WorkersBehindError, WouldBlock
from shmring.line import WaitingLine
from shmring.memory.copier import Copier
from shmring.memory.slab import Slab, reserve_for_one_writer
from shmring.memory.tensors import make_decoder, make_packer
from shmring.ring import limits
from shmring.ring.frontend import fit_text
from shmring.ring.life import RingLife
from shmring.statistics import WorkerStatistics
from shmring.transport.endpoint import Peer, answer_peer, handshake_frame, refuse
from shmring.transport.link import Link
from shmring.transport.liveness import ProcessWatch
from shmring.transport.rings import map_rings, sealed_memory, sealed_rings

__all__ = ["Workers"]

logger = logger_of("shmring.ring")

_MADV_DONTFORK = 10
_INLINE_NBYTES = (
    1024  # of tensors in a record: it is copied for each worker, and a view of the one copy in memory costs as much
)
_KEPT_S = 0.001  # after which this file looks whether slots of claims may go back
_GONE_S = 0.1  # the same for dropped workers, which do not ring: only their pages change
_LOOK_S = 0.00025  # how long it looks for replies before the loop goes on, if this engine polls busily: a part of a turn
_MOST_ANSWERS = 4  # of max_payload_nbytes: what one reply may take in parts, tensors included
_BACKLOG_NBYTES = 64 << 10  # of a message that can't wait: that a connection ends


class _Worker(JoinedWorker):
    """A worker that has joined: what its connection reports."""

    def __init__(self, workers: Workers, peer: Peer, watch: ProcessWatch, page: Mapping, ring_fds: tuple[int, int]) -> None:
        hello = peer.hello
        assert isinstance(hello, Join)
        super().__init__(workers.end)
        self._workers = workers
        self.rank = hello.rank
        self.name = printable(hello.name)
        self.pid = peer.pid
        self.watch = watch
        self.page = page
        self.parts: list[bytes] = []
        self.parts_nbytes = 0
        to_worker, to_engine = map_rings(ring_fds, int(workers.life.config.message_ring_nbytes))
        life = workers.life
        self.link = _WorkerLink(
            self,
            peer.socket,
            to_engine,
            to_worker,
            life.poller,
            max_backlog_nbytes=_BACKLOG_NBYTES,
            busy_poll_s=life.config.busy_poll_s,
        )

    def __str__(self) -> str:
        return f"worker {self.rank} ({self.name or 'unnamed'}, pid {self.pid})"

    def handle_message(self, record: bytes) -> None:
        message = decode_worker_message(record)
        if isinstance(message, AnswerPart):
            self._handle_part(message)
        elif isinstance(message, AnswerFailed):
            type_name, text = printable(message.type_name), printable_lines(message.message)
            self.end.handle_failure(self.record, message.sequence, type_name, text)
        else:
            raise RemoteProtocolError("a worker joins once")

    def _handle_part(self, part: AnswerPart) -> None:
        self.parts.append(part.data)
        self.parts_nbytes += len(part.data)
        if self.parts_nbytes > _MOST_ANSWERS * int(self._workers.life.config.max_payload_nbytes):
            raise RemoteProtocolError(f"a reply in parts exceeds {_MOST_ANSWERS} times max_payload_nbytes")
        if not part.more:
            record, self.parts, self.parts_nbytes = b"".join(self.parts), [], 0
            if not self.handle_answer(record):
                raise RemoteProtocolError("what came in parts is no reply")

    def rang(self) -> None:
        self._workers.hear()

    def peer_gave_up(self) -> None:
        """It uses none of the memory that it was lent."""
        self._workers.part(self, "gave up", uses_nothing=True)

    def protocol_violated(self, error: RemoteProtocolError) -> None:
        self._workers.refuse(self, error)

    def failed(self, error: BaseException) -> None:
        self._workers.failed(self, error)

    def connection_lost(self) -> None:
        self._workers.part(self, "has died" if self.watch.has_died() else "has left")


class _WorkerLink(Link):
    """A link that reports each bell to its owner: a worker may have rung because it has left a message."""

    _owner: _Worker

    def _hear(self) -> None:
        super()._hear()
        self._owner.rang()


class Workers:
    """The workers of a ring; the :class:`~shmring.core.shells.BroadcastShell` of their end.

    Args:
        life, end, slab: of their engine.
        copier: has the turns of copies, and the threads.
    """

    def __init__(self, life: RingLife, end: EngineEnd, slab: Slab, copier: Copier) -> None:
        self.life = life
        self.home, self.loop = life.home, life.loop
        config = life.config
        self._slab = slab
        self._copier = copier
        self._reserving: asyncio.Future[tuple[int, Mapping]] | None = None
        self._fd = -1
        self._memory: Mapping | None = None
        self.book = FanOutBook(config.worker_backlog, limits.MAX_WORKERS)
        self.end = FanOutEnd(
            self,
            end,
            self.book,
            make_packer(config.max_tensors, int(config.max_payload_nbytes), config.max_values),
            make_decoder(),
            slab.mapping,
            inline_nbytes=min(_INLINE_NBYTES, int(config.inline_nbytes)),
            record_nbytes=life.record_nbytes,
            at_once_nbytes=life.offload_nbytes,
            max_tensors=config.max_tensors,
            max_values=config.max_values,
            look_s=min(config.busy_poll_s, _LOOK_S),
        )
        self._workers: dict[WorkerRecord, _Worker] = {}
        self._line: WaitingLine[None] = WaitingLine()  # of senders that wait for their turn, by their parcels
        self._sending: dict[Parcel, None] = {}  # of senders that have their turn, in order
        self._changes: WaitingLine[None] = WaitingLine()  # of senders that wait for workers
        self._joined: WaitingLine[None] = WaitingLine()  # of tasks that wait for workers to join
        self._looking: asyncio.TimerHandle | None = None

    # -- sending -------------------------------------------------------------------------------------------------------

    def broadcast(self, payload: object, to: Iterable[int] | None, timeout: float | None) -> Awaitable[tuple[int, ...]]:
        """See :meth:`Ring.broadcast`."""
        return self.end.broadcast(payload, ranks_of(to), timeout)

    def broadcast_nowait(self, payload: object, to: Iterable[int] | None) -> tuple[int, ...]:
        """See :meth:`Ring.broadcast_nowait`."""
        return self._sent_now(self.end.send_now(payload, ranks_of(to)))

    def share(
        self, claim: BaseClaim, beside: object, to: Iterable[int] | None, timeout: float | None
    ) -> Awaitable[tuple[int, ...]]:
        """See :meth:`Claim.share`."""
        return self.end.broadcast([claim.payload, beside], ranks_of(to), timeout, claim=claim)

    def share_nowait(self, claim: BaseClaim, beside: object, to: Iterable[int] | None) -> tuple[int, ...]:
        """See :meth:`Claim.share_nowait`."""
        return self._sent_now(self.end.send_now([claim.payload, beside], ranks_of(to), claim=claim))

    def _sent_now(self, ranks: tuple[int, ...] | None) -> tuple[int, ...]:
        if ranks is None:
            raise WouldBlock("workers are behind, others wait to send, or the message takes long to copy")
        return ranks

    def gather(self, payload: object, to: Iterable[int] | None, timeout: float | None) -> Awaitable[list[Any]]:
        """See :meth:`Ring.gather`."""
        return self.end.gather(payload, ranks_of(to), timeout)

    def ask_now(self, payload: object, to: Iterable[int] | None) -> Gathering | None:
        """See :meth:`FanOutEnd.ask_now`."""
        return self.end.ask_now(payload, ranks_of(to))

    async def send_in_turn(self, parcel: Parcel, timeout: float | None) -> None:
        """Sends a message that has to wait, or takes long to copy.

        Raises:
            WorkersBehindError: the time is over.
            WorkerLostError: one of its workers is no worker any more.
            ClosedError: the ring is closed meanwhile.
        """
        bound = asyncio.timeout(timeout)
        try:
            async with bound:
                await self._send(parcel)
        except TimeoutError:
            if not bound.expired():
                raise
            ranks = self._laggards(parcel)
            raise WorkersBehindError(
                f"waited {timeout:g} s for workers {', '.join(map(str, ranks)) or 'to be sent what others wait to send'}"
                f"{' to leave messages' if ranks else ''}, and gave up; nothing was sent",
                ranks=ranks,
            ) from None
        finally:
            del bound

    async def gather_in_turn(self, gathering: Gathering, parcel: Parcel, timeout: float | None) -> None:
        """Sends a message that is gathered, as :meth:`send_in_turn`, and waits for its replies within the same time."""
        deadline_s = None if timeout is None else self.loop.time() + timeout
        await self.send_in_turn(parcel, timeout)
        future: asyncio.Future[None] = self.loop.create_future()
        gathering.sent(future, None if deadline_s is None else self.loop.call_at(deadline_s, gathering.time_out))
        try:
            await future
        finally:
            del future  # it holds its error, whose traceback holds this frame, and those of callers with views of requests

    async def _send(self, parcel: Parcel) -> None:
        """Sends a message. Meanwhile later messages to its workers wait, and no others."""
        try:
            self.life.home.check_loop()
            await self._take_turn(parcel)
            try:
                while not self.end.reserve_memory(parcel):
                    self.life.home.check_open()
                    await self._changed(self.book.want_memory)
                if not parcel.is_copied and (address := self.end.address_of(parcel)):
                    assert self._memory is not None
                    await self._copier.copy(parcel.packed, self._memory, address)
                    self.end.copied(parcel)
                while True:
                    self.life.home.check_open()
                    if self.end.publish(parcel):
                        break
                    await self._changed(lambda: self._want_room(parcel))
            finally:
                self._pass_turn(parcel)
        finally:
            self.end.discard(parcel)
            self.look_again()

    async def _take_turn(self, parcel: Parcel) -> None:
        if not self.is_behind(parcel):
            self._sending[parcel] = None
            self.end.is_crowded = True
            return
        place = self._line.enter(parcel)
        try:
            await self._line.stay(place, lambda _: self._pass_turn(parcel), lambda _: self._give_turns())
        finally:
            del place

    def is_behind(self, parcel: Parcel) -> bool:
        """Whether a message that goes to one of its workers was to be sent before, and is not sent yet."""
        return any(_meet(parcel, other) for other in (*self._sending, *self._line.values()))

    def _pass_turn(self, parcel: Parcel) -> None:
        self._sending.pop(parcel, None)
        self._give_turns()

    def _give_turns(self) -> None:
        """Messages to the same workers are sent one after the other, and others beside them."""
        before = [*self._sending]
        for place, parcel in self._line.waiting():
            if any(other.to is None for other in before):
                break
            if not any(_meet(parcel, other) for other in before):
                self._sending[parcel] = None
                place.set_result(None)
            before.append(parcel)
        self.end.is_crowded = bool(before)

    async def _changed(self, want: Callable[[], bool]) -> None:
        """Waits until a worker rings. Returns at once if the workers did what is wanted while ``want`` asked them."""
        if want():
            await self._changes.wait(lambda _: None)

    def _want_room(self, parcel: Parcel) -> bool:
        """Asks the workers that are in the way to ring; returns False if no worker is in the way (any more)."""
        ranks = self.book.ranks if parcel.to is None else [rank for rank in parcel.to if self.book.member(rank)]
        if not self.book.can_publish(ranks):
            return self.book.want(ranks)
        is_full = False
        for rank in ranks:
            worker = self._workers.get(self.book.member(rank))  # type: ignore[arg-type]
            if worker is not None and worker.link.lacks_room():
                is_full = True
        return is_full

    def _laggards(self, parcel: Parcel) -> tuple[int, ...]:
        if parcel.needs_memory:
            return self.book.memory_laggards()
        ranks = self.book.ranks if parcel.to is None else [rank for rank in parcel.to if self.book.member(rank)]
        return self.book.laggards(ranks) or tuple(
            rank
            for rank in ranks
            if not self._workers[self.book.member(rank)].link.can_write  # type: ignore[index]
        )

    def look(self) -> None:
        """Messages may have come back: looks, and wakes the senders that wait for that."""
        if self.book.outstanding:
            self.book.sweep()
        self._settle()
        self.look_again()

    def look_again(self) -> None:
        """A message was sent beside those that wait, or not sent after all: who waits for memory or room looks again. What it
        asked of the workers was about the messages that they had then.
        """
        self._changes.give_all(None)

    def _settle(self) -> None:
        """Removes the workers that are gone."""
        gone, self.book.gone = self.book.gone, []
        for record in gone:
            worker = self._workers.pop(record)
            worker.watch.close()

    def expects_replies(self, record: WorkerRecord) -> None:
        """A worker is to reply to an engine that polls busily, so its link stays awake."""
        self._workers[record].link.published()

    def hear(self) -> None:
        """A worker has rung, which it does once. A caller that still waits asks again; for frontends, this method asks."""
        self.look()
        if self.book.holds_slots():
            self.slots_are_kept()

    def slots_are_kept(self) -> None:
        """Workers read slots of claims."""
        if self._looking is None:
            self._looking = self.loop.call_later(_KEPT_S, self._look_after)

    def _look_after(self) -> None:
        """Gives slots of claims back, although no task here waits for them."""
        self._looking = None
        if not self.end.is_open:
            return
        self.look()
        has_departed = any(not record.is_member for record in self._workers)
        if self.book.holds_slots() and not self.book.want_slots():
            self.look()
        if has_departed and self.book.outstanding and self._looking is None:  # they ring no more
            self._looking = self.loop.call_later(_GONE_S, self._look_after)

    # -- workers come ----------------------------------------------------------------------------------------------

    async def wait(self, count: int, timeout: float | None) -> tuple[int, ...]:
        """See :meth:`Ring.wait_workers`."""
        count = count_of(count, "count", least=0, most=limits.MAX_WORKERS)
        timeout = timeout_of(timeout)
        self.life.home.enter()
        bound = asyncio.timeout(timeout)
        try:
            async with bound:
                while len(self.book.ranks) < count:
                    self.life.home.check_open()
                    await self._joined.wait(lambda _: None)
                self.life.home.check_open()
        except TimeoutError:
            if not bound.expired():
                raise
            raise TimeoutError(f"waited {timeout:g} s for {count} workers, and there are {list(self.book.ranks)}") from None
        return self.book.ranks

    async def admit(self, peer: Peer) -> None:
        """Makes a peer a worker, or sends it the reason why not. Takes its pidfd over.

        Raises:
            RemoteProtocolError: it can't be a worker; it has got the reason.
            OSError, SlabError: there is no memory, or there are no descriptors.
        """
        join = peer.hello
        assert isinstance(join, Join)
        dead = asyncio.Event()  # until it is a worker
        worker: _Worker | None = None

        def died() -> None:
            if worker is None:
                dead.set()
            else:
                self._died(worker)

        watch = ProcessWatch(self.loop, peer.pidfd, died)
        try:
            await self._reserve()
            self._check_room(peer, join)
            if dead.is_set():
                raise RemoteProtocolError(f"process {peer.pid} has died")
            worker = self._make(peer, watch)
        except BaseException:
            watch.close()
            raise
        worker.link.start()
        self._joined.give_all(None)
        logger.info("%s has joined", worker)

    def _check_room(self, peer: Peer, join: Join) -> None:
        self._settle()
        taken = self.book.member(join.rank)
        if taken is not None:
            pid = self._workers[taken].pid
            with contextlib.suppress(OSError):  # it may be gone
                peer.socket.send(handshake_frame(RankTaken(join.rank, pid, self.life.name)))
            raise RemoteProtocolError(f"process {pid} is worker {join.rank} already")
        if len(self._workers) >= self.book.max_workers:
            refuse(peer.socket, f"the engine has {self.book.max_workers} workers, and takes no more")
            raise RemoteProtocolError("too many workers")

    async def _reserve(self) -> None:
        """Reserves memory for broadcasts, once; on a thread, since that touches all of it."""
        if self._memory is None:
            if self._reserving is None:
                config = self.life.config
                nbytes = -(-int(config.broadcast_nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES
                self._reserving = self.loop.run_in_executor(
                    None, lambda: reserve_for_one_writer(f"{self.life.name}-broadcasts", nbytes, prefault=config.prefault)
                )
                self._reserving.add_done_callback(self._reserved)
            reserving = self._reserving
            try:
                await asyncio.shield(reserving)
                self._reserved(reserving)  # if it was done before this waited, it may not have been called yet
            finally:
                del reserving  # as below
            self.life.home.check_open()

    def _reserved(self, reserving: asyncio.Future[tuple[int, Mapping]]) -> None:
        if self._reserving is not reserving:
            return  # it was called before
        self._reserving = None  # it holds the memory, or an error, whose traceback holds frames
        if reserving.cancelled() or reserving.exception() is not None:
            return  # the next worker that joins tries again
        fd, memory = reserving.result()
        if self.end.is_open:
            self._fd, self._memory = fd, memory
            self.end.reserve(memory)
        else:  # the ring was closed meanwhile
            os.close(fd)

    def _make(self, peer: Peer, watch: ProcessWatch) -> _Worker:
        config = self.life.config
        assert self._memory is not None
        fds: list[int] = []
        try:
            ring_fds = sealed_rings(int(config.message_ring_nbytes))
            fds += ring_fds
            page_fd = sealed_memory("shmring-worker", WORKER_PAGE_NBYTES)
            fds.append(page_fd)
            # Opened anew, to be read: this process's own descriptor would let a worker write.
            slab_fd = os.open(f"/proc/self/fd/{self._slab.fd}", os.O_RDONLY | os.O_CLOEXEC)
            fds.append(slab_fd)
            page = Mapping(page_fd, WORKER_PAGE_NBYTES)
            page.advise(0, WORKER_PAGE_NBYTES, _MADV_DONTFORK)
            worker = _Worker(self, peer, watch, page, ring_fds)
            answer_peer(peer, self._welcome(), (slab_fd, self._slab.reply_fd, self._fd, *ring_fds, page_fd))
            worker.attach(self.book.join(worker.rank, page, worker.link.writer), worker.link.reader)
            self._workers[worker.record] = worker
            return worker
        finally:
            for fd in fds:
                os.close(fd)

    def _welcome(self) -> WorkerWelcome:
        config = self.life.config
        assert self._memory is not None
        return WorkerWelcome(
            version=PROTOCOL_VERSION,
            epoch=self.life.epoch,
            slab_nbytes=self._slab.nbytes,
            leased_nbytes=self._slab.nbytes - self._slab.reply_nbytes,
            broadcast_nbytes=self._memory.nbytes,
            message_ring_nbytes=int(config.message_ring_nbytes),
            inline_nbytes=int(config.inline_nbytes),
            max_payload_nbytes=int(config.max_payload_nbytes),
            max_tensors=config.max_tensors,
            max_values=config.max_values,
            engine_name=self.life.name,
        )

    # -- workers go ----------------------------------------------------------------------------------------------------

    def drop(self, rank: int, reason: str) -> None:
        """See :meth:`Ring.drop_worker`."""
        self.life.home.check_open()
        record = self.book.member(rank)
        if record is None:
            raise self.book.no_workers((rank,))
        worker = self._workers[record]
        worker.link.send(Refused(fit_text(reason, self.life.record_nbytes)))
        self.part(worker, "was dropped")
        worker.link.close()

    def refuse(self, worker: _Worker, error: RemoteProtocolError) -> None:
        """Ends the connection of a worker that broke the rules."""
        self.life.protocol_errors += 1
        self._dismiss(worker, error, "broke the protocol")
        self.life.note_error(f"{worker} broke the protocol and is disconnected: {error}")
        logger.warning("%s broke the protocol and is disconnected: %s", worker, error)

    def failed(self, worker: _Worker, error: BaseException) -> None:
        """Ends the connection of a worker, since this engine has failed in the middle of a message from it or to it."""
        self._dismiss(worker, error, "is disconnected: this engine has failed in the middle of a message")
        logger.error("%s is disconnected: this engine has failed in the middle of a message", worker, exc_info=error)

    def _dismiss(self, worker: _Worker, error: BaseException, how: str) -> None:
        worker.link.send(Refused(f"{type(error).__name__}: {printable(str(error))}"[:1024]))
        self.part(worker, how)
        worker.link.close()

    def worker_violated(self, record: WorkerRecord, error: RemoteProtocolError) -> None:
        """A worker's count in its ring can't be true."""
        worker = self._workers[record]
        self.book.part(record)
        self.loop.call_soon(self.refuse, worker, error)

    def part(self, worker: _Worker, how: str, *, uses_nothing: bool = False) -> None:
        """A worker gets no more messages, and will not reply. A second call does nothing."""
        record = worker.record
        was_known = worker in self._workers.values()
        if uses_nothing:
            self.book.died(record)
        else:
            self.book.part(record)
        self.end.lost(record, how)
        self.look()
        if self.book.outstanding and not record.is_gone:
            self.slots_are_kept()
        if was_known and how:
            logger.info("%s %s", worker, how)

    def _died(self, worker: _Worker) -> None:
        worker.link.read_last_words()
        self.book.died(worker.record)
        self.end.lost(worker.record, "has died")
        worker.link.abort()
        self.look()
        logger.info("%s has died", worker)

    def close(self, reason: str) -> None:
        """Ends all connections. The memory of messages that workers still read goes with this process."""
        self.end.close()
        for worker in list(self._workers.values()):
            worker.link.send(Refused(reason))
            self.end.lost(worker.record, "was told that the engine is closing")
            worker.link.close()
            self.book.died(worker.record)  # messages that it may still read stay mapped there, and are not written any more
            worker.watch.close()
        self._workers.clear()
        self.book.gone.clear()
        self._line.give_all(None)
        self._joined.give_all(None)
        self._changes.give_all(None)
        if self._looking is not None:
            self._looking.cancel()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._memory = None

    def statistics(self) -> tuple[WorkerStatistics, ...]:
        """Returns the numbers of each worker, in order of rank."""
        self.look()
        return tuple(
            sorted(
                (
                    WorkerStatistics(
                        rank=record.rank,
                        pid=worker.pid,
                        is_member=record.is_member,
                        sent=record.sent,
                        unacknowledged=record.unacknowledged,
                        unacknowledged_nbytes=record.unacknowledged_nbytes,
                        is_stopped=worker.watch.is_stopped(),
                    )
                    for record, worker in self._workers.items()
                ),
                key=lambda worker: (worker.rank, worker.pid),
            )
        )

    @property
    def memory_nbytes(self) -> int:
        """Memory that is reserved for broadcasts."""
        return 0 if self._memory is None else self._memory.nbytes


def _meet(parcel: Parcel, other: Parcel) -> bool:
    """Whether both messages go to one worker, perhaps."""
    return parcel.to is None or other.to is None or not set(parcel.to).isdisjoint(other.to)
