"""An executor of your own for the server: it embeds pictures by their mean colour, and answers a chat with its last words.

shmring serve --executor-path examples --executor colours:Colours --executor-options '{"max_words": 50}'
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shmring.engine.executors import ContextLengthError, ExecutorOptions, StepInput, StepOutput
from shmring.engine.protocol import (
    EncodeReply,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    Picture,
    PictureSpec,
    TextPart,
)


class Colours:
    def __init__(self, options: ExecutorOptions) -> None:
        self.max_words = int(options.options.get("max_words", 100))
        self.answers: dict[int, tuple[list[str], int]] = {}  # by request: its words, and how many were said

    def describe(self) -> ModelDescription:
        return ModelDescription(
            executor="colours",
            model="colours",
            tasks=["encode", "generate"],
            max_batch_size=32,
            embedding_size=3,
            max_model_len=self.max_words,
            input=InputSpec(text=True, picture=PictureSpec(max_pixels=1_000_000)),
        )

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        outputs: list[StepOutput | Exception] = []
        for part in batch:
            try:
                outputs.append(self.embed(part.payload) if isinstance(part.payload, EncodeRequest) else self.speak(part))
            except ValueError as error:
                outputs.append(error)  # this request fails, the others of the step do not
        return outputs

    def embed(self, request: EncodeRequest) -> StepOutput:
        pictures = [item for item in request.inputs if isinstance(item, Picture)]
        if len(pictures) < len(request.inputs):
            raise ValueError("only pictures have a colour")
        colours = torch.stack([picture.pixels.float().mean(dim=(0, 1)) for picture in pictures])
        return StepOutput(EncodeReply(torch.nn.functional.normalize(colours, dim=1)))

    def speak(self, part: StepInput) -> StepOutput:
        if isinstance(part.payload, GenerateRequest):  # its first step; in the following ones the payload is None
            texts = [piece.text for piece in part.payload.messages[-1].parts if isinstance(piece, TextPart)]
            words = " ".join(texts).split() or ["nothing"]
            limit = ContextLengthError.check(len(words), part.payload.sampling.max_tokens, self.max_words)
            self.answers[part.request_id] = words[:limit], 0
        words, said = self.answers[part.request_id]
        finished = said + 1 == len(words)
        self.answers[part.request_id] = words, said + 1
        reply = GenerateReply(
            text=words[said] + " ",  # what is new, as token_ids
            token_ids=[said],
            prompt_tokens=len(words),
            completion_tokens=said + 1,  # so far
            finish_reason="stop" if finished else None,
        )
        return StepOutput(reply, finished=finished)

    def forget(self, request_id: int) -> None:
        self.answers.pop(request_id, None)

    def close(self) -> None:
        self.answers.clear()
