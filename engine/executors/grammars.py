"""Answers that must have a form: JSON of a schema, a pattern, one of some texts, calls of tools.

A form becomes a grammar. Before each token of such an answer, the grammar says which tokens may be next, and the logits of all
others are left out: of this answer alone. llguidance makes grammars and follows them; it is a library in Rust, which lets go of
the interpreter while it computes.

Compiling takes from a millisecond to some hundred, and a caller chooses what is compiled. So it is done on threads of its own.
Steps go on meanwhile, and a request asks in each of its steps whether its form is ready. llguidance counts what it does, and
gives up beyond limits that are set here, for a form and for each token. But it does not count everything: forty alternatives,
combined, are sixteen million, and nothing ends a thread. So a new form is first tried in a process, which the system ends when
it has used its seconds or its memory. The process does all that is done here then, on a smaller stack. What came of it is kept.

Invariant: an answer has a matcher of its own, compiled for it. Copies of a matcher share its lexer, whose states are counted
over all of them: answers of the same form would use up each other's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmring.engine.executors.checkpoint import Checkpoint
from shmring.engine.executors.interface import OverloadedError
from shmring.engine.protocol import MAX_CHOICES, MAX_FORM_CHARACTERS, StructuredOutputsParams

__all__ = ["Form", "Grammar", "Grammars", "can_require_calls", "form_of", "form_of_calls", "try_form"]

#: What an answer must be: its kind, and what says more. It can be a key.
Form = tuple[str, str]

_KEPT = 32  # forms
_MAX_CALLS = 16  # of tools in an answer that must call one
_MAX_ERROR_CHARACTERS = 300
_THREADS = 4  # a form that is tried for seconds keeps no other one waiting

# Seconds of a processor and bytes that the process of a form may take: a form of use takes a hundredth. On a busy machine it
# may be waited for longer.
_MAX_SECONDS = 2
_MAX_NBYTES = 512 << 20
_TIMEOUT_S = 30.0
_TRIAL = """
import json, os, resource, sys, threading
seconds, nbytes, limits = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(5)
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

def work():
    grammar = sys.stdin.buffer.read().decode()
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**limits))
    matcher.compute_logit_bias()
    if matcher.is_error():
        sys.stdout.buffer.write(matcher.get_error().encode())
        sys.stdout.flush()

def fail(given):
    sys.__excepthook__(*given[:3])
    sys.stderr.flush()
    os._exit(1)

threading.excepthook = fail
threading.stack_size(1 << 20)  # what fits here fits the stack of an engine's thread
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""

# What llguidance may do for a form, and for a token of an answer, in its own units; and lexer states, of 1 to 2 KB each.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 10_000,
    "verbose_errors": False,
}

# What is added to the scores of eight tokens, by the byte that says which of them are allowed.
_OF_BITS = np.where(np.arange(256)[:, np.newaxis] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)

# A model that does not know how to go on writes white space without end, which JSON allows.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}


def form_of(structure: StructuredOutputsParams) -> Form:
    """Returns what an answer must be.

    Raises:
        ValueError: it says nothing, or too much.
    """
    if structure.json is not None:
        form = "json", structure.json
    elif structure.json_object:
        form = "json", '{"type": "object"}'
    elif structure.regex is not None:
        form = "regex", structure.regex
    elif structure.choice:
        if len(structure.choice) > MAX_CHOICES:
            raise ValueError(f"the form of the answer has {len(structure.choice)} choices, at most {MAX_CHOICES} are taken")
        form = "choice", f"start: {' | '.join(map(_quoted, structure.choice))}"
    else:
        raise ValueError("the form of the answer is empty: it has no json, json_object, regex or choice")
    return _checked(form)


def form_of_calls(template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Form:
    """Returns the form of an answer that calls tools and does nothing else.

    Args:
        template: how the model writes, as transformers says it.
        tools: that it may call.
        parallel: whether there may be several calls.

    Raises:
        ValueError: they are too many or too long.
    """
    marks = _read_marks(template)
    assert marks is not None, "can_require_calls says so"
    calls = []
    for tool in tools:
        function = tool["function"]
        before = f'{{"name": {_quoted(function["name"])}, "arguments": '
        schema = (function.get("parameters") or {}) | {"type": "object", "x-guidance": _JSON_OPTIONS}
        calls.append(f'{_quoted(before)} %json {json.dumps(schema, ensure_ascii=False)} "}}"')
    more = f"(BREAK? call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    lines = [f"start: call {more}", f"call: opening BREAK? ({' | '.join(calls)}) BREAK? closing", 'BREAK: "\\n"']
    return _checked(("calls", json.dumps([*marks, "\n".join(lines)])))


def can_require_calls(template: Mapping[str, Any] | None) -> bool:
    """Whether a model's calls have a form that is known here: a JSON object with name and arguments, between two marks."""
    return template is not None and _read_marks(template) is not None


class Grammar:
    """Which tokens an answer may go on with.

    Args:
        matcher: llguidance's, for this answer alone.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def restrict(self, scores: npt.NDArray[np.float32]) -> None:
        """Leaves out the tokens that can't be next: their scores become minus infinity.

        Args:
            scores: shape (vocabulary,).

        Raises:
            ValueError: it takes too long to say which can.
        """
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        known = scores[: 8 * len(allowed)]
        known += _OF_BITS[allowed].reshape(-1)[: len(known)]
        scores[len(known) :] = -np.inf

    def take(self, token: int) -> None:
        """Goes on with a token that was chosen.

        Raises:
            ValueError: it takes too long.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the form of the answer is too complex: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles forms, and keeps which of them can be compiled.

    All methods are called from one thread.

    Args:
        checkpoint: the model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="shmring-grammars")
        self._tokens: Any = None  # the tokenizer as llguidance has it: a second's work, once
        self._making_tokens = threading.Lock()
        self._kept: OrderedDict[Form, concurrent.futures.Future[None]] = OrderedDict()  # of those that were tried
        self._awaited: dict[int, tuple[Form, concurrent.futures.Future[list[Any] | None]]] = {}  # by request: first the trial
        self._trials: set[subprocess.Popen[bytes]] = set()

    def _missing(self) -> str | None:
        """What an answer can't have a form without; None: nothing."""
        try:
            importlib.import_module("llguidance")
        except ImportError:
            return "response_format, structured_outputs and a required call need llguidance, which is not installed"
        if getattr(self._checkpoint.tokenizer, "backend_tokenizer", None) is None:
            return "response_format, structured_outputs and a required call need a tokenizer of the library tokenizers"
        return None

    def ready(self, request_id: int, make_form: Callable[[], Form], count: int = 1) -> list[Grammar] | None:
        """Returns what answers go by; None if that is not ready yet: to be asked again, or to be forgotten.

        Args:
            request_id: whose they are.
            make_form: what the answers must be.
            count: of the answers.

        Raises:
            ValueError: the form can't be compiled, or ``make_form`` raises it, or what is needed is missing.
            OverloadedError: as :func:`try_form`.
        """
        if (missing := self._missing()) is not None:
            raise ValueError(missing)
        if request_id not in self._awaited:
            form = make_form()
            self._awaited[request_id] = form, self._find(form)
        form, future = self._awaited[request_id]
        if not future.done():  # asked once: it may be done in the next moment
            return None
        if future.exception() is None and future.result() is None:
            self._awaited[request_id] = form, self._threads.submit(self._compile, form, count)
            return None
        del self._awaited[request_id]
        error = future.exception()
        if error is None:
            return [Grammar(matcher) for matcher in future.result() or ()]
        if not isinstance(error, ValueError) and self._kept.get(form) is future:
            del self._kept[form]  # another time it may succeed
        # Not raised itself: it may be kept, and the frames of this step would be with it.
        kind = next((kind for kind in (ValueError, OverloadedError) if isinstance(error, kind)), RuntimeError)
        raise kind(str(error))

    def _find(self, form: Form) -> concurrent.futures.Future[Any]:
        future = self._kept.get(form)
        if future is None or future.cancelled():
            future = self._kept[form] = self._threads.submit(try_form, form, self._trials)
        self._kept.move_to_end(form)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return future

    def wait(self, seconds: float) -> None:
        """Waits a little until one of those that requests ask for is ready."""
        futures = [future for _, future in self._awaited.values()]
        concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)

    def forget(self, request_id: int) -> None:
        """A request has ended; what only it was waiting for, and was not begun, is not compiled."""
        _, future = self._awaited.pop(request_id, (None, None))
        if future is not None and all(other is not future for _, other in self._awaited.values()):
            future.cancel()

    def close(self) -> None:
        """Ends what is being tried; nothing can be compiled any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for trial in list(self._trials):
            trial.kill()

    def _compile(self, form: Form, count: int) -> list[Any]:
        """Returns a matcher for each answer."""
        llguidance = importlib.import_module("llguidance")
        with self._making_tokens:
            if self._tokens is None:
                eos = sorted(self._checkpoint.eos_token_ids) or None
                from_tokenizer = importlib.import_module("llguidance.hf").from_tokenizer
                self._tokens = from_tokenizer(self._checkpoint.tokenizer, eos_token=eos)
        with _as_the_callers_fault():
            grammar = _written(form, self._mark)
            limits = llguidance.LLParserLimits(**_LIMITS)
            matchers = [llguidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits) for _ in range(count)]
            for matcher in matchers:
                matcher.compute_logit_bias()  # the first mask takes longest
                if matcher.is_error():
                    raise ValueError(matcher.get_error())
        return matchers

    def _mark(self, text: str) -> str:
        """Returns a mark as a grammar has it: a control token is no text."""
        token = self._checkpoint.tokenizer.get_vocab().get(text)
        return f"<[{token}]>" if token is not None and self._tokens.is_special_token(token) else _quoted(text)


def try_form(form: Form, trials: set[subprocess.Popen[bytes]]) -> None:
    """Compiles a form in a process that is ended if that takes too much.

    Args:
        form: which.
        trials: has the process meanwhile, so that others can end it.

    Raises:
        ValueError: it does, or the form is wrong.
        OverloadedError: it has had no turn on a busy machine.
        RuntimeError: there can be no such process.
    """
    with _as_the_callers_fault():
        grammar = _written(form, _quoted)
        command = [sys.executable, "-P", "-c", _TRIAL, json.dumps([_MAX_SECONDS, _MAX_NBYTES, _LIMITS])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as trial:
            trials.add(trial)
            try:
                output, errors = trial.communicate(grammar.encode(), _TIMEOUT_S)
            except subprocess.TimeoutExpired:
                text = f"the form of the answer was not compiled within {_TIMEOUT_S:g} s; try again later"
                raise OverloadedError(text) from None
            finally:
                trial.kill()
                trials.discard(trial)
        if trial.returncode > 0:
            raise RuntimeError(f"forms can't be tried: {errors.decode(errors='replace')[-_MAX_ERROR_CHARACTERS:]}")
        if trial.returncode < 0:  # of a signal
            raise ValueError(f"it takes more than {_MAX_SECONDS} s or {_MAX_NBYTES >> 20} MiB")
        if output:
            raise ValueError(output.decode())


@contextlib.contextmanager
def _as_the_callers_fault() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"the form of the answer can't be compiled: {_first_line(str(error))}") from None


def _written(form: Form, write_mark: Callable[[str], str]) -> str:
    """Returns a form as a grammar.

    Args:
        form: which.
        write_mark: writes the marks of calls: those who know a model's tokens write these.
    """
    kind, text = form
    matcher = importlib.import_module("llguidance").LLMatcher
    if kind == "json":
        grammar: str = matcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    elif kind == "regex":
        grammar = matcher.grammar_from_regex(text)
    elif kind == "choice":
        grammar = matcher.grammar_from_lark(text)
    else:
        opening, closing, lark = json.loads(text)
        marks = [f"opening: {write_mark(opening)}", f"closing: {write_mark(closing)}"]
        grammar = matcher.grammar_from_lark("\n".join(["%llguidance {}", lark, *marks]))
    return grammar


def _checked(form: Form) -> Form:
    if len(form[1]) > MAX_FORM_CHARACTERS:
        raise ValueError(f"the form of the answer has {len(form[1])} characters, at most {MAX_FORM_CHARACTERS} are taken")
    return form


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read_marks(template: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns what stands before and after a call; None if it is not JSON in the usual form."""
    field = template["fields"]["tool_calls"]
    opening, closing = field.get("open"), field.get("close")
    pattern = field.get("open_pattern", "").removeprefix(r"\s*")
    literal = pattern.replace("\\", "")
    if literal and re.escape(literal) == pattern:
        opening = literal
    is_usual = field.get("transform") == {"type": "function", "function": "{content}"} and not field.get("content_args")
    if field.get("content") != "json" or not is_usual or field.get("transform_each"):
        return None
    return (opening, closing) if isinstance(opening, str) and isinstance(closing, str) else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:_MAX_ERROR_CHARACTERS]
