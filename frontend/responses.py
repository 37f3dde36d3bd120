"""Answers that are JSON: what msgspec can encode, and errors in their envelope."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from frontend.errors import ApiError

__all__ = ["JsonResponse", "error_response"]


class JsonResponse(Response):
    """An answer whose body is anything that msgspec can encode. Bytes are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the body."""
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


def error_response(error: ApiError) -> Response:
    """Returns the response of an error."""
    return JsonResponse(error.envelope(), error.status, error.headers)
