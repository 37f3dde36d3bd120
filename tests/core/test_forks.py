"""An object that belongs to the process that made it knows when it is a copy in a child."""

from __future__ import annotations

import ctypes
import os

from shmring.core.compiled import Origin


def seen_in_child(origin: Origin) -> int:
    """Returns what a forked child sees, as its exit code."""
    pid = os.fork()
    if not pid:
        os._exit(10 if origin.forked and origin.pid != os.getpid() else 20)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_knows_that_it_is_one_and_its_parent_that_it_is_none() -> None:
    origin = Origin()
    assert (origin.forked, origin.pid) == (False, os.getpid())
    assert seen_in_child(origin) == 10
    assert not origin.forked


def test_what_a_child_makes_is_its_own() -> None:
    pid = os.fork()
    if not pid:
        os._exit(20 if Origin().forked else 10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10


def test_a_fork_that_python_does_not_know_of_is_one() -> None:
    origin = Origin()
    pid = ctypes.PyDLL(None).fork()  # PyDLL: keeps the interpreter's lock
    if not pid:
        os._exit(10 if origin.forked else 20)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
    assert not origin.forked


def test_a_child_of_a_child_can_use_neither_s() -> None:
    origin = Origin()
    pid = os.fork()
    if not pid:
        child = Origin()
        grandchild = os.fork()
        if not grandchild:
            os._exit(10 if origin.forked and child.forked else 20)
        status = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
        os._exit(status if origin.forked and not child.forked else 30)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 10
