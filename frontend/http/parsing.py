"""From a request's body to its type. Every error in the bytes is a 400 that says where the error is.

If a name is twice in an object, its last value counts, as in nearly every JSON parser. Unknown fields are skipped, and only
their nesting is checked.

Unknown fields are ignored, as in other servers of this API, but the answer names them. So are known fields that mean nothing
here, unless they have a value that asks for nothing (``MEANS_NOTHING``). Nearly all bodies have no such fields,
and msgspec can detect this while it decodes: each type has a strict double, a subclass whose fields are strict too. The
strict double is tried first. Only if it refuses a body, the body is decoded as its own type and searched for the names of
unknown fields.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import quote

import msgspec

from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["MAX_IGNORED", "MEANS_NOTHING", "BodyParser", "invalid_value", "misplaced"]

#: The values of a field without meaning here that may be ignored silently. For other values, the caller is told that the field
#: was ignored.
MEANS_NOTHING = "means_nothing"

#: The most parts of a request that were ignored and are named, in one header of its answer.
MAX_IGNORED = 16

_Request = TypeVar("_Request", bound=msgspec.Struct)

_ERROR_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_PART_TYPE = re.compile(r"\.content\[[^]]*\]\.type$")
_PART_TYPES = "text, image_url, input_audio, audio_url or video_url"
_MAX_MESSAGE_CHARACTERS = 300  # msgspec quotes values of enumerations, which may be as long as a body

_MAX_NAME_CHARACTERS = 64
_FIRST = re.compile(rb"[^ \t\r\n]")  # which says what a JSON value is


class BodyParser(Generic[_Request]):
    """Decodes bodies of one type. Made once.

    Args:
        kind: the type.
        part_types: the types of parts that its messages may have, for errors.
    """

    def __init__(self, kind: type[_Request], part_types: str = _PART_TYPES) -> None:
        self._kind = kind
        self._part_types = part_types
        self._decoder = msgspec.json.Decoder(kind)
        self._strict_decoder = msgspec.json.Decoder(_strict(kind))

    def parse(self, body: bytes) -> _Request:
        """Decodes a request's body.

        Raises:
            ApiError: it is not JSON, or not such a request.
        """
        try:
            try:
                strict: _Request = self._strict_decoder.decode(body)
            except msgspec.ValidationError:  # it has a field that is not known, or is wrong besides
                return self._decoder.decode(body)
            return strict
        except msgspec.ValidationError as error:
            raise invalid_value(str(error), self._part_types) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(ErrorCode.INVALID_JSON, f"the request's body is not valid JSON: {error}") from None

    def ignored_fields(self, request: _Request, body: bytes) -> list[str]:
        """Returns the first names of unknown fields, which were ignored, as paths such as ``messages[0].name``.

        Their text is safe for logs and headers: anything but the usual characters of names is percent-encoded.

        Args:
            request: the result of :meth:`parse`.
            body: the body that was parsed.
        """
        if type(request) is not self._kind:  # it passed the strict double
            return []
        paths = _unknown_fields(memoryview(body), self._kind, "")
        return list(dict.fromkeys(islice(paths, MAX_IGNORED)))


def _strict(kind: Any) -> Any:
    """Returns the strict double of a type: structs that refuse fields which they do not know, at any depth."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = [(field.name, _strict(field.type), _default_of(field)) for field in msgspec.structs.fields(kind)]
        return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)
    if neutral := _neutral_values(kind):
        return Literal[neutral] | None
    arguments = tuple(_strict(argument) for argument in get_args(kind))
    if get_origin(kind) is Annotated:
        return Annotated[(_strict(kind.__origin__), *kind.__metadata__)]
    if get_origin(kind) in (Union, types.UnionType):
        return Union[arguments]  # noqa: UP007 - they are known only now
    return kind if get_origin(kind) is not list else list[arguments]  # type: ignore[valid-type]  # as above


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field() if field.default is msgspec.NODEFAULT else msgspec.field(default=field.default)


def _unknown_fields(value: memoryview | msgspec.Raw, kind: Any, path: str) -> Iterator[str]:
    """Yields the paths of fields that a type does not know. The value was decoded as that type before."""
    match = _FIRST.search(memoryview(value))
    first = match[0] if match else b""
    if first == b"[":
        for item_kind in (get_args(member)[0] for member in _members(kind) if get_origin(member) is list):
            for index, item in enumerate(msgspec.json.decode(value, type=list[msgspec.Raw])):
                yield from _unknown_fields(item, item_kind, f"{path}[{index}]")
    elif first == b"{" and (structs := [member for member in _members(kind) if isinstance(member, type)]):
        values = msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        struct = _struct_of(values, structs)
        if struct is None:
            return
        known = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
        tag_field = struct.__struct_config__.tag_field
        for name, field_value in values.items():
            field_path = f"{path}.{quote(name[:_MAX_NAME_CHARACTERS])[:_MAX_NAME_CHARACTERS]}".removeprefix(".")
            if name in known and (neutral := _neutral_values(known[name])):
                if msgspec.json.decode(field_value) not in (None, *neutral):
                    yield field_path
            elif name in known:
                yield from _unknown_fields(field_value, known[name], field_path)
            elif name != tag_field:
                yield field_path


def _neutral_values(kind: Any) -> tuple[str, ...]:
    """Returns the values with which a field that means nothing here asks for nothing; none: its values mean something."""
    metadata = kind.__metadata__ if get_origin(kind) is Annotated else ()
    return next((meta.extra[MEANS_NOTHING] for meta in metadata if meta.extra and MEANS_NOTHING in meta.extra), ())


def _members(kind: Any) -> list[Any]:
    """Returns the types with fields that a type may be: structs, and lists of structs."""
    if get_origin(kind) is Annotated:
        return _members(kind.__origin__)
    if get_origin(kind) in (Union, types.UnionType):
        return [member for argument in get_args(kind) for member in _members(argument)]
    if get_origin(kind) is list:
        return [kind] if _members(get_args(kind)[0]) else []
    return [kind] if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else []


def _struct_of(values: dict[str, msgspec.Raw], structs: list[type[msgspec.Struct]]) -> type[msgspec.Struct] | None:
    """Returns which of several structs an object is, by its tag."""
    for struct in structs:
        config = struct.__struct_config__
        if config.tag is None:
            return struct
        if config.tag_field in values and msgspec.json.decode(values[config.tag_field]) == config.tag:
            return struct
    return None


def misplaced(message: str, place_of: Callable[[str], str | None]) -> ApiError:
    """Returns the error for what msgspec says of the translation of a request: it names the place in the request itself."""
    error = invalid_value(_ERROR_PATH.sub(lambda match: f" - at `$.{place_of(match['path'])}`", message))
    of_translation = invalid_value(message).param
    error.param = of_translation and place_of(of_translation)
    return error


def invalid_value(message: str, part_types: str = _PART_TYPES) -> ApiError:
    """Returns the error for what msgspec says of a request that has a wrong value."""
    match = _ERROR_PATH.search(message)
    path = match["path"] if match else ""
    if missing := _MISSING.search(message):
        path = f"{path}.{missing['name']}".removeprefix(".")
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = f"{message[:_MAX_MESSAGE_CHARACTERS]}..."
    if _PART_TYPE.search(path):
        message = f"{message}; the type of a part is {part_types}"
    return ApiError(ErrorCode.INVALID_VALUE, message, param=path or None)
