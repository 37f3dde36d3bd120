"""The arguments of ``shmring.frontend.ray:app``: options of ``shmring serve``, and how Ray Serve is to run them.

An argument has the name of an option, with dashes or underscores, and a value of YAML or a text; the options themselves check
it. Each may also be a variable of the replicas' environment, and keys can only be that or stand in a file: Ray Serve shows an
application's arguments to whoever sees its dashboard.

Arguments are read twice. Before anything is deployed, they are checked as far as another machine can. Each replica reads them
on its node, where the model and the file of keys lie.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import click

from shmring.door import validate_name
from shmring.engine.options import ENGINE_OPTIONS, MODEL_ARGUMENT, engine_settings_of
from shmring.engine.settings import EngineSettings, ListenSettings
from shmring.frontend.options import FRONTEND_OPTIONS, settings_of
from shmring.frontend.settings import FrontendSettings
from shmring.service.flags import Flag
from shmring.service.option_table import Option, advice_for, filled, options_of

__all__ = ["DEPLOYMENT_OPTIONS", "DeploymentSettings", "ReplicaSettings", "settings_of_arguments"]

_KEYS = {"api_keys": "SHMRING_API_KEY, or api-key-file", "admin_keys": "SHMRING_ADMIN_KEY, or admin-key-file"}

_LISTEN = tuple(option.opts[0][2:] for option in options_of(ListenSettings()))
# Options of `shmring serve` that are Ray Serve's here.
_OF_SERVE = {
    **dict.fromkeys(("host", "port"), "Ray Serve listens: http_options in its configuration"),
    **dict.fromkeys(("root-path",), "route_prefix of the application"),
    **dict.fromkeys(("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs"), "TLS ends at the load balancer"),
    **dict.fromkeys(_LISTEN, "leave it out: a replica is a frontend and an engine on one node"),
    **dict.fromkeys(("timeout-keep-alive",), "keep_alive_timeout_s in Ray Serve's http_options"),
    **dict.fromkeys(("data-parallel-size", "api-server-count"), "num-replicas: each replica is a frontend and an engine"),
    **dict.fromkeys(("heartbeat-timeout", "health-port"), "health_check_period_s and health_check_timeout_s of the deployment"),
    **dict.fromkeys(("start-timeout", "shutdown-delay"), "leave it out: Ray Serve sends requests to replicas that run"),
    **dict.fromkeys(("uds", "ready-fd", "stop-with-stdin", "config"), "leave it out: these arguments are the configuration"),
}

_TRUTHS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_REPLICA = "00000000"  # as long as a replica's id
_MAX_NAME_LENGTH = 64 - len(f"ray-{'0' * 12}--{_REPLICA}")


def _parse_num_replicas(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= (number := int(text)) < 2**31:
        raise ValueError(f"{text[:64]!r} is neither a number of at least 1 nor auto")
    return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeploymentSettings:
    """How Ray Serve runs an application. What its configuration says of the deployment ``shmring`` counts before this.

    Attributes:
        num_replicas: Replicas: each is a frontend with its engine, on one node. auto: as many as Ray Serve finds that requests
            need.
        autoscaling_config: With auto: what Ray Serve's AutoscalingConfig has, as a JSON object.

            Without target_ongoing_requests, Ray Serve starts a replica for every two requests.
        num_cpus: CPUs of an engine, as Ray counts them; torch uses as many threads. A frontend has one more.
        num_gpus: GPUs of an engine.
        max_ongoing_requests: Requests that a replica has at a time, streams included; others wait in Ray Serve's proxy, or go
            to another replica.
    """

    num_replicas: Annotated[int | Literal["auto"], Flag(kind=str, parse=_parse_num_replicas, default="1", metavar="N|auto")] = 1
    autoscaling_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_cpus: int = 1
    num_gpus: Annotated[int, Flag(least=0)] = 0
    max_ongoing_requests: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What arguments ask for.

    Attributes:
        deployment: how Ray Serve runs it.
        engine: the engine of a replica.
        http: what its frontend serves, and its limits.
    """

    deployment: DeploymentSettings
    engine: EngineSettings
    http: FrontendSettings


#: The options of how Ray Serve runs it.
DEPLOYMENT_OPTIONS = options_of(DeploymentSettings())
_OPTIONS = (*DEPLOYMENT_OPTIONS, *ENGINE_OPTIONS, *FRONTEND_OPTIONS)
_BY_NAME = {
    name[2:]: option for option in _OPTIONS for name in (*option.opts, *option.secondary_opts) if name[2:] not in _OF_SERVE
}


def settings_of_arguments(arguments: Mapping[str, Any], *, here: bool = True) -> ReplicaSettings:
    """Returns the settings that an application's arguments and the environment ask for.

    Args:
        arguments: by name; texts, or what YAML has.
        here: whether this is the node of the replica. If not, files and packages are not looked for, and there are no keys.

    Raises:
        ValueError: they make no sense; says which one, and what to do.
    """
    try:
        words = list(_words(arguments))
        options = _OPTIONS if here else tuple(map(_anywhere, _OPTIONS))
        command = click.Command("shmring", params=[MODEL_ARGUMENT, *options], add_help_option=False)
        with command.make_context("shmring", words) as context:
            values = dict(context.params)
            if not here:
                values |= {"api_key_file": None, "admin_key_file": None}
            engine = engine_settings_of(values, here=here)
            deployment = filled(DeploymentSettings(), DEPLOYMENT_OPTIONS, values)
            if deployment.autoscaling_config and deployment.num_replicas != "auto":
                raise click.UsageError("autoscaling-config is for num-replicas: auto")
            http = settings_of(values)
    except click.ClickException as error:
        raise ValueError(f"the application's arguments: {error.format_message()}") from None
    if len(validate_name(engine.name)) > _MAX_NAME_LENGTH:
        raise ValueError(f"the application's arguments: name has more than {_MAX_NAME_LENGTH} characters: {engine.name!r}")
    return ReplicaSettings(deployment=deployment, engine=engine, http=http)


def _words(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields arguments as a command line has them."""
    given: set[str] = set()
    for key, value in arguments.items():
        name = str(key).replace("_", "-")
        option = _BY_NAME.get(name)
        if option is None or option.name in _KEYS:
            raise click.UsageError(f"{str(key)[:64]!r} can't be one: {_advice(name, option)}")
        if str(option.name) in given:
            raise click.UsageError(f"{str(key)[:64]!r} is given twice")
        given.add(str(option.name))
        if option.is_flag:
            yield from _flag(option, name, value)
        else:
            values = value if option.multiple and isinstance(value, list) else [value]
            yield from (f"--{name}={_text(name, each)}" for each in values)


def _advice(name: str, option: Option | None) -> str:
    if option is not None:
        return f"Ray Serve shows arguments to others; use the variable {_KEYS[str(option.name)]}"
    if name in _OF_SERVE:
        return _OF_SERVE[name]
    return advice_for(name, _BY_NAME) or "docs/reference.md has the options of `shmring serve`"


def _flag(option: Option, name: str, value: Any) -> Iterator[str]:
    is_on = _TRUTHS.get(str(value).strip().lower())
    if is_on is None:
        raise click.UsageError(f"{name!r} is true or false, not {str(value)[:64]!r}")
    if f"--{name}" in option.secondary_opts:
        is_on = not is_on
    if is_on:
        yield option.opts[0]
    elif option.secondary_opts:
        yield option.secondary_opts[0]


def _text(name: str, value: Any) -> str:
    if value is None:
        raise click.UsageError(f"{name!r} has no value")
    if not isinstance(value, dict | list):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{name!r} is not what JSON has: {error}") from None


def _anywhere(option: Option) -> Option:
    """Returns an option whose path need not be there."""
    if not isinstance(option.type, click.Path):
        return option
    other = copy.copy(option)
    other.type = click.Path()
    return other
