"""``make sanitize`` runs each test of what is compiled, or says why it does not."""

from __future__ import annotations

from pathlib import Path

from tests.house.test_layers import imports, module_name, source_name
from tests.sanitize import COMPILED, CORE, LEFT_OUT, THREADED

ROOT = Path(__file__).resolve().parents[2]
COMPILED_MODULES = {module_name(path) for path in (ROOT / "shmring").rglob("*.pyx")}
TESTS = {source_name(path): path for path in (ROOT / "tests").rglob("test_*.py")}


def test_all_of_the_core_is_run() -> None:
    assert len(CORE) > 20
    assert set(CORE) <= set(COMPILED)


def test_whatever_is_named_is_there() -> None:
    named = {*COMPILED, *LEFT_OUT, *(argument for argument in THREADED if argument.endswith(".py"))}
    assert named <= TESTS.keys()
    assert not LEFT_OUT.keys() & set(COMPILED)


def test_who_uses_a_compiled_module_is_run_or_left_out_for_a_reason() -> None:
    names = [module.rpartition(".")[2] for module in COMPILED_MODULES]  # only what has one of them is parsed
    candidates = {name: path for name, path in TESTS.items() if any(map(path.read_text().__contains__, names))}
    users = {name for name, path in candidates.items() if imports(path) & COMPILED_MODULES}
    assert len(users) > 20
    assert users - {*COMPILED, *LEFT_OUT} == set()
