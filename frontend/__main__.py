"""``python -m shmring.frontend``, ``shmring frontend``: one frontend process.

It ends on SIGTERM, SIGINT and SIGHUP, and with its supervisor.

Options are checked before anything large is imported. Alone, it listens on a host and port. Under the supervisor its settings
come through a socket instead, and it shares a listening socket with its siblings.
"""

from __future__ import annotations

from typing import Any

import click

from shmring.core.loggers import logger_of
from shmring.frontend.operator.number_files import reserve_number_files
from shmring.frontend.options import FRONTEND_OPTIONS, PROCESS_OPTIONS, TLS_OPTIONS, process_settings_of
from shmring.frontend.settings import ProcessSettings
from shmring.memory.limits import check_open_files
from shmring.service.logs import configure_logging, ending
from shmring.service.option_table import CONFIG, ELSEWHERE, SUPERVISOR_FD, warn_of_variables
from shmring.service.supervision import SupervisorLink

__all__ = ["main"]

logger = logger_of("shmring.frontend")

_OPEN_FILES = 96  # 31 and three for each engine, five for each decoder, and some connections


@click.command(
    params=[CONFIG, *PROCESS_OPTIONS, *TLS_OPTIONS, *FRONTEND_OPTIONS, SUPERVISOR_FD],
    epilog=ELSEWHERE,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main(supervisor_fd: int | None, **values: Any) -> None:
    """Runs one frontend process: it serves HTTP, and decodes media for a running engine."""
    link: SupervisorLink | None = None
    if supervisor_fd is None:
        settings = process_settings_of(values)
    else:
        try:
            link, settings = SupervisorLink.open(supervisor_fd, ProcessSettings)
        except (EOFError, OSError) as error:
            raise SystemExit(f"shmring frontend: {error}") from None
    configure_logging(settings.log_level, "frontend", settings.log_format)
    warn_of_variables(logger)
    logger.info("starting for the engine %s", ", ".join(settings.far.engine) or settings.name)
    try:
        check_open_files(_OPEN_FILES, "shmring frontend")
    except OSError as error:
        raise ending(f"shmring frontend: {error.strerror}") from None
    reserve_number_files(len(settings.http.key_owners))
    from shmring.frontend.processes.process import run  # takes a second or more to import

    run(settings, link)


if __name__ == "__main__":
    main()
