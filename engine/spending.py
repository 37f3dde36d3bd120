"""What an engine's steps were spent on in the last seconds, and what that means: for people who ask why it is slow now.

A book: no clock, no loop. Whoever executes steps passes the time and what was spent so far. Whoever asks passes them, too, so
that the step that is running counts as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shmring.engine.accounts import NOW_S, Caller

__all__ = ["MEANINGS", "Spending", "whose"]

_STEPS = "steps"
_SEEN = 0.0005  # of the time, from which a part is told of
_MOSTLY = 0.5  # of the time: below it, it is not steps that make callers wait
_MUCH = 0.25  # of the time, or of a processor, from which a part is named
_WHOSE = 0.5  # of what requests took, from which a caller is named

# Of each part of steps: what it is, and why there may be much of it. Executors tell of most, and the engine of the last two.
_PARTS = {
    "layout": ("laying prompts out", "templates, tokens and pictures of new requests; long chats have much of them"),
    "prompts": ("reading prompts", "they are long, or many have come"),
    "answers": ("passes of the model for answers", ""),
    "alone": ("reading answers alone", "each answer with a seed has a pass of the model for itself"),
    "choosing": ("choosing tokens", "top_p, top_k, penalties, logprobs"),
    "embedding": ("embedding texts and pictures", "there are many inputs, or long ones"),
    "waiting": ("waiting for prompts and forms of answers", "all that runs is being prepared beside the steps"),
    "late": ("waiting for the engine's loop", "it was busy with what comes and goes, or could not begin"),
    "stopped": ("not getting to run", "the engine's process was stopped, or others have the processors"),
}
_USUAL = "answers"  # what steps are for
_OF_ENGINE = frozenset({"late", "stopped"})
# The same of what other threads do beside steps, in seconds of a processor.
_BESIDE = {
    "forms": ("forms of answers (schemas, patterns)", "new ones are tried and compiled, or take long to look up"),
    "preparing": ("laying prompts out", "chats with many messages, long texts, or large pictures"),
}
_REST = "other work of steps", "the executor does not say what it is"

#: What the parts are.
MEANINGS = {part: what for part, (what, _) in _PARTS.items()} | {
    part: f"{what}, beside the steps" for part, (what, _) in _BESIDE.items()
}


class Spending:
    """What was spent, second by second. See the head of this file.

    Args:
        now: the time, in seconds.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._noted: Mapping[str, float] = {}
        self._until = 0  # the next second
        # For each of the last seconds in which something was noted: what had been spent before.
        self._before: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=NOW_S)

    def note(self, now: float, spent: Mapping[str, float]) -> None:
        """Notes what was spent so far.

        Args:
            now: the time, in seconds.
            spent: seconds since the start: of all ``steps``, and by part. It is not changed any more.
        """
        if now >= self._until:
            second = int(now)
            self._before.append((second, self._noted))
            self._until = second + 1
        self._noted = spent

    def describe(
        self, now: float, steps_s: Sequence[float], line: str = "", working_s: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, Any]:
        """Returns what the last seconds were spent on: ``over_s`` of them, the share of ``steps``, ``parts`` and a ``cause``.

        Args:
            now: the time, in seconds.
            steps_s: how long the last steps took.
            line: a sentence on requests that wait for others, which comes first; empty: none do.
            working_s: by part and owner, seconds that work beside steps takes already, which is not noted before it ends.
        """
        first = int(now) - NOW_S + 1
        before = next((noted for second, noted in self._before if second >= first), self._noted)
        spent = {part: seconds - before.get(part, 0.0) for part, seconds in self._noted.items()}
        steps = spent.pop(_STEPS, 0.0)
        over_s = max(now - max(first, self._began), steps, 0.001)  # a step counts where it ends, also if it began before
        working = {part: sum(min(each, over_s) for each in owners.values()) for part, owners in (working_s or {}).items()}
        beside = [_Share((spent.pop(part, 0.0) + working.get(part, 0.0)) / over_s, *texts) for part, texts in _BESIDE.items()]
        _take_stops(spent, steps)
        usual = spent.get(_USUAL, 0.0) / over_s
        shares = [_Share(seconds / over_s, *_PARTS.get(part, (part, ""))) for part, seconds in spent.items()]
        shares.append(_Share(max(0.0, steps - sum(spent.values())) / over_s, *_REST))
        shares.sort(key=lambda share: -share.share)
        avoidable = next(each for each in shares if each.what != _PARTS[_USUAL][0])
        much = [each for each in beside if each.share >= _MUCH]
        has_room = not line and not much and avoidable.share < _MUCH
        causes = [line] if line else []
        causes.append(_steps_text(over_s, steps / over_s, sorted(steps_s), has_room=has_room))
        causes += [f"Beside steps, {each.what} took {each.share:.0%} of a processor: {each.why}." for each in much]
        causes += _parts_text(avoidable, usual)
        shares += [_Share(each.share, f"{each.what}, beside the steps", "") for each in beside]
        shares.sort(key=lambda share: -share.share)
        return {
            "over_s": round(over_s, 3),
            "steps": round(steps / over_s, 4),
            "parts": [{"what": each.what, "share": round(each.share, 4)} for each in shares if each.share >= _SEEN],
            "cause": " ".join(causes),
        }


class _Share(NamedTuple):
    share: float
    what: str
    why: str


def _take_stops(spent: dict[str, float], steps: float) -> None:
    """Takes the time in which the engine did not run from the part in which it fell: the greatest, since a stop makes it so."""
    parts = spent.keys() - _OF_ENGINE
    if parts:
        greatest = max(parts, key=spent.__getitem__)
        spent[greatest] = max(0.0, spent[greatest] - max(0.0, min(spent.get("stopped", 0.0), sum(spent.values()) - steps)))


def _steps_text(over_s: float, steps: float, steps_s: Sequence[float], *, has_room: bool) -> str:
    if steps < _SEEN or not steps_s:
        return f"The engine had nothing to do in the last {over_s:.0f} s."
    long = f"half of the last ones took {1e3 * steps_s[len(steps_s) // 2]:.0f} ms or more"
    if steps < _MOSTLY and has_room:
        return f"Steps ran {steps:.0%} of the time, so the engine has room; {long}."
    return f"Steps ran {steps:.0%} of the time; {long}."


def _parts_text(avoidable: _Share, usual: float) -> list[str]:
    """Names the greatest part that steps are not for, and then what they are for."""
    texts = []
    if avoidable.share >= _MUCH:
        texts.append(
            f"{avoidable.what} takes {avoidable.share:.0%} of the time{f' ({avoidable.why})' if avoidable.why else ''}"
        )
    if usual >= _MUCH:
        texts.append(f"{_PARTS[_USUAL][0]} take {usual:.0%}{'' if texts else ' of the time'}, as usual")
    sentence = "; ".join(texts)
    return [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []


def whose(callers: Sequence[Caller], waiting: Mapping[str, Counter[str]] | None = None) -> str:
    """Returns who takes most of steps, of preparation beside them and of decoders, if one does, and who has most of what is
    being prepared.

    Args:
        callers: as :meth:`~shmring.engine.accounts.Accounts.describe` returns them.
        waiting: how many requests of a step wait for what is prepared beside it, by what that is and by owner.
    """
    texts = []
    if callers and callers[0].share >= _WHOSE:
        most = callers[0]
        told = ((most.seconds, "steps"), (most.beside_s, "preparation beside steps"), (most.decoding_s, "decoders"))
        took = " and ".join(f"{seconds:.1f} s of {what}" for seconds, what in told if seconds >= 0.05)
        texts.append(f"Of what requests took, {most.share:.0%} was for {most.owner}: {took} in {NOW_S} s.")
    preparing = max(callers, key=lambda each: each.preparing, default=None)
    if preparing is not None and preparing.preparing:
        texts.append(f"{preparing.preparing} of those that are being prepared are of {preparing.owner}.")
    for what, owners in (waiting or {}).items():
        owner, count = owners.most_common(1)[0]
        texts.append(f"{count} of those that wait for {what} are of {owner}.")
    return " ".join(texts)
