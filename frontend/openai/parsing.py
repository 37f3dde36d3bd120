"""From a request's body to its type. Whatever is wrong with the bytes is a 400, and says where.

A name that stands twice in an object has its last value, as nearly every JSON parser does it; what is not asked for is skipped
without being looked into, but for its nesting.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

import msgspec

from frontend.errors import ApiError

__all__ = ["BodyParser"]

_Request = TypeVar("_Request")

_ERROR_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_PART_TYPE = re.compile(r"\.content\[[^]]*\]\.type$")
_PART_TYPES = "text, image_url, input_audio, audio_url or video_url"
_MAX_MESSAGE_CHARACTERS = 300  # msgspec quotes values of enumerations, which may be as long as a body


class BodyParser(Generic[_Request]):
    """Decodes bodies of one type. Made once."""

    def __init__(self, kind: type[_Request]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def parse(self, body: bytes) -> _Request:
        """Decodes a request's body.

        Raises:
            ApiError: it is not JSON, or not such a request.
        """
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid_value(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"the request's body is not valid JSON: {error}", code="invalid_json") from None


def _invalid_value(message: str) -> ApiError:
    found = _ERROR_PATH.search(message)
    path = found["path"] if found else ""
    if missing := _MISSING.search(message):
        path = f"{path}.{missing['name']}".removeprefix(".")
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = f"{message[:_MAX_MESSAGE_CHARACTERS]}..."
    if _PART_TYPE.search(path):
        message = f"{message}; the type of a part is {_PART_TYPES}"
    return ApiError(400, message, code="invalid_value", param=path or None)
