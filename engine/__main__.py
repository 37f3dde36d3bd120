"""``python -m shmring.engine``, ``shmring engine``: one engine process.

It ends on SIGTERM, SIGINT and SIGHUP, and with its supervisor.

Options are checked before torch is imported. Under the supervisor, settings come through a socket instead.
"""

from __future__ import annotations

from typing import Any

import click

from shmring.core.loggers import logger_of
from shmring.door import parse_nbytes
from shmring.engine.options import ENGINE_OPTIONS, MODEL_ARGUMENT, engine_settings_of, notice_of
from shmring.engine.settings import EngineSettings
from shmring.memory.available import lack_of_memory
from shmring.memory.limits import check_open_files
from shmring.service.logs import configure_logging, ending
from shmring.service.option_table import CONFIG, ELSEWHERE, SUPERVISOR_FD, warn_of_variables
from shmring.service.supervision import SupervisorLink
from shmring.transport.listener import make_directory, socket_path

__all__ = ["main"]

logger = logger_of("shmring.engine")

_OPEN_FILES = 48  # 22, what loading a model takes, and two for each frontend


@click.command(
    params=[MODEL_ARGUMENT, CONFIG, *ENGINE_OPTIONS, SUPERVISOR_FD],
    epilog=ELSEWHERE,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main(supervisor_fd: int | None, **values: Any) -> None:
    """Runs an engine: it creates the slab, and executes what frontends submit."""
    link: SupervisorLink | None = None
    if supervisor_fd is None:
        settings = engine_settings_of(values)
    else:
        try:
            link, settings = SupervisorLink.open(supervisor_fd, EngineSettings)
        except (EOFError, OSError) as error:
            raise SystemExit(f"shmring engine: {error}") from None
    configure_logging(settings.log_level, "engine", settings.log_format)
    warn_of_variables(logger)
    if link is None and (notice := notice_of(values, "shmring engine")):
        click.echo(f"shmring engine: {notice}", err=True)
    logger.info("%s is starting: executor %s, model %s", settings.name, settings.executor, settings.model)
    if link is None and (lack := lack_of_memory(parse_nbytes(settings.ring.slab_nbytes), option="--slab-nbytes")):
        raise ending(f"shmring engine: {lack}")  # before a model is loaded; the supervisor looks at all slabs together
    try:
        make_directory(socket_path(settings.name, settings.ring.socket_dir).parent)
        check_open_files(_OPEN_FILES, "shmring engine")
    except (OSError, ValueError) as error:
        raise ending(f"shmring engine: {getattr(error, 'strerror', None) or error}") from None
    from shmring.engine.process import run  # imports torch, which takes seconds

    run(settings, link)


if __name__ == "__main__":
    main()
