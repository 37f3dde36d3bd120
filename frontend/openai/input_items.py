"""The input of a response that the server keeps, as a list of items, in pages: `GET /v1/responses/{response_id}/input_items`.

Items are kept as their callers have sent them. Here each gets a name and the form of OpenAI's types, also if its caller has
left out a field or has written a part as chats do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import invalid_value
from shmring.frontend.openai.responses_request import InputItem

__all__ = ["InputItemList", "ItemPage", "list_items", "read_page"]

_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}  # of names; of messages: msg


class ItemPage(msgspec.Struct, frozen=True):
    """Which items of a response are listed.

    Attributes:
        limit: the most of them.
        order: from the first one on, or from the last one on.
        after: the name of the item before them; None: there is none.
    """

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class InputItemList(msgspec.Struct):
    """The answer to `GET /v1/responses/{response_id}/input_items`: a page of the items that were the response's input."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def read_page(parameters: Mapping[str, str]) -> ItemPage:
    """Reads the parameters of a query; others have no effect: an item always has all that there is of it.

    Raises:
        ApiError: one makes no sense.
    """
    try:
        return msgspec.convert({name: parameters[name] for name in parameters}, ItemPage, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_value(str(error)) from None


def list_items(items: Sequence[InputItem], number: str, page: ItemPage) -> InputItemList:
    """Lists a page of items.

    Args:
        items: the whole input of a response, in its order.
        number: what its names have in common.
        page: which.

    Raises:
        ApiError: no item has the name after which the page begins.
    """
    named = [(item.id or f"{_PREFIXES.get(item.type, 'msg')}_{number}in{place}", item) for place, item in enumerate(items)]
    if page.order == "desc":
        named.reverse()
    start = 0
    if page.after is not None:
        start = next((place for place, (name, _) in enumerate(named, 1) if name == page.after), 0)
        if not start:
            raise ApiError(ErrorCode.INVALID_VALUE, "no item of this response has this name", param="after")
    shown = named[start : start + page.limit]
    return InputItemList(
        data=[_written(name, item) for name, item in shown],
        first_id=shown[0][0] if shown else None,
        last_id=shown[-1][0] if shown else None,
        has_more=start + len(shown) < len(named),
    )


def _written(name: str, item: InputItem) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(item)
    fields |= {"id": name, "type": item.type, "status": "completed"}
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = _parts(fields.get("content"), kind)
    elif item.type == "reasoning":
        fields.setdefault("summary", [])
    elif isinstance(fields.get("output"), list):
        fields["output"] = _parts(fields["output"], "input_text")
    return fields


def _parts(content: Any, kind: str) -> list[dict[str, Any]]:
    """Returns content as a list of parts, texts as parts of a kind."""
    parts = content if isinstance(content, list) else [content or ""]
    return [_part({"type": "text", "text": part} if isinstance(part, str) else part, kind) for part in parts]


def _part(part: dict[str, Any], kind: str) -> dict[str, Any]:
    if part["type"] in ("text", "input_text", "output_text"):
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        return {"type": kind, "text": part["text"]} | more
    if part["type"] in ("image_url", "input_image"):
        place = part.get("image_url")
        url = place["url"] if isinstance(place, dict) else place
        return {"type": "input_image", "image_url": url, "detail": part.get("detail") or "auto"}
    return part
