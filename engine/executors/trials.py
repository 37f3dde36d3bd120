"""Trials of forms: each new form is tried in a process, before an answer begins with it.

The process (:mod:`shmring.engine.trial_process`) has the model's tokens and does what an answer will do. The kernel ends it
when it has used its seconds or its memory. What came of a trial is kept, whatever it was, unless another time it may be
different.

Some trials go on at the same time, one for each owner at most (:mod:`.shared_threads`). Each takes a thread, which waits.

Invariant: nobody but the request that needs a form waits for its trial.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import io
import json
import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

from shmring.engine.executors.failures import first_line
from shmring.engine.executors.forms import Form, quoted, schemas_of, write_grammar
from shmring.engine.executors.interface import FormRefusedError, OverloadedError
from shmring.engine.executors.preparing import FORMS, Stage, Stages
from shmring.engine.executors.shared_threads import Job, SharedThreads
from shmring.engine.form_faults import explained
from shmring.engine.trial_process import MAX_MESSAGE_NBYTES
from shmring.processes.forking import ForkingProgram

__all__ = ["TRIAL_LIMITS", "FormTokens", "Trial", "Trials", "refused"]

_KEPT = 4096  # forms, by a hash: callers with new ones must not soon push out those of others
_AT_A_TIME = 4  # a trial that takes seconds keeps no other one waiting
_MAX_ERROR_CHARACTERS = 300

# Seconds of a processor and bytes that a trial may take: that of a form of use takes a hundredth. On a busy machine it may be
# waited for longer.
_MAX_SECONDS = 2
_MAX_NBYTES = 512 << 20
_TIMEOUT_S = 30.0
_ATTEMPTS = 2  # a trial whose process somebody else ended is done once more

#: What llguidance may do for a form, and for each token of an answer, in its own units: up to ten milliseconds. A lexer's
#: states take 1 to 2 KB each.
TRIAL_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}


class FormTokens:
    """A model's tokens as llguidance has them, for answers here and for trials there.

    Making them takes most of a second, in which no other thread runs. So it is done when a model is loaded.

    Args:
        tokenizer: of transformers.
        ends: tokens that end any answer; none: the one that the tokenizer names.

    Attributes:
        ends: the tokens that do.
        text: what llguidance's tokenizer is made of; empty if forms can't be had (:meth:`missing`).
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.ends = sorted(ends) or [end for end in [tokenizer.eos_token_id] if end is not None]
        self.text = ""
        self._tokens: Any = None
        self._fault = ""
        if self.missing() is None:
            backend = tokenizer.backend_tokenizer
            if backend.padding is not None or backend.truncation is not None:
                backend = copy.copy(backend)  # a second's work
                backend.no_padding()
                backend.no_truncation()
            self.text = backend.to_str()

    def missing(self) -> str | None:
        """What an answer can't have a form without; None: nothing."""
        try:
            importlib.import_module("llguidance")
        except ImportError:
            return "response_format, structured_outputs and a required call need llguidance, which is not installed"
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            return "response_format, structured_outputs and a required call need a tokenizer of the library tokenizers"
        return self._fault or None

    def make(self) -> Any:
        """Makes llguidance's tokenizer, which takes half a second for 150,000 tokens; returns it if forms can be had."""
        if self._tokens is None and self.text and not self._fault:
            try:
                self._tokens = importlib.import_module("llguidance").LLTokenizer(self.text, eos_token=self.ends or None)
            except Exception as error:  # noqa: BLE001 - whatever it does not understand; the model can be used without forms
                self._fault = (
                    f"with this model, answers can't have a form: llguidance can't read its tokens: {first_line(error)}"
                )
        return self._tokens

    def write_mark(self, text: str) -> str:
        """Returns a mark as a grammar has it: a control token is no text."""
        token = self._tokenizer.backend_tokenizer.token_to_id(text)
        return f"<[{token}]>" if token is not None and self.make().is_special_token(token) else quoted(text)


class Trial(Job[str]):
    """A trial of a form: why it can't be; empty: it can. It is paid for by the owner for whom it was begun.

    Args:
        owner: for whom.
        key: of the form.
        try_form: tries it; adds to the trial's seconds what its process takes.

    Attributes:
        key: as given.
        waiting: requests that wait for it.
    """

    def __init__(self, owner: str, key: bytes, try_form: Callable[[Trial], str]) -> None:
        super().__init__(owner, functools.partial(try_form, self))
        self.key = key
        self.waiting = 0


class Trials:
    """Tries forms, and keeps what came of that.

    All methods are called from one thread.

    Args:
        tokens: the model's.
    """

    def __init__(self, tokens: FormTokens) -> None:
        self._tokens = tokens
        self._threads = SharedThreads(_AT_A_TIME, "shmring-trials")
        self._kept: OrderedDict[bytes, Trial] = OrderedDict()
        self._process = _TrialProcess(tokens)

    def stages(self, form: Form, owner: str) -> Stages[None]:
        """Has a form tried, unless it is known. A form that nobody waits for is not tried any more, if that has not begun.

        Raises:
            FormRefusedError: the form can't be.
            ValueError: what is needed for forms is missing.
            OverloadedError: the trial had no turn on a busy machine.
            RuntimeError: the form can't be tried.
        """
        trial = self._find(form, owner)
        trial.waiting += 1
        try:
            yield Stage(trial, FORMS, pays_first=True)
        finally:
            trial.waiting -= 1
            if not trial.waiting and trial.cancel():
                self._drop(trial)
        error = trial.exception()
        if error is None:
            if fault := trial.result():
                raise refused(fault)
            return
        self._drop(trial)  # another time it may succeed
        # Not raised itself: the frames of this step would be with it.
        raise OverloadedError(str(error)) if isinstance(error, OverloadedError) else RuntimeError(str(error))

    def _find(self, form: Form, owner: str) -> Trial:
        if (missing := self._tokens.missing()) is not None:
            raise ValueError(missing)
        key = hashlib.sha256("\0".join(form).encode(errors="surrogatepass")).digest()
        trial = self._kept.get(key)
        if trial is None:
            trial = self._kept[key] = Trial(owner, key, functools.partial(self._try, form))
            self._threads.enter(trial)
        self._kept.move_to_end(key)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return trial

    def working_s(self) -> dict[str, float]:
        """Returns how long trials that have not ended take already, by owner. From any thread."""
        return self._threads.working_s()

    def close(self) -> None:
        """Ends what is being tried; nothing can be tried any more."""
        self._threads.close()
        self._process.close()

    def _drop(self, trial: Trial) -> None:
        if self._kept.get(trial.key) is trial:
            del self._kept[trial.key]

    def _try(self, form: Form, trial: Trial) -> str:
        try:
            grammar = write_grammar(form, self._tokens.write_mark)
        except ValueError as error:
            return explained(str(error))
        fault, seconds = self._process.run(json.dumps([grammar, schemas_of(form)], ensure_ascii=False))
        trial.seconds += seconds
        return fault


class _TrialProcess:
    """The process that forks trials; started when it is first needed, and again if it has ended."""

    def __init__(self, tokens: FormTokens) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()  # for what follows
        self._program = ForkingProgram("shmring.engine.trial_process")
        self._closed = False

    def run(self, form: str) -> tuple[str, float]:
        """Tries a form; returns why it can't be, or nothing, and how many seconds that took.

        Args:
            form: its grammar, and the schemas in it, as JSON.

        Raises:
            OverloadedError: it has had no turn on a busy machine.
            RuntimeError: there can be no such process.
        """
        spent_s = 0.0
        for _ in range(_ATTEMPTS):
            text, code, seconds = self._run_once(form)
            spent_s += seconds
            if code == 0:
                return _told(text), spent_s
            if code is not None and code > 0:
                raise RuntimeError(f"forms can't be tried: {text[-_MAX_ERROR_CHARACTERS:]}")
            if code is not None and code != -signal.SIGKILL:  # of its limits, or of what its libraries met there
                return f"it takes more than {_MAX_SECONDS} s or {_MAX_NBYTES >> 20} MiB", spent_s
        raise RuntimeError("forms can't be tried: something ends the processes that do it")

    def close(self) -> None:
        """Ends the process, and its trials with it."""
        with self._lock:
            self._closed = True
            self._program.close()

    def _run_once(self, form: str) -> tuple[str, int | None, float]:
        """Returns what a trial said, how its process ended, and its seconds. None: the process that had forked it ended."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        text = ""
        with connection:
            with theirs, _memory_file(form) as file:
                try:
                    self._send(theirs, file)
                except ConnectionError:
                    return text, None, 0.0
            try:
                while True:
                    connection.settimeout(max(0.001, deadline_s - time.monotonic()))
                    message = connection.recv(MAX_MESSAGE_NBYTES)
                    if not message:
                        return text, None, 0.0
                    if message.startswith(b"\0"):
                        code, seconds = json.loads(message[1:])
                        return text, code, seconds
                    text = message.decode(errors="replace")
            except ConnectionError:
                return text, None, 0.0
            except TimeoutError:
                text = f"the form of the answer was not compiled within {_TIMEOUT_S:g} s; try again later"
                raise OverloadedError(text) from None

    def _send(self, connection: socket.socket, grammar: io.FileIO) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("forms can't be tried: the executor is closed")
            if not self._program.lives:
                self._start()
            self._program.send(b"\0", connection.fileno(), grammar.fileno())

    def _start(self) -> None:
        settings = {"ends": self._tokens.ends, "seconds": _MAX_SECONDS, "nbytes": _MAX_NBYTES, "limits": TRIAL_LIMITS}
        with _memory_file(self._tokens.text) as file:
            self._program.start(str(file.fileno()), json.dumps(settings), pass_fds=[file.fileno()])


def refused(fault: object) -> FormRefusedError:
    """Returns the error of a form that can't be."""
    return FormRefusedError(f"the form of the answer can't be compiled: {explained(str(fault))[:_MAX_ERROR_CHARACTERS]}")


def _told(text: str) -> str:
    """Returns what a trial has found, as people are told it."""
    if not text:
        return ""
    fault, schema, place = json.loads(text)
    return f"{fault} (in {schema}, at {place})" if place else str(fault)


def _memory_file(text: str) -> io.FileIO:
    """Returns a file in memory with a text, to be read from its start."""
    file = io.FileIO(os.memfd_create("shmring-form"), "r+")
    content = memoryview(text.encode(errors="replace"))
    while content:
        content = content[file.write(content) :]
    file.seek(0)
    return file
