"""An SGLang server with a tiny model, on the CPU: started, asked, looked at, ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil

import shmring.threads
from bench.vllm.server import LOG, end, free_port

__all__ = ["Server", "left_behind", "serve"]

START_S = 600.0  # only a hang takes so long
QUIET_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
#: What keeps a tiny model tiny, and away from kernels that need CUDA or AMX.
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--disable-radix-cache", "--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
    *("--context-length", "8192", "--max-total-tokens", "65536", "--max-running-requests", "8", "--skip-server-warmup"),
    *("--enable-metrics", "--served-model-name", "tiny"),
]


class Server:
    """A running server. Made by :func:`serve`.

    Attributes:
        process: SGLang's launcher, in which the tokenizer is.
        port: where it listens.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
        self.process = process
        self.port = port
        self._directory = directory
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=START_S,
            default_headers={"connection": "close"},  # one that is kept would belong to one of several tokenizers
        )

    @property
    def log(self) -> str:
        """What its processes have logged."""
        return (self._directory / LOG).read_text(errors="replace").replace("\0", "")

    def get(self, path: str) -> str:
        """What it answers to a request by curl and others."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def ask(self, *pictures: str, max_tokens: int = 6, **named: Any) -> str:
        """Asks about pictures, given as data URLs; returns the answer and how likely each word of it was, as a text.

        Raises:
            openai.OpenAIError: there is none.
        """
        shown = [{"type": "image_url", "image_url": {"url": picture}} for picture in pictures]
        content: Any = [*shown, {"type": "text", "text": "What is in the picture?"}]
        answer = self._client.chat.completions.create(
            model="tiny",
            max_tokens=max_tokens,
            temperature=0,
            logprobs=True,
            messages=[{"role": "user", "content": content}],
            **named,
        )
        return repr([(choice.message.content, [word.logprob for word in choice.logprobs.content]) for choice in answer.choices])

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

    def report(self, place: int = 0) -> dict[str, Any]:
        """What a scheduler's half says now; asked of itself, so that no tokenizer is needed."""
        match = re.search(rf"scheduler {place} has a slab of .* \((\S+)\)", self.log)
        assert match is not None, "it has no slab"
        sockets = str(self._directory / "shmring")
        with shmring.threads.connect(match[1], socket_dir=sockets, prefault=False, lease_nbytes=4096) as client:
            report: dict[str, Any] = client.call("report", timeout=30)
            return report

    def processes(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind, as SGLang names them: ``scheduler``, ``detokenizer``, ``tokenizer_worker``."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if any(f"sglang::{kind}" in part for part in child.cmdline()[:1])]


@contextlib.contextmanager
def serve(
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    ranks: int = 1,
    installation: Path | None = None,
) -> Iterator[Server]:
    """Starts a server, yields it when it answers, and ends it with all of its processes.

    Args:
        directory: for its log and its sockets; its path is short, and nobody else may enter it.
        environment: variables beside this process's own, of which it gets none that begins with ``SHMRING_SGLANG``.
        options: of SGLang, beside ``OPTIONS``.
        ranks: of all schedulers together.
        installation: the environment that has SGLang; ``None``: the one that this runs in.

    Raises:
        RuntimeError: it did not start.
    """
    port = free_port()
    prefix = installation or Path(sys.prefix)
    command = [str(prefix / "bin" / "python"), "-m", "sglang.launch_server", "--model-path", str(prefix / "model"), *OPTIONS]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    unwanted = ("SHMRING_SGLANG", "_SHMRING_SGLANG")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    # A rank is bound to the cores of its own; SGLang wants a NUMA node for each otherwise.
    allowed = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(allowed[rank % len(allowed)]) for rank in range(ranks))
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": bound} if ranks > 1 else {}
    private = {"XDG_RUNTIME_DIR": str(directory)}
    settled = {**inherited, **QUIET_ENVIRONMENT, **private, **cores, **(environment or {})}
    with (directory / LOG).open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=settled, start_new_session=True)
    server = Server(process, port, directory)
    try:
        _wait_until_it_answers(server)
        yield server
    finally:
        end(process)


def _wait_until_it_answers(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start; the end of its log:\n{server.log[-6000:]}")
        with contextlib.suppress(Exception):
            server.get("/health")
            return
        time.sleep(0.2)


def left_behind() -> list[str]:
    """What lies in ``/dev/shm`` of tensors: SGLang's segments, and ours."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(("sgl_shm_mm", "shmring-"))]
