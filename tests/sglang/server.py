"""An SGLang server with a tiny model, on the CPU: started, asked, looked at, ended."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil

from bench.servers import OtherServer, free_port, started, wait_until_it_answers
from bench.sglang.ends import QUIET_ENVIRONMENT
from shmring.memory.slab import SHM_DIRECTORY
from shmring.processes.process import Process

_ASK_S = 600.0  # only a hang takes so long
#: What keeps a tiny model tiny, and away from kernels that need CUDA or AMX.
OPTIONS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "bfloat16"),
    *("--disable-radix-cache", "--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
    *("--context-length", "8192", "--max-total-tokens", "65536", "--max-running-requests", "8", "--skip-server-warmup"),
    *("--enable-metrics", "--served-model-name", "tiny"),
]


class Server(OtherServer):
    """A running server. Made by :func:`serve`. The tokenizer is in its launcher."""

    def __init__(self, process: Process, port: int, directory: Path) -> None:
        super().__init__(process, port, directory)
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key="none",
            max_retries=0,
            timeout=_ASK_S,
            default_headers={"connection": "close"},  # one that is kept would belong to one of several tokenizers
        )
        self._pids = {process.pid}  # of all its processes that were seen

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

    def report(self, place: int = 0) -> dict[str, Any]:
        """What a scheduler's half says now."""
        match = re.search(rf"scheduler {place} has a slab of .* \((\S+)\)", self.log)
        assert match is not None, "it has no slab"
        return self.report_of(match[1])

    def processes(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind, as they name themselves."""
        found = super().processes(kind)
        self._pids |= {process.pid for process in found}
        return found

    def left_behind(self) -> list[str]:
        """What lies in ``/dev/shm`` of its tensors: SGLang's segments, and ours. Other servers may have theirs there."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            self.processes("")
        ours = f"shmring-{os.getuid()}-sglang-{self.process.pid}-"
        segments = (ours, *(f"sgl_shm_mm_{pid}_" for pid in self._pids))
        return [name for name in os.listdir(SHM_DIRECTORY) if name.startswith(segments)]


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
    # A rank is bound to the cores of its own; SGLang wants a NUMA node for each otherwise.
    allowed = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(allowed[rank % len(allowed)]) for rank in range(ranks))
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": bound} if ranks > 1 else {}
    settled = {**QUIET_ENVIRONMENT, **cores, **(environment or {})}
    with started(command, directory, settled, unwanted=("SHMRING_SGLANG", "_SHMRING_SGLANG")) as process:
        server = Server(process, port, directory)
        wait_until_it_answers(server)
        server.processes("")  # which left_behind() asks about later
        yield server
