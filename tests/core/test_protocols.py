"""The protocols of sleeping and waking: the sources take the steps that spin has searched, in that order.

What a missing fence does can't be seen where one core runs both ends, and on two it is seldom. So spin searches a model
(``make verify``). Here each function that touches what two processes share is held against the model's function of that name:
which place it loads, stores or exchanges, where it fences and rings, and which stores are releases. What those words mean is in
``atomics.h``; the compiler is asked whether they are the instructions that they must be.

What is compared is the text of sources and not what they do, since a missing fence does nothing that a test could see. So who
renames a function, a helper or a place, or moves a step into another function, changes the tables below as well; the failure
says which. A step that is added, lost or moved is no matter of tables: it belongs into the model, which spin searches again.
"""

from __future__ import annotations

import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "shmring/core"
MODELS = ROOT / "tests/model"

#: A function of the sources, and the model that has its steps under the same name.
FUNCTIONS = (
    ("message_ring.pyx", "commit", "message_ring.pml"),
    ("message_ring.pyx", "wake_reader", "message_ring.pml"),
    ("message_ring.pyx", "wait_for_space", "message_ring.pml"),
    ("message_ring.pyx", "take", "message_ring.pml"),
    ("message_ring.pyx", "wake_writer", "message_ring.pml"),
    ("message_ring.pyx", "fall_asleep", "message_ring.pml"),
    ("worker_end.pyx", "_acknowledge", "acknowledgements.pml"),
    ("fan_out_book.pyx", "_want", "acknowledgements.pml"),
)

#: What stands for a step elsewhere.
CALLED = {"_look_at_head()": "load HEAD", "sweep()": "load STAMPS", "look()": "load STAMPS", "memcpy(to": "load RECORDS"}
#: As the model names places.
PLACES = {"DATA": "RECORDS", "STAMP": "STAMPS"}

#: Whose value says that something else is there to be read: it is loaded with acquire, everywhere.
ACQUIRED = {"TAIL", "HEAD", "STAMPS", "WANT", "CLOSED"}
#: Whose value stands for itself, or for what a fence has ordered.
RELAXED = {"READER_SLEEPS", "WRITER_WAITS", "RECORDS"}

STEP = re.compile(
    r"(?P<fence>fence(_full)?\()|(?P<ring>\b(send|ring)\()|(?P<called>" + "|".join(re.escape(name) for name in CALLED) + r")"
    r"|(?P<kind>load|store|exchange)(_(?P<order>acquire|release|relaxed))?(_u(32|64))?\((?P<arguments>.*)"
)
PLACE = re.compile(r"\bAT_(\w+)|\b(TAIL|HEAD|READER_SLEEPS|WRITER_WAITS|DATA|WANT|STAMP)\b")


def steps_in(lines: list[str]) -> list[str]:
    """What a function does to what is shared. Loads of one place that follow each other are one step."""
    steps: list[str] = []
    for line in lines:
        for found in STEP.finditer(re.sub(r"/\*.*?\*/|#.*|\"\"\".*", "", line)):
            steps += _step(found)
    return [step for number, step in enumerate(steps) if not number or step != steps[number - 1]]


def _step(found: re.Match[str]) -> list[str]:
    if found["fence"]:
        return ["fence"]
    if found["ring"]:
        return ["ring"]
    if found["called"]:
        return [CALLED[found["called"]]]
    place = PLACE.search(found["arguments"])
    name = "WANT" if place is None else place[1] or place[2]  # fan_out_book.pyx names that address
    is_release = found["order"] == "release" or (found["kind"] == "store" and ", true)" in found["arguments"])
    step = f"{found['kind']} {PLACES.get(name, name)}{', release' if is_release else ''}"
    return [step, *steps_in([found["arguments"]])]


def function_in(source: str, name: str) -> list[str]:
    """The lines of the only function of a name."""
    heads = re.findall(rf"^( *)(?:cdef|cpdef|def) [^\n]*\b{name}\([^\n]*\n", source, re.MULTILINE)
    assert len(heads) == 1, f"{len(heads)} functions are called {name}: if it was renamed, FUNCTIONS and its model say so too"
    head = heads[0]
    body = re.split(rf"^{head}(?:cdef|cpdef|def) [^\n]*\b{name}\([^\n]*\n", source, flags=re.MULTILINE)[1]
    end = re.search(rf"^ {{0,{len(head)}}}\S", body, re.MULTILINE)
    return body[: end.start() if end else None].splitlines()


def function_in_model(model: str, name: str) -> list[str]:
    """The lines of an inline, or between the comments "begin" and "end"; without what only mutants do."""
    marked = re.search(rf"/\* begin: {name} \*/(.*?)/\* end: {name} \*/", model, re.DOTALL)
    inlined = re.search(rf"^inline {name}\(.*?\{{(.*?)^\}}", model, re.DOTALL | re.MULTILINE)
    assert (marked is None) != (inlined is None), f"the model has no {name}, or two"
    found = (marked or inlined)[1]
    lines, is_mutant = [], [False]
    for line in found.splitlines():
        word = line.split()[0] if line.strip() else ""
        if word in ("#ifdef", "#ifndef"):
            is_mutant.append(word == "#ifdef")
        elif word == "#else":
            is_mutant[-1] = not is_mutant[-1]
        elif word == "#endif":
            is_mutant.pop()
        elif not any(is_mutant):
            lines.append(line)
    return lines


@for_each(("file", "name", "model"), FUNCTIONS, ids=lambda value: value)
def test_a_function_takes_the_steps_of_its_model(file: str, name: str, model: str) -> None:
    ours = steps_in(function_in((CORE / file).read_text(), name))
    assert ours == steps_in(function_in_model((MODELS / model).read_text(), name)), (
        "if a helper was renamed, CALLED and PLACES name it; if a step is another, the model has to have it, and `make verify`"
    )
    assert ours


def test_each_use_of_what_two_processes_share_is_in_a_model_or_orders_nothing() -> None:
    """A new one needs a model, or a line here that says why not."""
    apart = {
        ("message_ring.pyx", "_look_at_head"),  # a step of those that call it
        ("message_ring.pyx", "reserve"),  # what it stores is published by commit
        ("message_ring.pyx", "end_record"),  # the same
        ("message_ring.pyx", "next_nbytes"),  # the first half of a read, whose second is take
        ("message_ring.pyx", "has_news"),  # a look that nobody relies on
        ("message_ring.pyx", "stay_awake"),  # a bell too many harms nobody
        ("fan_out_book.pyx", "_look_at"),  # what sweep is made of
        ("fan_out_book.pyx", "_has_closed_before"),  # of a worker that has parted, which is waited for in other ways
        ("worker_end.pyx", "close"),  # the same
    }
    users = set()
    # The one declares them, and the numbers of the other are loaded and stored in any order.
    for path in sorted(set(CORE.glob("*.pyx")) - {CORE / "atomics.pyx", CORE / "load.pyx"}):
        name = ""
        for line in path.read_text().splitlines():
            defined = re.match(r" *(?:cdef|cpdef|def) [^=]*?(\w+)\(", line)
            name = defined[1] if defined else name
            if re.search(r"\b(load|store|exchange)_\w+_u\d\d\(|\bexchange_u\d\d\(|\bfence_full\(", line.partition("#")[0]):
                users.add((path.name, name))
    assert users == apart | {(file, name) for file, name, _ in FUNCTIONS}, "if one was renamed, the tables say so too"


def test_what_says_that_something_is_there_is_loaded_with_acquire() -> None:
    loads = set()
    for name in ("message_ring.pyx", "worker_end.pyx", "fan_out_book.pyx"):
        for order, arguments in re.findall(r"\bload_(\w+)_u\d\d\((.*)", (CORE / name).read_text()):
            place = PLACE.search(arguments)
            loads.add(("WANT" if place is None else place[1], order))
    assert loads == {(place, "acquire") for place in ACQUIRED} | {(place, "relaxed") for place in RELAXED}


# -- what the words of atomics.h are to a processor -------------------------------------------------------------------------

INSTRUCTIONS = {
    "x86_64": {
        "fence_full()": r"\b(mfence|lock)\b",
        "exchange_u32(at, 0)": r"\bxchg",
        "exchange_u64(at, 0)": r"\bxchg",
        "take_reference(at)": r"\block\b",
        "drop_reference(at)": r"\block\b",
        "push_top(at, at, at)": r"\block\s+cmpxchg",
        "*(void **)at = take_stack(at, at)": r"\bxchg",
    },
    "aarch64": {
        "fence_full()": r"\bdmb\s+ish$",
        "store_release_u64(at, 0)": r"\b(stlr|dmb)\b",
        "*(uint64_t *)at = load_acquire_u64(at)": r"\b(ldar|ldapr|dmb)\b",
        "exchange_u32(at, 0)": r"\b(ldaxr|swpal|__aarch64_swp4_acq_rel)\b",
        "exchange_u64(at, 0)": r"\b(ldaxr|swpal|__aarch64_swp8_acq_rel)\b",
        "take_reference(at)": r"\b(ldxr|ldadd|stadd|__aarch64_ldadd4_relax)\b",
        "drop_reference(at)": r"\b(ldaxr|ldaddal|__aarch64_ldadd4_acq_rel)\b",
        "push_top(at, at, at)": r"\b(ldxr|casl|__aarch64_cas8_rel)\b",
        "*(void **)at = take_stack(at, at)": r"\b(ldaxr|swpal|__aarch64_swp8_acq_rel)\b",
    },
}


@for_each("operation", sorted(INSTRUCTIONS.get(platform.machine(), {"fence_full()": ""})))
def test_an_operation_is_the_instruction_that_orders_what_it_says(operation: str) -> None:
    compilers = [shlex.split(name) for name in (sysconfig.get_config_var("CC") or "cc", "gcc", "clang", "cc")]
    compiler = next((command for command in compilers if shutil.which(command[0])), None)
    if compiler is None or platform.machine() not in INSTRUCTIONS:
        pytest.skip("no compiler, or an unknown processor")
    program = f'#include "{CORE / "atomics.h"}"\nvoid f(void *at) {{ {operation}; }}\n'
    command = [*compiler, "-O2", "-S", "-o", "-", "-x", "c", "-"]
    assembly = subprocess.run(command, input=program, capture_output=True, text=True, check=True).stdout
    assert re.search(INSTRUCTIONS[platform.machine()][operation], assembly, re.MULTILINE), assembly
