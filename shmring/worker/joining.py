"""How a worker joins an engine: the handshake, and the mapping of the engine's memory.

It maps three things side by side, all read-only: the leasable part of the slab (through a descriptor that was opened for
reading, so that the kernel refuses any writable mapping), the replies, and the broadcasts. Beside these it has two message
rings and a page of its own.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any

from shmring.config import WorkerConfig
from shmring.core.compiled import (
    WORKER_PAGE_NBYTES,
    BaseMessage,
    Mapping,
    Packer,
    PayloadDecoder,
    RecordReader,
    RecordWriter,
    RingMemory,
    WorkerEnd,
)
from shmring.core.messages import PROTOCOL_VERSION, Join
from shmring.core.shells import WorkerShell
from shmring.core.welcome import check_worker_welcome
from shmring.memory.limits import check_open_files
from shmring.memory.slab import map_read_only
from shmring.memory.tensors import make_decoder, make_packer
from shmring.transport.endpoint import JoinedEngine, give_up, join_engine
from shmring.transport.listener import socket_path
from shmring.transport.rings import check_sealed, map_rings
from shmring.transport.waiting import reach_in_time

__all__ = ["Joined", "join_in_time"]

_MADV_DONTFORK = 10
_OPEN_FILES = 8  # of a worker: its socket, what it is sent with the welcome, the engine's pidfd


@dataclasses.dataclass(frozen=True, slots=True)
class Joined:
    """A worker's place at an engine. The owner of this object closes socket and pidfd."""

    name: str
    rank: int
    config: WorkerConfig
    epoch: int
    socket: socket.socket
    pidfd: int
    mapping: Mapping
    page: Mapping
    incoming: RingMemory
    outgoing: RingMemory
    max_tensors: int
    max_values: int
    max_payload_nbytes: int

    def make_end(
        self, shell: WorkerShell, reader: RecordReader, writer: RecordWriter, message_type: type[BaseMessage], payload_type: Any
    ) -> WorkerEnd:
        """Returns the compiled end of a worker, which is the shell.

        Raises:
            TypeError: msgspec knows no such ``payload_type``.
            OSError: there are no descriptors left.
        """
        decoder: PayloadDecoder = make_decoder(payload_type)
        packer: Packer = make_packer(self.max_tensors, self.max_payload_nbytes, self.max_values)
        return WorkerEnd(
            shell,
            reader,
            writer,
            self.socket.fileno(),
            self.mapping,
            self.page,
            decoder,
            make_decoder(tuple[payload_type, Any]),
            packer,
            message_type,
            max_tensors=self.max_tensors,
            max_values=self.max_values,
            max_payload_nbytes=self.max_payload_nbytes,
        )

    def close(self) -> None:
        """Ends the connection before it was used."""
        give_up(self.socket)
        self.socket.close()
        os.close(self.pidfd)


async def join_in_time(name: str, rank: int, label: str, config: WorkerConfig) -> Joined:
    """Joins the engine of a name, which may have to start first.

    Args:
        name: the engine's.
        rank: this worker's.
        label: how the engine's log calls this worker.
        config: how long to wait, and which users to trust.

    Raises:
        EngineDeadError: there was none in time.
        RankTakenError: a living worker has this rank.
        RemoteProtocolError, PermissionError, SlabError, OSError: it can't be joined.
    """
    path = socket_path(name, config.socket_dir)
    check_open_files(_OPEN_FILES, f"worker {rank} of {name!r}")
    uids = config.engine_uids if config.engine_uids is not None else frozenset({os.getuid()})
    join = Join(PROTOCOL_VERSION, rank, label)
    engine = await reach_in_time(name, path, lambda: join_engine(path, join, uids), config.connect_timeout_s)
    return _map(name, rank, config, engine)


def _map(name: str, rank: int, config: WorkerConfig, engine: JoinedEngine) -> Joined:
    welcome = engine.welcome
    try:
        check_worker_welcome(welcome)
        sizes = (
            welcome.leased_nbytes,
            welcome.slab_nbytes - welcome.leased_nbytes,
            welcome.broadcast_nbytes,
        )
        incoming, outgoing = map_rings(engine.ring_fds, welcome.message_ring_nbytes)
        check_sealed(engine.page_fd, WORKER_PAGE_NBYTES, "a worker's page")
        page = Mapping(engine.page_fd, WORKER_PAGE_NBYTES)
        page.advise(0, WORKER_PAGE_NBYTES, _MADV_DONTFORK)
        mapping = map_read_only(engine.memory_fds, sizes, prefault=config.prefault)
        return Joined(
            name,
            rank,
            config,
            welcome.epoch,
            engine.socket,
            engine.pidfd,
            mapping,
            page,
            incoming,
            outgoing,
            welcome.max_tensors,
            welcome.max_values,
            welcome.max_payload_nbytes,
        )
    except BaseException:
        give_up(engine.socket)
        engine.socket.close()
        os.close(engine.pidfd)
        raise
    finally:
        for fd in (*engine.memory_fds, *engine.ring_fds, engine.page_fd):
            os.close(fd)
