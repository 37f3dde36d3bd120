"""docs/settings.md, made of the code: ``python docs/make_settings.py`` writes it, and a test compares."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import msgspec

import shmring
from shmring.engine.__main__ import main as engine_command
from shmring.engine.executors.synthetic import SyntheticOptions
from shmring.engine.executors.transformers import TransformersOptions
from shmring.frontend.__main__ import main as frontend_command
from shmring.frontend.commands.ray_options import DeploymentSettings
from shmring.frontend.commands.serve import serve as serve_command
from shmring.service.flags import descriptions
from shmring.service.option_table import ELSEWHERE, Option

PAGE = Path(__file__).with_name("settings.md")

_INTRODUCTION = f"""\
# Settings

Every option of the commands, and every field of the two ends' configurations. This page is made of the code by
`python docs/make_settings.py`. Sizes are bytes, or text such as `64MiB`, `1.5GiB`, `10MB`; durations are seconds.

{ELSEWHERE}
"""

_DEFAULT_IN_HELP = re.compile(r"\s*\[default: (.*?)\]")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def make_page() -> str:
    """Returns the page's text."""
    sections = [
        _INTRODUCTION,
        _command("shmring serve", serve_command),
        _command("shmring engine", engine_command),
        _command("shmring frontend", frontend_command),
        _record("shmring.frontend.ray:app", "on Ray Serve, beside options of `shmring serve`", DeploymentSettings),
        _record("RingConfig", "the engine's end of the ring, in code", shmring.RingConfig),
        _record("ClientConfig", "a frontend's end of the ring, in code", shmring.ClientConfig),
        _record("WorkerConfig", "a worker's end of the ring, in code", shmring.WorkerConfig),
        _record("--executor-options", "of the executor `transformers`", TransformersOptions),
        _record("--executor-options", "of the executor `synthetic`", SyntheticOptions),
    ]
    return "\n".join(sections)


def _command(name: str, command: click.Command) -> str:
    rows = []
    for option in command.params:
        if isinstance(option, Option) and not option.hidden:
            text = option.help or ""
            stated = _DEFAULT_IN_HELP.search(text)
            default = stated[1] if stated else _shown(option.default, option.name or "")
            meaning = f"{_DEFAULT_IN_HELP.sub('', text)} {option.reasons}"
            rows.append((", ".join(f"`{opt}`" for opt in option.opts), default, meaning))
    return f"## `{name}`\n\n{_table('option', rows)}"


def _record(name: str, subject: str, record: type) -> str:
    texts = descriptions(record)
    rows = [(f"`{field}`", _shown(default, field), " ".join(texts[field])) for field, default in _defaults(record).items()]
    return f"## `{name}`: {subject}\n\n{_table('field', rows)}"


def _defaults(record: type) -> dict[str, Any]:
    if issubclass(record, msgspec.Struct):
        return {field.name: field.default for field in msgspec.structs.fields(record)}
    instance = record()
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(record)}


def _shown(value: Any, name: str) -> str:
    if value is None or value == () or "UNSET" in repr(value).upper():  # what click has in place of no default
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "nbytes" in name:
        for size, unit in _UNITS:
            if value and value % size == 0:
                return f"{value // size}{unit}"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def _table(first: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| {first} | default | meaning |", "|---|---|---|"]
    lines.extend("| " + " | ".join(_markdown(cell) for cell in row) + " |" for row in rows)
    return "\n".join(lines) + "\n"


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`"))
    return text.replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(make_page())
