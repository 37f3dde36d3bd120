"""What the tests of the engine share: models of real architectures that are small enough for a test."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions


def skip_without_torchvision() -> None:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as error:  # the latter where it was built for another torch
        lines = str(error).splitlines()
        pytest.skip(
            f"torchvision can't be imported ({lines[0] if lines else type(error).__name__}): pip install -c constraints.txt "
            "-e '.[vision]' beside PyPI's torch; beside a CPU build of torch, torchvision 0.28.0 from where that came from"
        )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("llava")``: the directory of a model, written once; see tiny_models.py. Skips without transformers."""
    pytest.importorskip("transformers")
    place = Path(__file__).with_name("tiny_models.py")
    specification = importlib.util.spec_from_file_location("tiny_models", place)
    assert specification is not None
    assert specification.loader is not None
    tiny_models = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tiny_models)
    written: dict[tuple[str, bool], Path] = {}

    def write(architecture: str = "llava", *, chat_template: bool = True) -> Path:
        if architecture in tiny_models.TORCHVISION_ARCHITECTURES:
            skip_without_torchvision()
        key = (architecture, chat_template)
        if key not in written:
            path = tmp_path_factory.mktemp("models") / f"tiny-{architecture}"
            written[key] = tiny_models.write_tiny_model(path, architecture, chat_template=chat_template)
        return written[key]

    return write


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """``load("llava", **options)``: the executor ``transformers``; the same one again for the same arguments."""
    loaded: dict[tuple[Any, ...], Any] = {}

    def make(architecture: str = "llava", **options: Any) -> Any:
        key = (architecture, *options.items())
        if key not in loaded:
            settings = ExecutorOptions(model=str(tiny_model(architecture)), options=options)
            loaded[key] = create_executor("transformers", settings)
        return loaded[key]

    yield make
    for executor in loaded.values():
        executor.close()


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path]) -> Callable[[str], Any]:
    """``reference("llava")``: what transformers makes of the same model; see asking.py."""
    from tests.engine.asking import Reference  # after it was looked whether transformers is there

    references: dict[str, Reference] = {}
    return lambda architecture: references.setdefault(architecture, Reference(tiny_model(architecture)))


@pytest.fixture(scope="module")
def whisper(tiny_model: Callable[..., Path]) -> Path:
    """The directory of a speech model."""
    return tiny_model("whisper")


@pytest.fixture(scope="module")
def speech_executor(whisper: Path) -> Iterator[Any]:
    """The executor ``transformers`` with a speech model."""
    executor = create_executor("transformers", ExecutorOptions(model=str(whisper)))
    yield executor
    executor.close()
