"""Executors without an engine: steps until answers are finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmring.engine.executors.interface import Executor, StepInput
from shmring.engine.protocol import GenerateReply, GenerateRequest


def run(executor: Executor, requests: Mapping[int, GenerateRequest]) -> dict[int, list[GenerateReply] | Exception]:
    """Executes steps until all requests are finished, as the engine does."""
    answers: dict[int, Any] = {number: [] for number in requests}
    batch = [StepInput(number, request) for number, request in requests.items()]
    while batch:
        running = []
        for part, output in zip(batch, executor.execute(batch), strict=True):
            if isinstance(output, Exception):
                answers[part.request_id] = output
                continue
            for reply in (output.reply, *output.others):
                assert reply is None or isinstance(reply, GenerateReply)
                answers[part.request_id] += [] if reply is None else [reply]
            if not output.finished:
                running.append(StepInput(part.request_id, part.payload if output.keep_inputs else None))
        batch = running
    for number in requests:
        executor.forget(number)
    return answers


def answer(executor: Executor, request: GenerateRequest) -> list[GenerateReply]:
    """Has one request answered alone; raises its error."""
    replies = run(executor, {1: request})[1]
    if isinstance(replies, Exception):
        raise replies
    return replies
