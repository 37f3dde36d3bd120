"""What the tests of the transport share: both event loops, short-lived socket directories, rings and clients that are
closed again, and checks that nothing of ours outlives a test or the session.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import uvloop

import shmring
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY
from shmring.processes.process import Process
from tests.nursery import Nursery
from tests.waiting import AdjustableLoop, settled

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

# Tests with other people's servers run where these are installed: ``make test-vllm``, ``test-sglang`` and ``test-ray``.
collect_ignore_glob = [f"{name}/test_real_*.py" for name in ("vllm", "sglang", "ray") if importlib.util.find_spec(name) is None]

BOTH_LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

_LOOP = "_asyncio_loop_factory"  # what pytest-asyncio calls the loop of a test


# How many examples there are of each property: few in each run, always the same ones; many in `make test-all`, where SEED= says
# which. None fails for the time that it takes, as other tests run beside it.
hypothesis.settings.register_profile("fast", max_examples=10, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=100, deadline=None)
# Where all that matters is that one fails, no simpler one is looked for (tests/mutants/running.py).
hypothesis.settings.register_profile(
    "unshrunk", max_examples=50, deadline=None, derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
hypothesis.settings.load_profile("fast")

_MAX_WORKERS = 8
_WORKER_NBYTES = 1 << 30  # and the processes that it starts


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_loops: run each asynchronous test on plain asyncio and on uvloop")
    config.addinivalue_line(
        "markers", "first_row_on_both_loops: run the other rows of the table on uvloop: they end as it does"
    )
    config.addinivalue_line("markers", "one_loop: run it on uvloop alone: nothing in it depends on the loop")
    config.addinivalue_line(
        "markers",
        "ring(**options): so the fixture ``ring`` serves. A file's options hold as well; capitals are limits",
    )
    config.addinivalue_line("markers", "engines(*names): so many engines are there, of several")
    config.addinivalue_line("markers", "client(**options): so the fixture ``client`` connects")
    config.addinivalue_line("markers", "adjustable_clock: ``pass_time`` puts the loop's clock forward")
    gc.disable()  # until all tests are read: what that makes stays, and the collector would walk through it again and again
    # A shell that runs us in the background has it ignored, and children would inherit that: they could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _prepare_torch()  # which takes two seconds to import: not where tests are only handed out


def _prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)  # the machine's cores are for the processes under test
    # torch has forty loggers that do not propagate. To each of these pytest adds its handlers, six times in every test.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def certificate_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """``certificate_of("media.test", "DNS:media.test")``: a certificate that signs itself for these names, and its key."""

    def make(subject: str, *names: str) -> tuple[Path, Path]:
        program = shutil.which("openssl")
        if program is None:
            pytest.skip("there is no openssl to make a certificate with")
        directory = tmp_path_factory.mktemp("certificate")
        certificate, key = directory / "certificate.pem", directory / "key.pem"
        command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-subj", f"/CN={subject}", "-addext", f"subjectAltName={','.join(names)}"]
        subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
        return certificate, key

    return make


@pytest.fixture(scope="session")
def certificate(certificate_of: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    return certificate_of("127.0.0.1", "IP:127.0.0.1", "DNS:localhost")


@pytest.fixture
def hangups() -> Iterator[None]:
    """SIGHUP means what it usually does, also where we were started with ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes lone surrogates in captured logs: a report with them can't be sent to the process that prints it."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else marker.args[0]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each worker reads another part of the tests first: after a clone, each rewrites the asserts of a part, for all of them.

    That takes a worker twenty seconds, and all else before the first test ten. In which order tests run is said below.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker is not None and collector.path == TESTS:
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What may take longest begins first, so that no process is left with it while the others have nothing more to do.

    A limit of time is there for what hangs. What is slow, or what hypothesis marks where it tries many examples, may take
    longer: how long a busy machine takes says nothing.
    """
    # Before the others those that build: minutes each, on one core.
    items.sort(key=lambda item: (item.path.name != "test_build.py", -_limit_s(item), item.path))
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
    if config.getoption("--hypothesis-profile") == "thorough":
        for item in items:
            if item.get_closest_marker("hypothesis") is not None and item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Leaves out what needs no second loop."""
    made = yield
    return [item for item in made if not _is_repeated(item)] if isinstance(made, list) else made


def _is_repeated(item: pytest.Item) -> bool:
    """Whether this row of a table runs on uvloop as well, and only the first one has to run on both loops."""
    if not isinstance(item, pytest.Function) or item.get_closest_marker("first_row_on_both_loops") is None:
        return False
    rows = {name: row for name, row in item.callspec.indices.items() if name != _LOOP}
    return item.callspec.params[_LOOP] is not BOTH_LOOPS["uvloop"] and any(rows.values())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """``-n auto``: a worker more than this process has cores, since tests wait now and then; fewer where memory is short."""
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    in_memory = (int(available.split()[1]) << 10) // _WORKER_NBYTES
    return max(1, min(len(os.sched_getaffinity(0)) + 1, in_memory, _MAX_WORKERS))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("adjustable_clock") is not None:
        return {"adjustable": AdjustableLoop}
    if item.get_closest_marker("one_loop") is not None:
        return {"uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("both_loops") is not None or item.get_closest_marker("first_row_on_both_loops") is not None:
        return BOTH_LOOPS
    return {"asyncio": asyncio.new_event_loop}


# -- nothing is left --------------------------------------------------------------------------------------------------


def _segments() -> list[str]:
    return [path.name for path in SHM_DIRECTORY.glob(f"{NAME_PREFIX}-{os.getuid()}-*")]


_DECODERS = "shmring.frontend.media.decoder_process"


def _children(process: str | int = "self") -> dict[int, str]:
    """The living children of a process, by pid; multiprocessing's own tracker is none of ours.

    The process that forks decoders is for all tests, and ends with this one; the decoders themselves end before.
    """
    children = {}
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            pids = (thread / "children").read_text().split()
        except FileNotFoundError:  # it has ended just now
            continue
        for pid in pids:
            try:
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except FileNotFoundError:
                continue
            if _DECODERS in command and process == "self":
                children |= _children(int(pid))
            elif "multiprocessing.resource_tracker" not in command:
                children[int(pid)] = command
    return children


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The session leaves no segment in /dev/shm and no child process. Those of other workers' tests come and go meanwhile."""
    yield
    deadline = time.monotonic() + 5
    left = set(_segments())
    while (left or _children()) and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= set(_segments())
    assert left == set(), "segments are left in /dev/shm"
    assert _children() == {}, "child processes survive"


@pytest.fixture
def no_new_segments() -> Iterator[None]:
    """The test leaves nothing of ours or of torch's in /dev/shm. What tests beside it have there goes by itself."""
    before = set(SHM_DIRECTORY.iterdir())
    yield
    left = {path for path in set(SHM_DIRECTORY.iterdir()) - before if path.name.startswith(("torch_", NAME_PREFIX))}
    deadline = time.monotonic() + 5
    while (left := {path for path in left if path.exists()}) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == set()


class _Complaints(logging.Handler):
    """What asyncio reports because nobody retrieved it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def nothing_is_lost() -> Iterator[None]:
    """No task or future ends with an exception that nobody looks at, and no callback raises."""
    complaints = _Complaints()
    logger = logging.getLogger("asyncio")
    logger.addHandler(complaints)
    try:
        yield
        gc.collect()
        gc.freeze()  # what is left is no garbage of this test: without this, each walks through all that was imported
    finally:
        logger.removeHandler(complaints)
    assert complaints.messages == []


@pytest.fixture(params=["warned of", "an error"])
def dropped(request: pytest.FixtureRequest) -> Callable[[str], contextlib.AbstractContextManager[None]]:
    """``with dropped(text):`` what is dropped in the block is warned of. In the second run, warnings are errors: then it raises
    where nobody can catch it, and comes back all the same."""
    return _warned_of if request.param == "warned of" else _raised


@contextlib.contextmanager
def _warned_of(text: str) -> Iterator[None]:
    with pytest.warns(ResourceWarning, match=text):
        yield


@contextlib.contextmanager
def _raised(text: str) -> Iterator[None]:
    raised: list[BaseException | None] = []
    loop, hook = asyncio.get_running_loop(), sys.unraisablehook
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    sys.unraisablehook = lambda unraisable: raised.append(unraisable.exc_value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            yield
    finally:
        sys.unraisablehook = hook
        loop.set_exception_handler(None)
    assert raised
    assert all(isinstance(error, ResourceWarning) and re.search(text, str(error)) for error in raised), raised


class _RaisingFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise RuntimeError(f"a filter of the program does not take this line: {record.getMessage()}")


@pytest.fixture(autouse=True)
def log_filters_raise(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a test that runs on both loops, the run on asyncio's has a filter that raises at each line of our log."""
    loop = request.node.callspec.params.get(_LOOP) if hasattr(request.node, "callspec") else None
    if (
        loop is not BOTH_LOOPS["asyncio"]
        or request.node.get_closest_marker("both_loops") is None
        or "caplog" in request.fixturenames
    ):
        yield
        return
    ours = [logging.getLogger(name) for name in list(logging.Logger.manager.loggerDict) if name.split(".")[0] == "shmring"]
    raising = _RaisingFilter()
    for logger in ours:
        logger.addFilter(raising)
    yield
    for logger in ours:
        logger.removeFilter(raising)


_MAPS_SLABS = frozenset({"serve", "ring", "socket_dir"})  # fixtures of tests that do
_mapped_by: str | None = None  # the last of them
_left_mapped = 0  # slabs, by tests that were told so


@pytest.fixture(autouse=True)
def nothing_stays_mapped(request: pytest.FixtureRequest) -> None:
    """The last test that mapped a slab has left none: another one would count it. What fixtures held has gone only now."""
    global _left_mapped, _mapped_by
    mapped_by, _mapped_by = _mapped_by, None if _MAPS_SLABS.isdisjoint(request.fixturenames) else request.node.nodeid
    if mapped_by is not None:
        before, _left_mapped = _left_mapped, Path("/proc/self/maps").read_text().count("/dev/shm/shmring-")
        assert _left_mapped <= before, f"{mapped_by} has left {_left_mapped - before} slabs mapped"


@pytest.fixture
def keeps_slabs() -> Iterator[None]:
    """This test leaves slabs mapped, which a GPU might be using. To be named first."""
    global _left_mapped
    yield
    gc.collect()
    _left_mapped = Path("/proc/self/maps").read_text().count("/dev/shm/shmring-")


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts processes that need torch and shmring in milliseconds; one for all tests of this worker."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def run_python() -> Iterator[Callable[..., Process]]:
    """``run_python("-c", program, *arguments, **options)``: a process whose lines can be read; killed in the end.

    Options are those of :class:`subprocess.Popen`.
    """
    with contextlib.ExitStack() as stack:

        def start(*arguments: object, **options: Any) -> Process:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            options = {"stdout": subprocess.PIPE, "text": True, "env": environment} | options
            return stack.enter_context(Process.start([sys.executable, *map(str, arguments)], **options))

        yield start


@pytest.fixture
def without_collections() -> Iterator[None]:
    """What dies here dies by reference counting: nothing may need the cyclic collector."""
    gc.disable()
    yield
    gc.enable()


# -- memory ------------------------------------------------------------------------------------------------------------


def _peak_nbytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel says nothing of VmHWM")


@pytest.fixture
def peak_nbytes() -> Callable[[Callable[[], Any]], int]:
    """``peak_nbytes(function)``: calls it; by how many resident bytes this process grew meanwhile, at its peak.

    Memory that was freed before and is still resident is not counted; what takes megabytes is mapped anew.
    """

    def measure(function: Callable[[], Any]) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is reset to what is resident now
        before = _peak_nbytes()
        function()
        return _peak_nbytes() - before

    return measure


# -- both ends ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def refuses_everything() -> Callable[[shmring.Client, type[Exception]], Awaitable[None]]:
    """Checks that whatever a client that has ended is asked for fails, and how."""

    async def slot(client: shmring.Client) -> None:
        async with client.slot(1):
            pass

    async def check(client: shmring.Client, error: type[Exception]) -> None:
        for attempt in (
            client.request(1),
            client.submit(1),
            client.call("x"),
            client.wait_connected(),
            client.wait_prefaulted(),
            slot(client),
        ):
            with pytest.raises(error):
                await attempt
        with pytest.raises(error):
            client.submit_nowait(1)
        with pytest.raises(error):
            client.slot_nowait(1)

    return check


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory whose path is short enough for a socket's address; its name says of which process it is."""
    path = Path(tempfile.mkdtemp(prefix=f"shmr-{os.getpid()}-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def runtime_directory() -> Iterator[Path]:
    """The same for all tests of a file: for the sockets of a server, and its log."""
    path = Path(tempfile.mkdtemp(prefix=f"shmr-{os.getpid()}-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def rings() -> list[shmring.Ring]:
    """Those that ``serve`` has made."""
    return []


@pytest.fixture
async def serve(socket_dir: Path, rings: list[shmring.Ring]) -> AsyncIterator[Callable[..., Awaitable[shmring.Ring]]]:
    """``await serve(handler=None, name="test", **options)``: a small ring, with ``ring.run(handler)`` if there is one.

    Tensors of more than 1 KiB take a slot in it, so that small ones do; likewise in ``connect``.
    """
    tasks: list[asyncio.Task[None]] = []

    async def start(handler: Any = None, name: str = "test", max_concurrency: int = 64, **options: Any) -> shmring.Ring:
        settings: dict[str, Any] = {"slab_nbytes": "1MiB", "inline_nbytes": "1KiB", "socket_dir": str(socket_dir)}
        ring = await shmring.serve(name, **(settings | options))
        rings.append(ring)
        if handler is not None:
            tasks.append(asyncio.create_task(ring.run(handler, max_concurrency)))
        return ring

    yield start
    for ring in rings:
        await ring.close()
    await asyncio.gather(*tasks)
    for ring in rings:
        ring._shell._book.check()


@pytest.fixture
async def clients(serve: Any) -> AsyncIterator[list[shmring.Client]]:
    """Those that ``connect`` has made; closed before the rings are."""
    clients: list[shmring.Client] = []
    yield clients
    for client in clients:
        await client.close()


@pytest.fixture
def connect(clients: list[shmring.Client], socket_dir: Path) -> Callable[..., Awaitable[shmring.Client]]:
    """``await connect(name="test", **options)``: a client with small leases."""

    async def open_client(name: str = "test", **options: Any) -> shmring.Client:
        settings: dict[str, Any] = {"lease_nbytes": "64KiB", "inline_nbytes": "1KiB", "socket_dir": str(socket_dir)}
        client = await shmring.connect(name, **(settings | options))
        clients.append(client)
        return client

    return open_client


@pytest.fixture
async def ring(
    serve: Any,
    rings: list[shmring.Ring],
    clients: list[shmring.Client],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[shmring.Ring]:
    """What the test's mark says is served; if nothing, the test claims. Each ring is whole again when its clients have gone."""
    options = dict(collections.ChainMap(*(mark.kwargs for mark in request.node.iter_markers("ring"))))
    for limit in filter(str.isupper, list(options)):
        monkeypatch.setattr(f"shmring.ring.limits.{limit}", options.pop(limit))
    yield await serve(**options)
    for client in clients:
        await client.close()
    for ring in rings:
        if not ring._shell.life.home.is_closed:
            await settled(ring)


@pytest.fixture
async def client(ring: shmring.Ring, connect: Any, request: pytest.FixtureRequest) -> shmring.Client:
    """A client of that ring."""
    mark = request.node.get_closest_marker("client")
    return await connect(**({} if mark is None else mark.kwargs))
