"""Tools in chats: what a caller offers, what a model calls, and what a caller says that the calls returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shmring.engine.protocol import ToolCall as EngineToolCall
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.responses import new_id
from shmring.frontend.openai.messages import MAX_DEPTH

__all__ = [
    "MAX_TOOLS",
    "OF_TYPE",
    "AllowedToolChoice",
    "DeltaToolCall",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Tools",
    "called",
    "called_now",
    "check_values",
    "choose_tools",
    "engine_calls",
    "engine_tools",
    "other_tools",
]

MAX_TOOLS = 1024  # OpenAI's API takes 128 functions, and more in namespaces, which are functions here

_STRICT = "Calls keep to the schema; a required call always does. Ignored, and named, if the model can't be made to."

_Name = Annotated[str, Meta(min_length=1, max_length=256)]


class FunctionDefinition(msgspec.Struct):
    """A function that may be called; `parameters` is a JSON schema."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[bool | None, Meta(description=_STRICT)] = None


#: What is said of the type of a tool.
OF_TYPE = "`function`. Tools of other types are left out, and named: this server runs none itself."


class Tool(msgspec.Struct):
    """A tool that may be called."""

    type: Annotated[str, Meta(description=OF_TYPE)]
    function: FunctionDefinition | None = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class NamedFunction(msgspec.Struct):
    """The name of a function."""

    name: _Name


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: NamedFunction


class AllowedTools(msgspec.Struct):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The tools that may be called. The model is told of no others."""

    allowed_tools: AllowedTools


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool | AllowedToolChoice


class FunctionCall(msgspec.Struct):
    """Which function is called, and its arguments as JSON in a text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class DeltaToolCall(ToolCall, kw_only=True):
    """A call of a tool in a stream. It comes whole."""

    index: int


def choose_tools(tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool) -> dict[str, Any]:
    """Returns the fields of the engine's request that are about tools: which ones an answer may call, as chat templates take
    them, and how.

    A model that may call some of the tools only knows of no others. One that its caller names is called once.

    Raises:
        ApiError: there is no such tool, or one has something that is not accepted.
    """
    is_named = isinstance(choice, NamedTool)
    chosen: list[NamedTool] | None = None
    mode = "required" if is_named else choice or "auto"
    if isinstance(choice, NamedTool):
        chosen = [choice]
    elif isinstance(choice, AllowedToolChoice):
        chosen, mode = choice.allowed_tools.tools, choice.allowed_tools.mode
    in_engine = [] if mode == "none" else engine_tools(tools)
    if chosen is not None:
        by_name = {tool["function"]["name"]: tool for tool in reversed(in_engine)}
        if missing := [tool.function.name for tool in chosen if tool.function.name not in by_name]:
            text = f"tool_choice names {missing[0]!r}, which tools do not have"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param="tool_choice")
        in_engine = [by_name[name] for name in dict.fromkeys(tool.function.name for tool in chosen)]
    if mode == "required" and not in_engine:
        raise ApiError(ErrorCode.INVALID_VALUE, "tool_choice requires a tool, and there are none", param="tool_choice")
    names = {tool["function"]["name"] for tool in in_engine}
    return {
        "tools": in_engine,
        "tool_choice": "required" if mode == "required" else "auto",
        "strict_tools": [
            tool.function.name for tool in tools if tool.function and tool.function.strict and tool.function.name in names
        ]
        if mode == "auto"
        else [],
        "parallel_tool_calls": parallel and not is_named,
    }


def other_tools(tools: Sequence[Tool]) -> list[int]:
    """Returns which of some tools are no functions: a model is not told of them."""
    return [index for index, tool in enumerate(tools) if tool.type != "function"]


def engine_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns tools as chat templates take them.

    Raises:
        ApiError: one has something that is not accepted, or none is a function.
    """
    values: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        if tool.type != "function":
            continue
        if tool.function is None:
            text = "a tool of the type function must have a function"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param=f"tools[{index}].function")
        check_values(tool.function.parameters, f"tools[{index}].function.parameters")
        fields = msgspec.to_builtins(tool.function)
        function = {name: field for name, field in fields.items() if field is not None and name != "strict"}
        values.append({"type": "function", "function": function})
    if tools and not values:
        text = f"this server runs no tools itself: it takes those of the type function, and {tools[0].type!r} is none"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="tools[0].type")
    return values


def engine_calls(calls: Sequence[ToolCall], param: str) -> list[EngineToolCall]:
    """Returns the calls of an earlier answer, as the engine takes them.

    Raises:
        ApiError: arguments are no JSON object.
    """
    found = []
    for index, call in enumerate(calls):
        place = f"{param}[{index}].function.arguments"
        try:
            arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(ErrorCode.INVALID_VALUE, f"the arguments are no JSON object: {error}", param=place) from None
        check_values(arguments, place)
        found.append(EngineToolCall(call.function.name, call.function.arguments or "{}", call.id, index))
    return found


def check_values(value: Any, param: str, depth: int = 0) -> None:
    """Refuses values that are nested too deeply, and numbers of more than 64 bits.

    Raises:
        ApiError: they are.
    """
    if depth > MAX_DEPTH:
        raise ApiError(ErrorCode.INVALID_VALUE, f"more than {MAX_DEPTH} values in one another", param=param)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ApiError(ErrorCode.INVALID_VALUE, "a number has more than 64 bits", param=param)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        check_values(item, param, depth + 1)


def called(calls: Sequence[EngineToolCall]) -> list[ToolCall]:
    """Returns the calls of an answer."""
    return [ToolCall(new_id("call_"), FunctionCall(call.name, call.arguments)) for call in calls]


def called_now(calls: Sequence[EngineToolCall]) -> list[DeltaToolCall]:
    """Returns the calls of a piece of an answer."""
    return [DeltaToolCall(new_id("call_"), FunctionCall(call.name, call.arguments), index=call.index) for call in calls]
