"""A vLLM server with a tiny model, for benchmarks, tests and the demonstration: started, asked, looked at, ended."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.meter import cpu_s_of
from bench.servers import OtherServer, free_port, started, wait_until_it_answers
from shmring.processes.process import Process

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
RING = "test"
#: The model runs in the engine core's process, as it does on one GPU. vLLM for CPUs has a worker process otherwise.
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def model(side: int, installation: Path | None = None) -> Path:
    """Where ``tests/installing_servers.py`` has put the model that takes pictures of that size."""
    return (installation or Path(sys.prefix)) / "models" / str(side)


class Server(OtherServer):
    """A running server for pictures of so many pixels a side. With one API server, its launcher is that as well."""

    def __init__(self, process: Process, port: int, directory: Path, side: int) -> None:
        super().__init__(process, port, directory)
        self.side = side

    def ask(self, picture: str | None, *, uuid: str | None = None, max_tokens: int = 4, timeout: float = 60) -> str:
        """Asks about a picture, given as a data URL; returns the answer, or raises ``urllib.error.HTTPError``."""
        answer = self.post("/v1/chat/completions", question(picture, uuid=uuid, max_tokens=max_tokens), timeout)
        return str(answer["choices"][0]["message"]["content"])

    def cpu_s_of(self, *kinds: str) -> dict[str, float]:
        """CPU seconds so far of its processes of each kind, of which one may be ``APIServer``."""
        processes = {kind: self.processes(kind) or [self.launcher] * (kind == "APIServer") for kind in kinds}
        return {kind: cpu_s_of(process.pid for process in of_kind) for kind, of_kind in processes.items()}

    def engine(self, index: int = 0) -> dict[str, Any]:
        return self.report_of(f"{RING}-{index}")


@contextlib.contextmanager
def serve(
    directory: Path,
    *,
    side: int = 1344,
    model_path: Path | None = None,
    api_servers: int = 1,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    in_process: bool = True,
    installation: Path | None = None,
    waits: bool = True,
    under: Sequence[str] = (),
) -> Iterator[Server]:
    """Starts a server, yields it when it answers, and ends it with all of its processes; raises RuntimeError if it never does.

    Args:
        directory, environment: see :func:`bench.servers.started`; it gets no variable of this process that begins with
            ``SHMRING_VLLM``.
        side, model_path: of the pictures that the tiny model takes; or another model.
        options: of ``vllm serve``, beside those that keep the tiny model tiny.
        in_process: whether the model runs in the engine core's process.
        installation: the environment that has vLLM; ``None``: the one that this runs in.
        waits: whether to wait until it answers; if not, call :func:`bench.servers.wait_until_it_answers`.
        under: a program that becomes the server, whose command is added to its arguments.
    """
    port = free_port()
    executable = (installation or Path(sys.prefix)) / "bin" / "vllm"
    executor = ["--distributed-executor-backend", IN_PROCESS] if in_process else []
    command = [
        *(*under, executable, "serve", model_path or model(side, installation), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", port, "--api-server-count", api_servers),
        *("--max-model-len", 512, "--max-num-seqs", 32, "--load-format", "dummy", "--enforce-eager", "--dtype", "bfloat16"),
        *("--limit-mm-per-prompt", '{"image": 1}', "--mm-processor-cache-gb", "0.5", *executor, *options),
    ]
    unwanted = ("SHMRING_VLLM", "PYTHONDONTWRITEBYTECODE")  # without kept bytecode a start takes twice as long
    settled = {**QUIET_ENVIRONMENT, "SHMRING_VLLM_NAME": RING, **(environment or {})}
    with started(command, directory, settled, unwanted) as process:
        server = Server(process, port, directory, side)
        if waits:
            wait_until_it_answers(server)
        yield server


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
