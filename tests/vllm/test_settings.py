"""The environment's settings: read, checked, documented; and what is imported where the plug-in is off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmring.door import validate_name
from shmring.integrations.environment import SettingError, name_the_run
from shmring.integrations.vllm.settings import NAMES, PREFIX, Settings
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


def test_without_any_there_are_defaults() -> None:
    settings = Settings.from_environment({"SHMRING_VLLM": "1", "HOME": "/"})
    assert settings == Settings()


def test_each_is_read() -> None:
    settings = Settings.from_environment(
        {
            "SHMRING_VLLM": "1",
            "SHMRING_VLLM_SLAB": "4GiB",
            "SHMRING_VLLM_MIN_NBYTES": "1MiB",
            "SHMRING_VLLM_WAIT_S": "0.5",
            "SHMRING_VLLM_KEEP": "0",
            "SHMRING_VLLM_TAKE_TIMEOUT_S": "2",
            "SHMRING_VLLM_PIN": "off",
            "SHMRING_VLLM_CHECK": "1",
            "SHMRING_VLLM_NAME": "blue",
            "SHMRING_VLLM_DEVICE_SLAB": "512MiB",
        }
    )
    assert settings == Settings(
        slab_nbytes=4 << 30,
        min_nbytes=1 << 20,
        wait_s=0.5,
        keep_nbytes=0,
        take_timeout_s=2.0,
        pin="off",
        check=True,
        name="blue",
        device_slab_nbytes=512 << 20,
    )
    assert settings.ring_name(3) == "blue-3"


def test_half_of_the_slab_may_be_kept() -> None:
    assert Settings.from_environment({"SHMRING_VLLM_SLAB": "4GiB"}).keep_nbytes == 2 << 30


@for_each(
    ("name", "value"),
    [
        ("SHMRING_VLLM", "yes"),
        ("SHMRING_VLLM_SLAB", "1 pound"),
        ("SHMRING_VLLM_SLAB", "1MiB"),
        ("SHMRING_VLLM_MIN_NBYTES", "100"),
        ("SHMRING_VLLM_WAIT_S", "-1"),
        ("SHMRING_VLLM_WAIT_S", "nan"),
        ("SHMRING_VLLM_KEEP", "-1"),
        ("SHMRING_VLLM_TAKE_TIMEOUT_S", "0"),
        ("SHMRING_VLLM_PIN", "yes"),
        ("SHMRING_VLLM_CHECK", "true"),
        ("SHMRING_VLLM_NAME", "a/b"),
        ("SHMRING_VLLM_DEVICE_SLAB", "1MiB"),
        ("SHMRING_VLLM_NAME", "x" * 57),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}={re.escape(repr(value))} can't be used: it has to be ") as caught:
        Settings.from_environment({name: value})
    assert (caught.value.name, caught.value.value) == (name, value)


def test_an_unknown_setting_is_a_typing_error() -> None:
    with pytest.raises(SettingError, match="there is no such setting, but SHMRING_VLLM_SLAB, "):
        Settings.from_environment({"SHMRING_VLLM_SLAP": "1GiB"})


def test_a_name_leaves_room_for_the_number() -> None:
    assert len(Settings.from_environment({"SHMRING_VLLM_NAME": "x" * 56}).ring_name(65535)) <= 64


def test_the_first_process_names_the_rings_and_its_children_inherit_that() -> None:
    environment: dict[str, str] = {}
    assert name_the_run(PREFIX, "vllm", environment)
    run = Settings.from_environment(environment).run
    assert run.startswith(f"vllm-{os.getpid()}-")
    assert not name_the_run(PREFIX, "vllm", environment)
    assert Settings.from_environment(environment).run == run


def test_a_name_that_is_made_up_is_one_engine_cores() -> None:
    settings = Settings(run="vllm-4194304-abcdef")
    names = {settings.ring_name(65535) for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"vllm-4194304-abcdef-65535-\w{6}", validate_name(name)) for name in names)


def test_the_page_has_each_of_them() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert set(re.findall(r"^\| `SHMRING_VLLM_(\w+)`", page, re.MULTILINE)) == set(NAMES)


PROGRAM = """
import sys
from shmring.integrations.vllm import register
register()
ours = sorted(name for name in sys.modules if name.split(".")[0] == "shmring")
print(ours, "torch" in sys.modules, "vllm" in sys.modules)
"""


@for_each("value", [None, "", "0"])
def test_where_it_is_off_nothing_is_imported_but_the_entry_point(value: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "SHMRING_VLLM"} | {"PYTHONPATH": str(ROOT)}
    if value is not None:
        environment["SHMRING_VLLM"] = value
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['shmring', 'shmring.integrations', 'shmring.integrations.vllm'] False False\n"


def test_where_vllm_is_another_it_stays_off_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "vllm" / "v1" / "engine").mkdir(parents=True)
    for package in ("", "v1", "v1/engine", "multimodal"):
        directory = tmp_path / "vllm" / package
        directory.mkdir(exist_ok=True)
        (directory / "__init__.py").touch()
    program = "import logging; logging.basicConfig()\nfrom shmring.integrations.vllm import register\nregister(); register()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "SHMRING_VLLM": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("shmring stays off, and vLLM runs as without it: this vLLM is not as it needs it") == 1


def test_in_a_clone_that_is_not_compiled_it_stays_off_and_says_what_to_do(tmp_path: Path) -> None:
    """Python finds it there, and not the installed package, if the server is started by ``python -m``."""
    shutil.copytree(ROOT / "shmring", tmp_path / "shmring", ignore=shutil.ignore_patterns("*.so", "engine", "frontend"))
    program = "import logging; logging.basicConfig()\nfrom shmring.integrations.vllm import register\nregister(); register()"
    environment = {**os.environ, "SHMRING_VLLM": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    said = f"shmring stays off, and vLLM runs as without it: it was imported from {tmp_path}, where it is not compiled. Start"
    assert done.stderr.count(said) == 1
