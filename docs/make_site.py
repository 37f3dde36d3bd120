"""Hooks of mkdocs (``make docs``): what GitHub shows of the repository is on the site as well.

The pages are written for GitHub, where a link may lead out of docs/: to the README, to a program, to a directory. Here, each
file and directory that a page links to is a page of the site too, and the link leads there. Lists are written as GitHub reads
them, and are changed to what Python-Markdown reads so. The pages of the reference say only whose docstrings they show.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

#: Where pages that do not lie in docs/ have their place. Others are there because a page links to them.
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples/index.md",
}

#: The pages of the reference: what is at their head, and whose docstrings they show, in which module.
REFERENCE = {
    "opening": ("Opening an end", "shmring", "serve connect join inspect start_store nbytes_for"),
    "engine": ("The engine's side", "shmring", "Ring Claim"),
    "frontend": ("The frontend's side", "shmring", "Client EngineConnection EngineLoad Submission Slot Kept Keeping"),
    "worker": ("The worker's side", "shmring", "Worker Message"),
    "options": ("Options", "shmring", "RingConfig ClientConfig WorkerConfig"),
    "numbers": ("Numbers and snapshots", "shmring", "RingStatistics ClientStatistics WorkerStatistics RingSnapshot"),
    "errors": (
        "Errors",
        "shmring",
        "ShmringError ClosedError PeerLostError EngineDeadError WorkerLostError WouldBlock CapacityError "
        "StaleDescriptorError AbortedError RemoteError WorkerFailedError RankTakenError ProtocolError LocalProtocolError "
        "RemoteProtocolError SlabError WorkersBehindError",
    ),
    "executors": (
        "Executors",
        "shmring.engine.executors",
        "Executor ExecutorOptions StepInput StepOutput ContextLengthError OverloadedError ExecutorDeadError",
    ),
    "requests": (
        "What executors are asked",
        "shmring.engine.protocol",
        "ModelDescription InputSpec PictureSpec VideoSpec SoundSpec EncodeRequest Text Picture Video Waveform Spectrogram "
        "Features EncodeReply GenerateRequest ChatMessage TextPart MediumPart ToolCall SamplingParams StructuredOutputsParams "
        "GenerateReply TokenLogprobs",
    ),
}
ELSEWHERE = {"threads", "__version__"}  # of shmring: docs/api.md says what differs in threads

_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(\s*)(```+|~~~+)")
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the reference, the pages that do not lie in docs/, and what any page links to."""
    from mkdocs.structure.files import File

    for name, (title, module, names) in REFERENCE.items():
        shown = "\n".join(f"::: {module}.{shown}\n" for shown in names.split())
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {title}\n\n{shown}"))
    if missing := _exported() - _named("shmring") - ELSEWHERE:
        raise ValueError(f"the reference (docs/make_site.py) has no page for {sorted(missing)}")
    to_read = [*PLACES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]
    known = set(to_read)
    while to_read:
        path = to_read.pop()
        place = _place(path)
        if files.get_file_from_path(place) is None:
            files.append(File.generated(config, place, content=_content(path)))
        found = {target for target in _linked(path) if target not in known and not _is_asset(target)}
        known |= found
        to_read += sorted(found)
    config.extra["origins"] = {_place(path): path for path in known}
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to the places of the site, and writes lists as Python-Markdown reads them."""
    place = page.file.src_uri
    origin = config.extra["origins"].get(place)
    if origin is None or not origin.endswith(".md"):
        return markdown

    def lead(link: re.Match[str]) -> str:
        target = _target(origin, link[1])
        return f"]({relpath(_place(target), dirname(place) or '.')}{link[2] or ''})" if target else link[0]

    out: list[str] = []
    in_item = False  # in the lines of an item, up to a blank one
    fence, deeper = "", ""  # the marks that end the present block of code, and how much deeper its lines lie
    for line in markdown.split("\n"):
        spaces = line[: len(line) - len(line.lstrip())]
        if found := _FENCE.match(line):
            if not fence:
                fence, deeper = found[2], spaces
            elif found[2].startswith(fence):
                fence = ""
            out.append(deeper + line)
        elif fence:
            out.append(deeper + line if line else line)
        else:
            if begins := bool(_ITEM.match(line)):
                out += [""] * bool(out and out[-1].strip() and not in_item)  # it follows a paragraph at once
            in_item = begins or (in_item and bool(line.strip()))
            out.append(spaces + _LINK.sub(lead, line))
    return "\n".join(out)


def _exported() -> set[str]:
    """The names that ``import shmring`` offers."""
    for node in ast.parse((ROOT / "shmring" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise ValueError("shmring has no __all__")


def _named(module: str) -> set[str]:
    return {name for _, of, names in REFERENCE.values() if of == module for name in names.split()}


def _without_code(markdown: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", markdown, flags=re.MULTILINE | re.DOTALL)


def _linked(path: str) -> set[str]:
    """Returns what a page links to: files and directories of the repository."""
    if (ROOT / path).is_dir():
        return {str(entry.relative_to(ROOT)) for entry in (ROOT / path).iterdir() if entry.is_file()}
    links = _LINK.findall(_without_code((ROOT / path).read_text())) if path.endswith(".md") else []
    return {target for link, _ in links if (target := _target(path, link))}


def _is_asset(path: str) -> bool:
    """Whether mkdocs has it already: pictures and other files of docs/."""
    return path.startswith("docs/") and (ROOT / path).is_file() and not path.endswith(".md")


def _target(path: str, link: str) -> str | None:
    """Returns what a link of a page leads to, as a path in the repository; None: it is no such path."""
    target = normpath(join(dirname(path), link))
    return target if (ROOT / target).exists() else None


def _place(path: str) -> str:
    """Returns where the site has a file or directory of the repository."""
    if path in PLACES:
        return PLACES[path]
    place = path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{place}/index.md"
    return place if place != path or place.endswith(".md") else f"files/{path}.md"


def _content(path: str) -> str:
    """Returns the page of a file or a directory that is none in docs/."""
    if path.endswith(".md"):
        return (ROOT / path).read_text()
    if (ROOT / path).is_dir():
        return _directory(path)
    text = (ROOT / path).read_text()
    language = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".service": "ini"}.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def _directory(path: str) -> str:
    """Returns a page that names what lies in a directory: pages by their headings."""
    rows = []
    for entry in sorted((ROOT / path).iterdir()):
        inside = str(entry.relative_to(ROOT))
        shown = entry.read_text().partition("\n")[0].lstrip("# ") if entry.suffix == ".md" else entry.name
        if entry.is_file():
            rows.append(f"- [{shown}]({relpath(_place(inside), _place(path).removesuffix('/index.md'))})")
    title = Path(path).name.capitalize()
    return f"# {title}\n\n" + "\n".join(rows) + "\n"
