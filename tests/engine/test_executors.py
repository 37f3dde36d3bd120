"""Choosing an executor: by name, or one's own."""

from __future__ import annotations

import pytest

from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import Executor, ExecutorOptions
from shmring.engine.settings import EXECUTORS
from tests.nursery import Nursery
from tests.tables import for_each


@for_each("name", ["fingerprints", "synthetic"])
def test_a_built_in_one_is_named_as_it_describes_itself(name: str) -> None:
    executor = create_executor(name)
    assert isinstance(executor, Executor)
    assert executor.describe().executor == name


def test_the_error_about_an_unknown_executor_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no executor 'fingerprint'; choose one of .*fingerprints.*or write module:Class"):
        create_executor("fingerprint")


def test_an_executor_of_another_module_gets_the_options() -> None:
    executor = create_executor(
        "shmring.engine.executors.synthetic:SyntheticExecutor", ExecutorOptions(options={"embedding_size": 7})
    )
    assert executor.describe().embedding_size == 7


def test_an_executors_missing_class_is_named() -> None:
    with pytest.raises(ValueError, match=r"engine\.protocol has no Nothing"):
        create_executor("shmring.engine.protocol:Nothing")


def test_an_executors_missing_module_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        create_executor("no_such_module:Executor")


def test_a_class_that_is_no_executor_is_refused() -> None:
    with pytest.raises(TypeError, match="must have describe, execute, forget and close"):
        create_executor("builtins:type")


def test_only_the_chosen_one_is_imported(nursery: Nursery) -> None:
    """The others may need packages that are not installed."""
    code = (
        "import sys, shmring.engine.executors\n"
        "shmring.engine.executors.create_executor('synthetic')\n"
        "print([name for name in shmring.engine.settings.EXECUTORS if f'shmring.engine.executors.{name}' in sys.modules])\n"
    )
    done = nursery.run_text(code)
    assert (done.stdout, done.stderr) == ("['synthetic']\n", "")
    assert "transformers" in EXECUTORS
