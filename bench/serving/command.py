"""``python -m bench serve``: the command line of the load generator."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, get_args

import click
import msgspec
import uvloop

from bench.children import BenchError
from bench.command_line import NotMeasured, benchmark, shown_progress
from bench.modes import Timing
from bench.results import Findings
from bench.serving import report, run
from bench.serving.plan import PRESETS, Endpoint, Load, Media, MediaKind, Plan, ServerOptions
from shmring.engine.option_types import COUNT, SECONDS, FiniteRange
from shmring.engine.settings import MAX_ENGINES

_SIZE = re.compile(r"([1-9]\d{0,4})[xX]([1-9]\d{0,4})")
_ABOVE_0 = FiniteRange(min=0, min_open=True)
_KINDS = click.Choice([*get_args(MediaKind), "none"])
_SCALED = ("requests", "max_concurrency")

_MEDIA, _LOAD, _SERVER = Media(), Load(requests=1), ServerOptions()

_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _size(value: str) -> tuple[int, int]:
    """Width and height: 640x360."""
    size = _SIZE.fullmatch(value)
    if size is None:
        raise click.BadParameter(f"write a width and a height in pixels such as 640x360, not {value!r}")
    return int(size[1]), int(size[2])


def _even_size(value: str) -> tuple[int, int]:
    width, height = _size(value)
    if width % 2 or height % 2:
        raise click.BadParameter(f"{value}: width and height of a clip must be even")
    return width, height


def _rate(value: str) -> float | None:
    """Requests a second; None: inf."""
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise click.BadParameter(f"{value!r} is neither a number above 0 nor inf")
    return None if math.isinf(rate) else rate


def _field(part: msgspec.Struct, name: str, flag: str, kind: Any, text: str) -> Callable[[_Function], _Function]:
    """An option that sets a field of a plan, whose default is the field's; repeatable if that holds several."""
    default = getattr(part, name)
    return click.option(flag, name, default=default, multiple=isinstance(default, tuple), type=kind, help=text)


@benchmark("serve", repetitions="Of the load on each server, in turn.", seconds=False)
@click.option("--preset", type=click.Choice(list(PRESETS)), help="A known scenario; options given besides it count more.")
@click.option("--scale", default=1.0, type=_ABOVE_0, help="Multiplies the preset's requests and their concurrency.")
@click.option("--url", help="Of a server that runs already.  [default: one is started, and stopped]")
@click.option("--compare", is_flag=True, help="Start two servers, slab and --disable-mm-shm, and load them in turn.")
@click.option(
    "--compare-engines",
    type=click.IntRange(2, MAX_ENGINES),
    help="Start two servers, with so many engines and with one, and load them in turn.",
)
@click.option(
    "--compare-kept", is_flag=True, help="Start two servers, of which one keeps prepared media, and load them in turn."
)
@click.option("--num-prompts", "requests", default=100, type=COUNT, help="Requests.")
@click.option(
    "--request-rate", default="inf", type=_rate, metavar="RATE", help="Requests that become due a second; inf: all at once."
)
@click.option(
    "--burstiness", default=1.0, type=SECONDS, help="Of their arrival: 1 is a Poisson process, less is burstier, more steadier."
)
@click.option("--max-concurrency", type=COUNT, help="Requests in flight at most.  [default: as many as are due]")
@click.option("--endpoint", default="chat", type=click.Choice(get_args(Endpoint)), help="Chats are streamed.")
@_field(_LOAD, "output_tokens", "--output-tokens", COUNT, "Asked for in each chat.")
@_field(_MEDIA, "kinds", "--media", _KINDS, "What a request has; repeatable, then they take turns.")
@click.option("--picture-size", default="{}x{}".format(*_MEDIA.picture_size), type=_size, metavar="SIZE", help="In pixels.")
@_field(_MEDIA, "audio_seconds", "--audio-seconds", SECONDS, "Length of a recording.")
@_field(_MEDIA, "video_frames", "--video-frames", COUNT, "Of a clip.")
@click.option("--video-size", default="{}x{}".format(*_MEDIA.video_size), type=_even_size, metavar="SIZE", help="In pixels.")
@_field(_MEDIA, "distinct", "--distinct-media", COUNT, "Made of each kind; requests take them in turn.")
@_field(_LOAD, "seed", "--seed", click.IntRange(min=0), "Of arrival times and media.")
@_field(_LOAD, "warm_up_requests", "--warm-up", click.IntRange(min=0), "Requests before, not counted.")
@_field(_LOAD, "request_timeout_s", "--request-timeout", SECONDS, "Seconds until a request has failed.")
@click.option("--model", help="What requests name as their model.  [default: the first that the server lists]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="That the server of --url asks for; better in OPENAI_API_KEY.")
@_field(_SERVER, "executor", "--executor", str, "Of the server that is started.")
@_field(_SERVER, "executor_options", "--executor-options", str, 'JSON; synthetic: {"step_s": 0.01, "item_s": 0}.')
@_field(_SERVER, "api_servers", "--api-servers", COUNT, "Frontends of the server that is started.")
@_field(_SERVER, "slab_nbytes", "--slab-nbytes", str, "Of the server that is started.")
@click.option("--disable-mm-shm", "copied", is_flag=True, help="The server decodes media into private memory, and copies them.")
@click.option("--keep-media", "kept", is_flag=True, help="The server keeps what it has prepared, and uses it again.")
@click.option("--serve-option", "further", multiple=True, help="Of `shmring serve`: --serve-option=--decoders=2.")
def serve_command(timing: Timing, preset: str | None, **values: Any) -> Findings:
    """Loads an HTTP server: throughput, TTFT, TPOT, ITL, end-to-end times, failures; decoding into slots or copying."""
    return report.report(_run(_plan(preset, repetitions=timing.repetitions, **values)))


def _plan(preset: str | None, scale: float, **values: Any) -> Plan:
    """Returns what the options of ``bench serve`` mean, in the context of the command."""
    if preset is not None:
        preset_values = dict(PRESETS[preset])
        preset_values |= {name: max(1, round(preset_values[name] * scale)) for name in _SCALED}
        values |= {name: value for name, value in preset_values.items() if _is_default(name)}
    elif not _is_default("scale"):
        raise click.UsageError("--scale is for a preset; without one, say --num-prompts and --max-concurrency")
    values["compare_engines"] = values["compare_engines"] or 0
    comparisons = [name for name in ("compare", "compare_engines", "compare_kept") if values[name]]
    if values["url"] is not None and (comparisons or values["copied"]):
        raise click.UsageError("comparisons and --disable-mm-shm are about servers that are started here; leave --url out")
    if len(comparisons) > 1:
        raise click.UsageError("make one comparison after the other")
    if values["compare_kept"] and values["copied"]:
        raise click.UsageError("--compare-kept starts servers that decode into slots; leave --disable-mm-shm out")
    if values["copied"] and values["compare"]:
        raise click.UsageError("--compare has both paths; leave --disable-mm-shm out")
    if "none" in values["kinds"] and len(values["kinds"]) > 1:
        raise click.UsageError("--media none goes with no other --media")
    if "none" in values["kinds"]:
        values["kinds"] = ()
    values["media"], values["server"] = _taken(Media, values), _taken(ServerOptions, values)
    values["load"] = _taken(Load, values)
    return _taken(Plan, values)


def _is_default(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.DEFAULT


def _taken(kind: type[_Struct], values: dict[str, Any]) -> _Struct:
    """Makes a part of a plan of the parameters that have the names of its fields."""
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})


# -- running it ----------------------------------------------------------------------------------------------------------


def _run(plan: Plan) -> run.Results:
    """Carries a plan out; returns what was measured."""
    try:
        with shown_progress(run.steps(plan)) as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_terminated(run.run(plan, progress)))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except (BenchError, OSError) as error:
        raise NotMeasured(str(error)) from error


async def _until_terminated(running: Coroutine[Any, Any, run.Results]) -> run.Results:
    """Runs it; SIGTERM cancels it, as SIGINT does by itself, so that what was started is stopped on the way out.

    A handler that raises, as other modes have, may raise inside the HTTP client, which takes it for a failed request.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await running
