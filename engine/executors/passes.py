"""Which answers are read in a step of the executor ``transformers``, by which pass of the model, and how many tokens of each.

All answers that can be are read by one pass: a token of each that is being written, and pieces of prompts. The others are read
alone, some in a step, in turn.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

from shmring.engine.executors.generation import LanguageModel
from shmring.engine.executors.written import Answer

__all__ = ["Passes"]

# Most tokens of prompts in a step: the first while answers are written, the second while none is. With a model of which a token
# takes a millisecond, an answer pauses for an eighth of a second. A prompt that is read alone has pieces of the first length.
_PIECE_TOKENS = 128
_IDLE_TOKENS = 2048
_IDLE_S = 0.0125  # that tokens of prompts take about, while no answer is written: whoever comes meanwhile waits for their end

# While a model is shared by several owners, what choosing the tokens of one owner's answers may take in a step, and about what
# prompts may take beside answers: as long as a pass of a small model. Whoever was in one of the last steps is still counted: it
# comes again in the midst of the next one, and would wait for the end of a step that another owner has for itself.
_SHARED_S = 0.004
_SHARED_STEPS = 8
_LEAST_TOKENS = 16  # of prompts, which are read there in any case

_LONE_PASSES = 2  # in a step, of answers that are read by themselves: each takes as long as one of all others together


class Passes:
    """Chooses them.

    Args:
        model: reads.
        may_batch: whether several answers may be read together.
    """

    def __init__(self, model: LanguageModel, *, may_batch: bool) -> None:
        self._model = model
        self._may_batch = may_batch
        self._turns = itertools.count(1)
        self._owners: collections.deque[set[str]] = collections.deque(maxlen=_SHARED_STEPS)  # of the last steps
        self._token_s = _IDLE_S / _IDLE_TOKENS  # of a token, in the last pass of many

    def choose(self, answers: Sequence[Answer]) -> list[dict[Answer, int]]:
        """Returns which answers are read by one pass each, and of each how many tokens: the first together, others alone."""
        self._owners.append({answer.owner for answer in answers})
        together = self._choose_pieces(self._share_choosing([answer for answer in answers if self.can_batch(answer)]))
        passes = [together] if together else []
        for answer in self._choose_lone([answer for answer in answers if not self.can_batch(answer)]):
            unread = answer.context.unread
            passes.append({answer: min(unread, _PIECE_TOKENS) if self._model.flat else unread})
        return passes

    def note(self, tokens: int, seconds: float) -> None:
        """Notes how long a pass took."""
        if tokens >= _PIECE_TOKENS:
            self._token_s = seconds / tokens

    def _choose_pieces(self, answers: Sequence[Answer]) -> dict[Answer, int]:
        """Returns how many tokens of each answer's context are read together in this step; those of none are missing.

        Of the tokens of prompts, half are given out in the order of the step, and the others to the shortest prompts: so none
        waits for all long ones, and none waits for ever. While nothing is written, those that can be read to their ends are,
        and what is longer gets no more beside them than beside answers, since answers begin in this step.
        """
        pieces = {answer: 1 for answer in answers if answer.context.prompt is None}
        prompts = [answer for answer in answers if answer.context.prompt is not None]
        left = most = self._most_beside()
        shortest_first = sorted(prompts, key=lambda answer: answer.context.unread)
        if not pieces:
            left = max(most, min(_IDLE_TOKENS, int(_IDLE_S / self._token_s)))
            for answer in shortest_first:
                if answer.context.unread > left - most // 2:
                    break
                pieces[answer] = answer.context.unread
                left -= pieces[answer]
            if pieces:
                left = min(left, most)
        for line, kept in ((prompts, left // 2), (shortest_first, 0)):
            for answer in line:
                count = min(answer.context.unread - pieces.get(answer, 0), left - kept)
                if count > 0:
                    pieces[answer] = pieces.get(answer, 0) + count
                    left -= count
        return pieces

    def _is_shared(self) -> bool:
        return len(set().union(*self._owners)) > 1

    def _most_beside(self) -> int:
        """Returns how many tokens of prompts are read beside answers: fewer, while several owners share the model."""
        if not self._is_shared():
            return _PIECE_TOKENS
        return min(_PIECE_TOKENS, max(_LEAST_TOKENS, int(_SHARED_S / self._token_s)))

    def _choose_lone(self, answers: Sequence[Answer]) -> list[Answer]:
        """Returns the answers that are read alone in this step: the first one, and of the others the one whose turn is next."""
        chosen = [*answers[:1], *sorted(answers[1:], key=lambda answer: answer.turn)[: _LONE_PASSES - 1]]
        for answer in chosen:
            answer.turn = next(self._turns)
        return chosen

    def _share_choosing(self, answers: Sequence[Answer]) -> Sequence[Answer]:
        """Returns the answers that are read in this step: all of them, while they are one owner's. Otherwise, of each owner, as
        many as take some milliseconds to choose tokens for, in turn.
        """
        if not self._is_shared() or sum(answer.choosing_s for answer in answers) <= _SHARED_S:
            return answers
        left = dict.fromkeys((answer.owner for answer in answers), _SHARED_S)
        chosen = set()
        for answer in sorted(answers, key=lambda answer: answer.turn):
            if left[answer.owner] > 0:
                left[answer.owner] -= answer.choosing_s
                answer.turn = next(self._turns)
                chosen.add(answer)
        return [answer for answer in answers if answer in chosen]

    def can_batch(self, answer: Answer) -> bool:
        """Whether an answer is read together with others."""
        return self._model.flat and self._may_batch and not answer.repeatable
