"""``shmring demo``: pictures through HTTP, slab and engine; altered copies of them find their originals.

Everything is what a user would run: ``shmring serve`` with two frontends as a process of its own, the official ``openai``
client, the sample pictures. What the table shows was measured: the similarity from the embeddings, bytes and copies from
the frontends' counters before and after each request (one at a time, so that the difference is that request's), the
milliseconds by the clock of this process, encoding and decoding of HTTP included.

The demonstration fails, with exit code 1, unless every altered copy finds its original first, no tensor was copied, the
slab is empty at the end, and nothing is left: no process, nothing in ``/dev/shm``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources

import numpy as np
import openai
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

__all__ = ["run_demo"]

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_SETTLE_TIMEOUT_S = 5.0
_READY = re.compile(r"serving on (?P<url>\S+) \(engine pid (?P<engine>\d+), frontends pids (?P<frontends>[\d ]+)\)")
_MODEL = "shmring-features"

_SLAB_BYTES = "shmring_frontend_slab_bytes_total"
_COPIES = "shmring_frontend_copies_total"
_IN_USE = ("shmring_frontend_slots_in_use", "shmring_engine_ring_slots_in_use")


def _recompressed(picture: Image.Image) -> Image.Image:
    return picture  # encoding it at quality 50 is the alteration


def _scaled(picture: Image.Image) -> Image.Image:
    return picture.resize((picture.width // 2, picture.height // 2))


def _brightened(picture: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(picture).enhance(1.1)


def _cropped(picture: Image.Image) -> Image.Image:
    margin_x, margin_y = picture.width // 40, picture.height // 40
    return picture.crop((margin_x, margin_y, picture.width - margin_x, picture.height - margin_y))


#: How copies are altered: name, alteration, JPEG quality.
_ALTERATIONS: tuple[tuple[str, Callable[[Image.Image], Image.Image], int], ...] = (
    ("JPEG quality 50", _recompressed, 50),
    ("scaled to 50 %", _scaled, 90),
    ("brightened 10 %", _brightened, 90),
    ("cropped 5 %", _cropped, 90),
)


@dataclasses.dataclass(slots=True)
class _Server:
    """The running server: ``shmring serve``, and the processes that it said it has."""

    process: subprocess.Popen[str]
    url: str
    pids: list[int]


@dataclasses.dataclass(slots=True)
class _Answer:
    """What one request gave, and what it took."""

    embedding: NDArray[np.float64]
    slab_nbytes: int
    copies: int
    milliseconds: float


class _Client:
    """Sends pictures with the ``openai`` client, and reads the server's counters."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none is needed")
        self._metrics_url = f"{url}/metrics"

    def embed(self, file: bytes) -> _Answer:
        """Sends a picture, and measures."""
        url = f"data:image/jpeg;base64,{base64.b64encode(file).decode('ascii')}"
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        before = self.counters()
        started = time.perf_counter()
        response = self._client.embeddings.create(model=_MODEL, input=[], extra_body={"messages": messages})
        elapsed_s = time.perf_counter() - started
        after = self.counters()
        return _Answer(
            np.array(response.data[0].embedding),
            int(after[_SLAB_BYTES] - before[_SLAB_BYTES]),
            int(after[_COPIES] - before[_COPIES]),
            elapsed_s * 1000,
        )

    def counters(self) -> dict[str, float]:
        """Reads the server's numbers, all frontends together."""
        text = self._client.get(self._metrics_url, cast_to=str)
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


def run_demo() -> int:
    """Runs the demonstration.

    Returns:
        The exit code: 0 if all of it went as it must.
    """
    console = Console(width=None if sys.stdout.isatty() else 132)
    try:
        with _serving(console) as server:
            problems = _show(console, _Client(server.url))
        problems += _left_behind(server)
    except (RuntimeError, openai.OpenAIError) as error:
        problems = [str(error)]
    for problem in problems:
        console.print(f"[bold red]FAILED[/] {problem}", highlight=False)
    if not problems:
        console.print("Everything was stopped; nothing is left in /dev/shm, and no process survives.")
    return 1 if problems else 0


@contextlib.contextmanager
def _serving(console: Console) -> Iterator[_Server]:
    """Runs a server; ends it, whatever happens."""
    arguments = ["serve", "--port=0", "--api-server-count=2", f"--name=demo-{os.getpid()}", "--slab-nbytes=64MiB"]
    console.print(f"Starting an engine and two frontends: [bold]shmring {' '.join(arguments)}[/]", highlight=False)
    process = subprocess.Popen([sys.executable, "-m", "frontend.cli", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        server = _wait_until_ready(process)
        console.print(f"Serving on {server.url}\n", highlight=False)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str]) -> _Server:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(_START_TIMEOUT_S) else ""
    found = _READY.search(line)
    if found is None:
        raise RuntimeError(f"the server did not start within {_START_TIMEOUT_S:g} s; its own message is above")
    pids = [process.pid, int(found["engine"]), *map(int, found["frontends"].split())]
    return _Server(process, found["url"], pids)


def _show(console: Console, client: _Client) -> list[str]:
    """Sends everything, prints the table, and returns what went wrong."""
    pictures = dict(_samples())
    originals = {name: client.embed(file) for name, file in pictures.items()}
    table = _table()
    problems = []
    for name, file in pictures.items():
        _add_row(table, name, "original", file, originals[name], *_nearest(originals[name], originals, but=name))
        for alteration, alter, quality in _ALTERATIONS:
            altered = _encode(alter(_open(file)), quality)
            answer = client.embed(altered)
            found, similarity = _nearest(answer, originals)
            _add_row(table, name, alteration, altered, answer, found, similarity, right=found == name)
            if found != name:
                problems.append(f"{name}, {alteration}: its nearest neighbour is {found}")
            if answer.copies or not answer.slab_nbytes:
                problems.append(f"{name}, {alteration}: {answer.copies} copies, {answer.slab_nbytes} bytes through the slab")
        table.add_section()
    console.print(table)
    counters = _settled(client)
    console.print(
        f"{counters[_SLAB_BYTES]:,.0f} bytes crossed through the slab, in {counters['shmring_frontend_in_place_total']:.0f} "
        f"tensors decoded in place; {counters[_COPIES]:.0f} were copied.",
        highlight=False,
    )
    return problems + [f"{name} is {counters[name]:g} at the end, not 0" for name in (*_IN_USE, _COPIES) if counters[name]]


def _settled(client: _Client) -> dict[str, float]:
    """Reads the counters once the slab is empty: frontends update their gauges every second."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        counters = client.counters()
        if time.monotonic() > deadline or not any(counters[name] for name in _IN_USE):
            return counters
        time.sleep(0.1)


def _table() -> Table:
    table = Table(title="Altered copies find their originals", caption="similarity is the cosine of two embeddings")
    for heading in ("picture", "alteration"):
        table.add_column(heading, no_wrap=True)
    for heading in ("size", "bytes in", "bytes through the slab", "copies"):
        table.add_column(heading, justify="right")
    table.add_column("nearest original", no_wrap=True)
    table.add_column("similarity", justify="right")
    table.add_column("ms", justify="right")
    return table


def _add_row(
    table: Table,
    name: str,
    alteration: str,
    file: bytes,
    answer: _Answer,
    found: str,
    similarity: float,
    right: bool | None = None,
) -> None:
    mark = {None: "", True: "[green]✓[/] ", False: "[bold red]✗[/] "}[right]
    other = "[dim]other:[/] " if right is None else ""
    size = _open(file).size
    table.add_row(
        name,
        alteration,
        f"{size[0]} x {size[1]}",
        f"{len(file):,}",
        f"{answer.slab_nbytes:,}",
        str(answer.copies),
        f"{mark}{other}{found}",
        f"{similarity:.3f}",
        f"{answer.milliseconds:.1f}",
    )


def _nearest(answer: _Answer, originals: dict[str, _Answer], but: str | None = None) -> tuple[str, float]:
    similarities = {name: float(answer.embedding @ other.embedding) for name, other in originals.items() if name != but}
    name = max(similarities, key=lambda candidate: similarities[candidate])
    return name, similarities[name]


def _samples() -> Iterator[tuple[str, bytes]]:
    directory = resources.files("frontend") / "samples"
    for path in sorted(directory.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".jpg"):
            yield path.name.removesuffix(".jpg"), path.read_bytes()


def _open(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file)).convert("RGB")


def _encode(picture: Image.Image, quality: int) -> bytes:
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=quality)
    return encoded.getvalue()


def _left_behind(server: _Server) -> list[str]:
    """Returns what should have gone and has not."""
    problems = []
    if server.process.returncode != 0:
        problems.append(f"the server ended with exit code {server.process.returncode}")
    problems += [f"process {pid} survives" for pid in server.pids if _exists(pid)]
    mine = f"shmring-{os.getuid()}-demo-{os.getpid()}-"
    problems += [f"/dev/shm/{name} is left" for name in os.listdir("/dev/shm") if name.startswith(mine)]
    return problems


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
