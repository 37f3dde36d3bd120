"""Engines that say something, and what callers of streams with named events get and send."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import shmring
from shmring.engine.protocol import GenerateReply, ToolCall

__all__ = ["in_pieces", "named_events", "say", "think_and_call"]


async def say(claim: shmring.Claim) -> None:
    """Says something in two pieces."""
    await claim.reply(GenerateReply("Hel", [1], 5, 1))
    await claim.reply(GenerateReply("lo.", [2], 5, 2, "stop"))


async def think_and_call(claim: shmring.Claim) -> None:
    """Thinks, says something, and calls two tools."""
    await claim.reply(GenerateReply("", [1], 5, 1, reasoning="Hm"))
    await claim.reply(GenerateReply("Let ", [2], 5, 2, reasoning="m."))
    await claim.reply(GenerateReply("me.", [3], 5, 3))
    calls = [ToolCall("f", '{"x":1}'), ToolCall("g", "{}", index=1)]
    await claim.reply(GenerateReply("", [4], 5, 4, "tool_calls", calls))


def named_events(text: str) -> list[Any]:
    """The events of a stream, in which each line with an event's name says its type."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def in_pieces(body: Any) -> AsyncIterator[bytes]:
    """A body of JSON, as a server hands it out."""
    encoded = json.dumps(body).encode()
    for start in range(0, len(encoded), 64 << 10):
        yield encoded[start : start + (64 << 10)]
