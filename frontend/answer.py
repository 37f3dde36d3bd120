"""What an engine answers to a request, piece by piece, and what the headers of that say: nothing here knows of any API."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Self

import shmring
from shmring.core.loggers import logger_of
from shmring.engine.protocol import GenerateReply, Medium, ModelDescription, Waveform, tensor_of
from shmring.frontend.callers.key_usage import running_usage
from shmring.frontend.http.parsing import MAX_IGNORED
from shmring.frontend.operator.metrics import AnswerStatistics
from shmring.service.tracing import note

__all__ = ["Answer", "Facts", "ignoring", "unfinished"]

logger = logger_of("shmring.frontend.answer")

_MAX_TOLD = 8  # media of which a header says what is missing: 2 KB, a quarter of what proxies take for all headers


@dataclasses.dataclass(slots=True)
class Facts:
    """What the headers of an answer say of it.

    Attributes:
        synthetic: whether it is made up.
        max_model_len: tokens of prompt and answer together, if the model has such a limit.
        slab_nbytes: bytes of tensors that crossed through the slab.
        shortfalls: what of the request's media was damaged or missing, for its caller.
        copies: tensors that this process copied for sending while a request with media was sent. Exact if it was alone, and
            otherwise an upper bound: the ring's client counts for all requests together.
        sound_s: how long its recordings are, in seconds.
        ignored: parts of the request that have no effect with this model, as its caller calls them.
    """

    synthetic: bool
    max_model_len: int | None = None
    slab_nbytes: int = 0
    shortfalls: str = ""
    copies: int = 0
    sound_s: float = 0.0
    ignored: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, media: Sequence[Medium], description: ModelDescription) -> Facts:
        """Returns what is known before the answer, of a request's media."""
        slab_nbytes = sum(tensor_of(medium).nbytes for medium in media)
        sound_s = sum(len(medium.samples) / medium.sample_rate for medium in media if isinstance(medium, Waveform))
        texts = [f"{number} of {len(media)}: {medium.shortfall}" for number, medium in enumerate(media, 1) if medium.shortfall]
        more = [f"and of {len(texts) - _MAX_TOLD} more"] if len(texts) > _MAX_TOLD else []
        shortfalls = " | ".join([*texts[:_MAX_TOLD], *more])
        return cls(description.synthetic, description.max_model_len, slab_nbytes, shortfalls, sound_s=sound_s)

    def headers(self, ignored: Sequence[str], *, has_costs: bool) -> dict[str, str]:
        """Returns the headers.

        Args:
            ignored: further parts of the request that were ignored.
            has_costs: whether they say what the answer has cost. It is known of an answer that is whole.
        """
        headers = ignoring([*ignored, *self.ignored])
        if has_costs:
            headers |= {"x-shmring-slab-bytes": str(self.slab_nbytes), "x-shmring-copies": str(self.copies)}
        if self.synthetic:
            headers["x-shmring-synthetic"] = "true"
        if self.shortfalls:
            headers["x-shmring-media-shortfall"] = self.shortfalls
        return headers


def ignoring(names: Sequence[str]) -> dict[str, str]:
    """Returns the header that names parts of a request that were ignored, if there are any; the log says so as well."""
    if not names:
        return {}
    text = ", ".join(names[:MAX_IGNORED])
    logger.warning("parts of a request that have no meaning here were ignored: %s", text)
    return {"x-shmring-ignored-fields": text}


def unfinished() -> shmring.RemoteError:
    """Returns the error of an answer that ends too early, by an executor's bug."""
    return shmring.RemoteError("NoReply", "the engine ended the answer without saying why")


class Answer:
    """An answer that has begun. Close it, or read it to its end: each of its parts then has said why it ended.

    Attributes:
        count: of answers, to all prompts of the request.
        prompt_tokens, completion_tokens: so far. A prompt, which several answers have in common, counts once.
        facts: about it.
    """

    def __init__(
        self,
        count: int,
        prompts: int,
        first: GenerateReply,
        others: AsyncGenerator[GenerateReply, None],
        facts: Facts,
        arrived_at: float,
        statistics: AnswerStatistics,
    ) -> None:
        self.count = count
        self.prompt_tokens = self.completion_tokens = 0
        self._prompts = prompts
        self._first: GenerateReply | None = first
        self._last = first
        self._pieces: dict[int, GenerateReply] = {}  # the last one of each answer, by index
        self._others = others
        self._arrived_at = arrived_at
        self._first_at = first.first_at or time.monotonic()
        self._last_at: dict[int, float] = {}
        self._statistics = statistics
        self.facts = facts
        self._count(first, len(first.token_ids))
        statistics.first_token.add(self._first_at - arrived_at)
        note("gen_ai.latency.time_to_first_token", self._first_at - arrived_at)

    def __aiter__(self) -> Self:
        """Iterates over all pieces, the first one included; once."""
        return self

    async def __anext__(self) -> GenerateReply:
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            self._last = last = await anext(self._others)
        except StopAsyncIteration:
            self._end()
            raise
        self._count(last)
        return last

    def _count(self, piece: GenerateReply, without: int = 0) -> None:
        """Counts the tokens of a piece, and the times between them, but for so many that have none before them."""
        if not 0 <= piece.index < self.count:
            text = f"the engine answers {piece.index}, where it was asked for {self.count} answers"
            raise shmring.RemoteError("NoReply", text)
        now, before = time.monotonic(), self._last_at.get(piece.index, self._first_at)
        if piece.first_at:
            before, without = piece.first_at, 1
        if (count := len(piece.token_ids) - without) > 0:
            self._statistics.inter_token.add((now - before) / count, count)
        self._last_at[piece.index] = now
        self._pieces[piece.index] = piece

    def _end(self) -> None:
        if len(self._pieces) < self.count or any(piece.finish_reason is None for piece in self._pieces.values()):
            raise unfinished()
        self._count_tokens()
        last = self._last
        seconds = self._last_at[last.index] - self._arrived_at
        self._statistics.success[str(last.finish_reason),] += 1
        self._statistics.whole.add(seconds)
        note("gen_ai.latency.e2e", seconds)

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended."""
        await self._others.aclose()
        if self._pieces:
            self._count_tokens()

    def _count_tokens(self) -> None:
        """Counts them, for the key as well, once; also if the caller hung up, as far as the engine has sent them."""
        pieces, self._pieces = self._pieces, {}
        of_prompts = {index * self._prompts // self.count: piece.prompt_tokens for index, piece in pieces.items()}
        self.prompt_tokens = sum(of_prompts.values())
        self.completion_tokens = sum([piece.completion_tokens for piece in pieces.values()])
        if (usage := running_usage()) is not None:
            usage.count_tokens(self.prompt_tokens, self.completion_tokens)
