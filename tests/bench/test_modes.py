"""How old results are, by a repository made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.machine import ROOT
from bench.modes import MODES, age, age_in_words, head
from tests.tables import for_each


class Repository:
    """A checkout, each commit of which changes a file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", "-C", self.root, *named, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    def commit(self, path: str) -> str:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        with (self.root / path).open("a") as file:
            file.write("more\n")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", path)
        return self.git("rev-parse", "--short=12", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_changes_of_what_is_measured_make_a_result_old(repository: Repository) -> None:
    commit = repository.commit("shmring/core/wire.pyx")
    assert age("transport", commit, repository.root) == 0
    repository.commit("docs/api.md")
    repository.commit("bench/transport.py")
    repository.commit("shmring/gpu/upload.py")
    repository.commit("frontend/app.py")
    assert age("transport", commit, repository.root) == 0
    assert age("gpu", commit, repository.root) == 1
    assert age("serve", commit, repository.root) == 2
    assert age("a mode that nobody knows", commit, repository.root) == 2
    repository.commit("shmring/core/wire.pyx")
    last = repository.commit("shmring/ring/ring.py")
    assert age("transport", commit, repository.root) == 2
    assert age("allocator", commit, repository.root) == 0
    assert age("transport", last, repository.root) == 0
    assert head(repository.root) == last


def test_what_was_measured_with_changes_is_never_known_to_be_this_code(repository: Repository) -> None:
    commit = repository.commit("shmring/core/wire.pyx")
    assert age("transport", f"{commit}-dirty", repository.root) is None
    repository.commit("shmring/core/wire.pyx")
    assert age("transport", f"{commit}-dirty", repository.root) == 1


def test_what_git_does_not_know_is_of_unknown_age(repository: Repository, tmp_path_factory: pytest.TempPathFactory) -> None:
    commit = repository.commit("shmring/core/wire.pyx")
    assert age("transport", "0123456789ab", repository.root) is None
    assert age("transport", None, repository.root) is None
    sdist = tmp_path_factory.mktemp("sdist")
    assert age("transport", commit, sdist) is None
    assert head(sdist) is None
    inside = repository.root / "unpacked"
    inside.mkdir()
    assert age("transport", commit, inside) is None, "a repository further up is somebody else's"


def test_without_git_nothing_is_known(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = repository.commit("shmring/core/wire.pyx")
    monkeypatch.setenv("PATH", "")
    assert age("transport", commit, repository.root) is None


def test_ages_are_words() -> None:
    assert [age_in_words(changes) for changes in (None, 0, 1, 2)] == [
        "not known", "the same", "changed by 1 commit", "changed by 2 commits",
    ]  # fmt: skip


@for_each("mode", MODES)
def test_what_a_mode_measures_is_there(mode: str) -> None:
    for path in MODES[mode].code:
        assert list(ROOT.glob(path.removeprefix(":(exclude)"))), path
