"""What can be wrong, and who must notice: one row of the table, whose parts lie beside this by subject."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CYTHON = ".pyx"
C = (".c", ".h")


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that can be wrong, and who must notice.

    Attributes:
        name: what is wrong then; of a guard, what holds as long as it is there.
        file: where.
        old: what stands there, exactly once.
        new: what stands there with the fault.
        test: arguments of pytest.
        reason: why nobody need notice; empty if somebody must.
        is_guard: whether it takes away what a guarantee (docs/guarantees.md) needs.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    reason: str = ""
    is_guard: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def is_compiled(self) -> bool:
        """Whether it is there only after a build."""
        return self.file.endswith((CYTHON, *C))


def faults_in(file: str, *rows: tuple[str, ...] | Fault) -> tuple[Fault, ...]:
    """Returns the faults of one file; each row is one without that file's name, or a :func:`guard`."""
    return tuple(
        dataclasses.replace(row, file=file) if isinstance(row, Fault) else Fault(row[0], file, *row[1:]) for row in rows
    )


def guard(name: str, old: str, new: str, test: str) -> Fault:
    """A row of a guard."""
    return Fault(name, "", old, new, test, is_guard=True)


def check_place(fault: Fault) -> str:
    """Returns the source in which a fault is to be; ends the program where it does not fit, before much time is spent."""
    source = (ROOT / fault.file).read_text()
    if source.count(fault.old) != 1:
        sys.exit(f"{fault.name}: its code stands {source.count(fault.old)} times in {fault.file}; the table is out of date")
    for test in shlex.split(fault.test):
        file, _, name = test.partition("::")
        defined = rf"^(async )?def {name}\(|^{name} = " if name else ""
        if file.startswith("tests/") and not re.search(defined, (ROOT / file).read_text(), re.MULTILINE):
            sys.exit(f"{fault.name}: there is no {test}; the table is out of date")
    return source
