"""The faults of the table fit the sources, so that each of them can be put there."""

from __future__ import annotations

import collections
import itertools
import re
from pathlib import Path

from tests.mutants.fault import ROOT, Fault, check_place
from tests.mutants.switches import Change, with_switches
from tests.mutants.table import FAULTS, faults_in
from tests.tables import for_each

#: What of the product is compiled and has code in it: not only declarations.
COMPILED = {
    str(path.relative_to(ROOT))
    for path in (ROOT / "shmring").rglob("*")
    if path.suffix == ".c"
    or (path.suffix == ".pyx" and re.search(r"^(cdef class |cdef inline |def )", path.read_text(), re.MULTILINE))
    or (path.suffix == ".h" and "static inline" in path.read_text())
}


def test_a_fault_reads_like_a_patch() -> None:
    part = "a name\n- a > 0\n@ tests/one.py tests/two.py\n? It makes no difference.\n"
    lines = "guard: another\n      first\n-     second\n\n+     third\n@ tests/one.py\n"
    gone = "a third\n-     first\n@ tests/one.py\n"
    assert list(faults_in(f"# What this is.\n\n== a.py\n\n{part}\n== b.py\n\n{lines}\n{gone}")) == [
        Fault("a name", "a.py", "a > 0", "", "tests/one.py tests/two.py", "It makes no difference."),
        Fault("another", "b.py", "    first\n    second\n\n", "    first\n\n    third\n", "tests/one.py", is_guard=True),
        Fault("a third", "b.py", "    first\n", "", "tests/one.py"),
    ]


@for_each("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_and_its_check_are_in_the_code(fault: Fault) -> None:
    source = check_place(fault)
    assert fault.new != fault.old
    if not fault.is_compiled:
        compile(source.replace(fault.old, fault.new), fault.file, "exec")  # so that it is noticed for what it does


def test_every_compiled_file_has_a_fault() -> None:
    assert {fault.file for fault in FAULTS if fault.is_compiled} == COMPILED


def test_no_two_faults_have_one_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_no_fault_is_there_twice() -> None:
    tried = {(fault.file, check_place(fault).replace(fault.old, fault.new), fault.test) for fault in FAULTS}
    assert len(tried) == len(FAULTS)


def test_each_file_has_one_place() -> None:
    places = [file for file, _ in itertools.groupby(fault.file for fault in FAULTS)]
    assert len({(ROOT / file).resolve() for file in places}) == len(places)


def test_all_faults_of_a_file_are_behind_switches() -> None:
    changes = collections.defaultdict(list)
    for number, fault in enumerate(FAULTS, 1):
        if fault.is_compiled:
            changes[fault.file].append(Change(number, fault.old, fault.new))
    for file, of_file in changes.items():
        text = with_switches((ROOT / file).read_text(), Path(file).suffix == ".pyx", of_file)
        switched = {int(number) for number in re.findall(r"FAULT\((\d+)\)", text)}
        assert switched == {change.number for change in of_file}
