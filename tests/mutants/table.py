"""All faults: those of the files ``*.faults`` beside this, each of which has a subject.

Such a file has sections, one for each file of the product, and in these the faults::

    == shmring/core/blocks.pyx

    what is carved out still counts as free
              self._add(start + length, run_start + run_length - start - length)
    -         self.free_units -= length
    @ tests/core/test_blocks.py::test_free_space_in_pieces_does_not_fit_a_whole

A fault has a name, and then what stands there and what stands there with it, like a patch: lines that go begin with ``-``,
lines that come with ``+``, and those between with two spaces. Lines with an indentation are whole lines; without one, it is a
part of a line. Behind ``@`` is who must notice, behind ``?`` why nobody need. The name of a guard begins with ``guard:``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.fault import Fault

_SECTION = re.compile(r"^== (.*)\n", re.MULTILINE)
_FAULT = re.compile(r"\n(guard: )?(\w.*)\n((?:[-+ ].*\n|[-+]?\n)+)@ (.*)\n(?:\? (.*)\n)?")


def faults_in(text: str) -> Iterator[Fault]:
    """Reads what such a file says."""
    _, *sections = _SECTION.split(text)
    for file, section in zip(sections[::2], sections[1::2], strict=True):
        assert not _FAULT.sub("", section).strip(), f"these lines are no fault: {_FAULT.sub('', section)}"
        for guard, name, change, test, reason in _FAULT.findall(section):
            lines = change.splitlines()
            end = "\n" if lines[0][2:3] == " " else ""
            old, new = ("\n".join(line[2:] for line in lines if line[:1] != other) + end for other in "+-")
            yield Fault(name, file, old, new if new.strip() else "", test, reason, bool(guard))


FAULTS = tuple(fault for path in sorted(Path(__file__).parent.glob("*.faults")) for fault in faults_in(path.read_text()))
