"""Messages and their parts, for chats and embeddings: OpenAI's parts, and vLLM's ``audio_url`` and ``video_url``."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.body_scan import LONG_NBYTES, is_cut
from shmring.frontend.http.parsing import MEANS_NOTHING
from shmring.frontend.media.options import MediaKind
from shmring.frontend.media.sources import MediaSource

__all__ = [
    "INT64",
    "MAX_MESSAGES",
    "MAX_PARTS",
    "ContentPart",
    "ImagePart",
    "PictureFile",
    "Priority",
    "TextPart",
    "check_length",
    "data_url_kind",
    "source_of",
]

#: Seeds and priorities travel as msgpack's integers: from -INT64 to INT64 - 1.
INT64 = 2**63

Priority = Annotated[int, Meta(ge=-INT64, le=INT64 - 1, description="As in vLLM: lower is sooner.")]

#: The most messages of a request, and parts of a message: each costs a microsecond of the event loop, and a hundred bytes.
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of a message, and of all messages together

_URL = "A data: URL, or what the server is allowed to fetch."


class MediaUrl(msgspec.Struct):
    """Where a medium is. `detail` and other fields of the API mean nothing here."""

    url: Annotated[str, Meta(description=_URL)]
    detail: Annotated[str | None, Meta(description="Means nothing here.", extra={MEANS_NOTHING: ("auto",)})] = None


_Place = Annotated[MediaUrl | str, Meta(description="Where it is; its URL alone will do.")]


class InputAudio(msgspec.Struct):
    """A recording's file. Its format is read from the file itself; `format` is there for clients that must send it."""

    data: Annotated[str, Meta(description="The file, in base64.")]
    format: str | None = None


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


def check_length(text: str, param: str) -> None:
    """Refuses a text that was cut out of its body because it is too long.

    Raises:
        ApiError: it was.
    """
    if is_cut(text):
        message = f"a text has more than the {LONG_NBYTES} bytes that are accepted"
        raise ApiError(ErrorCode.TEXT_TOO_LONG, message, param=param)


def data_url_kind(text: str) -> MediaKind | None:
    """Returns the kind of medium if a text is a ``data:`` URL of one. Ordinary texts may also begin with ``data:``."""
    match = _DATA_URL.match(text)
    return _KINDS[match["kind"].lower()] if match else None
