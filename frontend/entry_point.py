"""The command ``shmring`` as it is installed. If the extra that it needs is not installed, it says so in one line.

It starts itself again where Python would import from the working directory (:mod:`shmring.service.import_path`).

``pip install shmring`` installs the transport, and this package beside it, but none of the packages that a server and a command
line need.
"""

from __future__ import annotations

import signal
import sys

from shmring.service.import_path import restart_without_working_directory

__all__ = ["EXTRAS", "main"]

#: The modules of each extra, by the extra's name.
EXTRAS = {
    "serve": frozenset(
        {
            *("av", "click", "httpcore", "httptools", "offapi", "PIL", "pillow_heif", "prometheus_client"),
            *("pybase64", "python_multipart", "rich", "starlette", "uvicorn", "yaml"),
        }
    ),
    "demo": frozenset({"openai"}),
}


def main() -> None:
    """Runs the command; exit code 1 if the extra for it is missing, and the shell's for Ctrl-C while it is being imported."""
    restart_without_working_directory()
    try:
        from shmring.frontend.cli import main as run

        run()
    except KeyboardInterrupt:  # before there is a command
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in EXTRAS.items() if missing in modules), None)
        if extra is None:
            raise
        sys.exit(f"shmring: this command needs the extra [{extra}] ({error}): pip install 'shmring[{extra}]'")


if __name__ == "__main__":
    main()
