"""The examples of docs/clusters.md, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    example, printed = re.search(r"```python\n(.*?)```\n\nIt prints:\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240)
    assert done.stdout == printed, done.stderr[-4000:]


def test_configurations_of_ray_serve_are_as_ray_serve_says() -> None:
    """Each is built as ``serve run`` and ``serve deploy`` build it."""
    from ray.serve.schema import ServeDeploySchema

    from shmring.frontend.ray import app

    [on_the_page] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.DOTALL)
    service = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "rayservice.yaml").read_text())
    for text in (on_the_page, service["spec"]["serveConfigV2"]):
        checked: Any = ServeDeploySchema.model_validate(yaml.safe_load(text))
        [application] = checked.applications
        assert application.import_path == "shmring.frontend.ray:app"
        built = app(application.args)
        assert built._bound_deployment.name == "shmring"
        assert built._bound_deployment.num_replicas == 2


def test_ray_serve_is_told_that_it_chooses_how_many_replicas_there_are() -> None:
    from shmring.frontend.ray import app

    config = {"max_replicas": 8, "target_ongoing_requests": 32}
    built = app({"num-replicas": "auto", "autoscaling-config": config})._bound_deployment
    chosen = built._deployment_config
    assert (chosen.autoscaling_config.min_replicas, chosen.autoscaling_config.max_replicas) == (1, 8)
    assert (chosen.autoscaling_config.target_ongoing_requests, chosen.max_ongoing_requests) == (32, 64)
    assert app({"num-replicas": "auto"})._bound_deployment._deployment_config.autoscaling_config.max_replicas == 100
    assert app({"num-replicas": 3})._bound_deployment._deployment_config.autoscaling_config is None
