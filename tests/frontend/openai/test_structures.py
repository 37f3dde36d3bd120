"""Forms of answers in requests: what the engine is told of them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from shmring.engine.protocol import StructuredOutputsParams
from shmring.frontend.errors import ApiError
from shmring.frontend.openai.chat import CHAT_PARSER, engine_request
from tests.tables import for_each

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
DEEP: Any = {}
for _ in range(70):
    DEEP = {"not": DEEP}


def structure_of(**fields: Any) -> StructuredOutputsParams | None:
    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    return engine_request(CHAT_PARSER.parse(body))[0].sampling.structured_outputs


@for_each(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
        ({"structured_outputs": {"json_object": True, "json": None}}, StructuredOutputsParams(json_object=True)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, StructuredOutputsParams(json='{"type": "null"}')),
    ],
)
def test_the_engine_is_told_what_the_answer_must_be(fields: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    assert structure_of(**fields) == expected


@for_each("fields", [{"response_format": FORMAT}, {"structured_outputs": {"json": SCHEMA}}])
def test_a_schema_keeps_the_order_of_its_properties(fields: dict[str, Any]) -> None:
    structure = structure_of(**fields)
    assert structure is not None
    assert structure.json == json.dumps(SCHEMA, separators=(",", ":"))


@for_each(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": DEEP}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": '"' + "a" * 200_000 + '"'}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_what_is_no_form_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        structure_of(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)
