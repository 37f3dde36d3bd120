"""Faults behind switches: what is there twice, and what the rest of a file still says."""

from __future__ import annotations

import pytest

from tests.mutants.switches import Change, with_switches

_CYTHON = '''"""A file."""

cdef int first(int a) noexcept:
    cdef int b = a + 1
    if a > 0:
        work(a)
        rest(b)
    else:
        other()
    while a < b and b:
        a += 1
    return a
'''


def _changed(old: str, new: str, *, source: str = _CYTHON) -> str:
    text = with_switches(source, True, [Change(7, old, new)])
    return text.replace("\n\nfrom shmring.core.fault cimport FAULT", "")


def test_a_statement_is_there_twice() -> None:
    expected = "        if FAULT(7):\n            pass\n        else:\n            work(a)\n        rest(b)\n"
    assert expected in _changed("        work(a)\n", "")


def test_a_line_behind_that_moves_into_a_block_is_there_twice() -> None:
    body = "    if a > 0:\n        work(a)\n    else:\n        other()\n    rest(a)\n"
    source = f'"""A file."""\n\ncdef int first(int a) noexcept:\n{body}'
    moved = _changed(body, "    if a > 1:\n        rest(a)\n", source=source)
    assert moved.endswith(
        "    if FAULT(7):\n        if a > 1:\n            rest(a)\n"
        "    else:\n        if a > 0:\n            work(a)\n        else:\n            other()\n        rest(a)\n"
    )


def test_a_condition_is_another_one() -> None:
    assert "    if (FAULT(7) and (a >= 0)) or (not FAULT(7) and (a > 0)):\n        work(a)" in _changed("a > 0", "a >= 0")
    assert "while (FAULT(7) and (a < b)) or (not FAULT(7) and (a < b and b)):\n" in _changed(" and b:", ":")


def test_what_a_variable_begins_with_is_something_else() -> None:
    assert "    cdef int b = ((a) if FAULT(7) else (a + 1))\n" in _changed("a + 1", "a")


def test_a_block_is_there_as_a_whole() -> None:
    text = _changed("        rest(b)\n    else:\n        other()\n", "        rest(b)\n")
    assert text.count("        work(a)\n") == 2
    assert text.count("other()") == 1
    assert text.index("if FAULT(7):") < text.index("if a > 0:")


def test_faults_may_have_one_place() -> None:
    text = with_switches(_CYTHON, True, [Change(1, "work(a)", "work(b)"), Change(2, "work(a)", "work(0)")])
    branches = (
        "if FAULT(1):\n            work(b)\n        elif FAULT(2):\n            work(0)\n        else:\n            work(a)\n"
    )
    assert branches in text


def test_what_is_declared_before_a_block_stays_there() -> None:
    source = '"""A file."""\n\ndef f():\n    cdef int a\n    work()\n'
    expected = "    cdef int a\n    if FAULT(7):\n        other()\n    else:\n        work()\n"
    assert expected in _changed("    cdef int a\n    work()\n", "    cdef int a\n    other()\n", source=source)


def test_what_is_declared_can_not_be_in_a_block() -> None:
    with pytest.raises(ValueError, match="declared"):
        _changed("    cdef int b = a + 1\n", "")


def test_c_has_statements_and_expressions() -> None:
    changes = [Change(1, "a = b;", "a = c;"), Change(2, "x < y", "x <= y")]
    text = with_switches("a = b;\nif (x < y) f();\n", False, changes)
    assert text == "if (FAULT(1)) { a = c; } else { a = b; }\nif ((FAULT(2) ? (x <= y) : (x < y))) f();\n"


def test_in_c_faults_do_not_lie_in_each_other() -> None:
    with pytest.raises(ValueError, match="lie in each other"):
        with_switches("a = b + c;\n", False, [Change(1, "b + c", "b"), Change(2, "c", "0")])
