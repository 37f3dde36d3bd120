"""Completions: requests and answers of ``POST /v1/completions``: a text that goes on from a prompt, without a chat template.

Several prompts in one request are answered as if each had come by itself; answers to the first prompt are the first choices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shmring.engine.protocol import FinishReason, GenerateReply, GenerateRequest, TokenLogprobs
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.inference import Generation
from shmring.frontend.openai.choices import AnswerForm, Usage
from shmring.frontend.openai.generation import (
    MAX_ANSWERS,
    GenerationRequest,
    GenerationWords,
    Logprobs,
    Token,
    sampling_of,
)
from shmring.frontend.openai.messages import check_characters
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = ["COMPLETION_FORM", "COMPLETION_PARSER", "Completion", "CompletionRequest", "check_prompt", "read_completion"]

_MAX_TOKENS = 16  # of an answer whose request does not say how many, as in OpenAI's API

_PROMPT = "A text, or its tokens, or a list of texts and lists of tokens: several prompts."


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`. Without `max_tokens`, an answer has up to 16."""

    prompt: Annotated[str | Annotated[list[str | Token | list[Token]], Meta(min_length=1)], Meta(description=_PROMPT)]
    add_special_tokens: bool | None = None
    suffix: Annotated[Any, only("")] = None
    logprobs: Logprobs | None = None
    prompt_embeds: Annotated[Any, only()] = None


class CompletionLogprobs(msgspec.Struct):
    """How likely tokens were: logarithms of their probabilities, before the request's parameters had a say.

    A part of a character is called by its bytes, such as `bytes:\\xf0\\x9f`; so is a token whose text another one has as well.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """An answer, or what is new of it."""

    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: CompletionLogprobs | None = None


class Completion(msgspec.Struct):
    """The answer to `POST /v1/completions`, and each event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"


_UNSUPPORTED = Unsupported(CompletionRequest)


def read_completion(request: CompletionRequest) -> Generation:
    """Returns what a request asks for; empties its prompt, which is most of its memory.

    Raises:
        ApiError: it asks for something that is not implemented.
    """
    check_supported(request, _UNSUPPORTED)
    sampling = sampling_of(request, _MAX_TOKENS if request.max_tokens is None else None, request.logprobs)
    prompts, request.prompt = _prompts_of(request.prompt, sampling.n), ""
    texts = (prompt for prompt in prompts if isinstance(prompt, str))
    check_characters("the prompts have {} characters", texts, "prompt")
    options: dict[str, Any] = {
        "add_special_tokens": request.add_special_tokens is not False,
        "sampling": sampling,
        "priority": request.priority or 0,
    }
    requests = [GenerateRequest(prompt=prompt, **options) for prompt in prompts]
    return Generation("complete", request.model, requests, stream=bool(request.stream), words=GenerationWords(request))


def _prompts_of(prompt: str | list[str | int | list[int]], answers: int) -> list[str | list[int]]:
    """Returns the prompts of a request, of which each gets some answers."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [check_prompt(prompt, "prompt")]
    if len(prompt) * answers > MAX_ANSWERS:
        text = f"{len(prompt)} prompts with n {answers} are more than the {MAX_ANSWERS} answers that a request may have"
        raise ApiError(ErrorCode.TOO_MANY_PROMPTS, text, param="prompt")
    return [check_prompt(item, f"prompt[{index}]") for index, item in enumerate(prompt)]


def check_prompt(prompt: str | int | Sequence[str | int | list[int]], param: str) -> str | list[int]:
    """Returns a prompt: a text or tokens.

    Raises:
        ApiError: it is neither, or empty or too long.
    """
    if not isinstance(prompt, str):
        items = [] if isinstance(prompt, int) else prompt
        tokens = [token for token in items if isinstance(token, int)]
        if isinstance(prompt, int) or len(tokens) != len(items):
            raise ApiError(ErrorCode.INVALID_VALUE, "a prompt is a text or tokens, not both", param=param)
        if not tokens:
            raise ApiError(ErrorCode.INVALID_VALUE, "the prompt is empty", param=param)
        return tokens
    check_characters("the prompt has {} characters", (prompt,), param)
    if not prompt:
        raise ApiError(ErrorCode.INVALID_VALUE, "the prompt is empty", param=param)
    return prompt


def _choice(
    pieces: Sequence[GenerateReply], reason: FinishReason, index: int, logprobs: CompletionLogprobs | None
) -> CompletionChoice:
    return CompletionChoice("".join(piece.text for piece in pieces), reason, index, logprobs)


def _piece(
    output: GenerateReply | None, reason: FinishReason | None, index: int, logprobs: CompletionLogprobs | None
) -> CompletionChoice:
    return CompletionChoice(output.text if output is not None else "", reason, index, logprobs)


def _logprobs(tokens: Sequence[TokenLogprobs], characters: int) -> CompletionLogprobs:
    """The chosen token is among the likeliest, as in OpenAI's API. They are encoded at once: all at the end would take long."""
    texts = [_name_of(token.token) for token in tokens]
    tops = [msgspec.Raw(msgspec.json.encode(_top_of(token))) for token in tokens]
    offsets = list(itertools.accumulate((token.characters for token in tokens), initial=characters))[:-1]
    return CompletionLogprobs(texts, [token.logprob for token in tokens], tops, offsets)  # type: ignore[arg-type]  # as above


def _top_of(token: TokenLogprobs) -> dict[str, float]:
    top: dict[str, float] = {}
    own = [] if any(other == token.token for other, _ in token.top) else [(token.token, token.logprob)]
    for other, logprob in [*token.top, *own]:
        name = _name_of(other)
        top[name if name not in top else _spelt(other)] = logprob
    return top


def _name_of(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return _spelt(token)


def _spelt(token: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


#: For bodies of requests.
COMPLETION_PARSER = BodyParser(CompletionRequest)

#: How completions are answered.
COMPLETION_FORM = AnswerForm(
    prefix="cmpl",
    whole=Completion,
    event=Completion,
    choice=_choice,
    opening=None,
    piece=_piece,
    logprobs=_logprobs,
)
