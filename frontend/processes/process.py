"""The frontend as a process: attaches to an engine, serves HTTP, ends on SIGTERM, SIGINT and SIGHUP and with its supervisor.

How it ends is said in :mod:`shmring.frontend.processes.server`. Last, the process leaves the engine, and ends without unloading
its imports.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from typing import NoReturn

import torch
import uvloop

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.client import EngineClient
from shmring.engine.settings import engine_names
from shmring.frontend.app import create_app
from shmring.frontend.callers.key_usage import UsageTable
from shmring.frontend.http.listening import listen, place_of, repeated
from shmring.frontend.openai.response_memory import ResponseMemory
from shmring.frontend.operator.number_files import DIRECTORY_VARIABLE
from shmring.frontend.processes.malloc import make_malloc_return_memory
from shmring.frontend.processes.server import Server
from shmring.frontend.settings import ProcessSettings, frontend_name
from shmring.service.logs import ending, leave
from shmring.service.supervision import DRAIN_SIGNAL, SupervisorLink, seldom_look_for_garbage
from shmring.service.tracing import start_tracing, stop_tracing

__all__ = ["run"]


def run(settings: ProcessSettings, link: SupervisorLink | None = None) -> NoReturn:
    """Serves until it is told to end, and ends the process.

    Args:
        settings: what it is to be.
        link: to the supervisor, if there is one; the frontend ends with it.

    Raises:
        SystemExit: it can't start, or has lost its engine; says why.
    """
    # `shmring drain` finds this process as soon as it is connected: it waits for the server's handlers, and then for the end.
    signal.pthread_sigmask(signal.SIG_BLOCK, {DRAIN_SIGNAL})
    make_malloc_return_memory()
    torch.set_num_threads(1)  # what the loop copies, it copies alone: waiting for threads on busy cores stopped it for 0.1 s
    try:
        start_tracing(settings.otlp_traces_endpoint, "frontend")
        uvloop.run(_serve(settings, link))
    except (shmring.ShmringError, OSError, ValueError) as error:
        raise ending(f"shmring frontend: {error}") from None
    finally:
        stop_tracing()
    leave()  # a thread may still write to a slot: the engine takes that memory back when we are dead


async def _serve(settings: ProcessSettings, link: SupervisorLink | None) -> None:
    config = shmring.ClientConfig(socket_dir=settings.socket_dir, connect_timeout_s=settings.connect_timeout_s)
    names = list(settings.far.engine) or engine_names(settings.name, settings.data_parallel_size)
    if link is not None:
        logger_of("shmring.waiting").setLevel("ERROR")  # the supervisor says for whom the start waits
    async with (
        link.held(_orphaned) if link is not None else contextlib.nullcontext(),
        await EngineClient.connect(
            names if len(names) > 1 else names[0],
            config,
            description="frontend" if settings.index is None else frontend_name(settings.index),
            retries=settings.http.engine_retries,
            **settings.far.arguments(),
        ) as engine,
    ):
        server = Server(
            create_app(
                engine,
                settings.http,
                frontends=lambda: () if link is None else link.frontends,
                usage=_usage_table(settings),
                usage_row=settings.index or 0,
                responses=_response_memory(settings),
            ),
            host=settings.host,
            port=settings.port,
            tls=settings.tls,
            root_path=settings.root_path,
            timeout_keep_alive_s=settings.timeout_keep_alive_s,
            log_level=settings.log_level,
            shutdown_delay_s=settings.shutdown_delay_s,
            shutdown_timeout_s=settings.shutdown_timeout_s,
            on_started=lambda: None if link is None else link.say_ready(),
        )
        seldom_look_for_garbage()
        if settings.listen_fd is not None:
            await server.serve(repeated(socket.socket(fileno=settings.listen_fd)))
        else:
            with _listening(settings) as listening:
                await server.serve(repeated(listening))


def _usage_table(settings: ProcessSettings) -> UsageTable | None:
    return None if settings.usage_fd is None else UsageTable(len(settings.http.key_owners), None, settings.usage_fd)


def _response_memory(settings: ProcessSettings) -> ResponseMemory | None:
    if settings.responses_fd is None:
        return None
    return ResponseMemory(settings.responses_fd, settings.index or 0, settings.http.response_lifetime_s)


def _listening(settings: ProcessSettings) -> socket.socket:
    try:
        return listen(settings)
    except OSError as error:
        raise ending(f"shmring frontend: can't listen on {place_of(settings)}: {error.strerror or error}") from None


def _orphaned() -> None:
    # The supervisor made it, and can't remove it any more; the first frontend that ends removes it.
    shutil.rmtree(os.environ.get(DIRECTORY_VARIABLE, ""), ignore_errors=True)
    signal.raise_signal(signal.SIGTERM)
