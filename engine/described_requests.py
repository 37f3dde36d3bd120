"""What snapshots of an engine say of its requests: whose they are, where they stand, and why they wait; and how others have
ended."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from shmring.core.printable import printable
from shmring.engine.executors.interface import BEING_PREPARED, Executor
from shmring.engine.request import EndedRequest, EngineRequest
from shmring.engine.scheduler import Scheduler

__all__ = ["being_prepared", "describe_ended", "describe_requests", "texts_of"]

_MOST = 64  # in a snapshot
_MOST_ENDED = 32  # the same of those that have ended

# How a request has ended, by the type of its error. Others have failed.
_ENDS = {
    "": "answered",
    "aborted": "left by its caller",
    "TimeoutError": "out of time",
    "OperatorAbortError": "ended by an operator",
    "PausedError": "given up for a pause",
}


def describe_requests(
    scheduler: Scheduler[EngineRequest], stepping: Set[EngineRequest], executor: Executor, now: float, *, is_paused: bool
) -> list[dict[str, Any]]:
    """Returns what there is to say of requests: of those that run, and then of those that wait, in order.

    If there are too many, the first of each owner are told of, then the second of each, and so on: also who has few requests,
    far behind those of others, sees its own.

    Args:
        scheduler: knows them.
        stepping: those in the step.
        executor: may say what these wait for.
        now: time of ``time.monotonic()``.
        is_paused: whether the engine is paused.
    """
    running = [(request, None) for request in scheduler]
    waiting = [(request, place) for place, request in enumerate(scheduler.line(), 1)]
    described = []
    requests = [*running, *waiting]
    for position in _some_of_each([request.owner for request, _ in requests], _MOST):
        request, place = requests[position]
        why = _why_in_line(scheduler, is_paused) if place else _why_not_written(request, stepping, executor)
        state = "waiting" if place else "preparing" if why in BEING_PREPARED else "running" if request in stepping else "paused"
        described.append(
            {
                "client_id": request.claim.client_id,
                "number": request.claim.request_id,
                "name": printable(request.claim.name),
                "owner": request.owner,
                "state": state,
                "place": place,
                "why": why,
                "age_s": round(now - request.arrived_at, 3),
                "prompt_tokens": request.prompt_tokens,
                "tokens": request.tokens,
                "seconds": round(request.seconds, 6),
            }
        )
    return described


def describe_ended(ended: Iterable[EndedRequest], now: float) -> list[dict[str, Any]]:
    """Returns what there is to say of requests that have ended lately, the last one first. If there are too many, the last of
    each owner are told of, then the one before, and so on.

    Args:
        ended: in the order in which they did.
        now: time of ``time.monotonic()``.
    """
    requests = list(ended)[::-1]
    return [
        {
            "ago_s": round(now - request.at, 1),
            "name": printable(request.name),
            "owner": request.owner,
            "end": _ENDS.get(request.error) or f"failed: {printable(request.error)}",
            "age_s": round(request.age_s, 3),
            "prompt_tokens": request.prompt_tokens,
            "tokens": request.tokens,
            "seconds": round(request.seconds, 6),
        }
        for request in map(requests.__getitem__, _some_of_each([request.owner for request in requests], _MOST_ENDED))
    ]


def being_prepared(stepping: Set[EngineRequest], executor: Executor) -> dict[str, Counter[str]]:
    """Returns how many requests of a step wait for what is prepared beside steps, by what that is and by owner."""
    waiting: dict[str, Counter[str]] = {}
    for request in stepping:
        if (what := BEING_PREPARED.get(_why_not_written(request, stepping, executor))) is not None:
            waiting.setdefault(what, Counter())[request.owner] += 1
    return waiting


def texts_of(waiting: Mapping[str, Counter[str]]) -> list[str]:
    """Returns a sentence for each thing that requests wait for, as :func:`being_prepared` returns them."""
    counts = {what: owners.total() for what, owners in waiting.items()}
    return [f"{count} {'request waits' if count == 1 else 'requests wait'} for {what}." for what, count in counts.items()]


def _some_of_each(owners: Sequence[str], most: int) -> list[int]:
    """Returns the places of so many, in order: the first of each owner, then the second of each, and so on."""
    ranks: Counter[str] = Counter()
    turns = []
    for position, owner in enumerate(owners):
        turns.append((ranks[owner], position))
        ranks[owner] += 1
    return sorted(position for _, position in heapq.nsmallest(most, turns))


def _why_in_line(scheduler: Scheduler[EngineRequest], is_paused: bool) -> str:
    if is_paused:
        return "the engine is paused"
    if scheduler.seats_taken < scheduler.config.max_num_seqs:
        return "a step must end first"
    return "all seats are taken"


def _why_not_written(request: EngineRequest, stepping: Set[EngineRequest], executor: Executor) -> str:
    if request not in stepping:
        return "others have their turn"
    waits_for: Callable[[int], str] | None = getattr(executor, "waits_for", None)
    if waits_for is not None:
        return waits_for(request.number)
    return "" if request.tokens or request.is_encoded else "before its first token"
