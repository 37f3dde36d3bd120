"""A vLLM server with a tiny model, for benchmarks, tests and the demonstration: started, asked, looked at, ended."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

import shmring.threads

STOP_S = 30.0
#: A start takes some 100 seconds of CPU, however busy the machine is. Who has used none of it for so long is stuck.
_START_CPU_S, _STUCK_S = 900.0, 300.0
#: glibc gives freed blocks above a size back to the kernel, and moves that size by what a process happens to free, up to
#: 32 MiB. So of two servers that did the same, one needed twice the CPU for a picture, to get its memory again and again. Here
#: it is where luck would bring it. (The image that vLLM makes for CPUs has another allocator, which keeps what is freed.)
QUIET_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
LOG, RING = "server.log", "test"
#: The model runs in the engine core's process, as it does on one GPU. vLLM for CPUs has a worker process otherwise.
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def model(side: int, installation: Path | None = None) -> Path:
    """Where ``tests/vllm/install.py`` has put the model that takes pictures of that size."""
    return (installation or Path(sys.prefix)) / "models" / str(side)


class Server:
    """A running server. Made by :func:`serve`.

    Attributes:
        process: vLLM's launcher.
        port: where it listens.
        side: of pictures, in pixels.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path, side: int) -> None:
        self.process = process
        self.port = port
        self.side = side
        self._directory = directory

    @property
    def log(self) -> str:
        """What its processes have logged."""
        return (self._directory / LOG).read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def ask(self, picture: str | None, *, uuid: str | None = None, max_tokens: int = 4, timeout: float = 60) -> str:
        """Asks about a picture, given as a data URL; returns the answer, or raises ``urllib.error.HTTPError``."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions",
            json.dumps(question(picture, uuid=uuid, max_tokens=max_tokens)).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            content: str = json.load(answer)["choices"][0]["message"]["content"]
            return content

    def metrics(self) -> dict[str, float]:
        """The plug-in's metrics, by name and labels as ``/metrics`` writes them."""
        lines = re.findall(r"^(shmring_[^ ]+) ([0-9.e+-]+)$", self.get("/metrics"), re.MULTILINE)
        return {name: float(value) for name, value in lines}

    def tensors(self) -> dict[str, int]:
        """Large tensors sent so far, by way, and inline ones by reason: ``inline space``."""
        counts: dict[str, int] = {}
        for name, value in self.metrics().items():
            if match := re.fullmatch(r'shmring_tensors_total\{reason="(\w*)",way="(\w+)"\}', name):
                counts[f"{match[2]} {match[1]}".strip()] = int(value)
        return counts

    def engine(self, index: int = 0) -> dict[str, Any]:
        """What an engine core's half says now; asked of itself, so that no API server is needed."""
        sockets = str(self._directory / "shmring")
        with shmring.threads.connect(f"{RING}-{index}", socket_dir=sockets, prefault=False, lease_nbytes=4096) as client:
            report: dict[str, Any] = client.call("report", timeout=10)
            return report

    @property
    def launcher(self) -> psutil.Process:
        """The process that started the others; with one API server, it is that as well."""
        return psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        """What all of its processes have used so far."""
        used_s = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self.launcher, *self.launcher.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    used_s += times.user + times.system
        return used_s

    def processes(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind, as vLLM names them: ``EngineCore``, ``APIServer``, ``Worker``."""
        found = []
        for child in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just died
                if any(kind in part for part in child.cmdline()[:1]):
                    found.append(child)
        return found


@contextlib.contextmanager
def serve(
    directory: Path,
    *,
    side: int = 1344,
    api_servers: int = 1,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    in_process: bool = True,
    installation: Path | None = None,
    waits: bool = True,
) -> Iterator[Server]:
    """Starts a server, yields it when it answers, and ends it with all of its processes.

    Args:
        directory: for its log and its sockets; its path is short, and nobody else may enter it.
        side: of the pictures that its model takes.
        api_servers: how many.
        environment: variables beside this process's own, of which it gets none that begins with ``SHMRING_VLLM``.
        options: of ``vllm serve``, beside those that keep the tiny model tiny.
        in_process: whether the model runs in the engine core's process.
        installation: the environment that has vLLM; ``None``: the one that this runs in.
        waits: whether to wait until it answers; if not, call :func:`wait_until_it_answers`.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_port()
    executable = (installation or Path(sys.prefix)) / "bin" / "vllm"
    executor = ["--distributed-executor-backend", IN_PROCESS] if in_process else []
    command = [
        *(executable, "serve", model(side, installation), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", port, "--api-server-count", api_servers),
        *("--max-model-len", 512, "--max-num-seqs", 32, "--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"),
        *("--limit-mm-per-prompt", '{"image": 1}', "--mm-processor-cache-gb", "0.5", *executor, *options),
    ]
    unwanted = ("SHMRING_VLLM", "PYTHONDONTWRITEBYTECODE")  # without kept bytecode a start takes twice as long
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    private = {"XDG_RUNTIME_DIR": str(directory), "SHMRING_VLLM_NAME": RING}
    settled = {**inherited, **QUIET_ENVIRONMENT, **private, **(environment or {})}
    with (directory / LOG).open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=output, stderr=output, env=settled, start_new_session=True
        )
    server = Server(process, port, directory, side)
    try:
        if waits:
            wait_until_it_answers(server)
        yield server
    finally:
        end(process)


def wait_until_it_answers(server: Server) -> None:
    """Waits; raises RuntimeError if it has ended, or will never answer."""
    cpu_s, since_s = 0.0, time.monotonic()
    while server.process.poll() is None and cpu_s < _START_CPU_S and time.monotonic() - since_s < _STUCK_S:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        used_s = server.cpu_s()
        if used_s >= cpu_s + 1:
            cpu_s, since_s = used_s, time.monotonic()
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start; the end of its log:\n{server.log[-6000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a launcher politely, and whatever it leaves behind."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        for survivor in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
    process.wait()


def free_port() -> int:
    """Of those below the ones that the kernel gives to connections: a server listens a minute later, and it is still free."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(16384, 32768))) as listening:
            port: int = listening.getsockname()[1]
            return port


def picture(side: int, seed: int) -> str:
    """A picture of made-up content, as the data URL of a JPEG."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def question(picture: str | None, *, uuid: str | None, max_tokens: int, stream: bool = False) -> dict[str, Any]:
    """The body of a request about a picture; of one that vLLM has in its cache, the uuid is enough."""
    part: dict[str, Any] = {"type": "image_url", "image_url": None if picture is None else {"url": picture}}
    if uuid is not None:
        part["uuid"] = uuid
    content = [part, {"type": "text", "text": "What is in the picture?"}]
    messages = [{"role": "user", "content": content}]
    return {
        "model": "tiny",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "messages": messages,
    }
