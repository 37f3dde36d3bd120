"""Nothing imports upward, and nothing in a circle: the layers of docs/architecture.md, read from the sources.

What is compiled is read as well. The parts of the core are one module, and each uses what stands before it: their order is
their layers. Type stubs that are written by hand are read, too; the core's is made from its parts.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
OURS = ("shmring", "bench")
LINKED = ("engine", "frontend")  # which are packages of shmring

CORE = ("shmring.core", "shmring.errors", "shmring.config", "shmring.door", "shmring.uncopied")
WAITING = ("shmring.cancellation", "shmring.line")
ENDS_STAND_ON = (
    "shmring.gpu",
    "shmring.memory",
    "shmring.transport",
    *CORE,
    *WAITING,
    "shmring.statistics",
    "shmring.snapshot",
    "shmring.opening",
    "shmring.request_options",
)

# What each part may import of this repository beside itself: other parts, or single modules of them. "shmring" is the package
# itself, shmring/__init__.py, which has what everybody may use.
ALLOWED: dict[str, tuple[str, ...]] = {
    "shmring.errors": (),
    "shmring.config": ("shmring.door",),
    "shmring.door": ("shmring.errors",),
    "shmring.uncopied": (),
    "shmring.request_options": ("shmring.core.compiled",),
    "shmring.statistics": (),
    "shmring.snapshot": (),
    "shmring.cancellation": (),
    "shmring.line": (),
    "shmring.processes": (),
    "shmring.opening": ("shmring.uncopied",),
    "shmring.core": CORE,
    "shmring.memory": (*CORE, *WAITING),
    "shmring.transport": (*CORE, *WAITING, "shmring.snapshot"),
    "shmring.gpu": (*CORE, *WAITING, "shmring.memory"),
    "shmring.ring": ENDS_STAND_ON,
    "shmring.client": (*ENDS_STAND_ON, "shmring.processes"),  # a store is started by its clients
    "shmring.worker": ENDS_STAND_ON,
    "shmring.gateway": (*ENDS_STAND_ON, "shmring.ring", "shmring.client"),  # is a client of its own engine
    "shmring.threads": (*ENDS_STAND_ON, "shmring.ring", "shmring.client", "shmring.worker"),
    "shmring.integrations": (
        *("shmring", "shmring.threads", "shmring.errors", "shmring.config", "shmring.memory.bundles", "shmring.ring.injecting"),
        *("shmring.door", "shmring.uncopied", "shmring.core.loggers"),
        # a client in a Ray cluster is made of the parts of the other one
        *("shmring.client", "shmring.cancellation", "shmring.line", "shmring.opening", "shmring.statistics"),
        "shmring.request_options",
        # an actor of Ray hosts an engine
        *("shmring.engine.core", "shmring.engine.executors", "shmring.engine.executors.interface", "shmring.engine.scheduler"),
        *("shmring.engine.protocol", "shmring.engine.counted", "shmring.engine.metrics", "shmring.engine.settings"),
        "shmring.service",
        *("shmring.gateway.gateway", "shmring.gateway.serving"),  # which lets clients on other nodes in
        "shmring.transport.liveness",  # it ends with its replica's process
        "shmring.memory.copying",  # what a stage of vLLM-Omni passes on is written in one piece
    ),
}
# What each process of a server has, whatever it serves.
ALLOWED["shmring.service"] = ("shmring.errors", "shmring.door", "shmring.core.loggers", "shmring.core.printable")
PARTS = ("shmring", *ALLOWED)
OF_THE_ENGINE = tuple(
    f"shmring.engine.{name}"
    for name in (
        "client",
        "counted",
        "exposition",
        "store.__main__",
        "inputs",
        "options",
        "picture_processor",
        "protocol",
        "settings",
    )
)
ALLOWED |= {
    "shmring": PARTS,
    "shmring.engine": PARTS,
    "shmring.frontend": (*PARTS, *OF_THE_ENGINE),
    "bench": (*PARTS, "shmring.engine", "shmring.frontend"),
}

# The frontend's folders, and the modules beside them. Each may import those before it, and what is named for it: single modules
# that know nothing of their folder.
FRONTEND: dict[str, tuple[str, ...]] = {
    "errors": (),
    "settings": ("callers.keys", "media.fetch", "media.options"),
    "http": (),
    "options": ("callers.keys",),
    "callers": (),
    "media": (),
    "intake": (),
    "operator": (),
    "served_model": (),
    "answer": (),
    "inference": (),
    "openai": (),
    "anthropic": (),
    "documentation": (),
    "app": (),
    "processes": (),
    "__main__": (),
    "commands": (),
    "ray": (),
    "demo": (),
    "cli": (),
    "entry_point": (),
}

# Where parts are handed what they use, and know no type of who has them.
WITHOUT_OWNERS = (
    *("shmring/client", "shmring/gpu", "shmring/memory", "shmring/ring"),
    *("shmring/threads", "shmring/transport", "shmring/worker"),
)

# The only types from above: what callers await of the core gives them what the shells around it have made.
GIVEN_BY_SUBCLASSES = {
    "shmring.core.compiled": {
        *("shmring.client.slot", "shmring.client.submission", "shmring.ring.claim", "shmring.ring.frontend"),
        "shmring.memory.bundles",
    },
    "shmring.core.shells": {"shmring.memory.bundles", "shmring.ring.frontend"},
}

# The core knows no I/O, no clock and no tensors,
FORBIDDEN_IN_CORE = {"asyncio", "os", "mmap", "socket", "time", "torch", "numpy", "threading", "random", "io", "pathlib"}

# but for what these do with the kernel's help: map memory, ring bells, wait for one or a GPU, look for a moment, hear of forks.
CALLING_THE_SYSTEM = {"forks", "load", "looking", "mapping", "message_ring", "polling", "views", "worker_end"}

CORE_DIRECTORY = ROOT / "shmring" / "core"
COMPILED_CORE = CORE_DIRECTORY / "compiled.pyx"
SHELLS = CORE_DIRECTORY / "shells.py"
HOME = CORE_DIRECTORY / "forks.pyx"  # asks which loop runs here, and calls none
CORE_PARTS = [CORE_DIRECTORY / name for name in re.findall(r'^include "(.*)"$', COMPILED_CORE.read_text(), re.MULTILINE)]

FILES = sorted(path for part in (*OURS, *LINKED) for path in (ROOT / part).rglob("*.p*"))
SOURCES = [path for path in FILES if path.suffix in {".py", ".pyx"}]
STUBS = [path for path in FILES if path.suffix == ".pyi" and path != COMPILED_CORE.with_suffix(".pyi")]
CORE_SOURCES = [path for path in SOURCES if path.is_relative_to(CORE_DIRECTORY)]


def module_name(path: Path) -> str:
    if path in CORE_PARTS:
        path = COMPILED_CORE
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["shmring"] * (parts[0] in LINKED) + [*parts]).removesuffix(".__init__")


def source_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


MODULES = {module_name(path) for path in SOURCES}


def part_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("shmring.") else 1])


@functools.cache
def imports(path: Path, *, types_too: bool = True) -> frozenset[str]:
    """The modules that a source imports or cimports; also those inside of functions.

    Args:
        types_too: also what is imported under ``if TYPE_CHECKING``.
    """
    return frozenset(_imports(path, types_too=types_too))


def _imports(path: Path, *, types_too: bool) -> Iterator[str]:
    if path.suffix == ".pyx":
        source = path.read_text()
        yield from compiled_imports(
            source if types_too else re.sub(r"^if TYPE_CHECKING:.*\n(    .*\n|\n)*", "", source, flags=re.M)
        )
        return
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            yield from named(".".join(filter(None, [base, node.module])), [alias.name for alias in node.names])
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too:
            waiting += node.orelse
        else:
            waiting += (child for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS))


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # and what they are in: an import is no part of an expression


def compiled_imports(source: str) -> Iterator[str]:
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    for module, names in re.findall(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|.*)", code, re.MULTILINE):
        yield from named(module, re.findall(r"[\w*]+", re.sub(r"\bas\s+\w+", "", names)))
    for modules in re.findall(r"^[ \t]*c?import[ \t]+(.*)", code, re.MULTILINE):
        yield from (module.split()[0] for module in modules.split(","))


def named(module: str, names: list[str]) -> Iterator[str]:
    """What ``from module import names`` imports: a name may be a module."""
    for name in names:
        yield full if (full := f"{module}.{name}") in MODULES else module


def test_there_is_something_to_check() -> None:
    assert {module.split(".")[0] for module in MODULES} == set(OURS)
    assert {path.suffix for path in CORE_SOURCES} == {".py", ".pyx"}
    assert {path for path in CORE_SOURCES if path.suffix == ".pyx"} == {COMPILED_CORE, *CORE_PARTS}
    assert len(CORE_PARTS) == len(set(CORE_PARTS)) > 20
    assert STUBS
    assert {part_of(module) for module in MODULES} == set(ALLOWED)


def test_imports_of_compiled_sources_are_read() -> None:
    source = '''"""
from a import b
"""
import b, c as d
cimport e.f
from shmring cimport config  # from g cimport h
from shmring.core import (
    states as table,
    unknown,
)
cdef extern from "i.h":
    import_j()
'''
    assert sorted(compiled_imports(source)) == ["b", "c", "e.f", "shmring.config", "shmring.core", "shmring.core.states"]


@for_each("path", [*SOURCES, *STUBS], ids=source_name)
def test_nothing_imports_upward(path: Path) -> None:
    part = part_of(module_name(path))
    allowed = {part, *ALLOWED[part]}
    given = GIVEN_BY_SUBCLASSES.get(module_name(path), set()).difference(imports(path, types_too=False))
    for name in imports(path) - given:
        if name.split(".")[0] in OURS:
            assert part_of(name) in allowed or name in allowed, f"{source_name(path)} imports {name}"


def folder_of(module: str) -> str:
    """The folder of the frontend, or the module beside its folders, that a module of it is in."""
    return module.removeprefix("shmring.frontend").split(".")[1] if module.startswith("shmring.frontend.") else ""


def test_each_folder_of_the_frontend_imports_what_stands_before_it() -> None:
    paths = {module_name(path): path for path in SOURCES if folder_of(module_name(path))}
    assert {folder_of(module) for module in paths} == set(FRONTEND)
    for module, path in paths.items():
        names = list(FRONTEND)
        before = {*names[: names.index(folder_of(module)) + 1]}
        named = {f"shmring.frontend.{name}" for name in FRONTEND[folder_of(module)]}
        upward = {name for name in imports(path) if folder_of(name) and folder_of(name) not in before} - named
        assert upward == set(), f"{source_name(path)} imports {sorted(upward)}"


def test_a_vendors_api_is_known_where_routes_are_put_together_and_nowhere_else() -> None:
    """It is readers and writers. What does the work, and what serves HTTP, would do without it."""
    for vendor, known in (("anthropic", {"app", "documentation"}), ("openai.speech", {"app", "documentation"})):
        name = f"shmring.frontend.{vendor}"
        knowing = {module_name(path) for path in SOURCES if any(each.startswith(name) for each in imports(path))}
        assert {folder_of(module) for module in knowing if not module.startswith(name)} == known


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even later, in functions. Only types may be of modules that need each other."""
    require_no_circle(SOURCES, types_too=False)


@for_each("package", WITHOUT_OWNERS)
def test_no_part_imports_the_type_of_its_owner(package: str) -> None:
    """There, not even a type is of a module that needs this one: a part is handed what it uses, and not its owner."""
    require_no_circle([path for path in SOURCES if path.is_relative_to(ROOT / package)], types_too=True)


def require_no_circle(paths: list[Path], *, types_too: bool) -> None:
    imported: defaultdict[str, set[str]] = defaultdict(set)
    modules = {module_name(path) for path in paths}
    for path in paths:
        module = module_name(path)
        imported[module] |= modules.intersection(imports(path, types_too=types_too)) - {module}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@for_each("path", CORE_SOURCES, ids=source_name)
def test_the_core_knows_no_io(path: Path) -> None:
    types_too = path not in (COMPILED_CORE, SHELLS)  # which say what tensors, futures and loops are handed through
    allowed = {"asyncio"} if path == HOME else set()
    assert not {name.split(".")[0] for name in imports(path, types_too=types_too)} & (FORBIDDEN_IN_CORE - allowed)


def test_only_some_of_the_compiled_core_call_the_system() -> None:
    declaring = CORE_DIRECTORY / "system_calls.pyx"
    calls = {"posix", *defined_in(declaring)}
    calling = {path.stem for path in CORE_PARTS if path != declaring and used_in(path) & calls}
    assert calling == CALLING_THE_SYSTEM
    foreign = r"extern from \"<(?!endian\.h)|#include <"  # whose functions only compute
    assert not [path for path in CORE_PARTS if path != declaring and re.search(foreign, path.read_text())]


@functools.cache
def code_of(path: Path) -> str:
    """A part of the core without its docstrings, comments and texts."""
    text = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
    return re.sub(r'"(\\.|[^"\\\n])*"|\'(\\.|[^\'\\\n])*\'|#.*', "", text)


@functools.cache
def defined_in(path: Path) -> set[str]:
    """The names that a part of the core defines for all: classes, functions, variables, constants and types of C."""
    code = code_of(path)
    patterns = (
        r"^(?:cdef|ctypedef) (?:class|struct|union|enum) (\w+)",
        r"^(?:cdef|cpdef|def) [^=(\n]*?(\w+)\(",
        r"^cdef [^=(\n]*?(\w+)(?:\[.*\])*(?: = .*)?$",
        r"^(\w+)(?:: [^=\n]+)? = ",
        r"^    (\w+)(?: = .*| *)$",  # of an enumeration
        r"^        ([A-Z]\w+) *$",  # of one that is declared
        r"^    (?:ctypedef )?(?:struct|enum) (\w+):",  # of others, as what follows
        r"^    (?! |ctypedef|struct|enum)[\w* ]*?(\w+) ?(?:\([^*\n][^\n]*)?$",
    )
    blocks = re.findall(r"^c?p?def (?:enum|extern)[^\n]*\n(?:    .*\n|\n)+", code + "\n", re.MULTILINE)
    named = [re.findall(pattern, code, re.MULTILINE) for pattern in patterns[:4]]
    named += [re.findall(pattern, block, re.MULTILINE) for pattern in patterns[4:] for block in blocks]
    return {name for names in named for name in names} - {"enum"}


def used_in(path: Path) -> set[str]:
    """The names that stand in a part of the core, but for members and for what it binds itself: methods and local variables."""
    code = code_of(path)
    bound = set(re.findall(r"^ +(?:cdef|cpdef|def) [^=(\n]*?(\w+)\(", code, re.MULTILINE))
    bound |= set(re.findall(r"\b(\w+)(?:, \w+)* = ", code))
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", code)) - bound - defined_in(path)


@for_each("place", range(len(CORE_PARTS)), ids=lambda place: CORE_PARTS[place].stem)
def test_a_part_of_the_core_uses_what_stands_before_it(place: int) -> None:
    """Not what stands behind it; and what begins with an underscore is nobody else's."""
    used = used_in(CORE_PARTS[place])
    behind = set().union(*(defined_in(path) for path in CORE_PARTS[place + 1 :]))
    assert used & behind == set()
    assert {name for path in CORE_PARTS for name in defined_in(path) & used if name.startswith("_")} == set()


def test_nothing_is_unpickled_but_between_the_processes_of_vllms_engine_core() -> None:
    """(What the plug-in for Ray sends is unpickled by Ray.)"""
    unpickles = re.compile(
        r"(?:pickle|marshal|dill|joblib|torch)\.(?:loads?|Unpickler)\(|import (?:loads?|Unpickler)\b|\bshelve\b"
    )
    sources = [
        path
        for name in ("shmring", "engine", "frontend")
        for path in (ROOT / name).rglob("*.py*")
        if path.suffix in (".py", ".pyx")
    ]
    assert len(sources) > 200
    found = {str(path.relative_to(ROOT)) for path in sources if unpickles.search(path.read_text())}
    assert found == {"shmring/integrations/vllm/parcels.py"}
