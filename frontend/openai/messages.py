"""Messages and their parts, for chats and embeddings: OpenAI's parts, and vLLM's ``audio_url`` and ``video_url``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.body_scan import LONG_NBYTES, is_cut
from shmring.frontend.http.parsing import MEANS_NOTHING
from shmring.frontend.media.options import MediaKind
from shmring.frontend.media.sources import MediaSource

__all__ = [
    "INT64",
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "MAX_MESSAGES",
    "MAX_PARTS",
    "MAY_BE_LONG",
    "ContentPart",
    "ImagePart",
    "PictureFile",
    "Priority",
    "TextPart",
    "check_characters",
    "check_whole",
    "data_url_kind",
    "source_of",
]

#: Seeds and priorities travel as msgpack's integers: from -INT64 to INT64 - 1.
INT64 = 2**63

Priority = Annotated[int, Meta(ge=-INT64, le=INT64 - 1, description="As in vLLM: lower is sooner.")]

#: The most messages of a request, and parts of a message: each costs a microsecond of the event loop, and a hundred bytes.
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of a message, and of all messages together

#: Of all texts together: a million tokens, and a few milliseconds of the loops that they pass.
MAX_CHARACTERS = 4 << 20
MAX_DEPTH = 64  # of values that a template writes, which is recursive

_URL = "A data: URL, or what the server is allowed to fetch."

#: The ``extra`` of a field whose text may be a file, or has no meaning: there, a text may have been cut out of its body
#: (:mod:`shmring.frontend.http.body_scan`).
MAY_BE_LONG = {"may_be_long": True}


class MediaUrl(msgspec.Struct):
    """Where a medium is. `detail` and other fields of the API mean nothing here."""

    url: Annotated[str, Meta(description=_URL, extra=MAY_BE_LONG)]
    detail: Annotated[str | None, Meta(description="Means nothing here.", extra={MEANS_NOTHING: ("auto",)} | MAY_BE_LONG)] = (
        None
    )


_Place = Annotated[MediaUrl | str, Meta(description="Where it is; its URL alone will do.", extra=MAY_BE_LONG)]


class InputAudio(msgspec.Struct):
    """A recording's file. Its format is read from the file itself; `format` is there for clients that must send it."""

    data: Annotated[str, Meta(description="The file, in base64.", extra=MAY_BE_LONG)]
    format: Annotated[str | None, Meta(extra=MAY_BE_LONG)] = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Text in a message."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """A picture in a message."""

    image_url: _Place


class PictureFile(ImagePart, kw_only=True):
    """A picture whose file is in the request, in base64: what requests of another vendor become. OpenAI's have none."""

    image_url: _Place = ""
    data: str


class InputAudioPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """A recording in a message."""

    input_audio: InputAudio


class AudioPart(msgspec.Struct, tag_field="type", tag="audio_url"):
    """A recording in a message, by its URL."""

    audio_url: _Place


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url"):
    """A clip in a message."""

    video_url: _Place


ContentPart: TypeAlias = TextPart | ImagePart | InputAudioPart | AudioPart | VideoPart

_DATA_URL = re.compile(r"data:(?P<kind>image|audio|video)/", re.IGNORECASE)
_KINDS: dict[str, MediaKind] = {"image": "image", "audio": "audio", "video": "video"}


def source_of(part: ImagePart | InputAudioPart | AudioPart | VideoPart, param: str) -> MediaSource:
    """Returns where a part's medium comes from.

    Args:
        part: of a message.
        param: where in the request it stands.
    """
    match part:
        case PictureFile():
            return MediaSource("image", f"{param}.image_url", base64=part.data)
        case ImagePart():
            return MediaSource("image", f"{param}.image_url", url=_url_of(part.image_url))
        case InputAudioPart():
            return MediaSource("audio", f"{param}.input_audio", base64=part.input_audio.data)
        case AudioPart():
            return MediaSource("audio", f"{param}.audio_url", url=_url_of(part.audio_url))
        case VideoPart():
            return MediaSource("video", f"{param}.video_url", url=_url_of(part.video_url))


def _url_of(place: MediaUrl | str) -> str:
    return place if isinstance(place, str) else place.url


def check_whole(request: msgspec.Struct) -> None:
    """Refuses a request of which a long text was cut out that is no file.

    Args:
        request: of a caller. Where its type has ``TAKES_URLS``, any text that is a ``data:`` URL of a medium is that medium.

    Raises:
        ApiError: such a text was.
    """
    takes_urls = getattr(request, "TAKES_URLS", False)
    for place, text in _texts_in(request, "", 0):
        if is_cut(text) and not (takes_urls and data_url_kind(text)):
            message = f"a text has more than the {LONG_NBYTES} bytes that are accepted"
            raise ApiError(ErrorCode.TEXT_TOO_LONG, message, param=place)


def _texts_in(value: Any, place: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yields all texts that may not be long, each with its place; for those in JSON, it is that of the JSON."""
    if isinstance(value, str):
        yield place, value
    elif depth > 2 * MAX_DEPTH:  # which is refused where it would be used
        return
    elif isinstance(value, msgspec.Struct):
        for name in _short_fields(type(value)):
            yield from _texts_in(getattr(value, name), f"{place}.{name}".removeprefix("."), depth + 1)
    elif isinstance(value, dict):
        for each in (*value, *value.values()):
            yield from ((place, text) for _, text in _texts_in(each, place, depth + 1))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts_in(each, f"{place}[{index}]", depth + 1)


@functools.cache
def _short_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the fields of a type but for those that may be long."""
    metas = {field.name: getattr(field.type, "__metadata__", ()) for field in msgspec.structs.fields(kind)}
    return tuple(name for name, found in metas.items() if not any((meta.extra or {}).keys() & MAY_BE_LONG for meta in found))


def check_characters(said: str, texts: Iterable[str], param: str, most: int = MAX_CHARACTERS) -> None:
    """Refuses texts that are too long together.

    Args:
        said: how many characters there are, with braces for the number.
        texts: all of them.
        param: where they stand.
        most: how many are accepted.

    Raises:
        ApiError: there are more.
    """
    characters = sum(map(len, texts))
    if characters > most:
        text = f"{said.format(characters)}, at most {most} are accepted"
        raise ApiError(ErrorCode.TEXT_TOO_LONG, text, param=param)


def data_url_kind(text: str) -> MediaKind | None:
    """Returns the kind of medium if a text is a ``data:`` URL of one. Ordinary texts may also begin with ``data:``."""
    match = _DATA_URL.match(text)
    return _KINDS[match["kind"].lower()] if match else None
