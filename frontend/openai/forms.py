"""Bodies of the type ``multipart/form-data``: fields, and one file. Parsed by python-multipart, in pieces, so that a large file
keeps no other request waiting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["Form", "names_of", "parse_form"]

_PIECE_NBYTES = 64 << 10  # of a body, in a turn of the loop
_MAX_PARTS = 64
_MAX_FIELD_NBYTES = 64 << 10  # of all fields together: a prompt is the longest of them
_MAX_NAME_NBYTES = 256
_SILENT = logging.Logger("forms", logging.CRITICAL)  # of the parser, which warns of what the caller is told


@dataclasses.dataclass
class Form:
    """What a form holds.

    Attributes:
        fields: names and values, in their order.
        file: of the field ``file``; None: there is none.
    """

    fields: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    file: bytes | None = dataclasses.field(default=None, repr=False)


async def parse_form(body: bytes, content_type: str) -> Form:
    """Parses a body.

    Args:
        body: all of it.
        content_type: the header of this name.

    Raises:
        ApiError: it is no such body, or has too much.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise _wrong("its Content-Type names no boundary")
    parts = _Parts()
    if not body[: len(boundary) + _PIECE_NBYTES].lstrip(b"\r\n").startswith(b"--" + boundary):
        raise _wrong("it does not begin with the boundary that its Content-Type names")
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.logger = _SILENT
        for start in range(0, len(body), _PIECE_NBYTES):
            parser.write(body[start : start + _PIECE_NBYTES])
            await asyncio.sleep(0)
        parser.finalize()
    except FormParserError as error:
        raise _wrong(str(error)) from None
    if not parts.is_complete:
        raise _wrong("it ends before its last boundary")
    return parts.form


class _Parts:
    """Takes what the parser finds.

    Attributes:
        form: so far.
        is_complete: whether the last boundary has come.
    """

    def __init__(self) -> None:
        self.form = Form()
        self.is_complete = False
        self._count = 0
        self._fields_nbytes = 0
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._data = bytearray()
        self._name = ""
        self._is_file = False

    def callbacks(self) -> Any:
        """Returns the parser's callbacks."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._grow(self._header, data[start:end]),
            "on_header_value": lambda data, start, end: self._grow(self._value, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > _MAX_PARTS:
            raise _wrong(f"it has more than the {_MAX_PARTS} parts that are accepted")
        self._disposition = b""
        self._data = bytearray()

    def _grow(self, text: bytearray, data: bytes) -> None:
        text += data
        if len(text) > 8 * _MAX_NAME_NBYTES:
            raise _wrong("a header of a part is too long")

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if kind != b"form-data" or name is None or len(name) > _MAX_NAME_NBYTES:
            raise _wrong("a part has no name, or a long one")
        self._name = name.decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file and self.form.file is not None:
            raise ApiError(ErrorCode.INVALID_VALUE, "the form has several files", param="file")
        if b"filename" in options and not self._is_file:
            raise ApiError(ErrorCode.INVALID_VALUE, "the file's field is called 'file'", param=self._name)

    def _take(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._fields_nbytes += end - start
            if self._fields_nbytes > _MAX_FIELD_NBYTES:
                text = f"the form's fields have more than the {_MAX_FIELD_NBYTES} bytes that are accepted"
                raise ApiError(ErrorCode.TEXT_TOO_LONG, text, param=self._name)
        self._data += data[start:end]

    def _end(self) -> None:
        if self._is_file:
            self.form.file = bytes(self._data)
        else:
            try:
                self.form.fields.append((self._name, self._data.decode()))
            except UnicodeDecodeError:
                raise ApiError(ErrorCode.INVALID_VALUE, "the field's text is not UTF-8", param=self._name) from None
        self._data = bytearray()

    def _complete(self) -> None:
        self.is_complete = True


def _wrong(why: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_FORM, f"the request's body is not a valid form: {why}")


def names_of(fields: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the values of fields by their names, of which those of lists may end with ``[]``."""
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name.removesuffix("[]"), []).append(value)
    return values
