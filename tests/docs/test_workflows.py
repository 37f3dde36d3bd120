"""The files of ``.github/`` are what GitHub reads, and what they say fits the Makefile and pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import validate
from ruamel.yaml import YAML

import shmring

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))

#: Where anybody can fetch something. Addresses of other hosts in these files are a mistake.
PUBLIC = {"https://download.pytorch.org/whl/cpu"}


def read(path: Path) -> Any:
    return YAML(typ="safe").load(path)  # to YAML 1.2, unlike to 1.1, the key "on" is a text


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", "workflows/*.yml"),
        ("vendor.dependabot", "dependabot.yml"),
        ("vendor.github-issue-config", "ISSUE_TEMPLATE/config.yml"),
        ("vendor.github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
    ],
)
def test_each_file_is_as_its_schema_says(schema: str, pattern: str) -> None:
    paths = sorted(GITHUB.glob(pattern))
    assert paths
    for path in paths:
        validate(read(path), get_builtin_schema(schema))


def test_each_file_has_a_schema() -> None:
    assert {str(path.relative_to(GITHUB)) for path in GITHUB.rglob("*") if path.is_file()} == {
        "dependabot.yml",
        "ISSUE_TEMPLATE/config.yml",
        "ISSUE_TEMPLATE/fault.yml",
        "ISSUE_TEMPLATE/wish.yml",
        *(f"workflows/{path.name}" for path in WORKFLOWS),
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_only_ends_in_time_and_names_commits(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.keys() >= {"timeout-minutes"}, name
        assert job.get("permissions", {}) == ({"contents": "write"} if name == "release" else {}), name
        for step in job["steps"]:
            assert "checkout" not in step.get("uses", "") or step["with"]["persist-credentials"] is False
    used = re.findall(r"uses: (.*)", path.read_text())
    assert [action for action in used if not re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)] == []


def test_the_workflows_name_one_commit_of_each_action() -> None:
    used = {action for path in WORKFLOWS for action in re.findall(r"uses: (\S+)", path.read_text())}
    assert len(used) == len({action.partition("@")[0] for action in used})


def test_what_they_make_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = set(read(GITHUB / "workflows" / "weekly.yml")["jobs"]["make"]["strategy"]["matrix"]["target"])
    for path in WORKFLOWS:
        for line in re.findall(r"run: make (.*?) PYTHON=python$", path.read_text(), re.MULTILINE):
            made |= set(line.replace("${{ matrix.target }}", "").split())
    assert made - targets == set()
    assert {"lint", "types", "unit", "test-all"} <= made


def test_each_python_is_tested_and_has_wheels() -> None:
    project = PROJECT["project"]
    versions = [label.rpartition(" ")[2] for label in project["classifiers"] if re.search(r":: 3\.\d+$", label)]
    assert read(GITHUB / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == versions
    assert project["requires-python"] == f">={versions[0]}"
    minors = ",".join(version.removeprefix("3.1") for version in versions)
    assert PROJECT["tool"]["cibuildwheel"]["build"] == f"cp31{{{minors}}}-manylinux_*"


def test_no_address_is_of_a_host_that_others_cannot_reach() -> None:
    written = [path.read_text() for path in WORKFLOWS] + [str(PROJECT["tool"]["cibuildwheel"])]
    assert {address for text in written for address in re.findall(r"https?://[^\s\"'}]+", text)} == PUBLIC


def test_security_md_names_sections_that_are_there() -> None:
    for page, heading in re.findall(r"\]\((docs/\w+\.md)#([\w-]+)\)", (ROOT / "SECURITY.md").read_text()):
        headings = re.findall(r"^#+ (.*)", (ROOT / page).read_text(), re.MULTILINE)
        assert heading in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}, (page, heading)


def test_the_version_is_said_in_one_way() -> None:
    """As the job that makes a release looks for it, and as the manifests name the images."""
    version = shmring.__version__
    assert f'__version__ = "{version}"' in (ROOT / "shmring" / "__init__.py").read_text().splitlines()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text().splitlines()
    images = {
        tag for path in (ROOT / "deploy").rglob("*.yaml") for tag in re.findall(r"image: shmring[\w-]*:(\S+)", path.read_text())
    }
    assert images == {version}
