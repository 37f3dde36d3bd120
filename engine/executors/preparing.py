"""What is prepared for requests before steps can begin with them: forms, tokens of texts, what a model makes of media.

How a request is prepared stands in one function, a generator, which yields whatever the request waits for: a job of a thread,
or a later step. Steps go on meanwhile.

Short texts are made into tokens within a step, as many as take some ten milliseconds, and less of one owner's in a step that
others are in; further requests come again. Media have a thread of their own, and so do long texts. Both do one piece of work
after the other. A request has one piece of work at a time, so those of others come between. Both are shared by owner
(:mod:`.shared_threads`).

Invariant: a request that has ended leaves nothing behind: the queue of a thread does not keep what it was to prepare.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from shmring.engine.executors.shared_threads import Job, SharedThreads, summed

__all__ = ["FORMS", "LATER", "LOOKING_S", "MEDIA", "TEXTS", "Preparing", "Stage", "Stages", "awaited", "is_long", "thread_for"]

_Result = TypeVar("_Result")
_Prepared = TypeVar("_Prepared")

#: The threads.
MEDIA, TEXTS = "media", "texts"

#: What the time of stages is spent on.
FORMS, PREPARING = "forms", "preparing"

#: A text of more characters is made into tokens beside steps. Those of a step have no more together, which take some ten
#: milliseconds.
_LONG_CHARACTERS = 16 << 10

# What the prompts of one owner may have together in a step that others are in, which takes some four milliseconds; and as how
# many a prompt counts at least, since reading it costs something, however short it is.
_SHARED_CHARACTERS = 6 << 10
_LEAST_CHARACTERS = 1536

#: A step with nothing to do waits so long for something that is being prepared. Requests that come wait, too.
LOOKING_S = 0.01


def is_long(characters: int) -> bool:
    """Whether a text, or several, are too long for a step."""
    return characters > _LONG_CHARACTERS


def thread_for(characters: int, *, has_media: bool) -> str | None:
    """Returns which thread prepares something; None: it is prepared within a step."""
    if has_media:
        return MEDIA
    return TEXTS if is_long(characters) else None


class Stage(NamedTuple):
    """What a request waits for.

    Attributes:
        job: of a thread; None: for a later step.
        part: what its time is spent on.
        keeps_inputs: whether the request needs its inputs meanwhile, or again.
        pays_first: whether the request goes on in the step after the one in which it has paid for the job: a request that fails
            in a step pays for nothing in it.
    """

    job: Job[Any] | None = None
    part: str = PREPARING
    keeps_inputs: bool = True
    pays_first: bool = False


LATER = Stage()
"""It has no room in this step."""

#: How something is prepared.
Stages: TypeAlias = Generator[Stage, None, _Result]


def awaited(job: Job[_Result], part: str = PREPARING, *, keeps_inputs: bool = True) -> Stages[_Result]:
    """Returns what comes of a job, which nobody else waits for."""
    try:
        yield Stage(job, part, keeps_inputs)
    finally:
        job.cancel()
    return job.result()


@dataclasses.dataclass(slots=True, eq=False)
class _Request(Generic[_Prepared]):
    owner: str
    stages: Stages[_Prepared]
    stage: Stage = LATER


class Preparing(Generic[_Prepared]):
    """What is being prepared. Methods are called from one thread, that of steps, unless they say otherwise."""

    def __init__(self) -> None:
        self.threads = {name: SharedThreads(1, f"shmring-{name}") for name in (MEDIA, TEXTS)}
        self._requests: dict[int, _Request[_Prepared]] = {}
        self._seconds: dict[int, dict[str, float]] = {}  # that requests have not paid for, by part
        self._characters = 0  # of texts that this step has made into tokens
        self._characters_of = Counter[str]()  # of them, by owner, as they count in a step that others are in
        self._owners: Collection[str] = ()

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def begin_step(self, owners: Collection[str] = ()) -> None:
        """A step may make texts into tokens again.

        Args:
            owners: who has requests in it.
        """
        self._characters = 0
        self._characters_of.clear()
        self._owners = owners

    def begin(self, request_id: int, owner: str, stages: Stages[_Prepared]) -> None:
        """Has something prepared for a request, for which nothing else is."""
        self._requests[request_id] = _Request(owner, stages)

    def take(self, request_id: int) -> _Prepared | None:
        """Goes on with a request; returns what was prepared for it, or None if that is not ready.

        Raises:
            Exception: a stage has raised it; nothing is being prepared any more.
        """
        if (request := self._requests.get(request_id)) is None:
            return None
        try:
            while not self._waits(request_id, request):
                request.stage = next(request.stages)
                if request.stage.job is None:
                    break
        except StopIteration as stopped:
            del self._requests[request_id]
            prepared: _Prepared = stopped.value
            return prepared
        except BaseException:
            del self._requests[request_id]
            raise
        return None

    def _waits(self, request_id: int, request: _Request[_Prepared]) -> bool:
        stage = request.stage
        if stage.job is None or not stage.job.done():
            return stage.job is not None
        seconds = stage.job.take_seconds(request.owner)
        parts = self._seconds.setdefault(request_id, {})
        parts[stage.part] = parts.get(stage.part, 0.0) + seconds
        return stage.pays_first and seconds > 0

    def stage_of(self, request_id: int) -> Stage | None:
        """Returns what a request waits for; None: nothing is prepared for it. From any thread."""
        request = self._requests.get(request_id)
        return None if request is None else request.stage

    def room_for(self, owner: str, characters: int) -> Stages[None]:
        """Waits for a step that has room for so many characters of an owner besides: for the first ones, in any."""
        counted = max(characters, _LEAST_CHARACTERS)
        while not self._has_room(owner, characters, counted):
            yield LATER
        self._characters += characters
        self._characters_of[owner] += counted

    def _has_room(self, owner: str, characters: int, counted: int) -> bool:
        if self._characters and is_long(self._characters + characters):
            return False
        before = self._characters_of[owner]
        is_shared = any(other != owner for other in self._owners)
        return not (is_shared and before and before + counted > _SHARED_CHARACTERS)

    def on_thread(self, name: str, owner: str, work: Callable[[], _Result], *, keeps_inputs: bool = True) -> Stages[_Result]:
        """Has a thread do some work.

        Args:
            name: of the two, which.
            owner: of the request.
            work: keeps nothing else alive that is needed only for that.
            keeps_inputs: as of :class:`Stage`.
        """
        return awaited(self.threads[name].submit(owner, work), keeps_inputs=keeps_inputs)

    def take_seconds(self, request_id: int) -> Mapping[str, float]:
        """Returns how many seconds of threads a request has taken, beside steps, since this was asked last, by part."""
        return self._seconds.pop(request_id, {})

    def working_s(self) -> dict[str, float]:
        """Returns how long work of the two threads that has not ended takes already, by owner. From any thread."""
        return summed(threads.working_s() for threads in self.threads.values())

    def wait(self, request_ids: Iterable[int]) -> None:
        """Waits a little until one of the requests can go on."""
        stages = [self._requests[request_id].stage for request_id in request_ids if request_id in self._requests]
        jobs = [stage.job for stage in stages if stage.job is not None]
        concurrent.futures.wait(jobs, LOOKING_S, concurrent.futures.FIRST_COMPLETED)

    def forget(self, request_id: int) -> None:
        """A request has ended; what only it was waiting for, and was not begun, is not done."""
        if (request := self._requests.pop(request_id, None)) is not None:
            request.stages.close()
        self._seconds.pop(request_id, None)

    def close(self) -> None:
        """All requests have ended. The threads go with this object."""
        for request_id in [*self._requests]:
            self.forget(request_id)
