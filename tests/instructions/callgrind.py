"""Runs a program of cases under callgrind, and reads what it has counted."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_TIMEOUT_S = 900  # it takes half a minute on a machine that does nothing else

#: Copying stands apart: to valgrind, each byte that ``rep movsb`` copies is an instruction.
_COPYING = re.compile(r"libc: \w*mem(cpy|move)")

_FEWEST = 10  # instructions a message, below which a function is not worth a row


@dataclasses.dataclass(frozen=True)
class Count:
    """What a message of a case takes.

    Attributes:
        instructions: of all functions, without copying.
        copying: those of copying, about one a byte.
        functions: instructions of each compiled function itself, without those that it calls.
        bytecodes: executed in each Python function; to callgrind, all of these are one function of the interpreter.
    """

    instructions: float
    copying: float
    functions: dict[str, float]
    bytecodes: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Failed:
    """A case that could not be carried out, and why."""

    why: str


def measure(checkout: Path, names: Sequence[str] = ()) -> dict[str, Count | Failed]:
    """Counts what cases take in a checkout that is built: all of them, or those that are named, in this order.

    Raises:
        subprocess.SubprocessError: the program did not get to its end.
    """
    with tempfile.TemporaryDirectory(prefix="shmring-instructions-") as scratch:
        meter, dump = Path(scratch) / "meter.so", Path(scratch) / "dump"
        Path(scratch, "instructions").symlink_to(_HERE)
        Path(scratch, "checkout").symlink_to(checkout)  # with paths of other lengths, all that is made later lies elsewhere
        compiler = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*compiler, "-O2", "-shared", "-fPIC", "-o", meter, _HERE / "meter.c"], check=True)
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{scratch}/checkout:{scratch}",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "METER": str(meter),
            "LD_PRELOAD": str(meter),
        }
        valgrind = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dump}"]
        command = [*_unrandomised(), *valgrind, sys.executable, "-P", "-m", "instructions.program", *names]
        lines = subprocess.run(
            command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S
        ).stdout.splitlines()
        dumps = (Path(f"{dump}.{number}") for number in itertools.count(1))
        return {told["case"]: _counted(dumps=dumps, **told) for told in map(json.loads, lines)}


def _unrandomised() -> list[str]:
    """Returns what has a program's addresses the same each time, on which hashes depend. Some containers forbid it."""
    command = ["setarch", "-R"]
    return command if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0 else []


def _counted(
    dumps: Iterator[Path],
    case: str,
    parts: int = 0,
    messages: int = 0,
    bytecodes: dict[str, float] | None = None,
    failed: str | None = None,
) -> Count | Failed:
    if failed is not None:
        return Failed(failed)
    each = [own_instructions(next(dumps).read_text(errors="replace")) for _ in range(parts)]
    functions = min(each, key=collections.Counter.total)
    copying = sum(functions.pop(name) for name in list(functions) if _COPYING.match(name))
    return Count(
        instructions=functions.total() / messages,
        copying=copying / messages,
        functions={name: count / messages for name, count in functions.items() if count > _FEWEST * messages},
        bytecodes=bytecodes or {},
    )


def own_instructions(dump: str) -> collections.Counter[str]:
    """Returns the instructions of each function itself, by library and name, of the text of a dump.

    Source: https://valgrind.org/docs/manual/cl-format.html
    """
    counts: collections.Counter[str] = collections.Counter()
    names: dict[str, str] = {}  # a name is written once, then only its number
    here = {"ob": "", "fn": ""}
    is_call = False
    for line in dump.splitlines():
        if named := re.match(r"(c?)(ob|fn)=(\(\d+\))(?: (.*))?$", line):
            called, what, number, text = named.groups()
            name = names.setdefault(what + number, text)
            if not called:
                here[what] = name
        elif line.startswith("calls="):
            is_call = True  # the next line is what the callee has taken
        elif re.match(r"[\d+*-]", line):
            if not is_call and len(numbers := line.split()) > 1:
                library = here["ob"].rpartition("/")[2].partition(".")[0]
                counts[f"{library}: {_readable(here['fn'])}"] += int(numbers[1])
            is_call = False
    return counts


def _readable(function: str) -> str:
    """Returns a function's name without what callgrind adds, and Cython, whose numbers change with each new method."""
    function = function.partition("'")[0]
    if function.startswith("__pyx_"):
        function = re.sub(r"^__pyx_[a-z]+_(7shmring_4core_8compiled_)?", "", function)
        function = re.sub(r"(?<![A-Za-z])\d+(?=[A-Za-z_])", "", function)
    return function
