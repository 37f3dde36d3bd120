"""A process that tries forms of answers: it has a model's tokens, and forks a process for each trial.

A caller chooses what is compiled, and llguidance does not count all that it does: forty alternatives, combined, are sixteen
million, and nothing ends a thread. So each form is first tried in a process that the kernel ends when it has used its seconds
or its memory. The process does what an answer will do. It compiles the form, and goes through it from token to token, by
chance. What ends answers is therefore found here, before they have begun.

A trial is a message with two descriptors: a socket, and a file with the grammar and the schemas in it. The process of the trial
says on that socket what it has found, and this process says how that process has ended. The trial is given up when the other
end of its socket is closed.

This module imports neither torch nor what needs it: a fork of a small process takes three milliseconds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shmring.engine.form_faults import explained, find_place
from shmring.processes.child import end_with_parent, step_back

__all__ = ["MAX_MESSAGE_NBYTES", "find_fault", "main"]

MAX_MESSAGE_NBYTES = 4096

_STACK_NBYTES = 1 << 20  # what fits here fits the stack of an engine's thread

# Walks through a form, and tokens of each: enough to meet what is met often, in some ten milliseconds for most forms.
_WALKS = 4
_TOKENS = 96
_SHORT = 300  # in most vocabularies, the first tokens are single bytes

_MAX_FAULT_CHARACTERS = 300

# Seconds of a processor that looking for the place of a fault may take, and that are left then of those of the trial.
_PLACE_S = 0.3
_RESERVE_S = 0.2

_ALLOWED = b"\xc8"  # in llguidance's masks


def main() -> None:
    """Tries forms until the control socket is closed.

    Its descriptor is the first argument. The others are those of a file with the tokenizer, and the settings in JSON.
    """
    # Whoever ends the engine's process group does not mean us: we end with the engine.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[3])
    with open(int(sys.argv[2]), encoding="utf-8") as file:
        tokens = LLTokenizer(file.read(), eos_token=settings["ends"] or None)
    gc.freeze()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ, lambda: _begin(control, selector, tokens, settings))
    while True:
        for key, _ in selector.select():
            key.data()


def _begin(control: socket.socket, selector: selectors.BaseSelector, tokens: LLTokenizer, settings: dict[str, Any]) -> None:
    """Forks a process for a trial, and watches both ends of it."""
    message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_NBYTES, 2)
    if not message:
        os._exit(0)  # trials end with this process
    connection, grammar_fd = socket.socket(fileno=descriptors[0]), descriptors[1]
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _try(own_pid, connection, grammar_fd, tokens, settings)
    os.close(grammar_fd)
    pidfd = os.pidfd_open(pid)

    def end() -> None:
        selector.unregister(connection)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def ended() -> None:
        _, status, usage = os.wait4(pid, 0)
        selector.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        with contextlib.suppress(OSError):  # it was given up
            end = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
            connection.send(b"\0" + json.dumps(end).encode())
        connection.close()

    selector.register(connection, selectors.EVENT_READ, end)  # nothing is sent here, so this is its end
    selector.register(pidfd, selectors.EVENT_READ, ended)


def _try(
    parent_pid: int, connection: socket.socket, grammar_fd: int, tokens: LLTokenizer, settings: dict[str, Any]
) -> NoReturn:
    """What the process of a trial does."""
    try:
        end_with_parent(parent_pid)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # llguidance writes there when it fails
        step_back()
        seconds = settings["seconds"]
        with open("/proc/self/statm") as file:
            nbytes = int(file.read().split()[0]) * resource.getpagesize() + settings["nbytes"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
        with open(grammar_fd, encoding="utf-8") as file:
            grammar, schemas = json.load(file)
        limits = LLParserLimits(**settings["limits"])
        threading.stack_size(_STACK_NBYTES)

        def work() -> None:
            if fault := find_fault(tokens, grammar, limits, settings["ends"]):
                found = _find_place(explained(fault), tokens, schemas, limits, seconds)
                _say(connection, json.dumps(found, ensure_ascii=False))

        _run_in_thread(work)
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this is a fork, whose caller is somebody else
        _say(connection, traceback.format_exc())
        os._exit(1)


def _say(connection: socket.socket, text: str) -> None:
    """Says what was found: the end of the text, if it is long."""
    if text:
        connection.send(text.encode(errors="replace")[-MAX_MESSAGE_NBYTES:])


def _run_in_thread(work: Callable[[], object]) -> None:
    """Does something on a thread of its own; raises what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def find_fault(tokens: LLTokenizer, grammar: str, limits: LLParserLimits, ends: list[int]) -> str:
    """Goes through a form some times, as answers do; returns why it can't be gone on with, or nothing.

    Args:
        tokens: the model's.
        grammar: of the form.
        limits: what may be done for it.
        ends: tokens that end any answer.
    """
    for walk in range(_WALKS):
        chance = random.Random(walk)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        for _ in range(_TOKENS):
            mask = matcher.compute_logit_bias()
            token = _choose(mask, ends, chance.randrange(min(_SHORT, len(mask)) if walk % 2 else len(mask)))
            if token is None or not matcher.consume_token(token) or matcher.is_stopped():
                break
        if matcher.is_error():
            error: str = matcher.get_error()
            return error
    return ""


def _find_place(
    fault: str, tokens: LLTokenizer, schemas: list[tuple[str, str]], limits: LLParserLimits, seconds: float
) -> tuple[str, str, str]:
    """Returns a fault of a form, which of some schemas has it, by what it is called, and where; two empty texts: that is not
    known.

    Some faults show only in the middle of an answer: the whole schema has none at its beginning, but a part of it alone may.
    """
    until_s = min(time.process_time() + _PLACE_S, seconds - _RESERVE_S)

    def may_go_on() -> bool:
        return time.process_time() < until_s

    def fault_of(schema: Any) -> str:
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        except ValueError as error:
            return explained(str(error))
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_logit_bias()
        return explained(matcher.get_error()) if matcher.is_error() else ""

    for name, text in schemas:
        if not may_go_on():
            break
        schema = json.loads(text)
        of_whole = fault_of(schema)
        place, found = find_place(schema, of_whole or fault, fault_of, may_go_on)
        if of_whole or place != "#":
            return found[:_MAX_FAULT_CHARACTERS], name, place
    return fault[:_MAX_FAULT_CHARACTERS], "", ""


def _choose(mask: bytes, ends: list[int], start: int) -> int | None:
    """Returns the first token that may be next, from a start on; None if only ends may."""
    token = mask.find(_ALLOWED, start)
    for _ in range(len(ends) + 2):
        if token < 0:
            token = mask.find(_ALLOWED)
        if token not in ends:
            break
        token = mask.find(_ALLOWED, token + 1)
    return None if token < 0 or token in ends else token


if __name__ == "__main__":
    main()
