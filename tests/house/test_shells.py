"""The compiled ends call what the Protocols of their shells name, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import shmring.core.shells
from tests.tables import for_each

CORE = Path(shmring.core.shells.__file__).parent
#: The parts of the core in which an end, or what belongs to it, calls its shell.
PARTS = {
    "ClientShell": ("client_end", "client_calls"),
    "EngineShell": ("engine_end", "engine_calls"),
    "BroadcastShell": ("fan_out_end",),
    "WorkerShell": ("worker_end",),
}
#: What has a shell in a name of its own: ``publish`` gets the owner of a link.
OF_OWNERS = {"link.queue", "link.published"}


def names_of(protocol: Any, within: str = "") -> set[str]:
    """The names that code outside may call, those of members that are protocols as well included: ``link.poll``."""
    names = set()
    for name, member in vars(protocol).items():
        if name.startswith("_"):
            continue
        inner = getattr(member, "fget", None) and getattr(shmring.core.shells, f"_{name.capitalize()}", None)
        names |= names_of(inner, f"{within}{name}.") if inner else {within + name}
    return names


@for_each(("shell", "parts"), PARTS.items(), ids=PARTS)
def test_an_end_calls_all_that_its_shell_has_and_nothing_else(shell: str, parts: tuple[str, ...]) -> None:
    named = names_of(getattr(shmring.core.shells, shell))
    text = "".join(re.sub(r'(?s:""".*?""")|#.*', "", (CORE / f"{part}.pyx").read_text()) for part in parts)
    called = {re.sub(r"^home\..*", "home", name) for name in re.findall(r"\bshell\.([a-z_]+(?:\.[a-z_]+)?)", text)}
    if shell == "ClientShell":
        called |= OF_OWNERS
    assert called == named


def test_no_other_part_calls_a_shell() -> None:
    knowing = {path.stem for path in CORE.glob("*.pyx") if re.search(r"\bshell\.[a-z_]+\(", path.read_text())}
    assert knowing <= {part for parts in PARTS.values() for part in parts}
