"""Forms that can't be compiled: what their authors are told, and where it is. No word is the library's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from shmring.engine.executors.interface import FormRefusedError
from shmring.engine.form_faults import find_place
from shmring.engine.protocol import StructuredOutputsParams
from tests.stepping import answer
from tests.tables import for_each

pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from shmring.engine.executors.transformers import TransformersExecutor
from tests.engine.asking import ask

WORDS_OF_THE_LIBRARY = re.compile(
    r"NoExtension|coerce_one_of|Unimplemented|Unsatisfiable|[a-z]+_[a-z]+_[a-z]+|<non-verbose|lark|llguidance|start:|Resource|"
    r"Some\(|\bparser\b|Expecting|while processing"
)
TEXT = {"type": "string"}


@pytest.fixture(scope="module")
def executor(load: Callable[..., TransformersExecutor]) -> TransformersExecutor:
    return load("llama")


def told(executor: TransformersExecutor, structure: StructuredOutputsParams) -> str:
    with pytest.raises(FormRefusedError, match="the form of the answer can't be compiled: ") as caught:
        answer(executor, ask("Hi", structured_outputs=structure))
    text = str(caught.value).removeprefix("the form of the answer can't be compiled: ")
    assert not WORDS_OF_THE_LIBRARY.search(text), text
    assert "\n" not in text
    assert len(text) < 400
    return text


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def needed(**properties: Any) -> dict[str, Any]:
    return of(**properties) | {"required": list(properties)}


@for_each(
    ("schema", "what", "place"),
    [
        ({"not": TEXT}, '"not"', "#"),
        (of(a={"type": "array", "items": {"not": TEXT}}), '"not"', "#/properties/a/items"),
        (of(a={"type": "array", "uniqueItems": True}, b=TEXT), '"uniqueItems"', "#/properties/a"),
        (of(v={"oneOf": [TEXT, {"type": "string", "maxLength": 4}]}), "use anyOf", "#/properties/v"),
        ({"$ref": "#/$defs/p", "$defs": {"p": of(v={"oneOf": [TEXT, TEXT]})}}, "use anyOf", "#/$defs/p/properties/v"),
        ({"type": "cat"}, 'no type "cat"', "#"),
        (of(**{"a/b": {"anyOf": [TEXT, {"type": "cat"}]}}), 'no type "cat"', "#/properties/a~1b/anyOf/1"),
        (of(a={"$ref": "https://example.com/schema"}), "another document, https://example.com/schema", "#/properties/a"),
        (of(a={"$ref": "#/nowhere"}), "leads to #/nowhere, where nothing is", "#/properties/a"),
        ({"$ref": "#"}, "leads back to itself", "#"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself", "#"),
        (of(p={"type": "string", "pattern": "(("}), "can't be read: unclosed group", "#/properties/p"),
        (of(p={"type": "string", "pattern": "(?=a)b"}), "look-around", "#/properties/p"),
        (of(p={"type": "string", "format": "nosuch"}), 'no format "nosuch"', "#/properties/p"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater", "#"),
        (of(p={"enum": 5}) | {"required": ["p"]}, "enum must be an array", "#/properties/p"),
        (of(p={"type": "integer", "minimum": "x"}), 'minimum can\'t be "x"', "#/properties/p"),
        (of(p={"type": "string", "minLength": -1}), "minLength can't be -1", "#/properties/p"),
        (of(p={"type": "number", "maximum": 1e300}), "a bound is out of range", "#/properties/p"),
        (of(p={"type": "number", "multipleOf": 1e-30}), "multipleOf has more digits", "#/properties/p"),
        (of(p={"$ref": "other.json#/a"}), "another document, other.json,", "#/properties/p"),
        (of(p={"$ref": "#nowhere"}), "leads to #nowhere, where nothing is", "#/properties/p"),
        (of(p={"$ref": "http://[x"}), "no URI: http://[x", "#/properties/p"),
        (needed(a=needed(b={"type": "integer", "minimum": 5, "maximum": 3})), "minimum (5)", "#/properties/a/properties/b"),
        (needed(a={"enum": []}), "no value fits it", "#/properties/a"),
        (needed(a={"anyOf": [{"type": "string", "const": 1}]}), "incompatible types", "#/properties/a/anyOf/0"),
        (needed(a={"$ref": "#/$defs/d"}) | {"$defs": {"d": {"enum": []}}}, "no value fits it", "#/$defs/d"),
        (needed(a={"$ref": "#/properties/b"}, b={"oneOf": [TEXT, TEXT]}), "use anyOf", "#/properties/a"),
        (needed(a={"$ref": "#/properties/a"}), "its $ref leads back to itself", "#/properties/a"),
        (needed(a=TEXT, b=needed(c={"$ref": "#/properties/b/properties/c"})), "back to itself", "#/properties/b/properties/c"),
    ],
)
def test_what_is_wrong_with_a_schema_is_told_and_where(
    executor: TransformersExecutor, schema: dict[str, Any], what: str, place: str
) -> None:
    for _ in range(2):  # and again, from what is kept
        text = told(executor, StructuredOutputsParams(json=json.dumps(schema)))
        assert what in text
        assert f"(in the schema, at {place}" in text, text


@for_each(
    ("pattern", "what"),
    [
        ("((", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bfoo\b", "word boundaries"),
        ("[z-a]", "invalid character class range"),
        (r"[^\s\S]", "no text fits it"),
        ("x" * 5000 + "((", "unclosed group"),
    ],
)
def test_what_is_wrong_with_a_pattern_is_told(executor: TransformersExecutor, pattern: str, what: str) -> None:
    assert what in told(executor, StructuredOutputsParams(regex=pattern))


@for_each("options", [{"lenient": True}, {"nosuch": 1}, 5])
def test_options_of_the_library_are_none_of_a_schema(executor: TransformersExecutor, options: Any) -> None:
    structure = StructuredOutputsParams(json=json.dumps({"not": TEXT, "x-guidance": options}))
    assert '"not"' in told(executor, structure)


@for_each("text", ["{", "5", '"x"', "false", "[1]"])
def test_what_is_no_schema_is_told(executor: TransformersExecutor, text: str) -> None:
    told(executor, StructuredOutputsParams(json=text))


def test_a_large_schema_takes_no_longer_than_there_is_time() -> None:
    schema = of(**{f"p{number}": {"not": {}} if number == 900 else TEXT for number in range(1000)})
    looked = []

    def fault_of(part: Any) -> str:
        looked.append(part)
        return "fault" if "not" in json.dumps(part) else ""

    place, fault = find_place(schema, "fault", fault_of, lambda: True)
    assert (place[:17], fault) == ("#/properties/p900", "fault")
    count = len(looked)
    assert find_place(schema, "fault", fault_of, lambda: len(looked) < count + 10) == ("#", "fault")
