"""The forms that answers can be asked to have: JSON of a schema, a pattern, one of some texts, calls of tools.

A form is a key: requests of the same form share what is known of it. It becomes a grammar of llguidance, a library in Rust,
which makes grammars and follows them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shmring.engine.executors.interface import FormRefusedError
from shmring.engine.protocol import (
    MAX_CHOICES,
    MAX_FORM_CHARACTERS,
    GenerateRequest,
    StructuredOutputsParams,
    parameters_of,
)

__all__ = [
    "Form",
    "can_require_calls",
    "form_of",
    "form_of_request",
    "opening_mark",
    "quoted",
    "schemas_of",
    "write_grammar",
]

#: What an answer must be: its kind, and what says more.
Form = tuple[str, str]

_MAX_CALLS = 16  # of tools in an answer that must call one

# A model that does not know how to go on writes white space without end, which JSON allows.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,64}"}


def form_of(structure: StructuredOutputsParams) -> Form:
    """Returns what an answer must be.

    Raises:
        ValueError: it says nothing, or too much.
    """
    if structure.json is not None:
        form = "json", _without_options(structure.json)
    elif structure.json_object:
        form = "json", '{"type": "object"}'
    elif structure.regex is not None:
        form = "regex", structure.regex
    elif structure.choice:
        if len(structure.choice) > MAX_CHOICES:
            raise ValueError(f"the form of the answer has {len(structure.choice)} choices, at most {MAX_CHOICES} are taken")
        form = "choice", f"start: {' | '.join(map(quoted, structure.choice))}"
    else:
        raise ValueError("the form of the answer is empty: it has no json, json_object, regex or choice")
    return _checked(form)


def form_of_request(request: GenerateRequest, template: Mapping[str, Any] | None, name: str) -> Form:
    """Returns the form of an answer: JSON or the like, calls of tools, or one of both. Or that of each call in it behind the
    call's opening mark, its closing mark included, if it may be anything else.

    Args:
        request: one that needs a form.
        template: how the model writes, as transformers says it.
        name: of the model.

    Raises:
        ValueError: the form has too much, or calls of this model can't be required.
    """
    structure, is_required = request.sampling.structured_outputs, request.tool_choice == "required"
    if structure is not None and not request.tools:
        return form_of(structure)
    if not request.tools:
        raise ValueError("a call is required, and there are no tools")
    marks = None if template is None else _read_marks(template)
    if marks is None:
        raise ValueError(f"the model {name!r} can't be made to call a tool: its calls are no JSON between two marks")
    functions = [tool["function"] for tool in request.tools]
    keeps = [is_required or function["name"] in request.strict_tools for function in functions]
    schemas = [
        (function["name"], (function.get("parameters") or {}) if kept else {})
        for function, kept in zip(functions, keeps, strict=True)
    ]
    if not is_required and structure is None:
        return _form_of_calls({"closing": marks[1]}, "start:", schemas)
    more = f" (BREAK? call){{0,{_MAX_CALLS - 1}}}" if request.parallel_tool_calls else ""
    answer = None if is_required or structure is None else _answer_of(structure)
    start = f"start: call{more}{'' if answer is None else ' | answer'}\ncall: opening"
    return _form_of_calls({"opening": marks[0], "closing": marks[1]}, start, schemas, answer)


def _answer_of(structure: StructuredOutputsParams) -> Mapping[str, Any]:
    """Returns the schema of an answer that may call tools instead."""
    kind, text = form_of(structure)
    if kind != "json":
        raise ValueError("an answer that may call tools has a form of JSON, or none")
    answer = msgspec.json.decode(text)
    if not isinstance(answer, dict):
        raise FormRefusedError("the form of the answer can't be compiled: a schema is a JSON object")
    return answer


def _without_options(schema: str) -> str:
    """Returns a schema without what llguidance takes for options: to its author, that is a word without a meaning."""
    if "x-guidance" not in schema:
        return schema
    try:
        value = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):
        return schema  # it is no JSON, as its author is told
    if isinstance(value, dict):
        value.pop("x-guidance", None)
    return msgspec.json.encode(value).decode()


def _form_of_calls(
    marks: Mapping[str, str],
    start: str,
    schemas: Sequence[tuple[str, Mapping[str, Any]]],
    answer: Mapping[str, Any] | None = None,
) -> Form:
    """Returns a form of calls: the marks in it, what stands before a call, the schema of each function's arguments, and that of
    an answer without calls, if there may be one."""
    objects = [(name, dict(schema) | {"type": "object"}) for name, schema in schemas]
    return _checked(("calls", msgspec.json.encode([marks, start, objects, answer]).decode()))


def _call_of(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a call. All of it is one, so that the model may write spaces where it does, and tokens that have
    the end of one part and the beginning of the next: of a text that is given, only certain tokens would do."""
    arguments = {"$id": "urn:arguments"} | {key: value for key, value in schema.items() if key != "x-guidance"}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},  # whose references are to its own parts, by its name
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": _JSON_OPTIONS,
    }


def schemas_of(form: Form) -> list[tuple[str, str]]:
    """Returns the schemas in a form, as JSON, and what each is called in an error."""
    kind, text = form
    if kind == "calls":
        _, _, schemas, answer = json.loads(text)
        answers = [] if answer is None else [("the schema", json.dumps(answer))]
        return [*((parameters_of(name), json.dumps(schema)) for name, schema in schemas), *answers]
    return [("the schema", text)] if kind == "json" else []


def opening_mark(template: Mapping[str, Any]) -> str:
    """Returns what stands before a call of a model whose calls have a form that is known here."""
    marks = _read_marks(template)
    assert marks is not None, "can_require_calls says so"
    return marks[0]


def can_require_calls(template: Mapping[str, Any] | None) -> bool:
    """Whether a model's calls have a form that is known here: a JSON object with name and arguments, between two marks."""
    return template is not None and _read_marks(template) is not None


def write_grammar(form: Form, write_mark: Callable[[str], str]) -> str:
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
        marks, start, schemas, answer = json.loads(text)
        calls = " | ".join(f"%json {json.dumps(_call_of(name, schema))}" for name, schema in schemas)
        rules = [f"{start} BREAK? ({calls}) BREAK? closing", 'BREAK: "\\n"']
        if answer is not None:
            rules.append(f"answer: %json {json.dumps(answer | {'x-guidance': _JSON_OPTIONS})}")
        written = [f"{name}: {write_mark(mark)}" for name, mark in marks.items()]
        grammar = matcher.grammar_from_lark("\n".join(["%llguidance {}", *rules, *written]))
    return grammar


def _checked(form: Form) -> Form:
    if len(form[1]) > MAX_FORM_CHARACTERS:
        raise ValueError(f"the form of the answer has {len(form[1])} characters, at most {MAX_FORM_CHARACTERS} are taken")
    return form


def quoted(text: str) -> str:
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
