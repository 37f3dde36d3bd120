"""Too few open files: a ring, client or worker is there as a whole, or there is one error that says what to raise."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmring
import shmring.threads
from shmring.memory import limits
from shmring.memory.limits import check_open_files
from tests.nursery import Nursery
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
MOST = 20  # more than any of them needs

ENGINE = """
import asyncio, shmring
async def main():
    async def echo(claim): await claim.reply(claim.payload)
    async with shmring.serve("test", socket_dir={socket_dir!r}, slab_nbytes="4MiB") as ring:
        print("ready", flush=True)
        await ring.run(echo)
asyncio.run(main())
"""


@pytest.fixture
def allow() -> Iterator[Callable[[int], None]]:
    """``allow(count)``: this process may open so many more files; negative: as many as ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gaps: list[int] = []

    def allow(count: int) -> None:
        limit = soft
        if count >= 0:
            highest = max(fd for fd in map(int, os.listdir("/proc/self/fd")) if Path(f"/proc/self/fd/{fd}").exists())
            while (fd := os.open("/dev/null", os.O_RDONLY)) < highest:  # below it, each number must be taken
                gaps.append(fd)
            os.close(fd)
            limit = max(fd, highest + 1) + count
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))

    yield allow
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for fd in gaps:
        os.close(fd)


def test_the_error_says_how_many_are_needed_and_how_there_are_more(allow: Any) -> None:
    check_open_files(3, "a test")
    allow(5)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = limit - len(os.listdir("/proc/self/fd")) + 1
    check_open_files(free, "a test")
    with pytest.raises(OSError) as caught:
        check_open_files(free + 1, "a test")
    assert caught.value.errno == errno.EMFILE
    assert caught.value.strerror == (
        f"a test needs {free + 1} more open files, and of the {limit} that this process may have (ulimit -n; "
        f"'Max open files' of /proc/self/limits), {free} are left; raise that limit: ulimit -n 65536, "
        "LimitNOFILE=65536 of systemd, docker run --ulimit nofile=65536"
    )


def test_where_none_is_left_it_says_so_and_where_nothing_is_known_nothing_is_said(
    allow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [os.open("/dev/null", os.O_RDONLY)]
    allow(0)
    with contextlib.suppress(OSError):
        while True:
            held.append(os.dup(held[0]))
    with pytest.raises(OSError, match=r"needs 1 more open files, .* 0 are left"):
        check_open_files(1, "a test")
    for fd in held:
        os.close(fd)
    monkeypatch.setattr(limits, "_OPEN_FILES", "/nowhere")
    check_open_files(1000, "a test")


async def _in_a_loop(what: str, name: str, socket_dir: str) -> None:
    if what == "serve":
        async with shmring.serve("other", socket_dir=socket_dir, slab_nbytes="4MiB"):
            pass
    elif what == "connect":
        async with shmring.connect(name, socket_dir=socket_dir) as client:
            assert await client.request(1) == 1
    else:
        async with shmring.join(name, rank=0, socket_dir=socket_dir):
            pass


def _without_a_loop(what: str, name: str, socket_dir: str) -> None:
    if what == "serve":
        with shmring.threads.serve("other", socket_dir=socket_dir, slab_nbytes="4MiB"):
            pass
    elif what == "connect":
        with shmring.threads.connect(name, socket_dir=socket_dir) as client:
            assert client.request(1) == 1
    else:
        with shmring.threads.join(name, rank=0, socket_dir=socket_dir):
            pass


@pytest.mark.parametrize("what", ["serve", "connect", "join"])
@pytest.mark.parametrize("use", [_in_a_loop, _without_a_loop])
async def test_an_end_is_there_or_one_error_says_what_to_raise(
    what: str, use: Callable[..., Any], nursery: Nursery, socket_dir: Path, allow: Any, tmp_path: Path
) -> None:
    """The engine is another process: it has its own limit."""
    engine = nursery.start_text(tmp_path / "engine", ENGINE.format(socket_dir=str(socket_dir)))
    try:
        assert await engine.said() == ["ready"]
        outcomes = []
        for count in (-1, *range(MOST + 1)):
            allow(count)
            try:
                if use is _in_a_loop:
                    await use(what, "test", str(socket_dir))
                else:
                    await asyncio.to_thread(use, what, "test", str(socket_dir))
                outcomes.append("")
            except shmring.RankTakenError:  # the engine has not seen yet that the worker before has gone
                outcomes.append("")
            except OSError as error:
                outcomes.append(str(error))
            finally:
                allow(-1)
    finally:
        engine.process.kill()
    assert outcomes[0] == outcomes[-1] == ""
    assert outcomes[1]
    assert [text for text in outcomes if text and "more open files, and of the" not in text] == []


@for_each(
    ("arguments", "limit", "said"),
    [
        *((["inspect", "nobody"], limit, "shmring: shmring inspect needs 16 more open files") for limit in (10, 12)),
        (["top", "nobody"], 12, "shmring: shmring top needs 16 more"),
        (["drain", "nobody"], 12, "shmring: shmring drain needs 16 more"),
        *((["serve", "--port=0"], limit, "shmring: shmring serve needs ") for limit in (12, 20, 32, 64)),
        *((["engine"], limit, "shmring engine needs 48 more open files") for limit in (20, 32)),
        (["engine"], 12, "shmring: shmring engine needs 16 more open files"),
        *((["frontend", "--port=0"], limit, "shmring frontend needs 96 more open files") for limit in (20, 32, 64)),
    ],
)
def test_a_command_with_too_few_says_so_in_one_sentence(arguments: list[str], limit: int, said: str, socket_dir: Path) -> None:
    command = ["-P", "-m", "shmring.frontend.cli", *arguments, f"--socket-dir={socket_dir}"]
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n {limit}; exec {shlex.join([sys.executable, *command])}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert said in last, done.stderr
    assert f"of the {limit} that this process may have (ulimit -n;" in last
    assert "Traceback" not in done.stderr
