"""What is wrong with a form that can't be compiled, in the words of whoever wrote it, and where in it.

llguidance never names a place in a schema, and its messages use words that a caller can't know. So each part of the schema is
compiled alone: the innermost part that has the same fault as the whole is where the fault is. If no value fits a part, the
message about that part says why: the one about the whole says only that the part is needed. And the messages of llguidance are
replaced by others.

This module imports nothing that needs torch: trials use it in a small process.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["explained", "find_place"]

_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")  # schemas by name
_SINGLE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SHARED = ("$defs", "definitions", "$schema", "$id")  # to which parts refer
_ROOT = "/$defs/root"  # where the whole schema stands beside a part that refers to something else in it
_NO_VALUE, _NO_TEXT = "no value fits it", "no text fits it"

_MAX_PLACE_CHARACTERS = 200

# Sentences of llguidance, in the order in which they are looked for, and what is said instead.
_SENTENCES: tuple[tuple[str, str], ...] = (
    (r"Unimplemented keys: \[(?P<a>.*)\]", "answers can't be kept to {a}"),
    (r"oneOf constraints are not supported", "alternatives of oneOf overlap, or it is not clear that they don't: use anyOf"),
    (r"Invalid type: (?P<a>.*)", 'there is no type "{a}"'),
    (
        r"Resource '(?:json-schema:///)?(?P<a>.*?)' is not present",
        "its $ref or $schema leads to another document, {a}, and none is fetched",
    ),
    (r"(Pointer|Anchor) '(?P<a>.*?)' does not exist", "its $ref leads to #{a}, where nothing is"),
    (r"Invalid URI( reference)? '(?P<a>.*?)'", "its $ref is no URI: {a}"),
    (r"Unknown format: (?P<a>.*)", 'there is no format "{a}" here'),
    (r"Unsatisfiable schema: (?P<a>.*)", f"{_NO_VALUE}: {{a}}"),
    (r"NoExtension(Bias)?\b", _NO_TEXT),
    (r"Failed to generate regex for \w+ range", "a bound is out of range"),
    (r"Value for 'multipleOf' has too many digits", "multipleOf has more digits than can be kept to"),
    (r"Expected .+? for '(?P<b>.*?)'( item)?, got (?P<c>.*)", "{b} can't be {c}"),
    (r"Expecting object schema to apply options", "a schema is a JSON object"),
    (r"(?s)regex parse error:.*error: (?P<a>[^\n]*)", "the pattern can't be read: {a}"),
    (r"invalid regex .*?\(in regex\): (?P<a>[^\n]*)", "the pattern can't be used: {a}"),
    (r"lookarounds not supported yet", "the pattern can't be used: look-around, word boundaries included, is not supported"),
    (r"invalid multiple of", "multipleOf must be more than 0"),
    (r"(?i)fuel|too complex|limit|too many|too large", "it is too complex"),
)


def explained(fault: str) -> str:
    """Returns what a fault of llguidance means, in one line."""
    for pattern, sentence in _SENTENCES:
        if match := re.search(pattern, fault):
            return sentence.format(**{name: (value or "").strip() for name, value in match.groupdict().items()})
    return fault.strip().partition("\n")[0]


def find_place(schema: Any, fault: str, fault_of: Callable[[Any], str], may_go_on: Callable[[], bool]) -> tuple[str, str]:
    """Returns where in a schema a fault is, and the fault there: of the innermost part that has it, as a pointer such as
    ``#/properties/a``.

    Args:
        schema: as JSON has it.
        fault: of all of it.
        fault_of: returns that of a schema, or nothing.
        may_go_on: says whether there is time to look at one more part.
    """
    place, part = "#", schema
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for path, inner in _parts_within(part):
            if not may_go_on():
                return place, fault
            found = fault_of(_alone(inner, schema)).replace(_ROOT, "")
            if found == fault or (found.startswith(_NO_VALUE) and fault.startswith(_NO_VALUE)):
                place, part, fault, is_deeper = f"{place}/{path}", inner, found, True
                break
    if fault == _NO_TEXT and isinstance(part, Mapping) and "$ref" in part:
        fault = f"{fault}: its $ref leads back to itself"
    return place if len(place) <= _MAX_PLACE_CHARACTERS else f"{place[:_MAX_PLACE_CHARACTERS]}...", fault


def _alone(part: Any, schema: Mapping[str, Any]) -> Any:
    """Returns a part of a schema as a schema of its own, beside what it refers to."""
    if not isinstance(part, Mapping):
        return part
    text = json.dumps(part)
    if '"$ref": "#' not in re.sub(r'"\$ref": "#/(\$defs|definitions)/', "", text):
        return {name: schema[name] for name in _SHARED if name in schema} | dict(part)
    both = re.sub(r'"\$ref": "#(?=[/"])', f'"$ref": "#{_ROOT}', json.dumps({"part": part, "root": schema}))
    moved = json.loads(both)
    return moved["part"] | {"$defs": {"root": moved["root"]}}


def _parts_within(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a schema, and then theirs: a fault in the middle of an answer shows in no part around it."""
    left = deque(_parts_of(schema))
    while left:
        path, part = left.popleft()
        yield path, part
        left.extend((f"{path}/{further}", inner) for further, inner in _parts_of(part))


def _parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, Mapping):
        return
    for key in _OF_NAMES:
        if isinstance(schema.get(key), Mapping):
            for name, inner in schema[key].items():
                yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", inner
    for key in _SINGLE:
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            for number, inner in enumerate(schema[key]):
                yield f"{key}/{number}", inner
