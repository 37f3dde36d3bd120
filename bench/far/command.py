"""``python -m bench far``: connections between hosts, over loopback TCP, beside streams of asyncio that do the same.

One process receives (:mod:`bench.far.serving`); this one sends. The same bytes go to both ways, and a receiver has them in one
piece of memory: a slot, or a numpy array. CPU is that of both processes, for each request.

Then a near client asks the same engine, alone, beside two processes that compute (*neutral*), and beside far clients
(:mod:`bench.far.loads`), which take a core as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

import shmring
from bench import columns
from bench.children import BenchError, on_uvloop
from bench.columns import compare
from bench.command_line import benchmark
from bench.far.loads import LOADS
from bench.far.serving import NUMBER, TOKEN, Places
from bench.meter import process_cpu_s
from bench.neutral import neutral_load
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured, percentile
from bench.results import Table, format_nbytes
from bench.targets import Numbers, Target, ratios
from shmring.processes.process import Process

_OURS, _STREAM = "shmring", "stream"
_ALONE, _NEUTRAL, _BESIDE = "alone", "beside a neutral load", "beside far clients"

_SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
_WINDOW, _MOST_NBYTES = 16, 192 << 20  # in flight
_NEAR_NBYTES = 64 << 10
_LARGE_NBYTES = 8 << 20  # of targets
_LEAD_S = 0.5
_TIMES = 2.0  # of a near client's 99th percentile
_TIMEOUT_S = 60.0


class Sent(NamedTuple):
    """Tensors of a size, so many in flight, with TLS or without."""

    nbytes: int
    window: int
    encrypted: bool

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.window} in flight{', TLS' * self.encrypted}"


class Near(NamedTuple):
    """A near client, and what far ones do meanwhile."""

    load: str

    @property
    def title(self) -> str:
        return f"near, and {self.load}"


class Rate(NamedTuple):
    """Requests a second, and milliseconds of CPU of both processes for each."""

    per_s: float
    cpu_ms: float


class Waits(NamedTuple):
    """Milliseconds of each request of a near client."""

    each_ms: list[float]


_WINDOWS = {nbytes: (1, min(_WINDOW, _MOST_NBYTES // nbytes)) for nbytes in _SIZES}
CASES: dict[Sent | Near, tuple[str, ...]] = {
    **{
        Sent(nbytes, window, encrypted): (_OURS, _STREAM)
        for encrypted in (False, True)
        for nbytes in _SIZES
        for window in _WINDOWS[nbytes]
    },
    **{Near(load): (_ALONE, _NEUTRAL, _BESIDE) for load in LOADS},
}

# -- measuring -------------------------------------------------------------------------------------------------------------

_Ask = Callable[[], Awaitable[object]]


@contextlib.asynccontextmanager
async def _asking_shmring(places: Places, case: Sent, tls: ssl.SSLContext) -> AsyncIterator[list[_Ask]]:
    payload = {"x": torch.full((case.nbytes,), 7, dtype=torch.uint8)}
    async with shmring.connect(places.engines[case.encrypted], token=TOKEN, tls=tls if case.encrypted else None) as client:

        async def ask() -> object:
            return await client.request(payload)

        yield [ask] * case.window


@contextlib.asynccontextmanager
async def _asking_streams(places: Places, case: Sent, tls: ssl.SSLContext) -> AsyncIterator[list[_Ask]]:
    """A connection for each request in flight."""
    body = np.full(case.nbytes, 7, np.uint8).data
    context = tls if case.encrypted else None

    async def connect() -> _Ask:
        reader, writer = await asyncio.open_connection("localhost", places.ports[case.encrypted], ssl=context)
        stack.callback(writer.close)

        async def ask() -> object:
            writer.write(NUMBER.pack(case.nbytes))
            writer.write(body)
            await writer.drain()
            return NUMBER.unpack(await reader.readexactly(NUMBER.size))[0]

        return ask

    with contextlib.ExitStack() as stack:
        yield [await connect() for _ in range(case.window)]


_ASKING = {_OURS: _asking_shmring, _STREAM: _asking_streams}


async def _rate(
    places: Places, pid: int, case: Sent, subject: str, tls: ssl.SSLContext, warm_up_s: float, timed_s: float
) -> Rate:
    async def ask_until(ask: _Ask, end_s: float) -> int:
        count = 0
        while time.perf_counter() < end_s:
            if await ask() != 7:
                raise BenchError("the answer is another number than was sent")
            count += 1
        return count

    async with asyncio.timeout(_TIMEOUT_S), _ASKING[subject](places, case, tls) as asks:
        await asyncio.gather(*(ask_until(ask, time.perf_counter() + warm_up_s) for ask in asks))
        begun_s, cpu_s = time.perf_counter(), time.process_time() + process_cpu_s(pid)
        count = sum(await asyncio.gather(*(ask_until(ask, begun_s + timed_s) for ask in asks)))
        cpu_s = time.process_time() + process_cpu_s(pid) - cpu_s
        return Rate(count / (time.perf_counter() - begun_s), 1e3 * cpu_s / count)


async def _waits(places: Places, socket_dir: str, timed_s: float) -> Waits:
    payload = {"x": torch.ones(_NEAR_NBYTES, dtype=torch.uint8)}
    each_ms = []
    async with asyncio.timeout(_TIMEOUT_S), shmring.connect(places.names[0], socket_dir=socket_dir) as client:
        end_s = time.perf_counter() + timed_s
        while (begun_s := time.perf_counter()) < end_s:
            await client.request(payload)
            each_ms.append((time.perf_counter() - begun_s) * 1e3)
    return Waits(each_ms)


@contextlib.contextmanager
def _beside(subject: str, load: str, address: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if subject == _NEUTRAL:
            stack.enter_context(neutral_load())
        elif subject == _BESIDE:
            command = [sys.executable, "-m", "bench.far.loads", load, address]
            loading = stack.enter_context(Process.start(command, stdout=subprocess.PIPE, text=True))
            if not loading.line():
                raise BenchError(f"this load did not start: {load}")
        if subject != _ALONE:
            time.sleep(_LEAD_S)
        yield
        if subject == _BESIDE and not loading.lives:
            raise BenchError(f"this load has ended: {load}")


# -- what is asked, and as people read it ----------------------------------------------------------------------------------


def _p99(measured: Measured) -> Numbers:
    """Beside far clients, of that beside a neutral load, which takes the cores as well."""
    for case in measured:
        if isinstance(case, Near):
            beside, neutral = (
                percentile(measured[case].get(subject, ()), lambda run: run.each_ms, 99) for subject in (_BESIDE, _NEUTRAL)
            )
            yield case.load, beside / neutral if beside and neutral else None


def _of_streams(what: str, number: str, encrypted: bool, *, at_least: bool) -> Target:
    """Of large tensors: a small one costs little beside its request, which a stream has not."""
    cases = {
        case.title: case
        for case in CASES
        if isinstance(case, Sent) and case.encrypted is encrypted and case.nbytes >= _LARGE_NBYTES
    }
    at = f"{format_nbytes(_LARGE_NBYTES)} and more{', TLS' * encrypted}"
    return Target(f"far clients: {what} of streams of asyncio", at, 1, "x", ratios(_OURS, _STREAM, number, cases), at_least)


TARGETS = (
    _of_streams("requests/s", "per_s", False, at_least=True),
    _of_streams("CPU", "cpu_ms", False, at_least=False),
    _of_streams("requests/s", "per_s", True, at_least=True),
    _of_streams("CPU", "cpu_ms", True, at_least=False),
    Target(
        "near clients' p99 beside far clients, of that beside a neutral load", "any load", _TIMES, "x", _p99, at_least=False
    ),
)

_RATES = (
    columns.median("requests/s", "per_s", 1),
    columns.spread("spread", "per_s"),
    columns.median("CPU ms", "cpu_ms", 2),
    columns.ratio("shmring is", _OURS, "per_s"),
    columns.ratio("its CPU", _OURS, "cpu_ms"),
)
_PERCENTILES = {"p50 ms": 50, "p99 ms": 99, "longest ms": 100}
_WAITS = [columns.percentile(title, lambda run: run.each_ms, percent, 2) for title, percent in _PERCENTILES.items()]


def _tables(measured: Measured) -> Iterator[Table]:
    sent, near = ({case: of for case, of in measured.items() if type(case) is kind} for kind in (Sent, Near))
    if sent:
        yield compare("far clients: requests over loopback TCP", ("tensor", "way"), sent, _RATES)
    if near:
        yield compare("how long a near client's request takes", ("far clients", ""), near, _WAITS)


PLAN = Plan(
    mode="far",
    cases=CASES,
    timing=Timing(5, 0.6, 0.2),
    tables=_tables,
    targets=TARGETS,
    notes=[
        "Loopback TCP. stream: asyncio streams on uvloop, a connection for each request in flight; what has come is copied "
        "into a numpy array. Answers are a number. CPU is that of both processes, for each request.",
        f"A near client sends {format_nbytes(_NEAR_NBYTES)}, one request after the other. The neutral load is two processes "
        "that compute.",
    ],
)


def _certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"openssl makes no certificate: {error}") from error
    return certificate, key


@benchmark(PLAN)
def far_command(runs: Runs) -> None:
    """Clients on other hosts, beside streams of asyncio; and near clients beside far ones; in about three minutes."""
    _, timed_s, warm_up_s = runs.plan.timing
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        certificate, key = _certificate(Path(directory))
        trusting = ssl.create_default_context(cafile=str(certificate))
        command = [sys.executable, "-m", "bench.far.serving", directory, str(certificate), str(key)]
        with Process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
            said = serving.line()
            if not said:
                raise BenchError("what receives did not start")
            places = msgspec.json.decode(said, type=Places)

            def once(case: Sent | Near, subject: str) -> Rate | Waits:
                if isinstance(case, Sent):
                    return on_uvloop(_rate(places, serving.pid, case, subject, trusting, warm_up_s, timed_s))
                with _beside(subject, case.load, places.engines[0]):
                    return on_uvloop(_waits(places, directory, timed_s))

            runs.measure(once)
