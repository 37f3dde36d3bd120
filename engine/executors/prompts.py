"""From a conversation, or from one thing to be embedded, to a model's inputs, by the model's own chat template and processor.

Pixels go to the processor as they lie in the slab; it reads them there and makes its own arrays, scaled and normalised.
The layout is named (channels last), since transformers would guess it, and takes a picture one pixel high for a planar one.
Where frontends have done that already, it is given what came of it (see :mod:`.processed`).

Callers' texts are only text: strings that look like control tokens, such as ``<|im_end|>`` or ``<image>``, are tokenised as
ordinary characters, so that no caller can close a message or forge the place of a medium (``sanitize_control_tokens``). If a
processor can't do that, such a text is refused. Templates of processors get content as a list of parts; those of tokenizers get
it as one string.

A text to be embedded is tokenised by itself, with what the tokenizer adds at its ends and without a template, unless it comes
as tokens; a medium to be embedded is all that a user's message holds, which no answer follows. Without a template only such
things can be taken, and a medium is then no more than its place.

Source: the chat form of vLLM's embeddings, which by default ends the prompt with the message as well.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from shmring.core.loggers import logger_of
from shmring.engine.executors.callers_texts import CallersTexts
from shmring.engine.executors.checkpoint import Checkpoint
from shmring.engine.executors.processed import GivenFeatures, check_features, find_processor
from shmring.engine.executors.tool_calls import ResponseReader
from shmring.engine.protocol import (
    Features,
    GenerateRequest,
    InputSpec,
    Medium,
    Picture,
    PictureSpec,
    Text,
    Video,
    VideoSpec,
)

__all__ = ["PromptBuilder", "check_pixels", "find_max_pixels"]

logger = logger_of("shmring.engine.executors.prompts")

# Ticks of the clock that clips' frames are placed on: transformers counts time in frames, so a clip is one of 1000 frames a
# second.
_TICKS_PER_S = 1000

# A processor that scales every picture to one size loses nothing visible if it starts from four times its edges.
# That also leaves room for aspect ratios up to 16 before the shorter edge falls below the target.
_OVERSAMPLING = 4

# Clips: what a model of some billions reads in a second or so. 16 frames of half a megapixel are 12.6 MB in the slab.
_NUM_FRAMES = 16
_MAX_FRAME_PIXELS = 512 * 512

# Arguments of the processor that users must not set: they make the outputs fit the model.
_RESERVED = frozenset(
    {"data_format", "device", "do_sample_frames", "input_data_format", "return_metadata", "return_tensors", "video_metadata"}
)
_PLACE = torch.zeros((1, 1, 3), dtype=torch.uint8)  # what a processor is shown of a picture that was processed already
_MODALITIES = {"images_kwargs": "image_processor", "videos_kwargs": "video_processor"}


class PromptBuilder:
    """Makes model inputs of requests.

    Args:
        checkpoint: the model.
        mm_processor_kwargs: arguments of the processor's call, as vLLM spells them; ``num_frames`` says how many frames of a
            clip are taken.

    Raises:
        ValueError: the processor does not know one of them.

    Attributes:
        input: the inputs that can be asked about and embedded.
        texts: checks those of requests.
    """

    def __init__(self, checkpoint: Checkpoint, mm_processor_kwargs: Mapping[str, Any]) -> None:
        self._name = checkpoint.name
        self._processor = processor = copy.copy(checkpoint.processor)
        self._given: GivenFeatures | None = None
        if processor is not None and getattr(processor, "image_processor", None) is not None:
            self._given = processor.image_processor = GivenFeatures(processor.image_processor, checkpoint.model.dtype)
        self._tokenizer = checkpoint.tokenizer
        self._media_settings = dict(mm_processor_kwargs)
        _check_media_settings(self._processor, self._media_settings)
        self._num_frames = self._media_settings.pop("num_frames", None) or _NUM_FRAMES
        self._template_error = importlib.import_module("jinja2").TemplateError
        self._sanitizes = _sanitizes(self._processor)
        self.texts = CallersTexts(
            checkpoint.name,
            self._tokenizer,
            int(checkpoint.model.get_input_embeddings().num_embeddings),
            checkpoint.max_model_len,
            template=self._template,
            model=checkpoint.model,
            processor=self._processor,
            sanitizes=self._sanitizes,
        )
        self.texts.message_tokens = self._measure_message()
        self.input = self._describe_input()

    def _measure_message(self) -> int:
        """Returns how many tokens the template writes for a message in which nothing stands; 1 if that is not known."""
        if not self.texts.has_template:
            return 1
        messages = [{"role": role, "content": "" if self._processor is None else []} for role in ("user", "assistant", "user")]
        try:
            one, three = (
                self._apply_template(messages[:count], [], add_generation_prompt=False)["input_ids"].shape[1]
                for count in (1, 3)
            )
        except Exception:  # noqa: BLE001 - a template need not take empty messages
            return 1
        return max(1, int(three - one) // 2)

    def offer_processor(self) -> None:
        """Has frontends process pictures (:attr:`input` then says so), where that is right; else the log says why not."""
        if self._given is None or self.input.picture is None:
            return
        try:
            processor = find_processor(self._given, self._build_media)
        except Exception as error:  # noqa: BLE001 - whatever a processor does not understand
            logger.info("%s: pictures are processed in the engine: %s", self._name, error)
            return
        self.input = msgspec.structs.replace(
            self.input, picture=msgspec.structs.replace(self.input.picture, processor=processor)
        )

    def build(self, request: GenerateRequest) -> dict[str, Any]:
        """Makes a request's inputs: ``input_ids`` of shape (1, tokens), and what the model takes of its media.

        Raises:
            ValueError: the conversation or its media are not what this model takes.
            ContextLengthError: its texts are too long, whatever tokens they are made of.
        """
        if request.prompt is not None:  # all of it is its caller's, who may therefore write control tokens
            max_tokens, special = request.sampling.max_tokens, request.add_special_tokens
            return self._tokenize(request.prompt, "a prompt", max_tokens, add_special_tokens=special)
        media, options = self.texts.open_conversation(request)
        self._check_features(media)
        conversation = self.texts.lay_out(request.messages, request.media, self._place)
        if self._processor is None:
            for message in conversation:
                message["content"] = "\n".join(part["text"] for part in message["content"])
        return self._apply_template(conversation, media, add_generation_prompt=True, **options)

    def readers_of(self, request: GenerateRequest, prompt: torch.Tensor) -> list[ResponseReader | None]:
        """Returns what reads each answer to a request with tools; None: its text is given out as it is.

        Args:
            request: any.
            prompt: its tokens, shape (tokens,).
        """
        readers = self.texts.readers_of(request, prompt.tolist())
        is_bound = request.tool_choice == "required" or request.sampling.structured_outputs is not None
        if is_bound and readers[0] is not None and readers[0].begins_within:
            raise ValueError(
                f"the model {self._name!r} begins its answer with reasoning, so a call or a form can't be required; its chat "
                "template may have a variable that turns reasoning off (chat_template_kwargs)"
            )
        return readers

    def build_single(self, item: Text | Medium) -> dict[str, Any]:
        """Makes the inputs of one thing to be embedded, as :meth:`build` does of a request.

        Raises:
            ValueError: it is not what this model takes, or is empty.
        """
        if isinstance(item, Text):
            return self._tokenize_single(item)
        self._check_features([item])
        return self._build_media([item])

    def read_text(self, text: Text) -> Text:
        """Returns a text to be embedded in tokens: in an array, which takes a ninth of a list's memory.

        Raises:
            ValueError, ContextLengthError: it is not what this model takes.
        """
        tokens = array("i", self._tokenize_single(text)["input_ids"][0].tolist())
        self.texts.check_prompt(cast("list[int]", tokens), None)
        return Text(cast("list[int]", tokens))

    def _tokenize_single(self, text: Text) -> dict[str, Any]:
        return self._tokenize(text.text, "a text to be embedded", split_special_tokens=True)

    def _build_media(self, media: Sequence[Medium]) -> dict[str, Any]:
        """Makes the inputs of a prompt that is nothing but media of one kind."""
        parts = [self._place(medium) for medium in media]
        if self.texts.has_template:
            return self._apply_template([{"role": "user", "content": parts}], media, add_generation_prompt=False)
        assert self._processor is not None, "it has a place for this medium"
        kind = parts[0]["type"]
        text = getattr(self._processor, f"{kind}_token") * len(parts)
        named = {f"{kind}s": [part[kind] for part in parts]}
        with self._giving(media) as complete:
            return complete(dict(self._processor(text=[text], **named, return_tensors="pt", **self._call_settings(media))))

    @contextlib.contextmanager
    def _giving(self, media: Sequence[Medium]) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
        """Has the processor given what frontends have made; yields a function that puts it into what the processor returns."""
        with contextlib.nullcontext() if self._given is None else self._given.giving(media):
            yield dict if self._given is None else self._given.complete

    def _check_features(self, media: Sequence[Medium]) -> None:
        for medium in media:
            if isinstance(medium, Features):
                check_features(medium, None if self.input.picture is None else self.input.picture.processor)

    def _apply_template(
        self, conversation: list[dict[str, Any]], media: Sequence[Medium], *, add_generation_prompt: bool, **options: Any
    ) -> dict[str, Any]:
        are_callers = bool(options) or any("tool_calls" in message for message in conversation)
        options |= {
            "add_generation_prompt": add_generation_prompt,
            "return_dict": True,
            "return_tensors": "pt" if media else None,
            "sanitize_control_tokens": self._sanitizes,
        }
        try:
            if self._processor is None:
                inputs = self._tokenizer.apply_chat_template(conversation, **options)
            else:
                with self._giving(media) as complete:
                    inputs = self._processor.apply_chat_template(
                        conversation, tokenize=True, processor_kwargs=self._call_settings(media), **options
                    )
                    inputs = complete(dict(inputs))
        except self._template_error as error:
            raise ValueError(f"the model's chat template refuses the conversation: {error}") from error
        except (TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            if not are_callers:
                raise
            raise ValueError(f"the model's chat template can't write these tools, calls or options: {error}") from error
        return dict(inputs) if media else {name: _row_of(numbers) for name, numbers in inputs.items()}

    def _tokenize(self, text: str | list[int], what: str, max_tokens: int | None = None, **options: Any) -> dict[str, Any]:
        """Makes the inputs of a text, or of its tokens."""
        self.texts.check_prompt(text, max_tokens, what)
        tokens: list[int] = self._tokenizer(text, **options)["input_ids"] if isinstance(text, str) else text
        if not tokens:
            raise ValueError(f"{what} can't be empty")
        return {"input_ids": _row_of(tokens)}

    # -- what a model takes --------------------------------------------------------------------------------------------

    @property
    def _template(self) -> Any:
        return (self._tokenizer if self._processor is None else self._processor).chat_template

    def _describe_input(self) -> InputSpec:
        image_processor = getattr(self._processor, "image_processor", None)
        video_processor = getattr(self._processor, "video_processor", None)
        picture = video = None
        if image_processor is not None and self._has_place("image"):
            picture = PictureSpec(find_max_pixels(image_processor, self._media_settings))
        if video_processor is not None and self._has_place("video"):
            video = VideoSpec(num_frames=self._num_frames, max_pixels=_MAX_FRAME_PIXELS)
        return InputSpec(text=True, tokens=True, picture=picture, video=video)

    def _has_place(self, kind: str) -> bool:
        """Whether a prompt can hold an image or video: by the template, or without one by a token that stands for it."""
        if self.texts.has_template:
            return kind in str(self._template)
        return bool(getattr(self._processor, f"{kind}_token", None))

    def _place(self, medium: object) -> dict[str, Any]:
        if isinstance(medium, Picture) and self.input.picture is not None:
            check_pixels(medium.pixels, "a picture", ndim=3)
            return {"type": "image", "image": medium.pixels}
        if isinstance(medium, Features) and self.input.picture is not None:
            return {"type": "image", "image": _PLACE}
        if isinstance(medium, Video) and self.input.video is not None:
            check_pixels(medium.frames, "a clip", ndim=4)
            if len(medium.timestamps_s) != len(medium.frames):
                raise ValueError(f"a clip has {len(medium.frames)} frames, and times of {len(medium.timestamps_s)}")
            return {"type": "video", "video": medium.frames}
        raise ValueError(f"the model {self._name!r} takes no {type(medium).__name__.lower()}")

    def _call_settings(self, media: Sequence[Medium]) -> dict[str, Any]:
        videos = [medium for medium in media if isinstance(medium, Video)]
        settings = dict(self._media_settings)
        settings["images_kwargs"] = {**settings.get("images_kwargs", {}), "input_data_format": "channels_last"}
        if videos:
            settings["videos_kwargs"] = {
                **settings.get("videos_kwargs", {}),
                "input_data_format": "channels_last",
                "do_sample_frames": False,
                "video_metadata": [_describe_clip(video) for video in videos],
            }
        return settings


def _row_of(numbers: Any) -> torch.Tensor:
    """Returns the numbers of one prompt, which processors put into a list, as a tensor of shape (1, length).

    torch, and transformers with it, looks at each number of a list for itself. For a million tokens that takes a second, in
    which no other thread runs.
    """
    row: Any = numbers[0] if numbers and isinstance(numbers[0], list) else numbers
    return torch.from_numpy(np.frombuffer(array("q", row), np.int64))[None] if row else torch.empty((1, 0), dtype=torch.int64)


def _sanitizes(processor: Any | None) -> bool:
    """Whether control tokens in texts can be made harmless. Processors with a ``__call__`` of their own can't do this."""
    return processor is None or type(processor).__call__ is importlib.import_module("transformers").ProcessorMixin.__call__


def check_pixels(pixels: torch.Tensor, what: str, ndim: int) -> None:
    """Raises ValueError if these are not pixels as frontends prepare them."""
    if pixels.dtype != torch.uint8 or pixels.ndim != ndim or pixels.shape[-1] != 3 or pixels.numel() == 0:
        shape = "(height, width, 3)" if ndim == 3 else "(frames, height, width, 3)"
        raise ValueError(
            f"expected {what} as uint8 of shape {shape}, not empty; got {pixels.dtype} of shape {tuple(pixels.shape)}"
        )


def _describe_clip(video: Video) -> dict[str, Any]:
    """Says when frames are shown, in the terms of transformers: as if they were taken from a clip of a frame per tick."""
    _, height, width, _ = video.frames.shape
    ticks = [round(timestamp_s * _TICKS_PER_S) for timestamp_s in video.timestamps_s]
    return {
        "total_num_frames": max(round(video.duration_s * _TICKS_PER_S), ticks[-1] + 1),
        "fps": float(_TICKS_PER_S),
        "duration": video.duration_s,
        "width": width,
        "height": height,
        "frames_indices": ticks,
    }


def _check_media_settings(processor: Any | None, settings: Mapping[str, Any]) -> None:
    """Refuses arguments that the processor does not know; transformers would only log them, or ignore them."""
    known: dict[str, set[str]] = {}
    for modality, attribute in _MODALITIES.items():
        valid = getattr(getattr(processor, attribute, None), "valid_kwargs", None)
        known[modality] = set(getattr(valid, "__annotations__", {})) - _RESERVED
    anywhere = set().union(*known.values()) | ({"num_frames"} if known["videos_kwargs"] else set())
    for name, value in settings.items():
        unknown = set(value) - known[name] if name in known and isinstance(value, Mapping) else {name} - anywhere
        if unknown:
            listed = ", ".join(sorted(anywhere)) or "nothing"
            raise ValueError(f"mm_processor_kwargs: the processor does not know {sorted(unknown)[0]!r}; it knows {listed}")
    num_frames = settings.get("num_frames")
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise ValueError(f"mm_processor_kwargs: num_frames must be a whole number of at least 1, got {num_frames!r}")


def find_max_pixels(image_processor: Any, settings: Mapping[str, Any]) -> int | None:
    """Returns how many pixels of a picture the processor makes use of; None if it does not say."""
    overrides = {**settings, **settings.get("images_kwargs", {})}
    if isinstance(overrides.get("max_pixels"), int):
        return int(overrides["max_pixels"])
    size = overrides.get("size") or getattr(image_processor, "size", None)
    edges = {name: value for name, value in dict(size or {}).items() if isinstance(value, int)}
    if "max_pixels" in getattr(image_processor.valid_kwargs, "__annotations__", {}):
        return edges.get("longest_edge")  # these processors call an area an edge
    if "longest_edge" in edges:
        return edges["longest_edge"] ** 2
    if {"height", "width"} <= set(edges):
        return edges["height"] * edges["width"] * _OVERSAMPLING**2
    if "shortest_edge" in edges:
        return (edges["shortest_edge"] * _OVERSAMPLING) ** 2
    return None
