"""The forms that answers can be asked to have: JSON of a schema, a pattern, one of some texts, calls of tools.

A form is a key: requests of the same form share what is known of it. It becomes a grammar of llguidance, a library in Rust,
which makes grammars and follows them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from shmring.engine.executors.interface import FormRefusedError
from shmring.engine.protocol import MAX_CHOICES, MAX_FORM_CHARACTERS, StructuredOutputsParams, parameters_of

__all__ = [
    "Form",
    "can_require_calls",
    "form_of",
    "form_of_answer_or_calls",
    "form_of_calls",
    "form_of_strict_call",
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


def form_of_calls(template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Form:
    """Returns the form of an answer that calls tools and does nothing else.

    Args:
        template: how the model writes, as transformers says it.
        tools: that it may call.
        parallel: whether there may be several calls.

    Raises:
        ValueError: they are too many or too long.
    """
    opening, closing = _marks_of(template)
    more = f"(BREAK? call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    functions = [tool["function"] for tool in tools]
    parameters = [(function["name"], function.get("parameters")) for function in functions]
    return _form_of_calls({"opening": opening, "closing": closing}, f"start: call {more}\ncall: opening", parameters)


def form_of_answer_or_calls(
    template: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    structure: StructuredOutputsParams,
    strict: Collection[str],
    *,
    parallel: bool,
) -> Form:
    """Returns the form of an answer that is JSON of a schema, unless it calls tools.

    Args:
        template, tools, parallel: as of :func:`form_of_calls`.
        structure: what the answer must be if it calls none.
        strict: as of :func:`form_of_strict_call`.

    Raises:
        ValueError: they are too many or too long; or the answer is to be something else than JSON.
    """
    kind, text = form_of(structure)
    if kind != "json":
        raise ValueError("an answer that may call tools has a form of JSON, or none")
    answer = msgspec.json.decode(text)
    if not isinstance(answer, dict):
        raise FormRefusedError("the form of the answer can't be compiled: a schema is a JSON object")
    opening, closing = _marks_of(template)
    more = f" (BREAK? call){{0,{_MAX_CALLS - 1}}}" if parallel else ""
    start = f"start: call{more} | answer\ncall: opening"
    return _form_of_calls({"opening": opening, "closing": closing}, start, _parameters_of(tools, strict), answer)


def form_of_strict_call(template: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], strict: Collection[str]) -> Form:
    """Returns the form of a call behind its opening mark, its closing mark included.

    Args:
        template: how the model writes, as transformers says it.
        tools: that may be called.
        strict: those whose schemas the call keeps to, by name; of others, it has any arguments.

    Raises:
        ValueError: they are too many or too long.
    """
    return _form_of_calls({"closing": _marks_of(template)[1]}, "start:", _parameters_of(tools, strict))


def _parameters_of(tools: Sequence[Mapping[str, Any]], strict: Collection[str]) -> list[tuple[str, Mapping[str, Any] | None]]:
    functions = [tool["function"] for tool in tools]
    return [(function["name"], function.get("parameters") if function["name"] in strict else None) for function in functions]


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
    parameters: Sequence[tuple[str, Mapping[str, Any] | None]],
    answer: Mapping[str, Any] | None = None,
) -> Form:
    """Returns a form of calls: the marks in it, what stands before a call, the schema of each function's arguments, and that of
    an answer without calls, if there may be one."""
    schemas = [(name, dict(schema or {}) | {"type": "object"}) for name, schema in parameters]
    return _checked(("calls", msgspec.json.encode([marks, start, schemas, answer]).decode()))


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
    return _marks_of(template)[0]


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


def _marks_of(template: Mapping[str, Any]) -> tuple[str, str]:
    marks = _read_marks(template)
    assert marks is not None, "can_require_calls says so"
    return marks


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
