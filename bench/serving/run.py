"""One run: servers, loads on them in turn, and what they have shown.

In a comparison two servers run all the time, of which the one that is not asked sleeps, and get the same load one after the
other, again and again (A B A B ...): whatever else the machine does meets both, and the ratio is taken within each repetition.
Requests, media and arrival times are the same for both, and made before.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import version
from typing import NamedTuple

import msgspec

from bench.coverage import Planned
from bench.machine import Machine
from bench.serving.client import Client
from bench.serving.load import Body, Measurement, play, request_body, warm_up
from bench.serving.media import media_parts
from bench.serving.plan import Plan, ServerOptions
from bench.serving.server import Server, serving

__all__ = ["LOAD", "Results", "planned", "run", "steps"]

LOAD = "the load"  # the one case of a run

COPIED = "copied"
SLAB = "slab"
URL = "url"
KEPT = "kept"
NOT_KEPT = "not kept"


class Results(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        client: what sent the requests.
        plan: what was asked for, without its key.
        request_nbytes: of the first one's body.
        slab_nbytes: that went through the slab for each request, by server; empty for one that was there before.
        copied_nbytes, decoded: bytes that were copied for sending, and media that were decoded, likewise, of all requests.
        measurements: every load, in the order in which they were sent.
    """

    machine: Machine
    client: str
    plan: Plan
    request_nbytes: int
    slab_nbytes: dict[str, int]
    measurements: list[Measurement]
    copied_nbytes: dict[str, int] = {}
    decoded: dict[str, int] = {}

    def of(self, variant: str) -> list[Measurement]:
        """Returns the measurements of one server, repetition by repetition."""
        return [measurement for measurement in self.measurements if measurement.variant == variant]

    @property
    def variants(self) -> list[str]:
        """The servers, in the order in which they were asked."""
        return list(dict.fromkeys(measurement.variant for measurement in self.measurements))


class _Target(NamedTuple):
    client: Client
    body: Body
    server: Server | None

    def cpu_s(self) -> dict[str, float]:
        return {} if self.server is None else self.server.cpu_s()


def steps(plan: Plan) -> int:
    """Returns how often :func:`run` reports progress."""
    return 2 + len(_wanted(plan)) * (1 + plan.repetitions) + (plan.url is None)


async def run(plan: Plan, progress: Callable[[str], None]) -> Results:
    """Carries a plan out, with a line before each step. When this returns or raises, no process and no file of it is left.

    Raises:
        BenchError, OSError: a server did not start, did not last, or can't be asked; or there are no media to send.
    """
    progress("making media")
    parts = await asyncio.to_thread(media_parts, plan.load)
    measurements: list[Measurement] = []
    if plan.url is None:
        progress("starting two servers" if plan.compares else "starting a server")
    async with _targets(plan, parts) as targets:
        request_nbytes = max(len(target.body(0)) for target in targets.values())
        for variant, target in targets.items():
            progress(f"{variant}: warming up")
            await warm_up(plan.load, target.client, target.body)
        for repetition in range(plan.repetitions):
            for variant, target in targets.items():
                progress(f"{variant}: {plan.load.requests:,} requests, {repetition + 1} of {plan.repetitions}")
                cpu_s = target.cpu_s()
                measurement = await play(variant, plan.load, target.client, target.body)
                used_s = {part: after - cpu_s[part] for part, after in target.cpu_s().items()}
                measurements.append(msgspec.structs.replace(measurement, cpu_s=used_s))
        progress("reading the servers' counters")
        requests = plan.load.warm_up_requests + plan.repetitions * plan.load.requests
        ours = {name: target.client for name, target in targets.items() if target.server is not None}
        counted = dict(zip(ours, await asyncio.gather(*(client.counters() for client in ours.values())), strict=True))
    return Results(
        machine=Machine.here(),
        client=f"aiohttp {version('aiohttp')}, uvloop {version('uvloop')}, Python {platform.python_version()}",
        plan=msgspec.structs.replace(plan, api_key=None),
        request_nbytes=request_nbytes,
        slab_nbytes={name: counters["slab_bytes"] // requests for name, counters in counted.items()},
        measurements=measurements,
        copied_nbytes={name: counters["copied_bytes"] for name, counters in counted.items()},
        decoded={name: counters["media_decoded"] for name, counters in counted.items()},
    )


def planned(plan: Plan) -> list[Planned]:
    """Returns the case of a plan."""
    return [Planned(LOAD, list(_wanted(plan)), plan.repetitions)]


@contextlib.asynccontextmanager
async def _targets(plan: Plan, parts: list[msgspec.Raw]) -> AsyncIterator[Mapping[str, _Target]]:
    """Has whoever is to be asked, by name; starts them together, since each takes some seconds."""
    async with contextlib.AsyncExitStack() as stack:

        async def target(options: ServerOptions | None) -> _Target:
            server = None if options is None else await stack.enter_async_context(serving(options, plan.load))
            url = plan.url if server is None else server.url
            assert url is not None, "there is a URL or a server"
            client = Client(url, plan.load.endpoint, plan.load.request_timeout_s, plan.api_key)
            await stack.enter_async_context(client)
            model = await client.model() if plan.model is None else plan.model
            return _Target(client, functools.partial(request_body, plan.load, model, parts), server)

        wanted = _wanted(plan)
        # Waits for all of them whatever happens, so that each server is either the stack's or has been stopped.
        started = await asyncio.gather(*map(target, wanted.values()), return_exceptions=True)
        targets = {}
        for name, result in zip(wanted, started, strict=True):
            if isinstance(result, BaseException):
                raise result
            targets[name] = result
        yield targets


def _wanted(plan: Plan) -> dict[str, ServerOptions | None]:
    """The servers of a plan, by name; None for one that runs already."""
    if plan.url is not None:
        return {URL: None}
    if plan.compare_engines:
        return {
            f"{count} engine{'s' if count > 1 else ''}": msgspec.structs.replace(plan.server, engines=count)
            for count in (plan.compare_engines, 1)
        }
    if plan.compare_kept:
        return {name: msgspec.structs.replace(plan.server, kept=name == KEPT) for name in (KEPT, NOT_KEPT)}
    if plan.compare:
        return {name: msgspec.structs.replace(plan.server, copied=name == COPIED) for name in (SLAB, COPIED)}
    return {COPIED if plan.server.copied else SLAB: plan.server}
