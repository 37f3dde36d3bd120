"""Environments with other people's servers are made by uv where it is on the PATH, and by pip where it is not."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.installing_servers import Environment

# In place of uv: writes down what it is told, and makes an environment.
UV = """#!/bin/sh
echo "$UV_FIND_LINKS $*" >> {said}
if [ "$1" = venv ]; then
    for directory; do :; done
    exec {python} -m venv --without-pip "$directory"
fi
"""


def test_uv_makes_and_fills_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, uv = tmp_path / "said", tmp_path / "uv"
    uv.write_text(UV.format(said=said, python=sys.executable))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("PIP_FIND_LINKS", "wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    environment = Environment(tmp_path / "environment")
    environment.install_torch()
    environment.install("click")
    environment.pip("uninstall", "torchaudio")
    made, *filled = said.read_text().splitlines()
    assert made == f" venv --quiet --seed --python {sys.executable} {environment.directory}"
    assert [line.split()[:2] for line in filled] == [["wheels", "pip"]] * 3
    assert "torch==" in filled[0]
    assert "click" in filled[1]
    assert {line.partition(" --python ")[2] for line in filled} == {str(environment.python)}


def test_without_uv_pip_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "environment"
    venv.create(directory)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = Environment(directory)
    with pytest.raises(subprocess.CalledProcessError) as caught:  # this one has no pip
        environment.install("click")
    assert caught.value.cmd[:3] == [environment.python, "-m", "pip"]
