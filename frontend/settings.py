"""What a frontend process can be told: one frozen object, every limit with its reason."""

from __future__ import annotations

import dataclasses

from frontend.media.image import PictureLimits

__all__ = ["FrontendSettings"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """Limits of one frontend process, and what it calls its model.

    Attributes:
        model_name: what requests must name as ``model``.
        max_concurrent_requests: requests whose body is read, decoded or embedded at a time. A request with a picture of
            12 megapixels takes up to 20 MB before its slot is there, and 50 MB more while it is decoded; the others
            wait in their sockets, where flow control bounds them.
        max_queued_requests: requests that wait for that; further ones are turned away. Each costs a connection and
            up to 320 KB of body that arrived with its header.
        queue_timeout_s: how long they wait. Shorter than the 600 s after which the ``openai`` client gives up.
        body_timeout_s: how long a body may take to arrive, because it keeps others waiting meanwhile.
        slot_timeout_s: how long a request waits for space in the slab.
        request_timeout_s: how long the engine may take with it.
        max_body_nbytes: of a request. 64 MiB hold six pictures of 12 megapixels as JPEG in base64.
        max_pictures: of a request; a slot is acquired for all of them together.
        decode_threads: pictures decoded at a time.
        picture_limits: what a picture may be.
    """

    model_name: str = "shmring-features"
    max_concurrent_requests: int = 8
    max_queued_requests: int = 1024
    queue_timeout_s: float = 300.0
    body_timeout_s: float = 60.0
    slot_timeout_s: float = 30.0
    request_timeout_s: float = 60.0
    max_body_nbytes: int = 64 << 20
    max_pictures: int = 64
    decode_threads: int = 4
    picture_limits: PictureLimits = dataclasses.field(default_factory=PictureLimits)
