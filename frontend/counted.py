"""The table of a frontend's numbers. ``/metrics`` and the page docs/metrics.md are made from it.

The engine's numbers are in its own records (:mod:`shmring.engine.metrics`, :mod:`shmring.statistics`).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

__all__ = ["COUNTED", "Counted"]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A number.

    Attributes:
        name: in Prometheus; a counter's ends with ``_total`` besides.
        kind: counters count up from a start, gauges have the present value.
        unit: the unit of the number; "s" is seconds.
        text: its meaning, in Markdown.
        source: the field of statistics that it is read from, behind "client." (of an engine) or "intake." (of media). Empty: it
            is counted where it happens.
        labels: names of its labels.
        across_frontends: how a gauge's values of several frontends are combined.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    source: str = ""
    labels: tuple[str, ...] = ()
    across_frontends: Literal["livesum", "livemax"] = "livesum"

    @property
    def exposed_name(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def help(self) -> str:
        """Unit and text as a sentence, for Prometheus."""
        text = re.sub(r" \(\[.*?\]\(.*?\)\)|`", "", self.text)
        sentence = text if self.unit in ("s", "0 or 1") else f"{self.unit} {text}"
        return f"{sentence[0].upper()}{sentence[1:]}."


COUNTED = (
    Counted("shmring_http_in_flight", "gauge", "requests", "being answered, those that wait for their turn included"),
    Counted(
        "shmring_http_requests",
        "counter",
        "requests",
        "answered, by `route` and `status`; 499 are those that hung up",
        labels=("route", "status"),
    ),
    Counted(
        "shmring_http_request_seconds",
        "histogram",
        "s",
        "time to answer, by `route`; a stream counts until its end",
        labels=("route",),
    ),
    Counted("shmring_http_aborted", "counter", "requests", "hung up, or stopped reading, before their answer was complete"),
    Counted(
        "shmring_http_broken_streams",
        "counter",
        "streams",
        "ended with an error after they had begun, by its `code`; their status was 200 by then",
        labels=("code",),
    ),
    Counted("shmring_frontend_slab_bytes", "counter", "bytes", "of slots handed to the engine", "client.slot_nbytes_submitted"),
    Counted("shmring_frontend_copies", "counter", "tensors", "copied for sending", "client.copies"),
    Counted("shmring_frontend_copied_bytes", "counter", "bytes", "of tensors copied for sending", "client.copied_nbytes"),
    Counted(
        "shmring_frontend_in_place",
        "counter",
        "tensors",
        "sent from where they were in the slab, without a copy",
        "client.in_place",
    ),
    Counted("shmring_frontend_reconnections", "counter", "engines", "attached to after the first", "client.reconnections"),
    Counted(
        "shmring_frontend_kept_hits",
        "counter",
        "lookups",
        "of prepared media that found them: neither decoded nor copied",
        "client.kept_hits",
    ),
    Counted("shmring_frontend_kept_misses", "counter", "lookups", "of prepared media that found nothing", "client.kept_misses"),
    Counted("shmring_frontend_media_decoded", "counter", "media", "decoded", "intake.decoded"),
    Counted(
        "shmring_frontend_media_passed_over",
        "counter",
        "media",
        "decoded and not kept, since callers send more in turn than can be kept "
        "([why](kept-content.md#when-more-is-sent-than-can-be-kept))",
        "intake.passed_over",
    ),
    Counted("shmring_frontend_kept_pins", "gauge", "media", "that the engine keeps and frontends use now", "client.kept_pins"),
    Counted("shmring_frontend_slots_in_use", "gauge", "slots", "in any state but free", "client.slots_in_use"),
    Counted("shmring_frontend_slots_draining", "gauge", "slots", "left, of which views live", "client.slots_draining"),
    Counted(
        "shmring_frontend_leased_bytes", "gauge", "bytes", "of the slab that frontends have leased", "client.leased_nbytes"
    ),
    Counted("shmring_frontend_slot_waiters", "gauge", "requests", "that wait for space in the slab", "client.waiting"),
    Counted(
        "shmring_frontend_decoders",
        "gauge",
        "processes",
        "that frontends may have for decoding media, together",
        "intake.decoders.total",
    ),
    Counted(
        "shmring_frontend_decoders_free",
        "gauge",
        "processes",
        "of these, those that nobody uses, started or not",
        "intake.decoders.free",
    ),
    Counted("shmring_frontend_decoder_waiters", "gauge", "media", "that wait for a decoder", "intake.decoders.waiting"),
    Counted(
        "shmring_frontend_decoder_waiting_seconds",
        "gauge",
        "s",
        "how long the first of them has waited; of several frontends, the longest time",
        "intake.decoders.waiting_s",
        across_frontends="livemax",
    ),
    Counted(
        "shmring_frontend_decoded_bytes",
        "gauge",
        "bytes",
        "taken by requests whose media are decoded, or being decoded, and not in the slab yet",
        "intake.decoded_nbytes",
    ),
    Counted("shmring_frontend_decoded_waiters", "gauge", "requests", "that wait for such memory", "intake.decoded_waiting"),
    Counted("shmring_engine_up", "gauge", "0 or 1", "whether the engine answers; the numbers below are there only if it does"),
)
