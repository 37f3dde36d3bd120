"""Names in bodies: which has which value, and which are not known. What is refused: test_refused_bodies.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shmring.frontend.http import parsing
from shmring.frontend.openai.chat import CHAT_PARSER, ChatRequest
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER
from tests.tables import for_each

HEAD = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]'


def test_a_name_that_stands_twice_has_its_last_value() -> None:
    assert CHAT_PARSER.parse(HEAD + b', "seed": 1, "seed": 2}').seed == 2


def test_what_is_not_known_is_ignored_whatever_it_is() -> None:
    CHAT_PARSER.parse(HEAD + b', "store": true, "metadata": {"a": ["\xff", ' + b"9" * 10_000 + b"]}}")


@for_each(
    ("fields", "names"),
    [
        ({}, []),
        ({"stop": ["a"], "stream": False, "logit_bias": {"5": 1}}, []),  # any values of known fields
        ({"store": True, "seed": 1}, ["store"]),
        ({"stream_options": {"include_usage": True, "more": 1}}, ["stream_options.more"]),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]}, ["messages[1].name"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
            ["messages[0].content[0].cache_control"],
        ),
        (
            {"messages": [{"role": "user", "content": [{"image_url": {"url": "a", "detail": "low"}, "type": "image_url"}]}]},
            ["messages[0].content[0].image_url.detail"],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": ["b", {"image_url": {"url": "a", "detail": detail}, "type": "image_url"}]}
                    for detail in ("auto", None)
                ]
            },
            [],
        ),
        ({"messages": [{"role": "assistant", "content": None, "refusal": "no"}]}, []),
        ({"a\r\nb, c": 1, "x" * 1000: 1, "é" * 1000: 1}, ["a%0D%0Ab%2C%20c", "x" * 64, ("%C3%A9" * 11)[:64]]),
        ({str(number): 1 for number in range(1000)}, [str(number) for number in range(16)]),
    ],
)
@for_each("space", [b"", b" \n" * 5000])
def test_fields_that_are_not_known_are_named(fields: dict[str, Any], names: list[str], space: bytes) -> None:
    known_fields = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    body = space + msgspec.json.encode(known_fields | fields)
    request = CHAT_PARSER.parse(body)
    assert CHAT_PARSER.ignored_fields(request, body) == names
    assert isinstance(request, ChatRequest)
    assert request == msgspec.json.decode(body, type=type(request))


def test_numbers_as_inputs_are_not_looked_through_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    body = msgspec.json.encode({"model": "m", "input": list(range(1000)), "store": True})
    request = EMBEDDING_PARSER.parse(body)
    looked_at = []
    original = parsing._unknown_fields

    def count(value: Any, kind: Any, path: str) -> Any:
        looked_at.append(path)
        return original(value, kind, path)

    monkeypatch.setattr(parsing, "_unknown_fields", count)
    assert EMBEDDING_PARSER.ignored_fields(request, body) == ["store"]
    assert len(looked_at) == 3
