"""A store as a process: what it keeps outlives who gave it, it says what it has, it starts once, and it ends when it is told to
or when nobody is there; and whoever is killed beside it takes nothing away and publishes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import shmring
from shmring.client import starting
from shmring.core.messages import PROTOCOL_VERSION
from shmring.engine.store import metrics
from shmring.engine.store.__main__ import main
from shmring.engine.store.metrics import serve_metrics
from shmring.engine.store.process import Ready
from shmring.engine.store.settings import StoreSettings
from shmring.frontend.commands.drain import drain
from shmring.frontend.commands.top import view
from shmring.processes.process import Process
from shmring.transport.listener import hold_start, listens, socket_path
from tests.nursery import Forked, Nursery
from tests.stores import end_stores, store_pids
from tests.tables import for_each
from tests.waiting import cancel, eventually, turns

ROOT = Path(__file__).resolve().parents[2]
SIZE = 100_000
_MODULE = "import runpy; runpy.run_module('shmring.engine.store', run_name='__main__', alter_sys=True)"


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@pytest.fixture
def fork(nursery: Nursery, socket_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """``fork(text, *arguments)``: a program that need not import torch; killed when the test ends."""
    forked: list[Forked] = []

    def run(text: str, *arguments: str) -> Forked:
        forked.append(nursery.start_text(tmp_path / f"output-{len(forked)}", text, *arguments))
        return forked[-1]

    yield run
    for each in forked:
        each.process.kill()


@pytest.fixture
async def store(fork: Callable[..., Forked], socket_dir: Path) -> Callable[..., Any]:
    """``await store("--option=value")``: a store of 4 MiB to which clients can connect."""

    async def start(*options: str) -> Forked:
        forked = fork(_MODULE, "s", "--slab=4MiB", f"--socket-dir={socket_dir}", *options)
        await eventually(lambda: forked.is_dead or any("is ready" in line for line in forked.lines))
        assert not forked.is_dead, forked.output.read_text()
        return forked

    return start


def connect(socket_dir: Path, **options: Any) -> Any:
    return shmring.connect("s", socket_dir=str(socket_dir), lease_nbytes="256KiB", inline_nbytes="1KiB", **options)


async def give(client: shmring.Client, *numbers: int, size: int = SIZE) -> None:
    for number in numbers:
        (await client.keep(key(number), {"x": torch.full((size,), number, dtype=torch.uint8)})).close()


async def statistics(socket_dir: Path) -> dict[str, Any]:
    return (await shmring.inspect("s", socket_dir=str(socket_dir))).statistics


# -- what it keeps and says --------------------------------------------------------------------------------------------------


async def test_a_store_keeps_content_for_others_and_answers_no_requests(store: Any, socket_dir: Path) -> None:
    await store()
    async with connect(socket_dir) as client:
        await give(client, 1)
        with pytest.raises(shmring.RemoteError, match="a store keeps content, and answers no requests"):
            await client.request({"x": torch.ones(5000)}, timeout=20)
        assert client.kept_nbytes >= 3 << 20
    async with connect(socket_dir) as other:
        with await other.find(key(1)) as kept:
            assert int(kept.payload["x"].sum()) == SIZE
        async with other.slot(200_000, timeout=20):
            pass  # there is room to write, whatever is kept
    assert (await statistics(socket_dir))["kept"] == 1


async def test_it_says_what_it_has_how_often_it_was_found_and_what_has_gone_and_why(store: Any, socket_dir: Path) -> None:
    await store("--kept-nbytes=1MiB", "--port=0", "--client-pinned-nbytes=300KB")
    async with connect(socket_dir) as client:
        await give(client, *range(5))
        with await client.find(key(4)), await client.find(key(3)):
            with pytest.raises(shmring.WouldBlock, match="as much kept content"):
                await client.find(key(2))
            waiting = asyncio.create_task(client.wait_kept(key(99)))
            await give(client, 10, size=SIZE // 2)
        await give(client, *range(5, 11))
        snapshot = await shmring.inspect("s", socket_dir=str(socket_dir))
        counts = snapshot.statistics
        assert (counts["kept_refusals"], counts["kept_waits"], counts["kept_misses"]) == (1, 1, 0)
        assert snapshot.kept_count == counts["kept"] == len(snapshot.kept)
        assert {each.key: each.hits for each in snapshot.kept}[key(3).hex()] == 1
        assert [each.nbytes for each in snapshot.kept] == sorted((each.nbytes for each in snapshot.kept), reverse=True)
        assert counts["kept_evictions"] == counts["kept_evictions_for_content"] == len(snapshot.dropped) > 0
        assert {each.why for each in snapshot.dropped} == {"content"}
        assert counts["kept_evicted_nbytes"] == sum(each.nbytes for each in snapshot.dropped)
        assert key(0).hex() in {each.key for each in snapshot.dropped}, "the least recently used one goes first"
        text = _printed(snapshot)
        assert key(3).hex() in text
        assert "other content" in text
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with client.slot((3 << 20) + (512 << 10), timeout=20):  # takes the place of all content
            gone = await shmring.inspect("s", socket_dir=str(socket_dir))
        assert gone.dropped[0].why == "lease"


def _printed(snapshot: Any) -> str:
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(view(snapshot, 200))
    return console.export_text()


def run_store(socket_dir: Path, *options: str) -> Process:
    """One that says when it is ready."""
    return Process.start(
        [sys.executable, "-P", "-m", "shmring.engine.store", "s", "--slab=4MiB", f"--socket-dir={socket_dir}", *options],
        ready_flag="--ready-fd=",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


async def test_its_numbers_are_those_of_an_engine_for_prometheus(socket_dir: Path) -> None:
    with run_store(socket_dir, "--port=0") as process:
        ready = await asyncio.to_thread(process.wait_until_ready, Ready, 120)
        async with connect(socket_dir) as client:
            await give(client, 1, 2)
            text = await asyncio.to_thread(_get, f"http://127.0.0.1:{ready.port}/metrics")
        assert "\nshmring_engine_ring_kept 2.0\n" in text
        assert "\nshmring_engine_ring_kept_evictions_for_content_total 0.0\n" in text
        assert "shmring_engine_steps" not in text, "a store makes no steps"
        assert await asyncio.to_thread(_get, f"http://127.0.0.1:{ready.port}/health") == "ok\n"
        assert process.stop(30) == 0
    with pytest.raises(OSError):
        _get(f"http://127.0.0.1:{ready.port}/health")


async def test_connections_for_its_numbers_are_bounded_in_number_and_in_time(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connections(port: int) -> list[asyncio.StreamReader]:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        writers.extend(writer for _, writer in opened)
        return [reader for reader, _ in opened]

    ring, writers = await serve(), list[asyncio.StreamWriter]()
    async with serve_metrics(ring, "127.0.0.1", 0) as port:
        monkeypatch.setattr(metrics, "_CONNECTION_S", 600.0)
        readers = await connections(port)
        await eventually(lambda: sum(reader.at_eof() or reader.exception() is not None for reader in readers) >= 36)
        assert sum(reader.at_eof() or reader.exception() is not None for reader in readers) == 36
        for writer in writers:
            writer.close()
        monkeypatch.setattr(metrics, "_CONNECTION_S", 0.2)
        readers = await connections(port)
        await eventually(lambda: all(reader.at_eof() or reader.exception() is not None for reader in readers))
        monkeypatch.undo()
        assert await asyncio.to_thread(_get, f"http://127.0.0.1:{port}/health") == "ok\n"
    for writer in writers:
        writer.close()


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


# -- how it ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
async def test_it_ends_when_nobody_uses_its_content_any_more(store: Any, socket_dir: Path, how: str) -> None:
    process = await store()
    async with connect(socket_dir) as client:
        await give(client, 1)
        with await client.find(key(1)) as kept:
            if how == "SIGTERM":
                process.signal(signal.SIGTERM)
                ending = asyncio.ensure_future(process.died())
            else:
                ending = asyncio.ensure_future(asyncio.to_thread(drain, "s", str(socket_dir), 60, engine=None, frontend=None))
            await eventually(lambda: _drains(client))
            with pytest.raises(shmring.WouldBlock, match="about to end"):
                await client.keep(key(2), {"x": torch.ones(5000)})
            assert not process.is_dead
            with await client.find(key(1)):  # what is there can be used
                assert int(kept.payload["x"].sum()) == SIZE
        assert await ending in (None, 0)
    await process.died()
    assert not listens(socket_path("s", str(socket_dir)))


async def test_a_second_signal_ends_it_at_once(store: Any, socket_dir: Path) -> None:
    process = await store("--shutdown-timeout=600")
    async with connect(socket_dir) as client:
        await give(client, 1)
        with await client.find(key(1)):
            waiting = asyncio.create_task(client.wait_kept(key(2)))
            process.signal(signal.SIGTERM)
            await eventually(lambda: _drains(client))
            await asyncio.sleep(0.6)  # two signals within half a second are one
            process.signal(signal.SIGTERM)
            await process.died()
            with pytest.raises(shmring.EngineDeadError):
                await waiting


def _drains(client: shmring.Client) -> bool:
    return client.engines["s"]._draining


async def test_it_ends_by_itself_when_nobody_was_there_for_long(store: Any, socket_dir: Path) -> None:
    process = await store("--idle-timeout=0.5")
    async with connect(socket_dir) as client:
        await give(client, 1)
        with pytest.raises(TimeoutError):
            await client.wait_kept(key(2), timeout=1.2)  # a client is there
        assert not process.is_dead
    await process.died()
    assert any("no client was there for 0.5 s" in line for line in process.lines)
    assert {path.name for path in socket_dir.iterdir()} == set()


# -- how it starts -----------------------------------------------------------------------------------------------------------


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def ends_stores(socket_dir: Path) -> Iterator[None]:
    """Those that a test has started end with it."""
    yield
    end_stores(socket_dir)
    starting._forgotten.clear()


_STARTER = """
import os, sys, shmring.threads
os.environ["PYTHONPATH"] = sys.argv[2]
name = shmring.threads.start_store("s", slab_nbytes="4MiB", socket_dir=sys.argv[1], timeout=120)
print("there", flush=True)
"""

#: What has the name of a store stops before it has a slab.
_STOPS = """
import os, signal, sys
def look(event, arguments):
    if event == "socket.bind" and str(arguments[1]).endswith("/s.sock"):
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(look)
"""


@pytest.fixture
def stops(tmp_path: Path) -> str:
    """A PYTHONPATH with which a store has its name, and stops."""
    directory = tmp_path / "stops"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(_STOPS)
    return f"{directory}:{ROOT}"


async def has_stopped(socket_dir: Path) -> tuple[Process, Process]:
    """The store that has stopped, and the process that waits for it; the caller closes them."""
    pid = await eventually(lambda: next((pid for pid in store_pids(socket_dir) if is_stopped(pid)), None), 120)
    return Process(pid), Process(parent_of(pid))


async def test_of_several_that_start_it_at_once_one_does(fork: Any, socket_dir: Path, ends_stores: None) -> None:
    starters = [fork(_STARTER, str(socket_dir), str(ROOT)) for _ in range(4)]
    for starter in starters:
        assert await starter.said(120) == ["there"]
        await starter.died()
    assert store_pids(socket_dir) == [(await shmring.inspect("s", socket_dir=str(socket_dir))).pid]
    async with connect(socket_dir) as client:  # it has outlived them
        await give(client, 1)


async def test_who_is_killed_while_its_store_reserves_memory_takes_it_from_nobody(
    fork: Any, socket_dir: Path, stops: str, ends_stores: None
) -> None:
    starter = fork(_STARTER, str(socket_dir), stops)
    stopped, between = await has_stopped(socket_dir)
    with stopped, between:
        starter.signal(signal.SIGKILL)
        between.send(signal.SIGKILL)
        with pytest.raises(TimeoutError, match="another process is starting"):
            await shmring.start_store("s", socket_dir=str(socket_dir), timeout=0.05)  # it has its name, and no more
        coming = asyncio.ensure_future(shmring.start_store("s", socket_dir=str(socket_dir), timeout=120))
        await turns()
        stopped.send(signal.SIGCONT)
        assert await coming == "s"
        async with connect(socket_dir) as client:
            await give(client, 1)
            assert (await shmring.inspect("s", socket_dir=str(socket_dir))).pid == stopped.pid


async def test_a_store_that_is_killed_while_it_starts_is_started_again_by_who_waits_for_it(
    socket_dir: Path, stops: str, ends_stores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(path: str) -> asyncio.Future[str]:
        monkeypatch.setenv("PYTHONPATH", path)
        return asyncio.ensure_future(shmring.start_store("s", slab_nbytes="4MiB", socket_dir=str(socket_dir), timeout=120))

    first = start(stops)
    stopped, between = await has_stopped(socket_dir)
    with stopped, between:
        second = start(str(ROOT))
        await turns()
        stopped.send(signal.SIGKILL)
        with pytest.raises(shmring.EngineDeadError, match="did not start: it was killed by signal 9"):
            await first
    assert await second == "s"
    async with connect(socket_dir) as client:
        await give(client, 1)


async def test_a_store_is_nobodys_child_and_lies_where_its_starter_means(
    socket_dir: Path, ends_stores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(socket_dir.parent)
    await shmring.start_store("s", slab_nbytes="4MiB", socket_dir=socket_dir.name, timeout=120)
    (pid,) = store_pids(socket_dir)
    assert (await shmring.inspect("s", socket_dir=str(socket_dir))).pid == pid
    flags = re.search(r"flags:\s+(\d+)", Path(f"/proc/{pid}/fdinfo/2").read_text())
    assert flags is not None
    assert int(flags[1], 8) & os.O_APPEND, "who empties its log leaves no hole"
    while pid := parent_of(pid):
        assert pid != os.getpid()


@pytest.mark.parametrize("ours", ["exit 75", "exec sleep 600"])
async def test_who_starts_a_store_in_vain_has_that_of_the_other_or_starts_another(
    serve: Any, socket_dir: Path, ends_stores: None, monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    """75: another one had the name, and has ended since. The other store answers while this one still starts."""
    real, started = starting._start, list[Process]()

    def start(*arguments: Any) -> Process:
        if started and "exit" in ours:
            return real(*arguments)
        started.append(Process.start(["sh", "-c", ours]))
        return started[0]

    monkeypatch.setattr(starting, "_start", start)
    coming = asyncio.ensure_future(shmring.start_store("s", slab_nbytes="4MiB", socket_dir=str(socket_dir), timeout=120))
    await eventually(lambda: started)
    with started[0]:
        if "sleep" in ours:
            await serve(name="s")
        assert await coming == "s"


async def test_a_store_whose_name_is_taken_says_so_by_its_exit_code(
    store: Any, fork: Any, nursery: Nursery, socket_dir: Path
) -> None:
    await store()
    second = fork(_MODULE, "s", "--slab=4MiB", f"--socket-dir={socket_dir}")
    await second.died()
    assert nursery.exit_code_of(second) == os.EX_TEMPFAIL
    assert "is running already" in second.output.read_text()


async def test_who_stops_waiting_for_a_store_starts_none(socket_dir: Path, ends_stores: None) -> None:
    held = hold_start(socket_path("s", str(socket_dir)))
    assert held is not None
    with held:
        waiting = asyncio.ensure_future(shmring.start_store("s", socket_dir=str(socket_dir), timeout=None))
        await turns()
        assert await cancel(waiting)
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 20)  # no thread waits on
    assert store_pids(socket_dir) == []


async def test_a_store_goes_on_if_nobody_hears_that_it_is_ready(socket_dir: Path, ends_stores: None) -> None:
    with run_store(socket_dir) as process:
        os.close(process._word_fd)
        process._word_fd = -1
        await eventually(lambda: listens(socket_path("s", str(socket_dir))) or not process.lives, 120)
        await shmring.start_store("s", socket_dir=str(socket_dir), timeout=120)
        assert await asyncio.to_thread(process.stop, 60) == 0, process.rest(60)


async def test_who_is_killed_while_it_starts_one_keeps_nobody_from_starting_another(
    fork: Any, socket_dir: Path, ends_stores: None
) -> None:
    path = socket_path("s", str(socket_dir))
    holder = fork(
        "import sys; from pathlib import Path; from shmring.transport.listener import hold_start\n"
        "held = hold_start(Path(sys.argv[1])); print('holds', flush=True); sys.stdin.read(); import time; time.sleep(600)",
        str(path),
    )
    await holder.said()
    assert hold_start(path) is None
    coming = asyncio.ensure_future(shmring.start_store("s", slab_nbytes="4MiB", socket_dir=str(socket_dir), timeout=120))
    with pytest.raises(TimeoutError, match="another process is starting"):
        await shmring.start_store("s", socket_dir=str(socket_dir), timeout=0.05)
    holder.signal(signal.SIGKILL)
    assert await coming == "s"
    async with connect(socket_dir) as client:
        await give(client, 1)
    assert await shmring.start_store("s", socket_dir=str(socket_dir)) == "s", "it is there"
    assert len(store_pids(socket_dir)) == 1


async def test_a_store_that_does_not_start_says_why(socket_dir: Path, ends_stores: None) -> None:
    with pytest.raises(shmring.EngineDeadError, match=r"a slab of .* can't be had"):
        await shmring.start_store("s", slab_nbytes="100TiB", socket_dir=str(socket_dir), timeout=120)
    assert not listens(socket_path("s", str(socket_dir)))


def test_the_name_of_a_users_store_has_the_user_and_the_version_of_the_protocol() -> None:
    assert starting.store_name() == f"store-{os.getuid()}-v{PROTOCOL_VERSION}"


def test_a_started_store_takes_no_options_of_a_server_and_imports_nothing_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMRING_PORT", "8000")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", f":{ROOT}:tests:")
    environment = starting._environment()
    assert "SHMRING_PORT" not in environment
    assert environment["PYTHONPATH"] == f"{ROOT}:{ROOT}/tests"


@for_each(
    ("options", "text"),
    [
        (("a/b",), "can't name an engine"),
        (("s", "--slab=1KiB"), "make slab_nbytes at least"),
        (("s", "--slab=much"), "is not a size"),
        (("s", "--port=70000"), "70000 is not in the range"),
    ],
)
def test_what_can_be_no_store_is_refused(options: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(main, [*options])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_seven_eighths_are_for_content_unless_it_is_said() -> None:
    ring = StoreSettings().ring
    assert (ring.pin, ring.kept_nbytes) == ("off", None)
    settings = StoreSettings(ring=dataclasses.replace(ring, slab_nbytes="64MiB")).checked()
    assert 0.87 < int(settings.ring.kept_nbytes or 0) / (64 << 20) < 0.88


# -- whoever is killed beside it ---------------------------------------------------------------------------------------------

_CLIENT = """
import asyncio, sys, torch, shmring, hashlib
key = lambda number: hashlib.sha256(b"%d" % number).digest()
async def main():
    async with shmring.connect("s", socket_dir=sys.argv[1], lease_nbytes="256KiB", inline_nbytes="1KiB") as client:
        {body}
asyncio.run(main())
"""
_BODIES = {
    "waits": """waiting = [asyncio.create_task(client.wait_kept(key(number))) for number in range(100, 200)]
        print("waits", flush=True)
        await asyncio.gather(*waiting)""",
    "writes": """slot = await client.slot(100_000)
        view = slot.tensor((100_000,), torch.uint8).fill_(1)
        print("writes", flush=True)
        while True: view.add_(1)""",
    "hands over": """from tests.model.fake_cuda import FakeCuda
        from shmring.client.client import Client
        from shmring.client.connecting import open_client
        cuda = FakeCuda()
        stream = cuda.create_stream(0)
        stream.held = True
        config = shmring.ClientConfig(socket_dir=sys.argv[1])
        giver = await open_client(Client, ["s"], config, cuda=cuda)
        slot = await giver.slot(100_000)
        view = slot.tensor((100_000,), torch.uint8).fill_(1)
        cuda.queue(stream, lambda: None)
        keeping = giver.keep_nowait(key(1), {"x": view}, slot, stream=stream)
        print("hands", "over", flush=True)
        await keeping.wait()""",
    "gives": """print("gives", flush=True)
        number = 1000
        while True:
            number += 1
            (await client.keep(key(number), {"x": torch.full((5000,), number % 251, dtype=torch.uint8)})).close()""",
}


async def test_who_is_killed_while_it_waits_leaves_nothing(store: Any, fork: Any, socket_dir: Path) -> None:
    await store()
    async with connect(socket_dir) as client:
        finders = [fork(_CLIENT.format(body=_BODIES["waits"]), str(socket_dir)) for _ in range(3)]
        for finder in finders:
            await finder.said()
        await _until(socket_dir, lambda counts: counts["kept_waits"] == 300)
        finders[0].signal(signal.SIGSTOP)
        finders[1].signal(signal.SIGKILL)
        await _until(socket_dir, lambda counts: counts["kept_waits"] == 200)
        await give(client, 100, 101, size=5000)  # it comes to one that is stopped, too
        counts = await _until(socket_dir, lambda counts: counts["kept_waits"] == 196)
        assert counts["kept_pinned"] == 2
        for finder in finders:
            finder.signal(signal.SIGKILL)
        await _until(socket_dir, _is_whole)
        with await client.wait_kept(key(100), timeout=20):
            pass


@pytest.mark.parametrize("what", ["writes", "hands over"])
async def test_who_is_killed_before_it_has_written_has_published_nothing(
    store: Any, fork: Any, socket_dir: Path, what: str
) -> None:
    await store()
    async with connect(socket_dir) as client:
        writer = fork(_CLIENT.format(body=_BODIES[what]), str(socket_dir))
        await writer.said()
        waiting = asyncio.create_task(client.wait_kept(key(1)))
        await _until(socket_dir, lambda counts: counts["kept_waits"] == 1)
        writer.signal(signal.SIGKILL)
        counts = await _until(socket_dir, lambda counts: counts["clients"] == 1 and counts["departed_clients"] == 0)
        assert (counts["kept"], counts["quarantined_nbytes"], waiting.done()) == (0, 0, False)
        await give(client, 1)  # another one computes it
        (await waiting).close()


async def test_who_is_killed_at_any_moment_of_giving_leaves_whole_content_or_none(
    store: Any, fork: Any, socket_dir: Path
) -> None:
    await store()
    async with connect(socket_dir) as client:
        for _ in range(8):
            giver = fork(_CLIENT.format(body=_BODIES["gives"]), str(socket_dir))
            await giver.said()
            await _until(socket_dir, lambda counts: counts["kept"] > 0)
            giver.signal(signal.SIGKILL)
            await _until(socket_dir, _is_whole)
        found = [
            (number, kept)
            for number, kept in zip(
                range(1001, 2001), await client.find_many([key(number) for number in range(1001, 2001)]), strict=True
            )
            if kept is not None
        ]
        assert found
        for number, kept in found:
            with kept:
                assert torch.equal(kept.payload["x"], torch.full((5000,), number % 251, dtype=torch.uint8))


async def test_the_next_store_is_empty_and_who_waits_again_waits_for_it(store: Any, socket_dir: Path) -> None:
    first = await store()
    async with connect(socket_dir, reconnect=True) as client:
        await give(client, 1)
        waiting = asyncio.create_task(client.wait_kept(key(2)))
        await _until(socket_dir, lambda counts: counts["kept_waits"] == 1)
        first.signal(signal.SIGKILL)
        with pytest.raises(shmring.EngineDeadError):
            await waiting
        again = asyncio.create_task(client.wait_kept(key(1), timeout=120))
        await first.died()
        await store()
        await _until(socket_dir, lambda counts: counts["kept_waits"] == 1)
        assert not again.done(), "what was kept went with the store"
        await give(client, 1)
        (await again).close()


def _is_whole(counts: dict[str, Any]) -> bool:
    return (counts["clients"], counts["departed_clients"], counts["kept_pinned"], counts["quarantined_nbytes"]) == (1, 0, 0, 0)


async def _until(socket_dir: Path, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    counts = await statistics(socket_dir)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + 60
    while not condition(counts):
        assert loop.time() < deadline, counts
        await asyncio.sleep(0.01)
        counts = await statistics(socket_dir)
    return counts
