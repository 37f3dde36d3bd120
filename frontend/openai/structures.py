"""Forms that an answer must have: ``response_format`` of OpenAI's API, and ``structured_outputs`` of vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shmring.engine.protocol import MAX_CHOICES, MAX_FORM_CHARACTERS, StructuredOutputsParams
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.openai.messages import check_characters
from shmring.frontend.openai.tools import check_values
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = ["ResponseFormat", "StructuredOutputs", "structure_of"]


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct):
    """A JSON schema. Answers always keep to it, whatever `strict` says; `name` and `description` are not told to the model."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct):
    """What an answer must be; one of the fields is set. As in vLLM."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Annotated[Any, only()] = None
    structural_tag: Annotated[Any, only()] = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    whitespace_pattern: Annotated[Any, only()] = None


_UNSUPPORTED = Unsupported(StructuredOutputs)
_SAID = "the form of the answer has {} characters"


def structure_of(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """Returns what an answer must be; None: anything.

    Raises:
        ApiError: that is said twice, or not at all, or at too great a length.
    """
    if isinstance(response_format, TextFormat):
        response_format = None
    if response_format is not None and structured is not None:
        text = "response_format and structured_outputs both say what the answer must be: send one of them"
        raise ApiError(ErrorCode.INVALID_VALUE, text, param="structured_outputs")
    if isinstance(response_format, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    if isinstance(response_format, JsonSchemaFormat):
        place = "response_format.json_schema.schema"
        if response_format.json_schema.schema is None:
            raise ApiError(ErrorCode.INVALID_VALUE, "a json_schema must have a schema", param=place)
        return StructuredOutputsParams(json=_schema_text(response_format.json_schema.schema, place))
    return None if structured is None else _structure(structured)


def _structure(structured: StructuredOutputs) -> StructuredOutputsParams:
    check_supported(structured, _UNSUPPORTED, "structured_outputs.")
    fields = {name: getattr(structured, name) for name in ("json", "json_object", "regex", "choice")}
    names = [name for name, value in fields.items() if value not in (None, False)]
    if len(names) != 1:
        text = f"structured_outputs must have one of {', '.join(fields)}; it has {len(names)}"
        raise ApiError(ErrorCode.INVALID_VALUE, text, param="structured_outputs")
    place = f"structured_outputs.{names[0]}"
    if structured.json is not None:
        return StructuredOutputsParams(json=_schema_text(structured.json, place))
    texts = [structured.regex] if structured.regex is not None else structured.choice or []
    check_characters(_SAID, texts, place, MAX_FORM_CHARACTERS)
    return StructuredOutputsParams(
        json_object=bool(structured.json_object), regex=structured.regex, choice=structured.choice or []
    )


def _schema_text(schema: dict[str, Any] | str, place: str) -> str:
    check_values(schema, place)
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    check_characters(_SAID, (text,), place, MAX_FORM_CHARACTERS)
    return text
