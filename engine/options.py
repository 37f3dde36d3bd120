"""The command line options of an engine: those of ``shmring engine``, most of which ``shmring serve`` has as well."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from shmring.engine.option_table import filled, options_of
from shmring.engine.settings import DEFAULT_EXECUTOR, EngineSettings

__all__ = ["ENGINE_OPTIONS", "MODEL_ARGUMENT", "engine_settings_of", "notice_of"]

MODEL_ARGUMENT = click.Argument(["model_argument"], required=False, metavar="[MODEL]")

ENGINE_OPTIONS = options_of(EngineSettings())


def engine_settings_of(values: dict[str, Any]) -> EngineSettings:
    """Returns the settings that options ask for, once they are known to make sense.

    Raises:
        click.UsageError: they do not.
    """
    model = _model_of(values)
    executor = values["executor"] or ("transformers" if model is not None else DEFAULT_EXECUTOR)
    try:
        settings = filled(EngineSettings(), ENGINE_OPTIONS, values | {"model": model, "executor": executor})
        settings.check()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return settings


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
