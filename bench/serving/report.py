"""What a run has shown, as a table to read and as JSON to keep.

A cell is the median of the repetitions, with the least and the greatest behind it where there are several. The ratio of a
comparison is taken within each repetition, and its median and spread shown likewise.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from bench.results import Coverage, Findings, Spread, Table, Verdict
from bench.serving.load import Measurement
from bench.serving.plan import PRESETS, Media, Plan
from bench.serving.run import LOAD, Results, planned

_BUSY_SHARE = 0.7  # of the generator's one core; above it, waiting for the generator shows in the latencies


class _Target(NamedTuple):
    """Of requests a second of the first server to those of the second, with a preset's load at any scale.

    Attributes:
        compared: the plan's field that says what is compared.
        preset, alike: a load is that of the preset if these parameters of it are the same.
    """

    compared: str
    preset: str
    alike: tuple[str, ...]
    what: str
    at: str
    limit: float


_MEDIA = ("kinds", "picture_size", "distinct")
_ENGINES = ("compare_engines", "executor", "api_servers", "endpoint", "kinds")
_REPEATED = "a repeated picture of 12 MP through HTTP"
_TARGETS = (
    _Target(
        "compare", "pr32104", ("endpoint", "kinds", "video_frames", "output_tokens", "executor"),
        "decoded into slots: requests/s of copying there", "preset of PR 32104", 1.0,
    ),
    _Target(
        "compare_engines", "engines-wait", (*_ENGINES, "executor_options"),
        "two engines whose steps wait 20 ms, two frontends: requests/s of one", "preset engines-wait", 1.9,
    ),
    _Target(
        "compare_engines", "engines-compute", _ENGINES,
        "two engines whose steps compute: requests/s of one", "preset engines-compute", 1.0,
    ),
    _Target("compare_kept", "repeated", _MEDIA, "kept content: requests/s of a new picture", _REPEATED, 5.0),
    # What can't be kept is no worse than without, within what two equal servers differ by.
    _Target(
        "compare_kept", "twice-the-slab", _MEDIA,
        "kept content: requests/s of without", "a working set twice the slab", 0.97,
    ),
)  # fmt: skip

#: Of what is in a row; one where it is not said.
_DECIMALS = {"requests/s": 2, "output tokens/s": 0, "peak concurrency": 0}
#: Rows of which a ratio says nothing.
_NOT_COMPARED = ("peak concurrency", "generator's CPU, ms/request", "generator's loop lag, p99, ms")


def report(results: Results) -> Findings:
    """Returns a run as it is shown and stored."""
    there = collections.Counter((LOAD, measurement.variant) for measurement in results.measurements if measurement.completed)
    return Findings(
        mode="serve",
        machine=results.machine,
        tables=[_table(results)],
        notes=_notes(results),
        targets=list(_targets(results)),
        coverage=Coverage.of(planned(results.plan), there),
    )


def _table(results: Results) -> Table:
    """The table of a run: a row for each figure, a column for each server, and their ratio."""
    variants, compare = results.variants, results.plan.compares
    columns = ["", *variants, *([f"{variants[0]} / {variants[1]}"] if compare else [])]
    rows = [["answered", *(_answered(results.of(variant)) for variant in variants)]]
    for reason in dict.fromkeys(reason for measurement in results.measurements for reason in measurement.failures):
        counts = (sum(one.failures.get(reason, 0) for one in results.of(variant)) for variant in variants)
        rows.append([f"failed: {reason}", *(f"{count:,}" for count in counts)])
    figures = [[_figures(measurement) for measurement in results.of(variant)] for variant in variants]
    for name in figures[0][0]:
        series = [[figure[name] for figure in repetitions] for repetitions in figures]
        if all(value is None for values in series for value in values):
            continue  # nobody has it
        row = [name, *(_cell(values, _DECIMALS.get(name, 1)) for values in series)]
        if compare and name not in _NOT_COMPARED:
            ratios = [ours / theirs for ours, theirs in zip(*series, strict=True) if ours is not None and theirs]
            row.append(_cell(ratios, 2))
        rows.append(row)
    if results.slab_nbytes:
        rows.append(["through the slab, bytes/request", *(f"{results.slab_nbytes[variant]:,}" for variant in variants)])
    if results.plan.compare_kept:
        rows.append(["media decoded", *(f"{results.decoded[variant]:,}" for variant in variants)])
        rows.append(["bytes copied for sending", *(f"{results.copied_nbytes[variant]:,}" for variant in variants)])
    return Table(_title(results.plan), columns, [row + [""] * (len(columns) - len(row)) for row in rows])


def _answered(measurements: Sequence[Measurement]) -> str:
    completed = sum(measurement.completed for measurement in measurements)
    return f"{completed:,} of {sum(measurement.requests for measurement in measurements):,}"


def _figures(measurement: Measurement) -> dict[str, float | None]:
    """The rows of a measurement; None where there is nothing to say, or nothing had an answer."""
    figures: dict[str, float | None] = {
        "requests/s": measurement.requests_per_s,
        "output tokens/s": measurement.output_tokens_per_s or None,
        "duration, s": measurement.duration_s,
        "peak concurrency": measurement.peak_concurrency,
    }
    latencies = {"TTFT": measurement.ttft, "TPOT": measurement.tpot, "ITL": measurement.itl, "E2E": measurement.e2e}
    for (name, latency), part in itertools.product(latencies.items(), ("mean", "median", "p99")):
        figures[f"{name}, {part}, ms"] = None if latency is None else getattr(latency, f"{part}_ms")
    parts = {"engine's": "engine", "frontends'": "frontends", "generator's": "generator"}
    cpu_s = {**measurement.cpu_s, "generator": measurement.generator.cpu_s}
    for whose, part in parts.items():
        told = part in cpu_s and measurement.completed
        figures[f"{whose} CPU, ms/request"] = 1e3 * cpu_s[part] / measurement.completed if told else None
    figures["generator's loop lag, p99, ms"] = measurement.generator.loop_lag_p99_ms
    return figures


def _cell(figures: Sequence[float | None], decimals: int) -> str:
    values = [value for value in figures if value is not None]
    if not values:
        return "none"
    median, *ends = (f"{value:,.{decimals}f}" for value in msgspec.structs.astuple(Spread.of(values)))
    return median if len(values) == 1 else f"{median} ({' .. '.join(ends)})"


def _title(plan: Plan) -> str:
    load = plan.load
    when = "all at once" if load.request_rate is None else f"{load.request_rate:g} a second"
    limit = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at a time"
    tokens = f", {load.output_tokens} tokens each" if load.endpoint == "chat" else ""
    return f"serve: {load.requests:,} {load.endpoint} requests with {_carried(load.media)}{tokens}, {when}{limit}"


def _carried(media: Media) -> str:
    if not media.kinds:
        return "text only"
    sizes = {
        "picture": "a picture of {}x{}".format(*media.picture_size),
        "audio": f"a recording of {media.audio_seconds:g} s",
        "video": "a clip of {} frames of {}x{}".format(media.video_frames, *media.video_size),
    }
    return " or ".join(sizes[kind] for kind in media.kinds)


# -- what a reader must know ---------------------------------------------------------------------------------------------


def _notes(results: Results) -> list[str]:
    """Returns what a reader must know besides the table."""
    load, server = results.plan.load, results.plan.server
    lines = [
        f"A body has {results.request_nbytes:,} bytes; seed {load.seed}. {load.warm_up_requests} requests before do not count. "
        f"Sent by {results.client}, on the same machine.",
        "A latency begins when a request was due and its turn had come. TTFT: until the first text; TPOT: the rest, divided by "
        "the tokens after the first; ITL: between two texts; E2E: until the end.",
    ]
    if results.plan.url is None:
        lines.append(
            f"Server: {server.api_servers} API servers, executor {server.executor} {server.executor_options}, slab "
            f"{server.slab_nbytes}" + "".join(f" {argument}" for argument in server.further)
        )
    if results.plan.compares:
        which = " and ".join(results.variants)
        if results.plan.compare:
            which += " (--disable-mm-shm)"
        if results.plan.compare_kept:
            which += f" (--mm-processor-cache-gb=0), of {load.media.distinct} media,"
        lines.append(
            f"The same load was sent {results.plan.repetitions} times, to {which} in turn. Medians, with the least and the "
            "greatest number; ratios are taken within each repetition."
        )
    failed = sum(measurement.requests - measurement.completed for measurement in results.measurements)
    failures = [f"{failed:,} requests failed; rates and latencies are those of the others."] if failed else []
    return [*lines, *_busy_notes(results), *failures]


def _busy_notes(results: Results) -> Iterator[str]:
    for variant in results.variants:
        measurements = results.of(variant)
        duration_s = sum(measurement.duration_s for measurement in measurements)
        generator_share = sum(one.generator.cpu_s for one in measurements) / duration_s
        shares = {part: sum(one.cpu_s[part] for one in measurements) / duration_s for part in measurements[0].cpu_s}
        shares["load generator"] = generator_share
        text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        cores = results.machine.cores
        yield f"CPU while the {variant} load ran, of {cores} x 100 %: {text}; together {sum(shares.values()):.0%}."
        if generator_share > _BUSY_SHARE:
            yield f"The load generator was busy {generator_share:.0%} of the {variant} load: it may be what was measured."


def _targets(results: Results) -> Iterator[Verdict]:
    """What a comparison says of the targets, if its load is that of one."""
    plan, load = results.plan, results.plan.load
    asked = {name: value for part in (load.media, load, plan.server, plan) for name, value in asdict(part).items()}
    for target in _TARGETS:
        preset = PRESETS[target.preset]
        if not asked[target.compared] or any(asked[name] != preset[name] for name in target.alike):
            continue
        ours, theirs = (results.of(variant) for variant in results.variants)
        pairs = zip(ours, theirs, strict=True)
        ratio = Spread.of(one.requests_per_s / other.requests_per_s for one, other in pairs if other.requests_per_s)
        at = f"{target.at}, {load.requests:,} requests"
        detail = f"{ratio.minimum:.2f} x to {ratio.maximum:.2f} x. {' '.join(_busy_notes(results))}"
        met = ratio.median >= target.limit
        yield Verdict(target.what, at, f">= {target.limit:g} x", f"{ratio.median:.2f} x", met, detail)
        if target.preset == "repeated":
            copied = results.copied_nbytes[results.variants[0]]
            yield Verdict("kept content: bytes copied", at, "0", f"{copied:,}", copied == 0)
