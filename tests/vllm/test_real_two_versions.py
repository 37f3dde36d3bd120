"""API servers and an engine core of two versions of shmring, as where it is upgraded beneath a running server."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers import picture
from bench.vllm.server import serve
from shmring.core.messages import PROTOCOL_VERSION

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
SIDE = 1344
MESSAGES = "shmring/core/messages.py"


@pytest.fixture
def other_version(tmp_path: Path) -> Path:
    """A directory with a shmring that speaks the next version of the protocol."""
    shutil.copytree(ROOT / "shmring", tmp_path / "shmring", ignore=shutil.ignore_patterns("__pycache__"))
    text, count = re.subn(
        rf"^PROTOCOL_VERSION = {PROTOCOL_VERSION}$",
        f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}",
        (ROOT / MESSAGES).read_text(),
        flags=re.MULTILINE,
    )
    assert count == 1
    (tmp_path / MESSAGES).write_text(text)
    return tmp_path


def test_tensors_go_inline_and_the_log_says_why(other_version: Path, runtime_directory: Path) -> None:
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "64MiB"}
    paths = (Path(__file__).parent / "other_version", ROOT)
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OTHER_SHMRING": str(other_version)}
    pictures = [picture(SIDE, seed) for seed in range(4)]
    with serve(runtime_directory, side=SIDE, api_servers=2, environment=environment) as server:
        alone = [server.ask(url) for url in pictures]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(server.ask, pictures * 4)) == alone * 4
        assert server.tensors().keys() == {"inline engine"}
        reason = f"protocol version {PROTOCOL_VERSION} is not spoken here, only {PROTOCOL_VERSION + 1}"
        said = re.findall("tensors go inline until the ring of engine core 0 is reached: .*", server.log)
        assert len(said) == 2, "each API server says it once"
        assert all(reason in line for line in said), said
        assert "Traceback" not in server.log
