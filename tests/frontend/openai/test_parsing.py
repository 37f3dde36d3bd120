"""Bodies that are no JSON, or not such a request: always a 400 that says where, never anything else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shmring.frontend.errors import ApiError
from shmring.frontend.openai import parsing
from shmring.frontend.openai.chat import CHAT_PARSER, ChatRequest
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER
from tests.tables import for_each

HEAD = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]'


def refused(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as raised:
        CHAT_PARSER.parse(body)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ud800x"}',
        b'{"model": "\\udc00"}',
        b'\xef\xbb\xbf{"model": "m"}',
        HEAD + b', "seed": NaN}',
        HEAD + b', "unknown": ' + b"[" * 100_000 + b"}",
        HEAD + b', "functions": ' + b"[" * 100_000 + b"}",
        HEAD + b', "functions": ' + b'{"a":' * 100_000 + b"}",
    ],
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


@for_each(
    ("fields", "param"),
    [
        (b', "seed": 99999999999999999999999999', "seed"),
        (b', "seed": ' + b"9" * 10_000, "seed"),
        (b', "seed": 1.5', "seed"),
        (b', "temperature": 1e400', "temperature"),
        (b', "temperature": -0.1', "temperature"),
        (b', "temperature": 2.1', "temperature"),
        (b', "temperature": true', "temperature"),
        (b', "top_p": 0', "top_p"),
        (b', "top_p": 1.1', "top_p"),
        (b', "max_tokens": 0', "max_tokens"),
        (b', "max_completion_tokens": -1', "max_completion_tokens"),
        (b', "priority": 1e30', "priority"),
        (b', "stop": [' + b", ".join([b'"a"'] * 17) + b"]", "stop"),
        (b', "stop": ""', "stop"),
        (b', "stop": [1]', "stop[0]"),
        (b', "stream": "yes"', "stream"),
        (b', "stream_options": {"include_usage": 1}', "stream_options.include_usage"),
        (b', "n": ' + b"9" * 10_000, "n"),
    ],
)
def test_what_is_not_such_a_request_is_refused_with_its_place(fields: bytes, param: str) -> None:
    error = refused(HEAD + fields + b"}")
    assert (error.code, error.param) == ("invalid_value", param)


def test_a_name_that_stands_twice_has_its_last_value() -> None:
    assert CHAT_PARSER.parse(HEAD + b', "seed": 1, "seed": 2}').seed == 2


def test_what_is_not_known_is_ignored_whatever_it_is() -> None:
    CHAT_PARSER.parse(HEAD + b', "store": true, "metadata": {"a": ["\xff", ' + b"9" * 10_000 + b"]}}")


def test_messages_stay_short_whatever_was_sent() -> None:
    body = {"model": "m", "messages": [{"role": "x" * 100_000, "content": ""}]}
    error = refused(msgspec.json.encode(body))
    assert len(str(error)) < 400
    with pytest.raises(ApiError) as raised:
        EMBEDDING_PARSER.parse(msgspec.json.encode({"model": "m", "encoding_format": "y" * 100_000}))
    assert len(str(raised.value)) < 400


@for_each(
    ("body", "param"),
    [
        (b"{}", "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text"),
    ],
)
def test_what_is_missing_is_named(body: bytes, param: str) -> None:
    error = refused(body)
    assert (error.code, error.param) == ("invalid_value", param)


def test_the_error_about_a_part_of_unknown_type_lists_all_types() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image"}]}]}'
    with pytest.raises(ApiError, match="text, image_url, input_audio, audio_url or video_url") as caught:
        CHAT_PARSER.parse(body)
    assert caught.value.param == "messages[0].content[0].type"


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
