"""Sends media with the official ``openai`` client, and reads the server's counters."""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from shmring.frontend.demo.media import Sample

__all__ = ["COPIES", "DECODED", "IN_PLACE", "IN_USE", "SLAB_BYTES", "Answer", "Chat", "Client"]

SLAB_BYTES = "shmring_frontend_slab_bytes_total"
COPIES = "shmring_frontend_copies_total"
IN_PLACE = "shmring_frontend_in_place_total"
DECODED = "shmring_frontend_media_decoded_total"
IN_USE = ("shmring_frontend_slots_in_use", "shmring_engine_ring_slots_in_use")

_SETTLE_TIMEOUT_S = 5.0
_METRICS_AGE_S = 1.3  # the age of an answer, and what the numbers of other frontends may be older
_PART_TYPES = {"picture": "image_url", "recording": "audio_url", "video": "video_url"}


@dataclasses.dataclass(slots=True)
class Answer:
    """The result of one request for an embedding, and its cost."""

    embedding: NDArray[np.float64]
    slab_nbytes: int
    copies: int
    milliseconds: float


@dataclasses.dataclass(slots=True)
class Chat:
    """One streamed answer, and its cost."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    slab_nbytes: int
    copies: int
    first_token_ms: float
    total_ms: float


class Client:
    """A client of a server, one request at a time, so that the counters' differences are that request's."""

    def __init__(self, url: str) -> None:
        import openai  # which takes a second

        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none is needed")
        self._metrics_url = f"{url}/metrics"
        self._model: str = self._client.models.list().data[0].id

    @property
    def model(self) -> str:
        """What the server says it serves."""
        return self._model

    def embed(self, sample: Sample) -> Answer:
        """Has a medium embedded, and measures."""
        messages = [{"role": "user", "content": [_part(sample)]}]
        started = time.perf_counter()
        create = self._client.embeddings.with_raw_response.create
        response = create(model=self._model, input=[], extra_body={"messages": messages})
        elapsed_s = time.perf_counter() - started
        slab_nbytes, copies = (int(response.headers[f"x-shmring-{name}"]) for name in ("slab-bytes", "copies"))
        return Answer(np.array(response.parse().data[0].embedding), slab_nbytes, copies, elapsed_s * 1000)

    def chat(self, question: str, samples: Sequence[Sample], max_tokens: int, show: Callable[[str], object]) -> Chat:
        """Asks about media; each piece of the answer is shown as it comes."""
        content = [{"type": "text", "text": question}, *(_part(sample) for sample in samples)]
        before = self.counters()
        started = time.perf_counter()
        first_s = 0.0
        text, usage = "", (0, 0)
        for chunk in self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.usage is not None:
                usage = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first_s = first_s or time.perf_counter() - started
                text += piece
                show(piece)
        total_s = time.perf_counter() - started
        after = self.settled()
        return Chat(
            text,
            *usage,
            int(after[SLAB_BYTES] - before[SLAB_BYTES]),
            int(after[COPIES] - before[COPIES]),
            first_s * 1000,
            total_s * 1000,
        )

    def counters(self) -> dict[str, float]:
        """Reads the server's numbers, all frontends together, as they are now: an answer may be a second old."""
        time.sleep(_METRICS_AGE_S)
        text = self._client.get(self._metrics_url, cast_to=str)
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def settled(self) -> dict[str, float]:
        """Reads the counters once the slab is empty."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            counters = self.counters()
            if time.monotonic() > deadline or not any(counters[name] for name in IN_USE):
                return counters


def _part(sample: Sample) -> dict[str, Any]:
    kind = _PART_TYPES[sample.kind]
    url = f"data:{sample.media_type};base64,{base64.b64encode(sample.file).decode('ascii')}"
    return {"type": kind, kind: {"url": url}}
