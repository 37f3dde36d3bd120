"""An object that belongs to the process that made it knows when it is a copy in a child."""

from __future__ import annotations

import ctypes
import os

from shmring.core.compiled import Home
from tests.forked import in_child


def test_a_child_knows_that_it_is_one_and_its_parent_that_it_is_none() -> None:
    home = Home("it", "make one")
    assert (home.forked, home.pid) == (False, os.getpid())

    def as_child() -> None:
        assert home.forked
        assert home.pid != os.getpid()

    in_child(as_child)
    assert not home.forked


def test_what_a_child_makes_is_its_own() -> None:
    def as_child() -> None:
        assert not Home("it", "make one").forked

    in_child(as_child)


def test_a_fork_that_python_does_not_know_of_is_one() -> None:
    home = Home("it", "make one")
    pid = ctypes.PyDLL(None).fork()  # PyDLL: keeps the interpreter's lock
    if not pid:
        os._exit(10 if home.forked else 20)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    assert not home.forked


def test_a_child_of_a_child_can_use_neither_s() -> None:
    home = Home("it", "make one")

    def as_child() -> None:
        child = Home("it", "make one")

        def as_grandchild() -> None:
            assert home.forked
            assert child.forked

        in_child(as_grandchild)
        assert home.forked
        assert not child.forked

    in_child(as_child)
