"""docs/clusters.md: what its examples do is what the page says (``make test-ray`` runs them), and their names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import yaml

from shmring.frontend.commands.ray_options import settings_of_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def test_the_example_is_a_program() -> None:
    example, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {alias.name for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom) for alias in node.names}
    public = ast.parse((ROOT / "shmring" / "integrations" / "ray" / "__init__.py").read_text())
    [exported] = [
        ast.literal_eval(node.value)
        for node in public.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names - {"Cluster"} <= set(exported)


def test_the_arguments_on_ray_serve_are_some() -> None:
    [command] = re.findall(r"^serve run shmring\.frontend\.ray:app (.*)$", PAGE, re.MULTILINE)
    given = settings_of_arguments(dict(word.split("=", 1) for word in command.split()), here=False)
    [application] = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])["applications"]
    assert settings_of_arguments(application["args"], here=False) == given, "the command and the file do the same"
