"""Answers that must have a form: before each token, a grammar says which tokens may be next.

The logits of all other tokens are left out: of this answer alone. llguidance makes grammars and follows them
(:mod:`.forms`). It lets go of the interpreter while it computes.

A caller chooses the form, and so how long this takes: a grammar is compiled in a millisecond to some hundred, and which tokens
may be next is said in some microseconds to some ten milliseconds. So all of it is done beside steps, on threads that are shared
by owner (:mod:`.shared_threads`): those that compile, and those that say what may be next. A request asks in each of its steps
whether its form is ready. An answer whose next tokens are not known yet waits for them alone. A form that is new is tried first
(:mod:`.trials`), with limits below those of answers.

Invariant: an answer has a matcher of its own, compiled for it. Copies of a matcher share its lexer, whose states are counted
over all of them: answers of the same form would use up each other's.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shmring.engine.executors.checkpoint import Checkpoint
from shmring.engine.executors.forms import Form, write_grammar
from shmring.engine.executors.interface import FormError
from shmring.engine.executors.preparing import FORMS, LOOKING_S, Stages, awaited
from shmring.engine.executors.shared_threads import Job, SharedThreads, summed
from shmring.engine.executors.trials import TRIAL_LIMITS, FormTokens, Trials, refused
from shmring.engine.form_faults import explained

__all__ = ["Grammar", "Grammars"]

_COMPILING = 2  # threads: what takes long on one of them keeps only its owner's others waiting
_MASKING = 2

# What a trial finds within its limits, no answer finds beyond these.
_LIMITS = TRIAL_LIMITS | {"step_lexer_fuel": 1_000_000, "step_max_items": 100_000, "max_items_in_row": 20_000}

# A lexer has states for all texts that it has looked at. A matcher that has used them up is made anew, and begins with those of
# the answer alone; but not after so few tokens, or it would be made anew all the time.
_FEWEST_TOKENS = 32

# What is added to the scores of eight tokens, by the byte that says which of them are allowed.
_OF_BITS = np.where(np.arange(256)[:, np.newaxis] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)

#: Has something done on a thread.
Submit: TypeAlias = Callable[[Callable[[], None]], Job[None]]


class Grammar:
    """Which tokens an answer may go on with.

    Args:
        make_matcher: makes llguidance's, for this answer alone.
        tokenize: returns the tokens of a text.
        masking: has something done on a thread that says which tokens may be next.
        compiling: has something done on a thread that compiles.

    Raises:
        ValueError: the form can't be.

    Attributes:
        complete: whether nothing can follow.
        job: finds out which tokens may be next.
    """

    def __init__(
        self, make_matcher: Callable[[], Any], tokenize: Callable[[str], list[int]], masking: Submit, compiling: Submit
    ) -> None:
        self._make_matcher, self._tokenize = make_matcher, tokenize
        self._masking, self._compiling = masking, compiling
        self._matcher = make_matcher()
        self._taken: list[int] = []
        self._fresh_until = _FEWEST_TOKENS
        self._allowed: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # a bit for each token
        self._seconds = 0.0  # of jobs before this one, that nobody has paid for
        self.complete: bool = self._matcher.is_stopped()
        self._find_next()
        self.job: Job[None] = Job("", lambda: None)  # it is done
        self.job.run()
        if self._error:
            raise refused(self._error)

    def is_ready(self) -> bool:
        """Whether it is known which tokens may be next."""
        if self.job.done() and self._error and len(self._taken) >= self._fresh_until:
            self._fresh_until = len(self._taken) + _FEWEST_TOKENS
            self._begin_job(self._compiling, self._renew)
        return self.job.done()

    def take_seconds(self) -> float:
        """Returns what it took of a processor since this was asked last."""
        seconds = self._seconds + self.job.take_seconds(self.job.owner)
        self._seconds = 0.0
        return seconds

    def restrict(self, scores: npt.NDArray[np.float32]) -> None:
        """Leaves out the tokens that can't be next: their scores become minus infinity. It must be known which can.

        Args:
            scores: shape (vocabulary,).

        Raises:
            FormError: it takes too long to say which can.
        """
        self.job.result()
        self._check()
        known = scores[: 8 * len(self._allowed)]
        known += _OF_BITS.take(self._allowed, axis=0).reshape(-1)[: len(known)]  # an eighth of the time of an index
        scores[len(known) :] = -np.inf

    def begin(self, text: str) -> bool:
        """Goes back to the start, and from there on with a text that was written without this grammar.

        Returns:
            Whether the grammar allows the text, and something behind it.
        """
        tokens = self._tokenize(text)
        self._taken, self.complete, self._fresh_until = tokens, False, len(tokens) + _FEWEST_TOKENS
        if self._error:
            self._begin_job(self._compiling, self._renew)
            return True
        self._matcher.reset()
        if tokens and (self._matcher.try_consume_tokens(tokens) < len(tokens) or self._matcher.is_stopped()):
            return False
        self._begin_job(self._masking, self._find_next)
        return True

    def take(self, token: int) -> None:
        """Goes on with a token that was chosen.

        Raises:
            FormError: it takes too long.
        """
        self._matcher.consume_token(token)
        self._error = _error_of(self._matcher)
        self._check()
        self._taken.append(token)
        self.complete = self._matcher.is_stopped()
        if not self.complete:
            self._begin_job(self._masking, self._find_next)

    def _begin_job(self, submit: Submit, work: Callable[[], None]) -> None:
        self._seconds += self.job.take_seconds(self.job.owner)
        self.job = submit(work)

    def _renew(self) -> None:
        self._matcher = self._make_matcher()
        self._matcher.consume_tokens(self._taken)
        self._find_next()

    def _find_next(self) -> None:
        self._allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._error = _error_of(self._matcher)

    def _check(self) -> None:
        if self._error:
            raise FormError(f"the form of the answer can't be gone on with: {self._error}")


class Grammars:
    """The grammars of answers. All methods but one are called from one thread.

    Args:
        checkpoint: the model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokens = FormTokens(checkpoint.tokenizer, checkpoint.eos_token_ids)
        self._tokens.make()
        self._trials = Trials(self._tokens)
        self._compiling = SharedThreads(_COMPILING, "shmring-grammars")
        self._masking = SharedThreads(_MASKING, "shmring-masks")
        self._given: dict[int, list[Grammar]] = {}  # by request

    def missing(self) -> str | None:
        """What an answer can't have a form without; None: nothing."""
        return self._tokens.missing()

    def stages(self, request_id: int, form: Form, count: int, owner: str) -> Stages[list[Grammar]]:
        """Makes what the answers of a request go by, which is then to be forgotten.

        Args:
            request_id: whose they are.
            form: what the answers must be.
            count: of the answers.
            owner: of the request.

        Raises:
            Exception: as :meth:`.trials.Trials.stages`.
        """
        yield from self._trials.stages(form, owner)
        job = self._compiling.submit(owner, functools.partial(self._compile, form, count, owner))
        self._given[request_id] = yield from awaited(job, FORMS)
        return self._given[request_id]

    def take_seconds(self, request_id: int) -> float:
        """Returns how many seconds of a processor a request's grammars have taken since this was asked last."""
        return sum(grammar.take_seconds() for grammar in self._given.get(request_id, ()))

    def working_s(self) -> dict[str, float]:
        """Returns how long work on forms that has not ended takes already, by owner. From any thread."""
        return summed([self._trials.working_s(), self._compiling.working_s(), self._masking.working_s()])

    def wait(self) -> None:
        """Waits a little until it is known which tokens of an answer may be next."""
        jobs = [grammar.job for grammars in self._given.values() for grammar in grammars]
        concurrent.futures.wait([job for job in jobs if not job.done()], LOOKING_S, concurrent.futures.FIRST_COMPLETED)

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        for grammar in self._given.pop(request_id, ()):
            grammar.job.cancel()

    def close(self) -> None:
        """Ends what is being tried; nothing can be compiled any more."""
        self._trials.close()
        self._compiling.close()
        self._masking.close()

    def _compile(self, form: Form, count: int, owner: str) -> list[Grammar]:
        llguidance = importlib.import_module("llguidance")
        tokens, limits = self._tokens.make(), llguidance.LLParserLimits(**_LIMITS)
        try:
            grammar = write_grammar(form, self._tokens.write_mark)
        except ValueError as error:
            raise refused(error) from None
        make = functools.partial(llguidance.LLMatcher, tokens, grammar, log_level=0, limits=limits)
        lines = [functools.partial(threads.submit, owner) for threads in (self._masking, self._compiling)]
        return [Grammar(make, tokens.tokenize_str, *lines) for _ in range(count)]


def _error_of(matcher: Any) -> str:
    return explained(matcher.get_error()) if matcher.is_error() else ""
