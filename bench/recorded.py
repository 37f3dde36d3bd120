"""The plans of stored results that do not record them, from the command that measured them.

The command line is parsed as ``bench`` itself parses it, and what its options mean is asked of the same function. So there is
no plan where no command was kept, or where the command has changed since.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec

from bench import transport
from bench.allocation import survey
from bench.allocation.command import allocator_command, allocator_plan
from bench.commands import quick_command, quick_plan, transport_command, transport_plan
from bench.coverage import Coverage
from bench.records import Absence, Result
from bench.request import plan as request
from bench.request.command import request_command, request_plan
from bench.request.scaling import ScalingPlan, planned_scaling, scaling_title
from bench.serving import run as serving
from bench.serving.command import serve_command, serve_plan

__all__ = ["recorded_coverage"]

_OUTPUTS = ("json_path", "plot_stem")  # parameters that are no part of a plan


def recorded_coverage(command: str, content: Mapping[str, Any]) -> Coverage | None:
    """Returns what was planned and what is missing, as far as the recorded command says; None if it does not.

    Args:
        command: as it was typed.
        content: of the stored result.
    """
    name, *arguments = shlex.split(command)[3:] or [""]
    if name not in _DERIVATIONS:
        return None
    parsed, derive = _DERIVATIONS[name]
    try:
        with parsed.make_context(name, arguments) as context:
            choices = {key: value for key, value in context.params.items() if key not in _OUTPUTS}
            coverage = derive(choices, content)
    except (click.ClickException, KeyError, TypeError, msgspec.ValidationError):
        return None  # the command or the result is of a version that is no more
    return msgspec.structs.replace(coverage, derived=True)


def _of_transport(plan: transport.Plan, content: Mapping[str, Any]) -> Coverage:
    results = msgspec.convert(content["results"], list[Result])
    return transport.coverage(transport.planned(plan), results, msgspec.convert(content["absences"], list[Absence]))


def _of_request(choices: dict[str, Any], content: Mapping[str, Any]) -> Coverage:
    plan = request_plan(**choices)
    if isinstance(plan, ScalingPlan):
        keys = [(scaling_title(result["nbytes"], result["in_flight"]), result["variant"]) for result in content["results"]]
        return Coverage.of(planned_scaling(plan), dict.fromkeys(keys, plan.repetitions))
    results = msgspec.convert(content["results"], list[request.Result])
    return request.coverage(request.planned(plan), results, msgspec.convert(content["unmeasured"], list[request.Unmeasured]))


def _of_serve(choices: dict[str, Any], content: Mapping[str, Any]) -> Coverage:
    there = Counter((serving.LOAD, result["variant"]) for result in content["results"])
    return Coverage.of(serving.planned(serve_plan(**choices)), there)


_Derivation = Callable[[dict[str, Any], Mapping[str, Any]], Coverage]

_DERIVATIONS: Mapping[str, tuple[click.Command, _Derivation]] = {
    "transport": (transport_command, lambda choices, content: _of_transport(transport_plan(**choices), content)),
    "quick": (quick_command, lambda choices, content: _of_transport(quick_plan(**choices), content)),
    "request": (request_command, _of_request),
    "serve": (serve_command, _of_serve),
    "allocator": (
        allocator_command,
        lambda choices, content: survey.coverage(survey.planned(allocator_plan(**choices)), content["results"]),
    ),
}
