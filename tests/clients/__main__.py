"""``make test-clients``: real servers, one with a tiny model that calls tools, one that takes pictures and sounds, one that
writes down what is said, and one whose model calls an agent's tool; and the clients in their own environment.

``python -m tests.clients DIRECTORY``, with the environment that has them: a virtual one of Python, and Node's modules.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shmring.frontend.commands.serve_process import ServerProcess
from tests.clients.tiny_caller import write
from tests.clients.try_agents import CALL, try_claude_code
from tests.engine.tiny_models import write_tiny_model

PROGRAMS = Path(__file__).parent


def main() -> int:
    clients = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as servers:
        model = Path(directory) / "tiny-caller"
        write(model)
        acting = Path(directory) / "tiny-agent"
        write(acting, CALL)
        hearing = write_tiny_model(Path(directory) / "tiny-whisper", "whisper")
        name = f"clients-{Path(directory).name}"
        started = []
        of_transformers = [["--executor=transformers", f"--model={directory}"] for directory in (model, hearing, acting)]
        for options in (of_transformers[0], ["--executor=synthetic"], *of_transformers[1:]):
            options += [f"--name={name}-{len(started)}", "--port=0", "--slab-nbytes=64MiB", "--api-server-count=1"]
            server = servers.enter_context(ServerProcess.start(options))
            started.append(server)
        places = []
        for server, called in zip(started, (model.name, "shmring-synthetic", hearing.name, acting.name), strict=True):
            server.wait_until_ready(120)
            places += [f"{server.url}/v1", called]
        *places, _, _ = places
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it asks a host on the internet otherwise
        programs = [[clients / "bin" / "python", PROGRAMS / "try_clients.py"]]
        if (clients / "node_modules").is_dir():
            # Node looks for modules beside a program.
            programs.append(["node", Path(shutil.copy(PROGRAMS / "try_clients.mjs", clients))])
            try_claude_code(clients / "node_modules" / ".bin" / "claude", server.url, acting.name)
            print("Claude Code: as it should be")
        else:
            print("JavaScript's clients are not tried: there is no npm that could install them")
        return max(subprocess.run([*program, *places], check=False, env=environment).returncode for program in programs)


if __name__ == "__main__":
    sys.exit(main())
