"""The dashboard for Grafana and the alerts for Prometheus in docs/monitoring: ``python docs/make_monitoring.py``.

Names come from all numbers (:data:`shmring.frontend.operator.metrics.COUNTED`): one that is not there raises an error here.
A test compares the files, and another asks a real Prometheus for each expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmring.frontend.operator.metrics import COUNTED

FOLDER = Path(__file__).with_name("monitoring")
DASHBOARD = FOLDER / "grafana.json"
ALERTS = FOLDER / "alerts.yml"
RUNBOOK = "docs/operations.md"  # has a row for each alert

_NAMES = {each.exposed_name for each in COUNTED if each.kind != "histogram"} | {
    f"{each.name}_{part}" for each in COUNTED if each.kind == "histogram" for part in ("bucket", "sum", "count")
}
_WINDOW = "$__rate_interval"  # Grafana puts a range in that fits the interval of scrapes


def rate(name: str, by: str = "") -> str:
    """The rate of a counter, of all instances together."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}[{_WINDOW}]))"


def quantiles(name: str, by: str = "") -> list[tuple[str, str]]:
    """The 50th and 99th percentile of a histogram."""
    others = f", {by}" if by else ""
    return [
        (
            f"histogram_quantile({share}, {rate(f'{name}_bucket', f'le{others}')})",
            f"p{share[2:]}{f' {{{{{by}}}}}' if by else ''}",
        )
        for share in ("0.5", "0.99")
    ]


def mean(name: str) -> list[tuple[str, str]]:
    """The mean of a histogram's values."""
    return [(f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}", "mean")]


#: Rows of panels: title, unit, expressions with their legends.
PANELS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Requests",
        [
            ("Answered", "reqps", [(rate("shmring_http_requests_total", "route, status"), "{{route}} {{status}}")]),
            ("Failed, by reason", "reqps", [(rate("shmring_request_failure_total", "reason"), "{{reason}}")]),
            (
                "In flight",
                "short",
                [
                    ("sum(shmring_http_in_flight)", "in flight"),
                    ("sum(shmring_num_requests_running)", "running"),
                    ("sum(shmring_num_requests_waiting)", "waiting in the engine"),
                    ("sum(shmring_frontend_slot_waiters)", "waiting for a slot"),
                ],
            ),
            (
                "Tokens",
                "short",
                [(rate("shmring_prompt_tokens_total"), "prompt"), (rate("shmring_generation_tokens_total"), "generated")],
            ),
            ("Succeeded", "reqps", [(rate("shmring_request_success_total", "finished_reason"), "{{finished_reason}}")]),
            (
                "Hung up",
                "reqps",
                [(rate("shmring_http_aborted_total"), "hung up"), (rate("shmring_http_broken_streams_total"), "broken")],
            ),
        ],
    ),
    (
        "Times",
        [
            ("To the first token", "s", quantiles("shmring_time_to_first_token_seconds")),
            ("Between tokens", "s", quantiles("shmring_inter_token_latency_seconds")),
            ("End to end", "s", quantiles("shmring_e2e_request_latency_seconds")),
            ("Queue", "s", quantiles("shmring_request_queue_time_seconds")),
            ("Prefill", "s", quantiles("shmring_request_prefill_time_seconds")),
            ("Decode", "s", quantiles("shmring_request_decode_time_seconds")),
            ("Step", "s", quantiles("shmring_step_time_seconds") + mean("shmring_step_time_seconds")),
            (
                "Loops late by",
                "s",
                [("max(shmring_frontend_loop_lag_seconds)", "frontends"), ("max(shmring_engine_loop_lag_seconds)", "engines")],
            ),
            ("Seconds of steps and beside, by part", "s", [(rate("shmring_engine_spent_seconds_total", "part"), "{{part}}")]),
            ("Seconds of steps and beside, by key", "s", [(rate("shmring_engine_caller_seconds_total", "key"), "{{key}}")]),
            (
                "Requests in a step",
                "short",
                [(f"{rate('shmring_engine_step_requests_total')} / {rate('shmring_engine_steps_total')}", "mean")],
            ),
        ],
    ),
    (
        "Media",
        [
            ("Preparation", "s", quantiles("shmring_media_preparation_seconds", "kind")),
            ("Fetch", "s", quantiles("shmring_media_fetch_seconds")),
            ("Wait for a slot", "s", quantiles("shmring_slot_wait_seconds")),
            (
                "Decoders",
                "short",
                [
                    ("sum(shmring_frontend_decoders - shmring_frontend_decoders_free)", "busy"),
                    ("sum(shmring_frontend_decoder_waiters)", "waiting"),
                ],
            ),
            (
                "Kept media",
                "short",
                [
                    (rate("shmring_frontend_kept_hits_total"), "found"),
                    (rate("shmring_frontend_kept_misses_total"), "not found"),
                    (rate("shmring_engine_ring_kept_evictions_total"), "dropped"),
                    (rate("shmring_frontend_media_passed_over_total"), "passed over"),
                ],
            ),
            (
                "Into the slab",
                "Bps",
                [
                    (rate("shmring_frontend_slab_bytes_total"), "submitted"),
                    (rate("shmring_frontend_copied_bytes_total"), "copied"),
                ],
            ),
        ],
    ),
    (
        "Slab",
        [
            (
                "Memory",
                "bytes",
                [
                    (f"sum(shmring_engine_ring_{part}_nbytes)", part)
                    for part in ("free", "leased", "quarantined", "kept", "kept_pinned")
                ],
            ),
            (
                "Slots at the engine",
                "short",
                [(f"sum(shmring_engine_ring_slots_{state})", state) for state in ("published", "claimed", "draining")],
            ),
            (
                "Peers",
                "short",
                [
                    ("sum(shmring_engine_ring_clients)", "frontends"),
                    ("sum(shmring_engine_ring_workers)", "workers"),
                    ("sum(shmring_engine_ring_lease_requests_waiting)", "waiting for memory"),
                    (f"{rate('shmring_engine_ring_protocol_errors_total')}", "protocol errors/s"),
                ],
            ),
        ],
    ),
]

#: Alerts: name, expression, for how long, severity, what it means and what to do.
RULES: list[tuple[str, str, str, str, str]] = [
    (
        "ShmringEngineDown",
        "shmring_engine_up == 0",
        "30s",
        "critical",
        "An engine does not answer. Look at the log for why it ended; with one engine, the server ends with it.",
    ),
    (
        "ShmringEngineStuck",
        "shmring_num_requests_running > 0 and on (instance, engine) rate(shmring_engine_steps_total[2m]) == 0",
        "1m",
        "critical",
        "A step does not end. `shmring inspect NAME` says what is in it; after `kill -USR1 PID`, the log has the stacks.",
    ),
    (
        "ShmringSlabFull",
        'sum by (instance) (increase(shmring_request_failure_total{reason="slab_full"}[5m])) > 0',
        "0s",
        "warning",
        "Requests were refused because no memory came free in the slab. The log says who holds it; raise --slab-nbytes.",
    ),
    (
        "ShmringSlabTight",
        "shmring_engine_ring_lease_requests_waiting > 0",
        "5m",
        "warning",
        "Frontends have waited for memory for five minutes. `shmring top NAME` says who holds it; raise --slab-nbytes.",
    ),
    (
        "ShmringMemoryQuarantined",
        "shmring_engine_ring_quarantined_nbytes > 0",
        "10m",
        "warning",
        "A frontend has disconnected, but its process lives and keeps memory. End the process that `shmring inspect` names.",
    ),
    (
        "ShmringRequestsFail",
        'sum by (instance) (rate(shmring_http_requests_total{status=~"5.."}[5m]))'
        " / sum by (instance) (rate(shmring_http_requests_total[5m])) > 0.05",
        "5m",
        "critical",
        "More than a twentieth of the requests fail by the server's fault. shmring_request_failure_total has the reasons.",
    ),
    (
        "ShmringQueueLong",
        "histogram_quantile(0.9, sum by (instance, le) (rate(shmring_request_queue_time_seconds_bucket[5m]))) > 10",
        "5m",
        "warning",
        "A tenth of the requests wait for the engine for more than ten seconds. Add engines, or let fewer requests in.",
    ),
    (
        "ShmringDecodersBusy",
        "shmring_frontend_decoder_waiting_seconds > 5",
        "2m",
        "warning",
        "Media wait for a decoder for more than five seconds, and /ready fails. Raise --decoders or --api-server-count.",
    ),
    (
        "ShmringLoopLate",
        "shmring_frontend_loop_lag_seconds > 0.5 or shmring_engine_loop_lag_seconds > 0.5",
        "1m",
        "warning",
        "The loop of a process is held up for half a second or more: all its requests wait. Look for what takes its time.",
    ),
    (
        "ShmringProtocolErrors",
        "increase(shmring_engine_ring_protocol_errors_total[5m]) > 0",
        "0s",
        "warning",
        "A frontend broke the rules of the protocol, and its connection was closed. The log says which one and how.",
    ),
    (
        "ShmringLogDropped",
        "increase(shmring_log_lines_dropped_total[5m]) > 0 or increase(shmring_engine_log_lines_dropped_total[5m]) > 0",
        "0s",
        "warning",
        "Lines of the log were dropped: nobody reads it, or the disk is full. Requests are answered as before.",
    ),
]


def expressions() -> Iterator[str]:
    """All expressions of the dashboard, with a range of one minute, and of the alerts."""
    for _, panels in PANELS:
        for _, _, targets in panels:
            yield from (expression.replace(_WINDOW, "1m") for expression, _ in targets)
    yield from (rule[1] for rule in RULES)


def make_dashboard() -> str:
    """Returns the dashboard's text."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in PANELS:
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for position, (name, unit, targets) in enumerate(row):
            panels.append(
                {
                    "type": "timeseries",
                    "title": name,
                    "id": len(panels) + 1,
                    "datasource": source,
                    "gridPos": {"x": position % 3 * 8, "y": y + position // 3 * 7, "w": 8, "h": 7},
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
                    "targets": [
                        {"refId": chr(65 + number), "expr": expression, "legendFormat": legend}
                        for number, (expression, legend) in enumerate(targets)
                    ],
                }
            )
        y += (len(row) + 2) // 3 * 7
    dashboard: dict[str, Any] = {
        "title": "shmring",
        "uid": "shmring",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]},
    }
    rows = ",\n".join(map(json.dumps, panels))
    return f'{json.dumps(dashboard)[:-1]}, "panels": [\n{rows}\n]}}\n'


def make_alerts() -> str:
    """Returns the text of the alerts."""
    lines = ["# Made by docs/make_monitoring.py", "groups:", "- name: shmring", "  rules:"]
    for name, expression, duration, severity, text in RULES:
        lines += [f"  - alert: {name}", f"    expr: {json.dumps(expression)}", f"    for: {duration}"]
        lines += [f"    labels: {{severity: {severity}}}", "    annotations:", f"      summary: {json.dumps(text)}"]
        lines.append(f"      runbook_url: {json.dumps(f'{RUNBOOK}#{name.lower()}')}")
    return "\n".join(lines) + "\n"


def check_names() -> None:
    """Raises LookupError if an expression has a name that no number has."""
    unknown = {name for text in expressions() for name in re.findall(r"\bshmring_\w+", text)} - _NAMES
    if unknown:
        raise LookupError(f"no number is called {', '.join(sorted(unknown))}")


if __name__ == "__main__":
    check_names()
    DASHBOARD.write_text(make_dashboard())
    ALERTS.write_text(make_alerts())
