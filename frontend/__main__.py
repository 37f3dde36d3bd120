"""``python -m shmring.frontend``, ``shmring frontend``: one frontend process.

It ends on SIGTERM, SIGINT and SIGHUP, and with its supervisor.

Options are checked before anything large is imported. Alone, it listens on a host and port. Under the supervisor its settings
come through a socket instead, and it shares a listening socket with its siblings.
"""

from __future__ import annotations

import logging
from typing import Any

import click

from shmring.engine.logs import configure_logging
from shmring.engine.option_types import LOG_LEVELS, FiniteRange
from shmring.engine.supervision import SupervisorLink
from shmring.frontend.options import DATA_PARALLEL_SIZE, FRONTEND_OPTIONS, LISTENING_OPTIONS, listening_of, settings_of
from shmring.frontend.settings import ProcessSettings

__all__ = ["main"]

logger = logging.getLogger("shmring.frontend")

_DEFAULT = ProcessSettings()

_OWN = (
    click.Option(["--name"], default=_DEFAULT.name, help="The engine's name."),
    DATA_PARALLEL_SIZE,
    click.Option(["--socket-dir"], help="Where the engine's socket lies.  [default: the user's runtime directory]"),
    *LISTENING_OPTIONS,
    click.Option(["--listen-fd"], type=int, help="A listening socket to inherit instead."),
    click.Option(
        ["--connect-timeout", "connect_timeout_s"],
        default=_DEFAULT.connect_timeout_s,
        type=FiniteRange(min=0),
        help="Seconds to wait for the engine, which may be loading a model.",
    ),
    click.Option(
        ["--shutdown-timeout", "shutdown_timeout_s"],
        default=_DEFAULT.shutdown_timeout_s,
        type=FiniteRange(min=0),
        help="Seconds that requests may go on when the process is told to end; with 0 they are aborted at once.",
    ),
    click.Option(["--log-level"], default=_DEFAULT.log_level, type=LOG_LEVELS, help="What to log, to stderr."),
    click.Option(["--supervisor-fd"], type=int, hidden=True),
)
_OWN_NAMES = (
    "name",
    "data_parallel_size",
    "socket_dir",
    "listen_fd",
    "connect_timeout_s",
    "shutdown_timeout_s",
    "log_level",
)


@click.command(
    params=[*_OWN, *FRONTEND_OPTIONS],
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"], "max_content_width": 100},
)
def main(supervisor_fd: int | None, **values: Any) -> None:
    """Runs one frontend process: it serves HTTP, and decodes media for a running engine."""
    link: SupervisorLink | None = None
    if supervisor_fd is None:
        own = {name: values[name] for name in _OWN_NAMES}
        settings = ProcessSettings(http=settings_of(values), **listening_of(values), **own)
    else:
        try:
            link, settings = SupervisorLink.open(supervisor_fd, ProcessSettings)
        except (EOFError, OSError) as error:
            raise SystemExit(f"shmring frontend: {error}") from None
    configure_logging(settings.log_level, "frontend")
    logger.info("starting for the engine %s", settings.name)
    from shmring.frontend.process import run  # takes a second or more to import

    run(settings, link)


if __name__ == "__main__":
    main()
