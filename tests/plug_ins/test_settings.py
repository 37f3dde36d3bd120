"""What the plug-ins for vLLM and SGLang have alike: settings of the environment, and where each stays off."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmring.door import validate_name
from shmring.integrations.environment import SettingError, name_the_run
from shmring.integrations.vllm.settings import Settings as VllmSettings
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {name: importlib.import_module(f"shmring.integrations.{name}.settings") for name in ("vllm", "sglang")}
PACKAGES = {
    "vllm": ("vLLM", ("vllm", "vllm/v1", "vllm/v1/engine", "vllm/multimodal")),
    "sglang": ("SGLang", ("sglang", "sglang/srt")),
}
REGISTERING = "import logging; logging.basicConfig()\nfrom shmring.integrations.{0} import register\nregister(); register()"


def settings_of(plug_in: str, variables: dict[str, str]) -> Any:
    """As read of an environment; the variables are without ``SHMRING_VLLM``, and the one that is called so is empty."""
    names = {f"{SETTINGS[plug_in].PREFIX}{name and '_'}{name}": value for name, value in variables.items()}
    return SETTINGS[plug_in].Settings.from_environment({"HOME": "/", **names})


@for_each(
    ("plug_in", "variables", "fields"),
    [
        ("vllm", {"": "1"}, {}),
        ("vllm", {"SLAB": ""}, {}),
        ("vllm", {"SLAB": "4GiB"}, {"slab_nbytes": 4 << 30, "keep_nbytes": 2 << 30}),
        ("vllm", {"MIN_NBYTES": "1MiB", "WAIT_S": "0.5"}, {"min_nbytes": 1 << 20, "wait_s": 0.5}),
        ("vllm", {"KEEP": "0", "TAKE_TIMEOUT_S": "2"}, {"keep_nbytes": 0, "take_timeout_s": 2.0}),
        ("vllm", {"PIN": "off", "CHECK": "1"}, {"pin": "off", "check": True}),
        ("vllm", {"NAME": "blue", "DEVICE_SLAB": "512MiB"}, {"name": "blue", "device_slab_nbytes": 512 << 20}),
        ("sglang", {"": "1"}, {}),
        ("sglang", {"SLAB": "4GiB", "COPY": "1"}, {"slab_nbytes": 4 << 30, "copies": True}),
    ],
)
def test_each_is_read(plug_in: str, variables: dict[str, str], fields: dict[str, Any]) -> None:
    assert settings_of(plug_in, variables) == SETTINGS[plug_in].Settings(**fields)


@for_each(
    ("plug_in", "name", "value"),
    [
        *(("vllm", "", "yes"), ("vllm", "SLAB", "1 pound"), ("vllm", "SLAB", "1MiB"), ("vllm", "MIN_NBYTES", "100")),
        *(("vllm", "WAIT_S", "-1"), ("vllm", "WAIT_S", "nan"), ("vllm", "KEEP", "-1"), ("vllm", "TAKE_TIMEOUT_S", "0")),
        *(("vllm", "PIN", "yes"), ("vllm", "CHECK", "true"), ("vllm", "NAME", "a/b"), ("vllm", "NAME", "x" * 57)),
        ("vllm", "DEVICE_SLAB", "1MiB"),
        *(("sglang", "", "yes"), ("sglang", "SLAB", "1 pound"), ("sglang", "SLAB", "1MiB"), ("sglang", "COPY", "true")),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(plug_in: str, name: str, value: str) -> None:
    switch = SETTINGS[plug_in].PREFIX
    variable = f"{switch}_{name}" if name else switch
    said = f"^{variable}={re.escape(repr(value))} can't be used: it has to be .* unset {switch} to run"
    with pytest.raises(SettingError, match=said) as caught:
        settings_of(plug_in, {name: value})
    assert (caught.value.name, caught.value.value) == (variable, value)


@for_each(("plug_in", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_an_unknown_setting_is_a_typing_error(plug_in: str, other: str) -> None:
    switch = SETTINGS[plug_in].PREFIX
    with pytest.raises(SettingError, match=f"there is no such setting, but {switch}_SLAB, "):
        settings_of(plug_in, {"SLAP": "1GiB"})
    SETTINGS[other].Settings.from_environment({f"{switch}_SLAP": "1GiB"})


@for_each("plug_in", SETTINGS)
def test_the_first_process_names_the_rings_and_its_children_inherit_that(plug_in: str) -> None:
    prefix, environment = SETTINGS[plug_in].PREFIX, dict[str, str]()
    assert name_the_run(prefix, plug_in, environment)
    settings = SETTINGS[plug_in].Settings.from_environment(environment)
    assert re.match(rf"{plug_in}-{os.getpid()}-\w{{6}}-1", settings.ring_name(1))
    assert not name_the_run(prefix, plug_in, environment)
    assert SETTINGS[plug_in].Settings.from_environment(environment) == settings


def test_a_name_of_vllm_leaves_room_for_its_number_and_one_that_is_made_up_is_one_engine_cores() -> None:
    assert settings_of("vllm", {"NAME": "blue"}).ring_name(3) == "blue-3"
    assert len(settings_of("vllm", {"NAME": "x" * 56}).ring_name(65535)) <= 64
    names = {VllmSettings(run="vllm-4194304-abcdef").ring_name(65535) for _ in range(100)}
    assert len(names) == 100
    assert all(re.fullmatch(r"vllm-4194304-abcdef-65535-\w{6}", validate_name(name)) for name in names)


@for_each("plug_in", SETTINGS)
def test_the_page_has_each_of_them(plug_in: str) -> None:
    page = (ROOT / "docs" / f"{plug_in}.md").read_text()
    in_page = re.findall(rf"^\| `{SETTINGS[plug_in].PREFIX}_(\w+)`", page, re.MULTILINE)
    assert set(in_page) == set(SETTINGS[plug_in].NAMES)


# -- where it is off --------------------------------------------------------------------------------------------------------


def run(plug_in: str, program: str, switch: str | None, path: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS[plug_in].PREFIX)}
    variables |= {"PYTHONPATH": path} if path else {}
    variables |= {} if switch is None else {SETTINGS[plug_in].PREFIX: switch}
    command = [sys.executable, "-c", program.format(plug_in)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, **options)


@for_each("plug_in", SETTINGS)
@for_each("value", [None, "", "0"])
def test_where_it_is_off_nothing_is_imported_but_the_entry_point(plug_in: str, value: str | None) -> None:
    looking = "\nimport sys; print(sorted(name for name in sys.modules if name.split('.')[0] in ('shmring', 'torch', '{0}')))"
    done = run(plug_in, REGISTERING + looking, value, str(ROOT))
    assert done.stdout == f"['shmring', 'shmring.integrations', 'shmring.integrations.{plug_in}']\n"


@for_each("plug_in", SETTINGS)
def test_where_the_server_is_another_it_stays_off_and_says_so_once(plug_in: str, tmp_path: Path) -> None:
    title, packages = PACKAGES[plug_in]
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    done = run(plug_in, REGISTERING, "1", f"{tmp_path}:{ROOT}")
    said = f"shmring stays off, and {title} runs as without it: this {title} is not as it needs it"
    assert done.stderr.count(said) == 1


@for_each("plug_in", SETTINGS)
def test_in_a_clone_that_is_not_compiled_it_stays_off_and_says_what_to_do(plug_in: str, tmp_path: Path) -> None:
    """Python finds it there, and not the installed package, if the server is started by ``python -m``."""
    clone, title = tmp_path / plug_in, PACKAGES[plug_in][0]
    shutil.copytree(ROOT / "shmring", clone / "shmring", ignore=shutil.ignore_patterns("*.so", "engine", "frontend"))
    done = run(plug_in, REGISTERING, "1", cwd=clone)
    said = f"shmring stays off, and {title} runs as without it: it was imported from {clone}, where it is not compiled. Start"
    assert done.stderr.count(said) == 1
