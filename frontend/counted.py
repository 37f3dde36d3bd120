"""The table of all numbers of a server. ``/metrics`` and the page docs/metrics.md are made from it.

Those of its engines stand in a table of their own (``engine/counted.py``).
"""

from __future__ import annotations

from shmring.engine.counted import OF_ENGINES, Counted

__all__ = ["COUNTED", "Counted"]

COUNTED = (
    # -- requests ------------------------------------------------------------------------------------------------------------
    Counted(
        "shmring_http_in_flight",
        "gauge",
        "requests",
        "being answered, those that wait for their turn included",
        "http.in_flight",
    ),
    Counted(
        "shmring_http_requests",
        "counter",
        "requests",
        "answered, by `route` and `status`; 499 are those that hung up",
        "http.requests",
        labels=("route", "status"),
    ),
    Counted(
        "shmring_http_request_seconds",
        "histogram",
        "s",
        "time to answer, by `route`; a stream counts until its end",
        "http.seconds",
        labels=("route",),
    ),
    Counted(
        "shmring_http_aborted",
        "counter",
        "requests",
        "hung up, or stopped reading, before their answer was complete",
        "http.aborted",
    ),
    Counted(
        "shmring_http_broken_streams",
        "counter",
        "streams",
        "ended with an error after they had begun, by its `code`; their status was 200 by then",
        "http.broken_streams",
        labels=("code",),
    ),
    Counted(
        "shmring_request_success",
        "counter",
        "requests",
        "for answers and embeddings that succeeded, by `finished_reason`: `stop`, `length`; embeddings count as `stop`",
        "answers.success",
        labels=("finished_reason",),
    ),
    Counted(
        "shmring_request_failure",
        "counter",
        "requests",
        "that failed, broken streams included, by `route` and `reason`: the `code` of the error",
        "http.failures",
        labels=("route", "reason"),
    ),
    Counted(
        "shmring_key_requests",
        "counter",
        "requests",
        "of keys that have an owner ([limits](operations.md#keys-and-their-limits)), by `key`, its name, and `status`",
        "http.key_requests",
        labels=("key", "status"),
    ),
    Counted(
        "shmring_key_refusals",
        "counter",
        "requests",
        "that a limit of their key refused, by `key` and `limit`",
        "keys.refused",
        labels=("key", "limit"),
    ),
    Counted("shmring_key_requests_running", "gauge", "requests", "now, by `key`", "keys.running", labels=("key",)),
    Counted(
        "shmring_key_slab_bytes",
        "gauge",
        "bytes",
        "of media that requests have in the slab or wait for, by `key`; kept media are not counted again",
        "keys.slab_nbytes",
        labels=("key",),
    ),
    Counted(
        "shmring_key_prompt_tokens",
        "counter",
        "tokens",
        "of requests that were answered, by `key`",
        "keys.prompt_tokens",
        labels=("key",),
    ),
    Counted(
        "shmring_key_generation_tokens",
        "counter",
        "tokens",
        "of answers, by `key`; of an answer that is not streamed and whose caller hangs up, all but those of the last second",
        "keys.generated_tokens",
        labels=("key",),
    ),
    Counted(
        "shmring_time_to_first_token_seconds",
        "histogram",
        "s",
        "from the end of a request's body to the first part of its answer",
        "answers.first_token",
    ),
    Counted(
        "shmring_inter_token_latency_seconds",
        "histogram",
        "s",
        "between two tokens of an answer; of tokens that came together, the mean",
        "answers.inter_token",
    ),
    Counted(
        "shmring_e2e_request_latency_seconds",
        "histogram",
        "s",
        "from the end of a request's body to the last part of its answer, of requests that succeeded",
        "answers.whole",
    ),
    Counted(
        "shmring_log_lines_dropped",
        "counter",
        "lines",
        "of frontends' logs that nobody read, or that could not be written",
        "process.log_lines_dropped",
    ),
    # -- media ---------------------------------------------------------------------------------------------------------------
    Counted(
        "shmring_media_fetch_seconds",
        "histogram",
        "s",
        "time to fetch a medium from a URL or a file, failures included",
        "intake.fetch",
    ),
    Counted(
        "shmring_media_preparation_seconds",
        "histogram",
        "s",
        "time to decode a medium, the wait for a decoder included, by `kind`: `image`, `audio`, `video`",
        "intake.preparation",
        labels=("kind",),
    ),
    Counted(
        "shmring_slot_wait_seconds",
        "histogram",
        "s",
        "how long requests with new media waited for space in the slab, those that gave up included",
        "intake.slot_wait",
    ),
    # -- a frontend's end of the slab ------------------------------------------------------------------------------------------
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
    *OF_ENGINES,
)
