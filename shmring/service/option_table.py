"""Makes options of commands from dataclasses of settings, as :mod:`shmring.service.flags` says, and settings from options.

An option may also stand in the environment (``SHMRING_MAX_PIXELS=1000``) and in the YAML file that ``--config`` names
(``max-pixels: 1000``). The command line counts first, then the environment, then the file. A text means the same in each place,
and an error says where the text stands.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from shmring.core.loggers import Logger
from shmring.service.flags import NO_OPTION, Flag, descriptions
from shmring.service.option_types import COUNT, JSON_OBJECT, NBYTES, SECONDS, FiniteRange
from shmring.service.vllm_options import advice_on

__all__ = [
    "CONFIG",
    "ELSEWHERE",
    "Option",
    "SUPERVISOR_FD",
    "UNKNOWN_VARIABLES",
    "advice_for",
    "filled",
    "options_of",
    "parsed",
    "warn_of_variables",
]

#: For the last words of help texts, and for the page of options.
ELSEWHERE = (
    "Each option can also be a variable of the environment (SHMRING_MAX_PIXELS=1000) and, but for keys, a line in the "
    "YAML file that --config names (max-pixels: 1000). The command line counts first, then the environment, then the file."
)

#: In a context: the variables of the environment that no command reads (:mod:`shmring.frontend.commands.variables`).
UNKNOWN_VARIABLES = "shmring.service.option_table.unknown_variables"

_Settings = TypeVar("_Settings")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_PATHS = {
    "file": click.Path(exists=True, dir_okay=False),
    "directory": click.Path(exists=True, file_okay=False),
}
_PLACES = "shmring.service.option_table.places"  # in a context: where the file of --config has each option
_NOT_IN_FILES = {"config", "api-key", "admin-key"}  # a file of keys is --api-key-file, which only its owner can read


class Option(click.Option):
    """An option that has a variable, and may stand in a file.

    Attributes:
        path: the fields that lead to its field of the settings, and that field. Empty: it has none.
        reasons: what the page says behind its help.
    """

    def __init__(self, names: Iterable[str], *, path: tuple[str, ...] = (), reasons: str = "", **rest: Any) -> None:
        super().__init__(list(names), **rest)
        self.path = path
        self.reasons = reasons
        if self.envvar is None and not self.hidden:
            self.envvar = "SHMRING_" + self.opts[0][2:].upper().replace("-", "_")

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Returns the value of its variable. A supervised process gets all settings from its supervisor, and reads no
        variables."""
        if ctx.get_parameter_source(str(SUPERVISOR_FD.name)) is ParameterSource.COMMANDLINE:
            return None
        text = super().resolve_envvar_value(ctx)
        # Kubernetes gives SHMRING_PORT=tcp://10.0.0.1:8000 to every container beside a service that is called shmring.
        return None if text is not None and str(self.envvar).endswith("_PORT") and text.startswith("tcp://") else text

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Says where a wrong value stands."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        if source is ParameterSource.ENVIRONMENT:
            return f"the variable {self.envvar}"
        if source is ParameterSource.DEFAULT_MAP and ctx:
            return str(ctx.meta[_PLACES][self.name])
        return super().get_error_hint(ctx)


def options_of(settings: Any, *, without: Iterable[str] = ()) -> tuple[Option, ...]:
    """Returns an option for each field of settings, and of the settings among them.

    Args:
        settings: with the defaults; or their class.
        without: names of fields that get none.
    """
    return tuple(option for option in _options(settings, (), None) if option.name not in without)


def _options(settings: Any, path: tuple[str, ...], chosen: Mapping[str, Flag] | None) -> Iterator[Option]:
    record = settings if isinstance(settings, type) else type(settings)
    texts = descriptions(record)
    for name, hint in get_type_hints(record, include_extras=True).items():
        kind, marks = (get_args(hint)[0], get_args(hint)[1:]) if get_origin(hint) is Annotated else (hint, ())
        if NO_OPTION in marks or (chosen is not None and name not in chosen):
            continue
        value = getattr(settings, name, None)
        if dataclasses.is_dataclass(value) and not hasattr(value, "parse"):
            yield from _options(value, (*path, name), next((mark for mark in marks if isinstance(mark, dict)), None))
        else:
            flag = chosen[name] if chosen else next((mark for mark in marks if isinstance(mark, Flag)), Flag())
            yield _option(settings, (*path, name), kind, flag, texts.get(name, [""]))


def _option(settings: Any, path: tuple[str, ...], kind: Any, flag: Flag, texts: list[str]) -> Option:
    name = path[-1]
    value = getattr(settings, name, None)
    kind = flag.kind or (get_args(kind)[0] if isinstance(kind, UnionType) else kind)
    default = _default(name, value) if flag.default is None else flag.default
    details: dict[str, Any] = {"metavar": flag.metavar, "type": _type(name, kind, flag)}
    if kind is bool:
        details = {"is_flag": True}
    elif get_origin(kind) is tuple and flag.default is None:
        details |= {"multiple": True, "type": str}
    help_text, stated = _help(flag.text or texts[0])
    parse = flag.parse or getattr(kind, "parse", None)
    return Option(
        [*(flag.names or [f"--{name.removesuffix('_s').replace('_', '-')}"]), name],
        path=path,
        default=default,
        help=help_text,
        reasons="" if flag.text else " ".join(texts[1:]),
        show_default=not (stated or kind is bool or default in (None, (), "")),
        callback=parse and parsed(functools.partial(_checked, settings, name, parse)),
        **details,
    )


def _checked(settings: Any, name: str, parse: Callable[[Any], Any], given: Any) -> Any:
    new = parse(given)
    return new if isinstance(settings, type) else getattr(dataclasses.replace(settings, **{name: new}), name)


def _default(name: str, value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return json.dumps(dataclasses.asdict(value))
    if isinstance(value, dict):
        return json.dumps(value)
    if name.endswith("_nbytes") and isinstance(value, int):
        return next((f"{value // size}{unit}" for size, unit in _UNITS if value and value % size == 0), value)
    return value


def _type(name: str, kind: Any, flag: Flag) -> Any:
    if flag.path is not None:
        return _PATHS[flag.path]
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if flag.least is not None:
        return (click.IntRange if kind is int else FiniteRange)(flag.least, flag.most)
    if name.endswith("_nbytes"):
        return NBYTES
    return JSON_OBJECT if get_origin(kind) is dict else {int: COUNT, float: SECONDS}.get(kind, str)


def _help(text: str) -> tuple[str, bool]:
    """Returns the text for a terminal, and whether it says what holds where nothing is given."""
    text = re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", lambda match: match[1] or match[2], text)
    text, stated = re.subn(r"[;.]? (?:None|none|Empty|empty): ([^;.]*)\.?$", r".  [default: \1]", text)
    return text[:1].upper() + text[1:], bool(stated)


def parsed(parse: Any) -> Any:
    """Returns what makes a value of an option's text. An error says what is wrong with it."""

    def convert(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(str(error)) from None

    return convert


# -- from options to settings ---------------------------------------------------------------------------------------------


class _Branch(dict[str, Any]):
    """New values of some fields."""


def filled(settings: _Settings, options: Iterable[Option], values: Mapping[str, Any]) -> _Settings:
    """Returns settings with the values that a command was given for options.

    Raises:
        ValueError: they make no sense together.
    """
    branches = _Branch()
    for option in options:
        branch = branches
        for name in option.path[:-1]:
            branch = branch.setdefault(name, _Branch())
        branch[option.path[-1]] = values[str(option.name)]
    changed: _Settings = _replaced(settings, branches)
    return changed


def _replaced(settings: Any, branch: _Branch) -> Any:
    changes: dict[str, Any] = {}
    for name, value in branch.items():
        changes[name] = _replaced(getattr(settings, name), value) if isinstance(value, _Branch) else value
    return dataclasses.replace(settings, **changes)


def warn_of_variables(logger: Logger) -> None:
    """Logs which variables of the environment no command reads, if the command ``shmring`` has found any."""
    if names := click.get_current_context().meta.get(UNKNOWN_VARIABLES):
        logger.warning("variables that no option has: %s", names)


def advice_for(name: str, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Returns what to write in the place of a name that is no option; empty: nothing is like it.

    Args:
        name: as it was written, without dashes before it.
        known: the names of options.
        shown: writes one as it stands where it is to be written.
    """
    if advice := advice_on(name):
        return advice
    near = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    return f"it may be {shown(near[0])}" if near else ""


# -- the file of --config ----------------------------------------------------------------------------------------------------


def _read_config(context: click.Context, _: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    options = {name[2:]: option for option in context.command.params if isinstance(option, Option) for name in option.opts}
    known = {name: option for name, option in options.items() if not (option.hidden or name in _NOT_IN_FILES)}
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, node in _lines_of(path):
        place = f"{str(key.value)[:64]!r} in {path}, line {key.start_mark.line + 1}"
        option = known.get(key.value) if key.id == "scalar" else None
        if option is None:
            advice = advice_for(str(key.value), known)
            raise click.UsageError(f"{place}: no option that can stand there" + (f"; {advice}" if advice else ""))
        if option.name in values:
            raise click.UsageError(f"{place}: this option stands there twice")
        places[str(option.name)] = place
        try:
            values[str(option.name)] = _values(node) if option.multiple else _text(node)
        except ValueError as error:
            raise click.UsageError(f"{place}: {error}") from None
    context.default_map, context.meta[_PLACES] = values, places


def _lines_of(path: str) -> list[tuple[Any, Any]]:
    """Returns the nodes of YAML's keys and values.

    Raises:
        click.UsageError: the file can't be read, or is no mapping.
    """
    import yaml  # only here, since most commands read no such file

    try:
        with open(path, "rb") as file:
            root = yaml.compose(file, yaml.SafeLoader)
    except (OSError, yaml.YAMLError, RecursionError) as error:
        raise click.UsageError(f"--config {path} can't be read: {' '.join(str(error).split())}") from None
    if root is None:
        return []
    if root.id != "mapping":
        raise click.UsageError(f"--config {path}: write options there, one in a line, such as max-pixels: 1000")
    entries: list[tuple[Any, Any]] = root.value
    return entries


def _text(node: Any) -> str:
    """Returns the text for a command line: a scalar as it stands, anything else as JSON."""
    import yaml

    if node.id != "scalar":
        loader = yaml.SafeLoader("")
        try:
            return json.dumps(loader.construct_document(node))
        except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"this is not what JSON has: {' '.join(str(error).split())}") from None
    if node.tag == "tag:yaml.org,2002:null":
        raise ValueError("no value")
    return str(node.value)


def _values(node: Any) -> list[str]:
    return [_text(item) for item in node.value] if node.id == "sequence" else [_text(node)]


#: Names the file. It is for every command that has an :class:`Option`.
CONFIG = Option(
    ["--config"],
    type=_PATHS["file"],
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="A YAML file of options, one in a line: max-pixels: 1000.",
)

#: Gives a process its end of its supervisor's socket. Then all settings come from there.
SUPERVISOR_FD = Option(["--supervisor-fd"], type=int, hidden=True, is_eager=True)
