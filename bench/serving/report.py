"""What a run has shown, as a table to read and as JSON to keep.

A cell is the median of the repetitions, with the least and the greatest behind it where there are several. The ratio of a
comparison is taken within each repetition, and its median and spread shown likewise.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench.coverage import Coverage
from bench.results import Findings, Spread, Table, Verdict
from bench.serving.measurement import Latency, Measurement
from bench.serving.plan import PRESETS, Media, Plan
from bench.serving.run import LOAD, Results, planned

__all__ = ["report"]

_TARGET_RATIO = 1.3  # of the slab path's requests a second to the inline path's
_BUSY_SHARE = 0.7  # of the generator's one core; above it, waiting for the generator shows in the latencies


class _Metric(NamedTuple):
    """A row: what it is called, where it comes from, its decimals, and whether a ratio says anything."""

    name: str
    of: Callable[[Measurement], float | None]
    decimals: int
    compared: bool = True


def _latency_metrics(name: str, of: Callable[[Measurement], Latency | None]) -> Iterator[_Metric]:
    def picked(field: str) -> Callable[[Measurement], float | None]:
        return lambda measurement: None if (latency := of(measurement)) is None else getattr(latency, field)

    for title, field in (("mean", "mean_ms"), ("median", "median_ms"), ("p99", "p99_ms")):
        yield _Metric(f"{name}, {title}, ms", picked(field), 1)


def _cpu_metric(part: str) -> _Metric:
    """CPU of a part of the server for each request with an answer; None where there is no such part."""
    return _Metric(
        f"{part}' CPU, ms/request" if part.endswith("s") else f"{part}'s CPU, ms/request",
        lambda measurement: (
            1e3 * measurement.cpu_s[part] / measurement.completed
            if part in measurement.cpu_s and measurement.completed
            else None
        ),
        1,
    )


_METRICS = (
    _Metric("requests/s", lambda measurement: measurement.requests_per_s, 2),
    _Metric("output tokens/s", lambda measurement: measurement.output_tokens_per_s or None, 0),
    _Metric("duration, s", lambda measurement: measurement.duration_s, 1),
    _Metric("peak concurrency", lambda measurement: measurement.peak_concurrency, 0, compared=False),
    *_latency_metrics("TTFT", lambda measurement: measurement.ttft),
    *_latency_metrics("TPOT", lambda measurement: measurement.tpot),
    *_latency_metrics("ITL", lambda measurement: measurement.itl),
    *_latency_metrics("E2E", lambda measurement: measurement.e2e),
    _cpu_metric("engine"),
    _cpu_metric("frontends"),
    _Metric(
        "generator's CPU, ms/request",
        lambda measurement: 1e3 * measurement.generator.cpu_s / max(measurement.completed, 1),
        1,
        compared=False,
    ),
    _Metric("generator's loop lag, p99, ms", lambda measurement: measurement.generator.loop_lag_p99_ms, 1, compared=False),
)


def report(results: Results) -> Findings:
    """Returns a run as it is shown and stored."""
    there = collections.Counter((LOAD, measurement.variant) for measurement in results.measurements)
    return Findings(
        mode="serve",
        machine=results.machine,
        tables=[_table(results)],
        notes=_notes(results),
        targets=_targets(results),
        results=results.measurements,
        plan=results.plan,
        coverage=Coverage.of(planned(results.plan), there),
    )


def _table(results: Results) -> Table:
    """Returns the table of a run."""
    variants = results.variants
    columns = ["", *variants]
    if results.plan.compare:
        columns.append(f"{variants[0]} / {variants[1]}")
    rows = [["answered", *(_answered(results.of(variant)) for variant in variants)]]
    rows += _failures(results)
    rows += [row for metric in _METRICS if (row := _row(metric, results)) is not None]
    if results.slab_nbytes:
        rows.append(["through the slab, bytes/request", *(f"{results.slab_nbytes[variant]:,}" for variant in variants)])
    return Table(_title(results.plan), columns, [row + [""] * (len(columns) - len(row)) for row in rows])


def _answered(measurements: Sequence[Measurement]) -> str:
    completed = sum(measurement.completed for measurement in measurements)
    return f"{completed:,} of {sum(measurement.requests for measurement in measurements):,}"


def _failures(results: Results) -> list[list[str]]:
    reasons = dict.fromkeys(reason for measurement in results.measurements for reason in measurement.failures)
    return [
        [
            f"failed: {reason}",
            *(
                f"{sum(measurement.failures.get(reason, 0) for measurement in results.of(variant)):,}"
                for variant in results.variants
            ),
        ]
        for reason in reasons
    ]


def _row(metric: _Metric, results: Results) -> list[str] | None:
    """A metric's row; None if nobody has it."""
    series = [[metric.of(measurement) for measurement in results.of(variant)] for variant in results.variants]
    if all(value is None for values in series for value in values):
        return None
    cells = [_cell([value for value in values if value is not None], metric.decimals) for values in series]
    if results.plan.compare and metric.compared:
        ratios = [ours / theirs for ours, theirs in zip(*series, strict=True) if ours is not None and theirs]
        cells.append(_cell(ratios, 2))
    return [metric.name, *cells]


def _cell(values: Sequence[float], decimals: int) -> str:
    if not values:
        return "none"
    spread = Spread.of(values)
    if len(values) == 1:
        return f"{spread.median:,.{decimals}f}"
    return f"{spread.median:,.{decimals}f} ({spread.minimum:,.{decimals}f} .. {spread.maximum:,.{decimals}f})"


def _title(plan: Plan) -> str:
    load = plan.load
    when = "all at once" if load.request_rate is None else f"{load.request_rate:g} a second"
    limit = "" if load.max_concurrency is None else f", at most {load.max_concurrency} at a time"
    tokens = f", {load.output_tokens} tokens each" if load.endpoint == "chat" else ""
    return f"serve: {load.requests:,} {load.endpoint} requests with {_carried(load.media)}{tokens}, {when}{limit}"


def _carried(media: Media) -> str:
    if not media.kinds:
        return "text only"
    if media.directory is not None:
        return f"files of kind {', '.join(media.kinds)}"
    sizes = {
        "picture": f"a picture of {_pixels(media.picture_size)}",
        "audio": f"a recording of {media.audio_seconds:g} s",
        "video": f"a clip of {media.video_frames} frames of {_pixels(media.video_size)}",
    }
    return " or ".join(sizes[kind] for kind in media.kinds)


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


# -- what a reader must know ---------------------------------------------------------------------------------------------


def _notes(results: Results) -> list[str]:
    """Returns what a reader must know besides the table."""
    load, server = results.plan.load, results.plan.server
    lines = [
        f"Bodies are {results.request_nbytes:,} bytes; seed {load.seed}; {load.warm_up_requests} requests before, not counted. "
        f"Sent by {results.client}, on the same machine.",
        "Latencies count from when a request was due and its turn had come. TTFT: to the first text; TPOT: the rest over the "
        "tokens after the first; ITL: between two texts; E2E: to the end.",
    ]
    if results.plan.url is None:
        lines.append(
            f"Server: {server.api_servers} API servers, executor {server.executor} {server.executor_options}, slab "
            f"{server.slab_nbytes}" + "".join(f" {argument}" for argument in server.further)
        )
    if results.plan.compare:
        lines.append(
            f"{results.plan.repetitions} repetitions of the same load, slab and inline (--disable-mm-shm) in turn; medians, "
            f"with the least and the greatest; ratios within each repetition."
        )
    return [*lines, *_busy_notes(results), *_failure_notes(results)]


def _busy_notes(results: Results) -> Iterator[str]:
    for variant in results.variants:
        measurements = results.of(variant)
        duration_s = sum(measurement.duration_s for measurement in measurements)
        generator_share = sum(measurement.generator.cpu_s for measurement in measurements) / duration_s
        shares = {
            part: sum(measurement.cpu_s[part] for measurement in measurements) / duration_s for part in measurements[0].cpu_s
        } | {"load generator": generator_share}
        text = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        cores = results.machine.cores
        yield f"CPU while the {variant} load ran, of {cores} x 100 %: {text}; together {sum(shares.values()):.0%}."
        if generator_share > _BUSY_SHARE:
            yield f"The load generator was busy {generator_share:.0%} of the {variant} load: it may be what was measured."


def _failure_notes(results: Results) -> Iterator[str]:
    failed = sum(measurement.requests - measurement.completed for measurement in results.measurements)
    if failed:
        yield f"{failed:,} requests failed; rates and latencies are those of the others."


def _targets(results: Results) -> list[Verdict]:
    """What a comparison says of the target, if its load is that of vLLM's pull request, at any scale."""
    load, preset = results.plan.load, PRESETS["pr32104"]
    of_preset = (load.endpoint, load.media.kinds, load.media.video_frames, load.output_tokens, results.plan.server.executor)
    names = ("endpoint", "kinds", "video_frames", "output_tokens", "executor")
    if not results.plan.compare or of_preset != tuple(preset[name] for name in names):
        return []
    pairs = zip(
        *([measurement.requests_per_s for measurement in results.of(variant)] for variant in results.variants), strict=True
    )
    ratio = Spread.of([slab / inline for slab, inline in pairs if inline])
    what, at = "slab path: requests/s of the inline path", f"preset of PR 32104, {load.requests:,} requests"
    detail = f"{ratio.minimum:.2f} x to {ratio.maximum:.2f} x. {' '.join(_busy_notes(results))}"
    return [Verdict(what, at, f">= {_TARGET_RATIO:g} x", f"{ratio.median:.2f} x", ratio.median >= _TARGET_RATIO, detail)]
