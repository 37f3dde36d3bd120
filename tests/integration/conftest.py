"""What the tests with processes share: their programs."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.nursery import Forked, Nursery

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
async def launch(nursery: Nursery, socket_dir: Path) -> AsyncIterator[Callable[..., Forked]]:
    """``launch("tour", "engine", ..., SOME=environment)``: runs a program of ``programs/`` until the test has ended."""
    processes: list[Forked] = []

    def run(program: str, *arguments: str, **environment: str) -> Forked:
        output = socket_dir / f"{program}-{len(processes)}.log"
        process = nursery.start(output, PROGRAMS / f"{program}.py", *arguments, **environment)
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.signal(signal.SIGKILL)
        await process.died()
        process.process.close()


@pytest.fixture
async def http(server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the file's server, which makes a connection for each request."""
    limits = httpx.Limits(max_keepalive_connections=0)  # the kernel chooses a frontend for each request
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        yield client
