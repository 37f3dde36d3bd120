"""Tools of ``POST /v1/responses``: functions, alone or in namespaces. They become the tools of a chat.

Chat templates know no namespaces. So the model is told of the function ``find`` in the namespace ``crm`` as ``crm__find``, and
what the namespace is for stands before the description of its first function. A call names the two apart again, and so does
what a caller sends back.

Source: vLLM's server calls them so as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.openai.tools import MAX_TOOLS, OF_TYPE

__all__ = [
    "AllowedTools",
    "ChatTools",
    "FunctionTool",
    "ResponsesTool",
    "ResponsesToolChoice",
    "ToolChoice",
    "name_in_chat",
    "shown",
]


class FunctionTool(msgspec.Struct):
    """A function that may be called; `parameters` is a JSON schema."""

    type: Annotated[str, Meta(description=OF_TYPE)]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesTool(FunctionTool):
    """A function that may be called, or a `namespace`: functions that belong together."""

    tools: Annotated[list[FunctionTool] | UnsetType | None, Meta(description="Of a `namespace`: its functions.")] = UNSET


class ToolChoice(msgspec.Struct, tag_field="type", tag="function"):
    """The function that must be called. One in a namespace has its own name, or that with the namespace's: `crm__find`."""

    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """The tools that may be called, and whether one must be. The model is told of no others."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Meta(min_length=1, max_length=MAX_TOOLS)]


ResponsesToolChoice: TypeAlias = Literal["none", "auto", "required"] | ToolChoice | AllowedTools


def name_in_chat(namespace: str | None, name: str) -> str:
    """Returns what a function is called in a chat."""
    return name if namespace is None else f"{namespace}__{name}"


class ChatTools:
    """The tools of a request as a chat has them.

    Args:
        tools: of the request.
        choice: which of them may be called, or must be.

    Raises:
        ApiError: a name would be that of two functions, or a namespace lacks something.

    Attributes:
        tools: of the chat.
        choice: of the chat.
        places: where each of the chat's tools stands in the request.
    """

    def __init__(self, tools: Sequence[ResponsesTool], choice: ResponsesToolChoice | None) -> None:
        self.tools: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._names: dict[str, tuple[str | None, str]] = {}  # the namespace and the name, by the name in the chat
        namespaces: list[tuple[str | None, list[dict[str, Any]]]] = []
        for index, tool in enumerate(tools):
            if tool.type == "namespace":
                namespaces.append((tool.description, self._add_namespace(tool, f"tools[{index}]")))
            else:
                self._add(tool, f"tools[{index}]")
        self.choice, chosen = self._read(choice)
        for description, functions in namespaces:
            first = next((function for function in functions if chosen is None or function["name"] in chosen), None)
            if first is not None:
                first["description"] = "\n\n".join(filter(None, (description, first["description"]))) or None

    def split(self, name: str) -> tuple[str | None, str]:
        """Returns the namespace, if there is one, and the name of a function of the chat."""
        return self._names.get(name, (None, name))

    def _add_namespace(self, namespace: ResponsesTool, place: str) -> list[dict[str, Any]]:
        """Adds what is in a namespace; returns its functions."""
        for field in ("name", "tools"):
            if getattr(namespace, field) in (None, "", UNSET):
                raise ApiError(ErrorCode.INVALID_VALUE, f"a namespace must have {field}", param=f"{place}.{field}")
        added = [self._add(tool, f"{place}.tools[{index}]", namespace.name) for index, tool in enumerate(namespace.tools or [])]
        return [tool["function"] for tool in added if "function" in tool]

    def _add(self, tool: FunctionTool, place: str, namespace: str | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"type": tool.type}
        if tool.type == "function":
            name = name_in_chat(namespace, tool.name) if tool.name else tool.name
            if name and self._names.setdefault(name, (namespace, tool.name or "")) != (namespace, tool.name):
                text = f"the model is told of this function as {name!r}, which is the name of another one"
                raise ApiError(ErrorCode.INVALID_VALUE, text, param=f"{place}.name")
            fields = {field: getattr(tool, field) for field in ("description", "parameters", "strict")}
            made["function"] = {"name": name, **fields}
        self.tools.append(made)
        self.places.append(place)
        return made

    def _read(self, choice: ResponsesToolChoice | None) -> tuple[Any, set[str] | None]:
        """Returns a choice as chats have it, and the functions that it names; None: it names none."""
        if isinstance(choice, ToolChoice):
            name = self._find(choice.name)
            return _named(name), {name}
        if isinstance(choice, AllowedTools):
            names = [self._find(tool.name) for tool in choice.tools]
            allowed = {"mode": choice.mode, "tools": [_named(name) for name in names]}
            return {"type": "allowed_tools", "allowed_tools": allowed}, set(names)
        return choice, None

    def _find(self, name: str) -> str:
        """Returns what the function is called in the chat that a choice names."""
        if name in self._names:
            return name
        found = [in_chat for in_chat, (_, own) in self._names.items() if own == name]
        if len(found) > 1:
            text = f"tool_choice names {name!r}, which is in several namespaces: say {' or '.join(found)}"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param="tool_choice")
        return found[0] if found else name  # which is refused as in a chat


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def shown(tools: Sequence[ResponsesTool]) -> list[ResponsesTool]:
    """Returns tools without those of which the model is not told."""
    functions: list[ResponsesTool] = []
    for tool in tools:
        if tool.type == "namespace":
            own = [function for function in tool.tools or [] if function.type == "function"]
            functions.append(msgspec.structs.replace(tool, tools=own))
        elif tool.type == "function":
            functions.append(tool)
    return functions
