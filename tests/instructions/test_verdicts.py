"""Which growth fails, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.instructions import ratios
from tests.instructions.callgrind import Count, Failed, own_instructions
from tests.instructions.earlier import NotThere, commit_of
from tests.instructions.verdicts import BUDGET, Budget, judge

BEFORE = Count(1000.0, 4096.0, {"libpython3: _PyObject_Malloc": 300.0}, {"client/client.py: Client.request": 40.0})
DUMP = """\
events: Ir
ob=(1) /usr/lib/libpython3.11.so.1.0
fl=(1) ceval.c
fn=(1) _PyEval_EvalFrameDefault
10 100
+3 20
cob=(2) /x/shmring/core/compiled.cpython-311.so
cfn=(2) __pyx_pw_7shmring_4core_8compiled_9EngineEnd_35send_reply
calls=1 5
* 5000

fn=(3) malloc'2
7 5
ob=(2)
fn=(2)
5 4000
-1 1000
totals: 5125
"""


def test_each_function_has_its_own_instructions() -> None:
    assert own_instructions(DUMP) == {
        "libpython3: _PyEval_EvalFrameDefault": 120,
        "libpython3: malloc": 5,
        "compiled: EngineEnd_send_reply": 5000,
    }


@pytest.mark.parametrize(
    ("instructions", "copying", "allowed", "is_red"),
    [
        (1019.0, 4096.0, 0.0, False),
        (1021.0, 4096.0, 0.0, True),
        (1021.0, 4096.0, 0.01, False),
        (1031.0, 4096.0, 0.01, True),
        (1000.0, 4680.0, 0.0, False),
        (1000.0, 4700.0, 0.0, True),
        (500.0, 0.0, 0.0, False),
    ],
)
def test_growth_above_what_is_allowed_is_red(instructions: float, copying: float, allowed: float, is_red: bool) -> None:
    assert judge("request", BEFORE, Count(instructions, copying, {}, {}), allowed).is_red == is_red


def test_functions_that_grew_are_named() -> None:
    functions = {"libpython3: _PyObject_Malloc": 300.0, "compiled: ClientEnd_send": 50.0}
    now = dataclasses.replace(BEFORE, instructions=1050.0, functions=functions, bytecodes={})
    text = judge("request", BEFORE, now).text
    assert text.splitlines()[0].split() == ["request", "1050", "+5.00%;", "copying", "4096", "+0,", "TOO", "MUCH"]
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["+50", "instructions", "compiled:", "ClientEnd_send"],
        ["-40", "bytecodes", "client/client.py:", "Client.request"],
    ]


def test_a_case_that_fails_is_red_and_one_that_is_new_is_not() -> None:
    assert judge("request", BEFORE, Failed("AttributeError: no")).is_red
    assert not judge("request", Failed("AttributeError: no"), BEFORE).is_red


@pytest.mark.parametrize(
    ("measured", "allowed", "is_too_much"),
    [
        ([1.12, 1.15, 1.13, 1.2, 1.11, 1.14, 1.16], 0.0, True),
        ([1.12, 1.15, 1.13, 1.2, 1.11, 1.14, 1.16], 0.05, False),
        ([0.8, 1.5, 1.3, 0.9, 1.4, 0.7, 1.6], 0.0, False),  # on a busy machine
        ([1.05, 1.04, 1.06, 1.05, 1.04, 1.05, 1.07], 0.0, False),
    ],
)
def test_a_ratio_is_too_much_if_three_of_four_are(measured: list[float], allowed: float, is_too_much: bool) -> None:
    assert ratios.is_red("CPU", measured, allowed) == is_too_much


def test_no_case_is_allowed_to_grow_without_a_reason() -> None:
    assert Budget.read('{"beside": "v1", "allowed": {"request": {"percent": 3, "why": "names are checked"}}}').allowed == {
        "request": 0.03
    }
    with pytest.raises(ValueError, match="'request' to grow, and does not say why"):
        Budget.read('{"beside": "v1", "allowed": {"request": {"percent": 3}}}')


def test_the_budget_can_be_read() -> None:
    assert len(Budget.read(BUDGET.read_text()).beside) == 40


def test_a_commit_that_is_not_here_is_said_to_be_so() -> None:
    with pytest.raises(NotThere, match=r"^no-such-commit$"):
        commit_of("no-such-commit")
