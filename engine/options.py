"""The command line options of an engine: those of ``shmring engine``, most of which ``shmring serve`` has as well."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import click
from click.core import ParameterSource

from shmring.engine.settings import DEFAULT_EXECUTOR, EngineSettings
from shmring.service.far_engines import read_token
from shmring.service.option_table import Option, filled, options_of, parsed
from shmring.service.vllm_options import parse_count

__all__ = ["ENGINE_OPTIONS", "MODEL_ARGUMENT", "engine_settings_of", "notice_of"]

MODEL_ARGUMENT = click.Argument(["model_argument"], required=False, metavar="[MODEL]")

_SETTINGS = options_of(EngineSettings())

# Options of executors that vLLM has as options of its own.
_OF_EXECUTORS = (
    Option(
        ["--max-model-len"],
        callback=parsed(parse_count),
        metavar="TOKENS",
        help="Tokens of prompt and answer together: 8192, 8k, 8K. The same as max_model_len in --executor-options.",
    ),
    Option(
        ["--dtype"],
        help="The type that the model computes in: bfloat16, float16, float32. The same as dtype in --executor-options.",
    ),
)

ENGINE_OPTIONS = (*_SETTINGS, *_OF_EXECUTORS)


def engine_settings_of(values: dict[str, Any], *, here: bool = True) -> EngineSettings:
    """Returns the settings that options ask for, once they are known to make sense.

    Args:
        values: of the options, by name.
        here: whether the engine will run on this machine (:meth:`EngineSettings.check`).

    Raises:
        click.UsageError: they do not.
    """
    model = _model_of(values)
    executor = values["executor"] or ("transformers" if model is not None else DEFAULT_EXECUTOR)
    try:
        changed = {"model": model, "executor": executor, "executor_options": _executor_options_of(values)}
        settings = filled(EngineSettings(), _SETTINGS, values | changed)
        if settings.listening.listen is not None:
            token = read_token(settings.listening.engine_token_file, os.environ)
            settings = dataclasses.replace(settings, listening=dataclasses.replace(settings.listening, engine_token=token))
        settings.check(here=here)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    return settings


def _executor_options_of(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the executor's options, those that have options of their own included.

    Raises:
        ValueError: one is named twice.
    """
    options = dict(values["executor_options"])
    for option in _OF_EXECUTORS:
        name = str(option.name)
        if values[name] is not None and options.setdefault(name, values[name]) != values[name]:
            raise ValueError(f"{option.opts[0]} is {values[name]}, and --executor-options say {name}: {options[name]}")
    return options


def _model_of(values: dict[str, Any]) -> str | None:
    argument, option = values["model_argument"], values["model"]
    given = click.get_current_context().get_parameter_source("model") is ParameterSource.COMMANDLINE
    if argument is not None and given and argument != option:
        raise click.UsageError(
            f"two models are named: the argument {argument!r} and --model {option!r}; one process serves one"
        )
    model: str | None = option if argument is None else argument
    return model


def notice_of(values: dict[str, Any], command: str) -> str:
    """Returns a line for whoever named neither a model nor an executor; else nothing."""
    if values["executor"] or _model_of(values) is not None:
        return ""
    return (
        f"no model is named, so {DEFAULT_EXECUTOR} of media and texts are served (--executor {DEFAULT_EXECUTOR}); "
        f"to serve a model: {command} PATH_OR_HUB_NAME"
    )
