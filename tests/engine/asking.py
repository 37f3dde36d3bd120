"""What tests ask the executor ``transformers``, and transformers' own way to its answers and embeddings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from shmring.engine.protocol import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    Medium,
    MediumPart,
    Picture,
    SamplingParams,
    Text,
    TextPart,
    Video,
)

SEEING = ["llava", "gemma3", "idefics3", "qwen2_vl"]
"""The tiny models that take pictures."""


def noise(height: int = 60, width: int = 60, seed: int = 0) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    return Picture(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator))


def clip(frames: int = 4, seed: int = 0) -> Video:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (frames, 40, 60, 3), dtype=torch.uint8, generator=generator)
    return Video(pixels, [0.5 * frame for frame in range(frames)], frames / 2)


def ask(*parts: str | Medium, **sampling: Any) -> GenerateRequest:
    """Returns a request of one message, greedy and of 20 tokens unless it says otherwise."""
    media: list[Any] = []
    content: list[TextPart | MediumPart] = []
    for part in parts:
        if isinstance(part, str):
            content.append(TextPart(part))
        else:
            content.append(MediumPart(len(media)))
            media.append(part)
    params = SamplingParams(**({"temperature": 0, "max_tokens": 20} | sampling))
    return GenerateRequest([ChatMessage("user", content)], media, params)


def tokens_of(replies: Any) -> list[int]:
    return [token for reply in replies for token in reply.token_ids]


@contextlib.contextmanager
def damaged(weights: torch.Tensor, value: float) -> Iterator[None]:
    """Has weights of a model be something else in a block."""
    before = weights.detach().clone()
    try:
        with torch.no_grad():
            weights.fill_(value)
        yield
    finally:
        with torch.no_grad():
            weights.copy_(before)


def text_of(replies: Iterable[GenerateReply] | Exception) -> str:
    assert not isinstance(replies, Exception), replies
    return "".join(reply.text for reply in replies)


class Reference:
    """A model as transformers loads it."""

    def __init__(self, path: Path) -> None:
        self.has_eyes = (path / "processor_config.json").exists()
        loader = transformers.AutoProcessor if self.has_eyes else transformers.AutoTokenizer
        factory = transformers.AutoModelForImageTextToText if self.has_eyes else transformers.AutoModelForCausalLM
        self.processor: Any = loader.from_pretrained(path, local_files_only=True)
        self.model: Any = factory.from_pretrained(path, local_files_only=True).eval()
        self.tokenizer = self.processor.tokenizer if self.has_eyes else self.processor

    def inputs(self, *parts: str | Medium, answers: bool = True) -> Any:
        """What the model gets of a conversation of one message, which is to be answered or not."""
        if not self.has_eyes:
            text = "\n".join(part for part in parts if isinstance(part, str))
            return self.processor.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=answers, return_dict=True, return_tensors="pt"
            )
        content: Any = []
        for part in parts:
            if isinstance(part, Picture):
                content.append({"type": "image", "image": part.pixels})
            elif isinstance(part, Video):
                content.append({"type": "video", "video": part.frames})
            else:
                content.append({"type": "text", "text": part})
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=answers,
            tokenize=True,
            return_dict=True,
            processor_kwargs={
                "return_tensors": "pt",
                "images_kwargs": {"input_data_format": "channels_last"},
                "videos_kwargs": {"input_data_format": "channels_last", "do_sample_frames": False},
            },
        )

    def generate(self, *parts: str | Medium) -> tuple[list[int], int]:
        """Returns the greedy answer's tokens, and how many the prompt has."""
        inputs = self.inputs(*parts)
        output = self.model.generate(**inputs, max_new_tokens=20, do_sample=False)
        length = inputs["input_ids"].shape[1]
        return output[0, length:].tolist(), length

    def decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def states(self, item: Text | Picture | Video) -> torch.Tensor:
        """Returns the last hidden states of an input: shape (tokens, hidden size)."""
        inputs = self.tokenizer(item.text, return_tensors="pt") if isinstance(item, Text) else self.inputs(item, answers=False)
        with torch.inference_mode():
            states: torch.Tensor = self.model(**inputs, output_hidden_states=True, use_cache=False).hidden_states[-1]
        return states[0].clone()
