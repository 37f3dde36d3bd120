"""An agent that people call such a server with, as it is: Claude Code asks, runs the tool that the model calls, and says what
the model makes of that.

Its system prompt and its tools are chosen: its own have many letters, and each is a token of the tiny model.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from tests.clients.tiny_caller import ANSWER

#: What the model calls.
CALL = ('{"name": "Bash", ', '"arguments": {"command": "echo Rain > weather"}}')

_LIMIT_S = 300  # it takes ten


def try_claude_code(program: Path, url: str, model: str) -> None:
    """Asks Claude Code for the weather, of a server whose model calls :data:`CALL`."""
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as directory:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_SMALL_FAST_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        options = ["--system-prompt", "Be brief.", "--tools", "Bash", "--allowedTools", "Bash"]
        said = subprocess.run(
            [program, "-p", "How is the weather in Ulm?", *options],
            check=False,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        assert (said.returncode, said.stdout.strip()) == (0, ANSWER), said
        assert (Path(directory) / "weather").read_text() == "Rain\n"
