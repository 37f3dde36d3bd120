"""What an engine's steps were spent on in the last seconds, and what that means: for people who ask why it is slow now.

A book: no clock, no loop. Whoever executes steps passes the time and what was spent so far. Whoever asks passes them, too, so
that the step that is running counts as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shmring.engine.accounts import NOW_S, Caller

__all__ = ["Spending", "whose"]

_STEPS = "steps"
_SEEN = 0.0005  # of the time, from which a part is told of
_MOSTLY = 0.5  # of the time: below it, it is not steps that make callers wait

# Of each part of a step that executors tell of: what it is, and why there may be much of it.
_PARTS = {
    "layout": ("laying prompts out", "templates, tokens and pictures of new requests; long chats have much of them"),
    "prompts": ("reading prompts", "they are long, or many have come"),
    "answers": ("passes of the model for answers", "a token of each answer in every step, which is what steps are for"),
    "alone": ("reading answers alone", "each answer with a seed has a pass of the model for itself"),
    "choosing": ("choosing tokens", "sampling with top_p, top_k or penalties, and logprobs; each answer pays for its own"),
    "embedding": ("embedding texts and pictures", "there are many inputs, or long ones"),
    "waiting": ("waiting for prompts and forms of answers", "all that runs is being prepared beside the steps"),
}
# The same of what other threads do beside steps, in seconds of a processor.
_BESIDE = {
    "forms": ("forms of answers (schemas, patterns)", "new ones are tried and compiled, or take long to look up"),
    "preparing": ("laying prompts out", "chats with many messages, long texts, or large pictures"),
}
_MUCH = 0.25  # of a processor, from which it is named
_WHOSE = 0.5  # of what requests took, from which a caller is named
_REST = "other work of steps", "the executor does not say what it is, or the engine's loop was late"


class Spending:
    """What was spent, second by second. See the head of this file.

    Args:
        now: the time, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._noted: dict[str, float] = {}
        # For each of the last seconds in which something was noted: what had been spent before.
        self._before: deque[tuple[int, dict[str, float]]] = deque(maxlen=NOW_S)

    def note(self, now: float, steps: float, parts: Mapping[str, float]) -> None:
        """Notes what was spent so far.

        Args:
            now: the time, in seconds.
            steps: seconds of all steps since the start.
            parts: seconds by part, since the start.
        """
        second = int(now)
        if not self._before or self._before[-1][0] != second:
            self._before.append((second, self._noted))
        self._noted = {**parts, _STEPS: steps}

    def describe(self, now: float, steps_s: Sequence[float]) -> dict[str, Any]:
        """Returns what the last seconds were spent on: ``over_s`` of them, the share of ``steps``, ``parts`` and a ``cause``.

        Args:
            now: the time, in seconds.
            steps_s: how long the last steps took.
        """
        first = int(now) - NOW_S + 1
        before = next((noted for second, noted in self._before if second >= first), self._noted)
        spent = {part: seconds - before.get(part, 0.0) for part, seconds in self._noted.items()}
        steps = spent.pop(_STEPS, 0.0)
        over_s = max(now - max(first, self._began), steps, 0.001)  # a step counts where it ends, also if it began before
        beside = [_Share(spent.pop(part, 0.0) / over_s, *texts) for part, texts in _BESIDE.items()]
        shares = [_Share(seconds / over_s, *_PARTS.get(part, (part, ""))) for part, seconds in spent.items()]
        shares.append(_Share(max(0.0, steps - sum(spent.values())) / over_s, *_REST))
        shares.sort(key=lambda share: -share.share)
        named = [
            f"Beside steps, {each.what} took {each.share:.0%} of a processor: {each.why}."
            for each in beside
            if each.share >= _MUCH
        ]
        cause = _cause(over_s, steps / over_s, shares[0], sorted(steps_s), named)
        shares += [_Share(each.share, f"{each.what}, beside the steps", "") for each in beside]
        return {
            "over_s": round(over_s, 3),
            "steps": round(steps / over_s, 4),
            "parts": [{"what": each.what, "share": round(each.share, 4)} for each in shares if each.share >= _SEEN],
            "cause": cause,
        }


class _Share(NamedTuple):
    share: float
    what: str
    why: str


def _cause(over_s: float, steps: float, greatest: _Share, steps_s: Sequence[float], beside: Sequence[str]) -> str:
    """Returns some sentences on what callers wait for: what is as it should be comes behind what is beside steps."""
    if steps < _SEEN or not steps_s:
        return " ".join([f"The engine had nothing to do in the last {over_s:.0f} s.", *beside])
    long = f"half of the last steps took {1e3 * steps_s[len(steps_s) // 2]:.0f} ms or more"
    if steps < _MOSTLY:
        return " ".join([f"Steps ran {steps:.0%} of the time, so the engine has room; {long}.", *beside])
    why = f": {greatest.why}" if greatest.why else ""
    most = f"The greatest part is {greatest.what} ({greatest.share:.0%} of the time){why}."
    parts = [*beside, most] if greatest.what == _PARTS["answers"][0] else [most, *beside]
    return " ".join([f"Steps ran {steps:.0%} of the time, and {long}.", *parts])


def whose(callers: Sequence[Caller]) -> str:
    """Returns a sentence that names the caller who takes most of the steps, if one does; otherwise nothing.

    Args:
        callers: as :meth:`~shmring.engine.accounts.Accounts.describe` returns them.
    """
    if not callers or callers[0].share < _WHOSE:
        return ""
    return f"Of what requests took, {callers[0].share:.0%} was for {callers[0].owner}."
