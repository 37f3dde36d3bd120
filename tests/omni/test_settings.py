"""What the YAML says of the connector, and what it must not say. Without vLLM-Omni."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from shmring.integrations.environment import run_variable
from shmring.integrations.omni.settings import Settings
from tests.tables import for_each


def test_nothing_need_be_said() -> None:
    settings = Settings.of({"stage_id": 1, "role": "receiver", "codec_chunk_frames": 25}, {})
    assert (settings.start, settings.slab_nbytes, settings.namespace) == (True, 1 << 30, "")
    assert settings.store.startswith("store-")


def test_stages_that_one_process_has_started_belong_together() -> None:
    environment = {run_variable("SHMRING_OMNI"): "omni-7-abc"}
    assert Settings.of({}, environment).namespace == "omni-7-abc"
    assert Settings.of({"shmring_namespace": "mine"}, environment).namespace == "mine"


def test_what_is_said_counts() -> None:
    settings = Settings.of({"shmring_store": "s", "shmring_slab": "2GiB", "shmring_wait_s": 1, "shmring_start": False}, {})
    assert (settings.store, settings.slab_nbytes, settings.wait_s, settings.start) == ("s", 2 << 30, 1.0, False)


@for_each(
    "extra, text",
    [
        ({"shmring_stor": "s"}, "shmring_stor is no setting of this connector; it has shmring_namespace, "),
        ({"shmring_slab": "much"}, "shmring_slab"),
        ({"shmring_wait_s": -1}, "shmring_wait_s"),
        ({"shmring_start": "no"}, "shmring_start is true or false"),
        ({"shmring_store": "a/b"}, "a/b"),
        ({"shmring_namespace": 7}, "shmring_namespace is a text"),
    ],
)
def test_what_cant_be_used_is_an_error(extra: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        Settings.of(extra, {})


def test_in_a_process_without_vllm_omni_nothing_happens_and_nothing_is_imported() -> None:
    program = (
        "import sys; from shmring.integrations.omni import register; register(); import os; "
        "print([name for name in sys.modules if name.startswith(('torch', 'vllm', 'shmring.integrations.omni.'))], "
        f"{run_variable('SHMRING_OMNI')!r} in os.environ)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"
