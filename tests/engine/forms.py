"""Forms of many kinds, as callers may ask for them: some are dear, some can't be."""

from __future__ import annotations

import json
from typing import Any

from shmring.engine.executors.forms import Form, form_of
from shmring.engine.protocol import StructuredOutputsParams

_TEXT, _WHOLE, _NUMBER, _YES = ({"type": name} for name in ("string", "integer", "number", "boolean"))


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _text(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **more}


_nested: dict[str, Any] = _TEXT
for _level in range(30):
    _nested = _object(**{f"l{_level}": _nested, "x": _WHOLE})

_EXPRESSION = {
    "anyOf": [
        _NUMBER,
        {"type": "array", "items": {"$ref": "#/$defs/e"}},
        _object(op={"enum": ["+", "-"]}, a={"$ref": "#/$defs/e"}, b={"$ref": "#/$defs/e"}),
    ]
}
_RECIPE = _object(
    title={"type": "string", "minLength": 1, "maxLength": 200},
    steps={
        "type": "array",
        "items": _object(text={"type": "string", "maxLength": 2000}, minutes={"type": "integer", "minimum": 0, "maximum": 600}),
        "minItems": 1,
        "maxItems": 30,
    },
)
_SCHEMAS: dict[str, Any] = {
    "person": _object(name=_TEXT, age=_WHOLE, email={"type": "string", "format": "email"}),
    "any object": {"type": "object"},
    "anything": {},
    "nested": _nested,
    **{
        f"format {name}": _object(v={"type": "string", "format": name})
        for name in ("date-time", "date", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri")
    },
    "enum of 2000": _object(e={"enum": [f"value number {number} of {number * 7}" for number in range(2000)]}),
    "range of whole numbers": _object(i={"type": "integer", "minimum": -1234567, "maximum": 98765432}),
    "range of numbers": _object(i={"type": "number", "minimum": -1.25, "exclusiveMaximum": 1e6}),
    "multiple of 7": _object(i={"type": "integer", "multipleOf": 7}),
    "multiple of 1000": _object(i={"type": "integer", "multipleOf": 1000}),
    "text of 1000": _object(s={"type": "string", "maxLength": 1000}),
    "text of 100 to 10000": _object(s={"type": "string", "minLength": 100, "maxLength": 10000}),
    "names": _object(s=_text("^[A-Z][a-z]+( [A-Z][a-z]+)*$")),
    "a pattern anywhere": _object(s=_text("foo[0-9]+bar")),
    "a pattern of 1000": _object(s=_text("^[a-z]{0,1000}$")),
    "a pattern, no longer than": _object(s=_text("^([a-z]+-)+[a-z]+$", maxLength=100)),
    "words of any letters": _object(s=_text(r"^\p{L}+(\s\p{L}+){0,20}$")),
    "a word of 200": _object(s=_text(r"^\w{1,200}$")),
    "any of 20": {"anyOf": [_object(kind={"const": f"k{number}"}, **{f"p{number}": _TEXT}) for number in range(20)]},
    "all of 8": {
        "allOf": [{"type": "object", "properties": {f"p{n}": _TEXT}, "required": [f"p{n}"]} for n in range(8)],
    },
    "all of any of": {
        "allOf": [{"anyOf": [{"type": "object", "properties": {f"p{i}{j}": _TEXT}} for j in range(3)]} for i in range(4)],
    },
    "all of these patterns": _object(
        s={"allOf": [_text("^[a-z0-9]+$"), _text("[0-9]"), _text("x"), {"type": "string", "maxLength": 40}]}
    ),
    "too many patterns": _object(s={"allOf": [_text(letter) for letter in "abcdefghij"]}),
    "a reference": {"$ref": "#/$defs/a", "$defs": {"a": _object(b={"$ref": "#/$defs/b"}), "b": _object(c=_TEXT)}},
    "an expression": {"$ref": "#/$defs/e", "$defs": {"e": _EXPRESSION}},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x-[a-z]+$": _TEXT, "^[0-9]{1,3}$": _NUMBER},
        "additionalProperties": False,
    },
    "others are numbers": {"type": "object", "properties": {"a": _TEXT}, "additionalProperties": _WHOLE},
    "100 names": _object(**{f"prop{number}": [_TEXT, _WHOLE, _NUMBER, _YES][number % 4] for number in range(100)}),
    "500 names, none required": {"type": "object", "properties": {f"property number {number}": _TEXT for number in range(500)}},
    "a row": {"type": "array", "prefixItems": [_TEXT, _WHOLE, _YES], "items": _NUMBER, "maxItems": 10},
    "1000 numbers": {"type": "array", "items": _WHOLE, "minItems": 10, "maxItems": 1000},
    "several types": _object(v={"type": ["string", "number", "null", "boolean"]}),
    "a recipe": _RECIPE,
    "an unknown format": _object(v={"type": "string", "format": "json-pointer"}),
}
_PATTERNS = {
    "a number": r"\d{3}-\d{4}",
    "any text": r"(.|\n)*",
    "any text of 1000": r"(.|\n){0,1000}",
    "1000 letters": r"[a-z]{0,1000}",
    "1000 times the same": r"a{1000}",
    "100000 times the same": r"a{100000}",
    "12 behind an a": r"[ab]*a[ab]{12}",
    "20 behind an a": r"(.|\n)*a(.|\n){20}",
    "500 of any letters": r"\p{L}{1,500}",
    "300 words": r"(\w+ ){0,300}\w+\.",
    "an address": r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}",
    "a statement": r"SELECT (\*|[a-z_]+(, [a-z_]+)*) FROM [a-z_]+( WHERE [a-z_]+ = '[^']{0,64}')?;",
    "stars within": r"((a+b*)+c?)+(d|e){5,50}",
    "headings and items": r"(# .{1,80}\n(- .{1,120}\n){1,10}){1,5}",
    "ideographs": r"[\u4e00-\u9fff]{10,200}",
    "pluses within": r"(x+x+)+y",
}
_CHOICES = {"a choice of 3": ["yes", "no", "maybe so"], "a choice of 1000": [f"choice {n} {n * n}" for n in range(1000)]}

FORMS: dict[str, Form] = {
    **{name: form_of(StructuredOutputsParams(json=json.dumps(schema))) for name, schema in _SCHEMAS.items()},
    **{name: form_of(StructuredOutputsParams(regex=pattern)) for name, pattern in _PATTERNS.items()},
    **{name: form_of(StructuredOutputsParams(choice=texts)) for name, texts in _CHOICES.items()},
}
"""By name. Those of :data:`REFUSED` can't be."""
