"""docs/clusters.md: what its example prints is what the page says (``make test-ray`` runs it), and its names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def test_the_example_is_a_program() -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {alias.name for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom) for alias in node.names}
    public = ast.parse((ROOT / "shmring" / "integrations" / "ray" / "__init__.py").read_text())
    [exported] = [
        ast.literal_eval(node.value)
        for node in public.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert names - {"Cluster"} <= set(exported)
