"""What can be wrong, and who must notice: one row of the table."""

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
    is_guard: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether it is there only after a build."""
        return self.file.endswith((CYTHON, *C))


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
