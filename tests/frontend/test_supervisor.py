"""The supervisor's parts: what it refuses to start, and how it ends children. Whole servers are in tests/integration."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from frontend import supervisor
from frontend.supervisor import ServeError, ServeOptions, serve

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
OBEDIENT = "import time; print('ready', flush=True); time.sleep(600)"


def options(**changes: Any) -> ServeOptions:
    fields: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "frontends": 1,
        "name": "test",
        "socket_dir": None,
        "slab_nbytes": 1 << 20,
        "executor": "features",
        "log_level": "warning",
        "frontend_arguments": (),
    }
    return ServeOptions(**(fields | changes))


def test_a_port_in_use_is_one_clear_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"can't listen on 127.0.0.1 port {port}: .*in use"):
            serve(options(port=port))


def test_an_address_that_is_not_ours_is_one_clear_message() -> None:
    with pytest.raises(ServeError, match=r"can't listen on 192\.0\.2\.1 port 0"):
        serve(options(host="192.0.2.1"))


def test_a_name_that_can_not_be_is_one_clear_message() -> None:
    with pytest.raises(ServeError, match="can't name an engine"):
        serve(options(name="../elsewhere"))


def test_the_listening_socket_can_be_taken_over_at_once() -> None:
    with supervisor._listen(options()) as listening:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert not os.get_inheritable(listening.fileno())  # only who is handed it has it


def test_both_ends_get_what_they_must_agree_on() -> None:
    assert options().shared_arguments() == ("--name=test", "--log-level=warning")
    assert options(socket_dir="/somewhere").shared_arguments()[-1] == "--socket-dir=/somewhere"


@pytest.mark.parametrize(
    ("configured", "expected"), [("/dev/shm", "/var/tmp"), ("/dev/shm/deeper", "/var/tmp"), ("/tmp", None)]
)
def test_temporary_files_keep_off_the_shared_memory(
    monkeypatch: pytest.MonkeyPatch, configured: str, expected: str | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", configured)
    assert supervisor._disk() == expected


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[supervisor._Child]]]:
    """``await start(program)``: a child that runs, and has said so."""
    children: list[supervisor._Child] = []

    async def run(program: str) -> supervisor._Child:
        reading, writing = os.pipe()
        with os.fdopen(reading) as words:
            children.append(
                await supervisor._Child.start(
                    "the child", ("-c", f"import os; os.dup2({writing}, 1)\n{program}"), pass_fds=(writing,)
                )
            )
            os.close(writing)
            assert await asyncio.to_thread(words.readline) == "ready\n"
        return children[-1]

    yield run
    for child in children:
        if child.process.returncode is None:
            child.process.kill()
        await child.process.wait()


async def test_children_are_told_to_end(start: Any) -> None:
    child = await start(OBEDIENT)
    await supervisor._end([child], asyncio.get_running_loop().time() + 30)
    assert child.describe_end() == f"the child (pid {child.pid}) was killed by signal 15 (Terminated)"


async def test_children_that_do_not_end_are_killed_in_time(start: Any) -> None:
    loop = asyncio.get_running_loop()
    children = [await start(STUBBORN), await start(OBEDIENT)]
    started = loop.time()
    await supervisor._end(children, started + 0.2)
    assert loop.time() - started < 5
    assert [child.process.returncode for child in children] == [-9, -15]


async def test_children_that_have_ended_need_nothing(start: Any) -> None:
    child = await start("print('ready', flush=True); raise SystemExit(3)")
    await child.process.wait()
    await supervisor._end([child], asyncio.get_running_loop().time())
    assert child.describe_end() == f"the child (pid {child.pid}) ended with exit code 3"


async def test_children_have_a_process_group_of_their_own(start: Any) -> None:
    child = await start(OBEDIENT)
    assert os.getpgid(child.pid) == child.pid  # Ctrl-C in a terminal must not reach them


async def test_a_pipe_s_byte_is_told_from_its_end(eventually: Any) -> None:
    for words, expected in ((b"\n", True), (b"", False)):
        reading, writing = os.pipe()
        os.write(writing, words)
        os.close(writing)
        assert await supervisor._reads_a_byte(reading) is expected
        descriptor = Path(f"/proc/self/fd/{reading}")
        await eventually(lambda: not descriptor.exists())  # noqa: B023 - it is awaited here
