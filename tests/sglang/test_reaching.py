"""How a tokenizer reaches the ring of its scheduler: that one and no other, and again and again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmring.errors import EngineDeadError
from shmring.integrations.sglang import hooking
from shmring.integrations.sglang.ends import Ends
from shmring.integrations.sglang.scheduler import Owner
from shmring.integrations.sglang.settings import Settings
from shmring.integrations.sglang.tokenizer import Sender
from tests.nursery import Nursery
from tests.sessions import session_of
from tests.sglang.test_exchange import MB, Process, encode, picture, reasons, until

INLINE = "tensors go inline until the ring of scheduler 0 is reached: "
AGAIN = "shmring: tensors go through shared memory (test-0)"
SETTINGS = Settings(slab_nbytes=64 * MB, name="test")


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    caplog.set_level("INFO")


@pytest.fixture
async def tokenizer_of() -> AsyncIterator[Callable[[Settings], Process]]:
    senders: list[Sender] = []

    def make(settings: Settings) -> Process:
        process = Process(settings)
        process.ends.sender = sender = Sender(settings, schedulers=1, tokenizers=1, chooses=True, public=False)
        senders.append(sender)
        return process

    yield make
    for sender in senders:
        await sender.close()


@pytest.fixture
def scheduler_of() -> Iterator[Callable[[Settings], Process]]:
    owners: list[Owner] = []

    def make(settings: Settings) -> Process:
        process = Process(settings)
        process.ends.owner = owner = Owner(settings, 0, 0)
        owners.append(owner)
        return process

    yield make
    for owner in owners:
        owner.close()


def sender_of(process: Process) -> Sender:
    assert process.ends.sender is not None
    return process.ends.sender


OWNS_UNTIL_TOLD = """if True:
    import os, signal, sys
    from shmring.integrations.sglang.scheduler import Owner
    from shmring.integrations.sglang.settings import Settings
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.environ["XDG_RUNTIME_DIR"] = sys.argv[1]
    owner = Owner(Settings(slab_nbytes=int(sys.argv[2]), name=sys.argv[3]), 0, 0)
    print("there", flush=True)
    signal.sigwait([signal.SIGTERM])
    owner.close()
"""


async def test_a_scheduler_that_is_stopped_while_it_is_connected_to_is_reached_when_it_goes_on(
    nursery: Nursery,
    tmp_path: Path,
    tokenizer_of: Callable[[Settings], Process],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmring.integrations.sglang.tokenizer._CONNECT_S", 0.5)
    ring = (os.environ["XDG_RUNTIME_DIR"], str(SETTINGS.slab_nbytes), SETTINGS.name)
    child = nursery.start_text(tmp_path / "output", OWNS_UNTIL_TOLD, *ring)
    assert await child.said() == ["there"]
    child.signal(signal.SIGSTOP)
    process = tokenizer_of(SETTINGS)
    sender = sender_of(process)
    sender.connect()
    with pytest.raises(OSError, match="connecting"):
        process.pointer(picture())
    await until(lambda: sender._links[0].reason == "engine")
    with pytest.raises(OSError, match="engine"):
        process.pointer(picture())
    assert reasons(sender) == {"connecting": 1, "engine": 1}
    child.signal(signal.SIGCONT)
    await until(lambda: sender.is_connected(0))
    assert process.pointer(picture()) is not None
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 1)
    child.signal(signal.SIGTERM)
    await child.died()


async def test_a_connection_that_is_lost_is_made_again_with_the_next_request(
    tokenizer_of: Callable[[Settings], Process],
    scheduler_of: Callable[[Settings], Process],
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler, process = scheduler_of(SETTINGS), tokenizer_of(SETTINGS)
    sender = sender_of(process)
    sender.connect()
    await until(lambda: sender.is_connected(0))
    session_of(sender._links[0].client)._lose(EngineDeadError("lost"))
    with pytest.raises(OSError, match="engine"):
        process.pointer(picture())
    sender.connect()
    await until(lambda: sender.is_connected(0))
    sent = picture(64)  # the memory of a lost connection comes back when its process has ended
    assert scheduler.decode(encode(process.pointer(sent))).materialize().equal(sent)
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 2)


async def test_a_scheduler_reads_no_reference_to_another_ones_ring(
    tokenizer_of: Callable[[Settings], Process], scheduler_of: Callable[[Settings], Process]
) -> None:
    """Their clients have the same numbers, and so have the requests of these."""
    settings = [SETTINGS.of_server(instance) for instance in ("first", "second")]
    schedulers = [scheduler_of(each) for each in settings]
    tokenizers = [tokenizer_of(each) for each in settings]
    messages, sent = [], [picture(), picture()]
    for process, tensor in zip(tokenizers, sent, strict=True):
        sender_of(process).connect()
        await until(lambda process=process: sender_of(process).is_connected(0))
        messages.append(encode(process.pointer(tensor)))
    with pytest.raises(RuntimeError, match="it is in the slab of another scheduler than 0"):
        schedulers[1].decode(messages[0]).materialize()
    for scheduler, message, tensor in zip(schedulers, messages, sent, strict=True):
        assert scheduler.decode(message).materialize().equal(tensor)


async def test_of_two_servers_in_a_process_each_request_goes_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooking, "_sender", lambda settings, context: settings.ring_name(0))
    servers = hooking._Servers(Ends(SETTINGS), None)

    class Manager:
        """In place of SGLang's ``TokenizerManager``."""

        async def send(self) -> Any:
            await asyncio.sleep(0)  # as SGLang does before it encodes
            return servers.sender()

        async def generate(self) -> Any:
            servers.sends(self, "a request")  # as the hook, before what it hooks is called
            return await self.send()

    managers = [Manager(), Manager()]
    for manager, instance in zip(managers, ("first", "second"), strict=True):
        servers.note_made(manager, SimpleNamespace(instance_id=instance))
    assert servers.sender() is None
    made = await asyncio.gather(*(manager.generate() for manager in managers * 2))
    assert made == ["test-first-0", "test-second-0"] * 2
    assert await Manager().generate() is None


def test_a_server_without_an_instance_id_is_none() -> None:
    with pytest.raises(ValueError, match="no instance_id"):
        SETTINGS.of_server("")
