"""``make test-clients``: a real server with a tiny model, and the clients in their own environment.

``python -m tests.clients PYTHON``, with the Python that has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shmring.frontend.serve_process import ServerProcess
from tests.clients.tiny_caller import write

PROGRAM = Path(__file__).with_name("try_clients.py")


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny-caller"
        write(model)
        options = [
            "--executor=transformers",
            f"--model={model}",
            f"--name=clients-{Path(directory).name}",
            "--port=0",
            "--slab-nbytes=64MiB",
        ]
        with ServerProcess.start(options) as server:
            server.wait_until_ready(120)
            program = [sys.argv[1], PROGRAM, f"{server.url}/v1", model.name]
            environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it asks a host on the internet otherwise
            return subprocess.run(program, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
