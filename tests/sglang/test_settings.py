"""The environment's settings: read, checked, documented; and what is imported where the plug-in is off."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmring.integrations.environment import SettingError, name_the_run
from shmring.integrations.sglang.settings import NAMES, PREFIX, Settings
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]


def test_each_is_read() -> None:
    assert Settings.from_environment({"SHMRING_SGLANG": "1", "SHMRING_VLLM_SLAP": "1"}) == Settings()
    settings = Settings.from_environment({"SHMRING_SGLANG_SLAB": "4GiB", "SHMRING_SGLANG_COPY": "1"})
    assert settings == Settings(slab_nbytes=4 << 30, copies=True)


@for_each(
    ("name", "value"),
    [
        ("SHMRING_SGLANG", "yes"),
        ("SHMRING_SGLANG_SLAB", "1 pound"),
        ("SHMRING_SGLANG_SLAB", "1MiB"),
        ("SHMRING_SGLANG_COPY", "true"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}={re.escape(repr(value))} can't be used: .* unset SHMRING_SGLANG to run"):
        Settings.from_environment({name: value})


def test_an_unknown_setting_is_a_typing_error() -> None:
    with pytest.raises(SettingError, match="there is no such setting, but SHMRING_SGLANG_SLAB, "):
        Settings.from_environment({"SHMRING_SGLANG_SLAP": "1GiB"})


def test_all_processes_of_a_server_have_the_name_that_the_first_one_made_up() -> None:
    environment: dict[str, str] = {}
    assert name_the_run(PREFIX, "sglang", environment)
    name = Settings.from_environment(environment).ring_name(1)
    assert re.fullmatch(rf"sglang-{os.getpid()}-\w+-1", name)
    assert not name_the_run(PREFIX, "sglang", environment)
    assert Settings.from_environment(environment).ring_name(1) == name


def test_the_page_has_each_of_them() -> None:
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert set(re.findall(r"^\| `SHMRING_SGLANG_(\w+)`", page, re.MULTILINE)) == set(NAMES)


PROGRAM = """
import sys
from shmring.integrations.sglang import register
register()
ours = sorted(name for name in sys.modules if name.split(".")[0] == "shmring")
print(ours, "torch" in sys.modules, "sglang" in sys.modules)
"""


@for_each("value", [None, "", "0"])
def test_where_it_is_off_nothing_is_imported_but_the_entry_point(value: str | None) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "SHMRING_SGLANG"} | {"PYTHONPATH": str(ROOT)}
    if value is not None:
        environment["SHMRING_SGLANG"] = value
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['shmring', 'shmring.integrations', 'shmring.integrations.sglang'] False False\n"


def test_where_sglang_is_another_it_stays_off_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for package in ("sglang", "sglang/srt"):
        (tmp_path / package / "__init__.py").touch()
    program = "import logging; logging.basicConfig()\nfrom shmring.integrations.sglang import register\nregister(); register()"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "SHMRING_SGLANG": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("shmring stays off, and SGLang runs as without it: this SGLang is not as it needs it") == 1


def test_in_a_clone_that_is_not_compiled_it_stays_off_and_says_what_to_do(tmp_path: Path) -> None:
    """Python finds it there, and not the installed package, if the server is started by ``python -m``."""
    shutil.copytree(ROOT / "shmring", tmp_path / "shmring", ignore=shutil.ignore_patterns("*.so", "engine", "frontend"))
    program = "import logging; logging.basicConfig()\nfrom shmring.integrations.sglang import register\nregister(); register()"
    environment = {**os.environ, "SHMRING_SGLANG": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    said = f"shmring stays off, and SGLang runs as without it: it was imported from {tmp_path}, where it is not compiled. Start"
    assert done.stderr.count(said) == 1
