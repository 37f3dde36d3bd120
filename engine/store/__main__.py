"""``python -m shmring.engine.store``, ``shmring store``: one store process. It ends on SIGTERM, SIGINT and SIGHUP.

Options are checked before torch is imported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from shmring.core.loggers import logger_of
from shmring.door import parse_nbytes
from shmring.engine.store.settings import StoreSettings
from shmring.memory.available import lack_of_memory
from shmring.memory.limits import check_open_files
from shmring.processes.child import leave_parent
from shmring.service.logs import configure_logging, ending
from shmring.service.option_table import CONFIG, ELSEWHERE, filled, options_of, warn_of_variables
from shmring.transport.listener import make_directory, socket_path

__all__ = ["main"]

logger = logger_of("shmring.store")

_OPEN_FILES = 48  # 22, and two for each client
_OPTIONS = options_of(StoreSettings())
_READY_FD = click.Option(["--ready-fd"], type=int, hidden=True)
_DETACH = click.Option(["--detach"], is_flag=True, hidden=True)  # of shmring/client/starting.py


@click.command(
    params=[click.Argument(["name"]), CONFIG, *_OPTIONS, _READY_FD, _DETACH],
    epilog=ELSEWHERE,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main(name: str, ready_fd: int | None, detach: bool, **values: Any) -> None:
    """Runs a store: it keeps content for the processes of this machine, under keys, and on its way from one to another.

    Content that nobody uses goes when its memory is wanted, the least recently used first. NAME is what clients connect to.
    """
    try:
        settings = dataclasses.replace(filled(StoreSettings(), _OPTIONS, values), name=name).checked()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if detach:
        ready_fd = leave_parent()
    configure_logging(settings.log_level, "store", settings.log_format)
    warn_of_variables(logger)
    if lack := lack_of_memory(parse_nbytes(settings.ring.slab_nbytes), option="--slab"):
        raise ending(f"shmring store: {lack}")
    try:
        make_directory(socket_path(name, settings.ring.socket_dir).parent)
        check_open_files(_OPEN_FILES, "shmring store")
    except (OSError, ValueError) as error:
        raise ending(f"shmring store: {getattr(error, 'strerror', None) or error}") from None
    from shmring.engine.store.process import run  # imports torch, which takes seconds

    run(settings, ready_fd)


if __name__ == "__main__":
    main()
