"""Makes .venv-ray: a Ray beside this package, for clusters of several nodes on one machine.

``make test-ray`` runs it once, with the Python that the environment is to have: ``python -m tests.ray.install .venv-ray``. It
takes about two minutes and 1.5 GB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.installing_servers import Environment, say

RAY = "2.60.0"


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an environment with Ray for the tests of the integration.")
    parser.add_argument("directory", type=Path)
    environment = Environment(parser.parse_args().directory)
    say("1 of 3: torch ...")
    environment.install_torch()
    say("2 of 3: Ray ...")
    environment.install(f"ray[default,serve]=={RAY}")
    say("3 of 3: this package, and what tests need ...")
    environment.install("httpx>=0.28")  # openai's client has another one
    environment.install_this_package("[demo]")  # with the server and the openai client


if __name__ == "__main__":
    main()
