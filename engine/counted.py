"""The table of an engine's numbers, wherever they are shown: in ``GET /metrics``, on docs/reference.md, in a Ray cluster.

Where a number has vLLM's meaning, it has vLLM's name with our prefix. The bounds of histograms are our own: many answers take a
few milliseconds here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from shmring.engine.spending import MEANINGS
from shmring.service.distributions import Distribution

__all__ = ["OF_ENGINES", "Counted", "EngineNumbers"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True)
class Counted:
    """A number.

    Attributes:
        name: in Prometheus; a counter's ends with ``_total`` besides.
        kind: counters count up from a start, gauges have the present value.
        unit: the unit of the number; "s" is seconds.
        text: its meaning, in Markdown.
        source: where it is read from: the name of a record, a dot and a field. "http", "answers", "keys" and "process" are
            counted by this frontend, "intake" by its media, "client" by its end of a ring; "engine", "ring" and "times" come
            from an engine. Empty: it is known when it is asked for.
        labels: names of its labels. The field is then a dictionary, from labels to values; of an engine, that is flat (see
            :class:`EngineNumbers`), and there is one label.
        across_frontends: how a gauge's values of several frontends are combined.
    """

    name: str
    kind: Kind
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


@dataclasses.dataclass(frozen=True, slots=True)
class EngineNumbers:
    """What an engine says of itself at one moment.

    Attributes:
        counts: its counts by name; those of its ring begin with ``ring_``. A colon and the value of a label
            may follow.
        times: how long the parts of requests took, by name.
    """

    counts: Mapping[str, float]
    times: Mapping[str, Distribution]

    def of(self, counted: Counted) -> float | Distribution | dict[str, float] | None:
        """Returns a number, by label if it has one; None if the engine does not say it."""
        source, _, field = counted.source.partition(".")
        if counted.labels:
            names = (name.partition(":") for name in self.counts)
            values = {label: self.counts[f"{name}:{label}"] for name, colon, label in names if colon and name == field}
            return values or None
        if source == "times":
            return self.times.get(field)
        return self.counts.get(f"ring_{field}" if source == "ring" else field) if source else 1.0


# Fields of :class:`shmring.engine.metrics.EngineMetrics` and :class:`shmring.RingStatistics`: kind, unit, meaning.
_ENGINE: tuple[tuple[str, Kind, str, str], ...] = (
    ("steps", "counter", "steps", "executed"),
    (
        "step_requests",
        "counter",
        "requests",
        "in those steps, each counted once for each step; divided by `steps`, the mean batch",
    ),
    ("step_seconds", "counter", "s", "spent in steps"),
    ("finished_requests", "counter", "requests", "answered"),
    ("failed_requests", "counter", "requests", "that the executor refused or failed"),
    ("refused_requests", "counter", "requests", "that never got in line: too many waited, or they made no sense"),
    ("timed_out_requests", "counter", "requests", "whose deadline passed"),
    ("loop_lag_seconds", "gauge", "s", "how late the engine's loop was at most in the last 15 to 30 s"),
    ("log_lines_dropped", "counter", "lines", "of the engine's log that nobody read, or that could not be written"),
)

_RING: tuple[tuple[str, Kind, str, str], ...] = (
    ("slab_nbytes", "gauge", "bytes", "the whole slab"),
    ("shm_nbytes", "gauge", "bytes", "of the slab that lie in `/dev/shm`; the rest lies in memfds. 0: all of it"),
    ("leasable_nbytes", "gauge", "bytes", "the part of it that is leased out; free, leased, quarantined and kept add up to it"),
    ("free_nbytes", "gauge", "bytes", "of the leasable part, lent to nobody"),
    ("leased_nbytes", "gauge", "bytes", "lent to frontends"),
    ("quarantined_nbytes", "gauge", "bytes", "of frontends that disconnected but whose process lives"),
    ("clients", "gauge", "frontends", "connected now"),
    ("departed_clients", "gauge", "frontends", "gone, of which something is still quarantined or being read"),
    ("lease_requests_waiting", "gauge", "frontends", "that wait for a lease"),
    ("waiting", "gauge", "requests", "not yet claimed"),
    ("running", "gauge", "requests", "claimed, and not ended"),
    ("slots_published", "gauge", "slots", "submitted, their request not yet claimed"),
    ("slots_claimed", "gauge", "slots", "of claimed requests"),
    ("slots_draining", "gauge", "slots", "released, but kept by living views: a handler or executor still has tensors"),
    ("slots_in_use", "gauge", "slots", "in one of these three states"),
    ("reply_nbytes", "gauge", "bytes", "the part of the slab kept for replies"),
    ("reply_free_nbytes", "gauge", "bytes", "of it, free"),
    ("replies_waiting", "gauge", "replies", "that wait for space in it"),
    ("submitted", "counter", "requests", "that came"),
    ("finished", "counter", "requests", "that ended well"),
    ("failed", "counter", "requests", "that ended with an error"),
    ("aborted", "counter", "requests", "that their frontend gave up, or left"),
    ("replies", "counter", "replies", "sent"),
    ("reply_copies", "counter", "tensors", "copied into replies"),
    ("reply_copied_nbytes", "counter", "bytes", "of those"),
    ("received_nbytes", "counter", "bytes", "of slots taken over from frontends"),
    ("late_aborts", "counter", "messages", "that aborted a request which had ended: they crossed"),
    ("stale_releases", "counter", "messages", "that gave a reply slot back once more"),
    ("protocol_errors", "counter", "connections", "closed because their frontend broke the rules"),
    ("refused", "counter", "connections", "refused in the handshake"),
    ("reclaimed_nbytes", "counter", "bytes", "taken back from frontends that had gone"),
    ("kept", "gauge", "contents", "kept to be sent again"),
    ("kept_nbytes", "gauge", "bytes", "of the slab that those take"),
    ("kept_pinned", "gauge", "contents", "of those that are in use; the memory of the others is free for requests"),
    ("kept_pinned_nbytes", "gauge", "bytes", "of the slab that those in use take"),
    ("kept_capacity_nbytes", "gauge", "bytes", "that may be kept"),
    ("kept_hits", "counter", "lookups", "of content that was there"),
    ("kept_misses", "counter", "lookups", "of content that was not"),
    ("kept_evictions", "counter", "contents", "that have gone because their memory was wanted"),
    ("pinned_nbytes", "gauge", "bytes", "of the slab that are registered with CUDA: all or nothing"),
    ("pin_seconds", "gauge", "s", "that registering them took"),
    ("device_copies", "counter", "requests", "copied to a GPU"),
    ("device_copied_nbytes", "counter", "bytes", "of those, small gaps between tensors included"),
    (
        "device_slab_nbytes",
        "gauge",
        "bytes",
        "the device slab; 0 if there is none. It is in none of the sizes above, but its slots are",
    ),
    ("device_slab_free_nbytes", "gauge", "bytes", "of the device slab, lent to nobody"),
    ("device_slab_leased_nbytes", "gauge", "bytes", "of the device slab, lent to frontends"),
    (
        "device_slab_quarantined_nbytes",
        "gauge",
        "bytes",
        "of the device slab, of frontends that disconnected but whose process lives",
    ),
    ("device_slots_in_use", "gauge", "slots", "of the device slab that the engine holds in any state"),
    ("device_slots_lost", "gauge", "slots", "of the device slab, kept for good because CUDA failed to say when they are free"),
    ("device_fences", "gauge", "events", "of frontends that are open in the engine's process"),
    ("workers", "gauge", "workers", "that get messages; in the record itself, one record for each worker, see below"),
    ("broadcasts", "counter", "messages", "sent to workers without waiting for replies, shared claims included"),
    ("gathers", "counter", "messages", "sent to workers, whose replies were waited for"),
    ("broadcasts_outstanding", "gauge", "messages", "that some worker has not left"),
    ("broadcast_nbytes", "gauge", "bytes", "reserved for what is copied to workers; 0 before the first one joins"),
    ("broadcast_free_nbytes", "gauge", "bytes", "of those, free"),
    ("broadcast_copied_nbytes", "counter", "bytes", "of tensors that were copied for workers"),
    ("broadcast_in_place_nbytes", "counter", "bytes", "of tensors that were sent to workers from where they were"),
    ("late_answers", "counter", "messages", "of workers: replies for which no gather waited any more"),
)

_PARTS = ", ".join(f"`{part}` ({what})" for part, what in MEANINGS.items())

#: The numbers of an engine.
OF_ENGINES = (
    Counted("shmring_engine_up", "gauge", "0 or 1", "whether the engine answers; the numbers below are there only if it does"),
    Counted(
        "shmring_request_queue_time_seconds", "histogram", "s", "from arrival in the engine to the first step", "times.queue"
    ),
    Counted(
        "shmring_request_prefill_time_seconds",
        "histogram",
        "s",
        "from the first step to the first part of the answer",
        "times.prefill",
    ),
    Counted(
        "shmring_request_decode_time_seconds",
        "histogram",
        "s",
        "from the first part of the answer to the last, of answers in text",
        "times.decode",
    ),
    Counted("shmring_step_time_seconds", "histogram", "s", "time of a step", "times.step"),
    Counted(
        "shmring_prompt_tokens",
        "counter",
        "tokens",
        "of requests that were answered, as far as the executor says them",
        "engine.prompt_tokens",
    ),
    Counted("shmring_generation_tokens", "counter", "tokens", "of answers", "engine.generated_tokens"),
    Counted(
        "shmring_engine_spent_seconds",
        "counter",
        "s",
        f"that steps, and what is done beside them, took by `part`: {_PARTS}",
        "engine.spent_seconds",
        labels=("part",),
    ),
    Counted(
        "shmring_engine_caller_seconds",
        "counter",
        "s",
        "that requests took, of steps and beside them, by `key`, the name of its owner; of keys that have one",
        "engine.caller_seconds",
        labels=("key",),
    ),
    Counted("shmring_num_requests_waiting", "gauge", "requests", "that wait for a step now", "engine.waiting_requests"),
    Counted("shmring_num_requests_running", "gauge", "requests", "in the running step now", "engine.running_requests"),
    *(Counted(f"shmring_engine_{field}", kind, unit, text, f"engine.{field}") for field, kind, unit, text in _ENGINE),
    *(Counted(f"shmring_engine_ring_{field}", kind, unit, text, f"ring.{field}") for field, kind, unit, text in _RING),
)
