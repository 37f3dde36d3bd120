"""The command line options of an engine: those of ``shmring engine``, most of which ``shmring serve`` has as well."""

from __future__ import annotations

from typing import Any

import click

from shmring.config import BACKINGS, RingConfig
from shmring.engine.option_types import COUNT, JSON_OBJECT, NBYTES, SECONDS, FiniteRange
from shmring.engine.settings import DEFAULT_EXECUTOR, EXECUTORS, EngineSettings

__all__ = ["ENGINE_OPTIONS", "MODEL_ARGUMENT", "engine_settings_of", "notice_of"]

_DEFAULT = EngineSettings()

MODEL_ARGUMENT = click.Argument(["model_argument"], required=False, metavar="[MODEL]")

ENGINE_OPTIONS = (
    click.Option(["--model"], help="A model to serve: a local path or a hub's name. The same as the argument MODEL."),
    click.Option(
        ["--executor"],
        help=f"What computes: {', '.join(sorted(EXECUTORS))}, or module:Class of your own.  "
        f"[default: transformers if a model is named, else {DEFAULT_EXECUTOR}]",
    ),
    click.Option(
        ["--executor-path"],
        type=click.Path(exists=True, file_okay=False, resolve_path=True),
        help="A directory that the module of module:Class lies in. The working directory is not searched.",
    ),
    click.Option(
        ["--executor-options"], default="{}", type=JSON_OBJECT, help="Further options of the executor, as a JSON object."
    ),
    click.Option(
        ["--mm-processor-kwargs"],
        default="{}",
        type=JSON_OBJECT,
        help="How media are prepared, as a JSON object: what the executor makes of it, frontends follow.",
    ),
    click.Option(["--slab-nbytes"], default="1GiB", type=NBYTES, help="Size of the slab."),
    click.Option(
        ["--slab-backing"],
        default="auto",
        type=click.Choice(BACKINGS),
        help="Where the slab lies; auto: in /dev/shm where it fits, else in a memfd.",
    ),
    click.Option(["--reply-nbytes"], type=NBYTES, help="The part of it that is kept for replies.  [default: a sixteenth]"),
    click.Option(
        ["--mm-processor-cache-gb"],
        type=FiniteRange(min=0),
        help="GiB of the slab that may hold prepared media, to be used again without decoding; 0: none.  [default: half of it]",
    ),
    click.Option(["--max-num-seqs"], type=COUNT, help="Requests in a step.  [default: what the executor takes]"),
    click.Option(
        ["--max-batch-nbytes"],
        default="256MiB",
        type=NBYTES,
        help="Bytes of media from which a step admits no further request.",
    ),
    click.Option(["--max-waiting"], default=_DEFAULT.max_waiting, type=COUNT, help="Requests that may wait for a step."),
    click.Option(["--max-clients"], default=RingConfig().max_clients, type=COUNT, help="Frontends at a time."),
    click.Option(["--max-payload-nbytes"], default="16MiB", type=NBYTES, help="The largest payload; tensors don't count."),
    click.Option(
        ["--step-timeout", "step_timeout_s"],
        default=_DEFAULT.step_timeout_s,
        type=SECONDS,
        help="Seconds from which a running step makes the engine report ill health.",
    ),
    click.Option(["--profiler-dir"], help="Where profiling, when it is started, writes its traces.  [default: no profiling]"),
)


def engine_settings_of(values: dict[str, Any]) -> EngineSettings:
    """Returns the settings that options ask for, once they are known to make sense.

    Raises:
        click.UsageError: they do not.
    """
    model = _model_of(values)
    cache_gib: float | None = values["mm_processor_cache_gb"]
    try:
        ring = RingConfig(
            slab_nbytes=values["slab_nbytes"],
            backing=values["slab_backing"],
            reply_nbytes=values["reply_nbytes"],
            kept_nbytes=None if cache_gib is None else int(cache_gib * 2**30),
            max_clients=values["max_clients"],
            max_payload_nbytes=values["max_payload_nbytes"],
            socket_dir=values["socket_dir"],
        )
        settings = EngineSettings(
            name=values["name"],
            executor=values["executor"] or ("transformers" if model is not None else DEFAULT_EXECUTOR),
            executor_path=values["executor_path"],
            model=model,
            executor_options=values["executor_options"],
            mm_processor_kwargs=values["mm_processor_kwargs"],
            ring=ring,
            max_num_seqs=values["max_num_seqs"],
            max_batch_nbytes=values["max_batch_nbytes"],
            max_waiting=values["max_waiting"],
            step_timeout_s=values["step_timeout_s"],
            profiler_dir=values["profiler_dir"],
            log_level=values["log_level"],
        )
        settings.check()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    return settings


def _model_of(values: dict[str, Any]) -> str | None:
    argument, option = values["model_argument"], values["model"]
    if argument is not None and option is not None and argument != option:
        raise click.UsageError(
            f"two models are named: the argument {argument!r} and --model {option!r}; one process serves one"
        )
    model: str | None = option if argument is None else argument
    return model


def notice_of(values: dict[str, Any], command: str) -> str:
    """Returns a line for whoever named neither a model nor an executor; else nothing."""
    if values["executor"] is not None or _model_of(values) is not None:
        return ""
    return (
        f"no model is named, so {DEFAULT_EXECUTOR} of media and texts are served (--executor {DEFAULT_EXECUTOR}); "
        f"to serve a model: {command} PATH_OR_HUB_NAME"
    )
