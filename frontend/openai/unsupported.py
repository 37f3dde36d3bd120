"""Fields of requests that this server does not implement. They stand in the types as ``only`` the values that change nothing,
because clients often send those; any other value is refused.

Fields that stand in no type are ignored, and the answer names them (:mod:`shmring.frontend.openai.parsing`). So a field that
would change an answer has to stand here. ``docs/compatibility.md`` lists those of vLLM.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError

__all__ = ["check_supported", "only", "unsupported_of"]

_NEUTRAL = "neutral"  # in the ``extra`` of a field's ``Meta``


def only(*neutral: Any) -> Meta:
    """Of a field that is not implemented: the values that change nothing. All others are refused, and null never is."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    return Meta(
        description=f"Not supported: it can be {values}." if neutral else "Not supported: leave it out.",
        extra={_NEUTRAL: neutral},
    )


def unsupported_of(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Returns a type's fields that are not implemented, each with the values that change nothing."""
    metas = {field.name: getattr(field.type, "__metadata__", ()) for field in msgspec.structs.fields(kind)}
    return {name: meta.extra[_NEUTRAL] for name, found in metas.items() for meta in found if _NEUTRAL in (meta.extra or {})}


def check_supported(given: msgspec.Struct, unsupported: dict[str, tuple[Any, ...]], place: str = "") -> None:
    """Refuses what is not implemented.

    Args:
        given: a request, or a part of one.
        unsupported: what :func:`unsupported_of` says of its type.
        place: where in the request it stands.

    Raises:
        ApiError: a field has a value that would change the answer.
    """
    for field, neutral in unsupported.items():
        value = getattr(given, field)
        if value is None or any(_is_same(value, allowed) for allowed in neutral):
            continue
        possible = f"; it can be {msgspec.json.encode(neutral[0]).decode()}, or left out" if neutral else ""
        text = f"{field} is not supported by this server{possible}"
        raise ApiError(400, text, code="unsupported_value", param=f"{place}{field}")


def _is_same(value: Any, allowed: Any) -> bool:
    """Whether two JSON values are equal; Python alone takes 1 for true."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
