"""Tokens: requests and answers of ``POST /tokenize`` and ``POST /detokenize``, as in vLLM. The engine has the tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shmring.engine.protocol import GenerateRequest
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser
from shmring.frontend.inference import Generation
from shmring.frontend.openai.chat import ChatMessageParam, engine_messages
from shmring.frontend.openai.completions import check_prompt
from shmring.frontend.openai.generation import Token
from shmring.frontend.openai.messages import MAX_MESSAGES
from shmring.frontend.openai.tools import Tools, check_values, engine_tools
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "DETOKENIZE_PARSER",
    "TOKENIZE_PARSER",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "TokenizeRequest",
    "TokenizeResponse",
    "read_detokenize",
    "read_tokenize",
]


class TokenizeRequest(msgspec.Struct):
    """The body of `POST /tokenize`: a model, and either `prompt` or `messages`, which are laid out as for an answer."""

    model: str
    prompt: str | None = None
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Of a prompt: those at its ends. They are, by default.")] = None
    return_token_strs: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    continue_final_message: Annotated[Any, only(False)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    tools: Tools | None = None


class TokenizeResponse(msgspec.Struct):
    """The answer to `POST /tokenize`. `max_model_len` are tokens of prompt and answer together, if there is such a limit."""

    tokens: list[int]
    count: int
    max_model_len: int | None = None
    token_strs: None = None


class DetokenizeRequest(msgspec.Struct):
    """The body of `POST /detokenize`."""

    model: str
    tokens: list[Token]


class DetokenizeResponse(msgspec.Struct):
    """The answer to `POST /detokenize`: the text of the tokens, control tokens included."""

    prompt: str


_UNSUPPORTED = Unsupported(TokenizeRequest)

#: For bodies of requests.
TOKENIZE_PARSER = BodyParser(TokenizeRequest)
DETOKENIZE_PARSER = BodyParser(DetokenizeRequest)


def read_tokenize(request: TokenizeRequest) -> Generation:
    """Returns what a request asks for.

    Raises:
        ApiError: it asks for something that is not implemented, or for nothing.
    """
    check_supported(request, _UNSUPPORTED)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(ErrorCode.INVALID_VALUE, "send either prompt or messages", param="prompt")
    if request.prompt is not None:
        prompt, adds = check_prompt(request.prompt, "prompt"), request.add_special_tokens is not False
        return Generation("tokenize", request.model, [GenerateRequest(prompt=prompt, add_special_tokens=adds)])
    if request.add_special_tokens:
        text = "add_special_tokens is for prompts: a chat template writes all tokens of messages"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="add_special_tokens")
    messages, sources = engine_messages(request.messages or [])
    if sources:
        raise ApiError(ErrorCode.UNSUPPORTED_INPUT, "media are not tokenised; leave them out", param=sources[0].param)
    options = request.chat_template_kwargs or {}
    check_values(options, "chat_template_kwargs")
    tools = engine_tools(request.tools or [])
    return Generation("tokenize", request.model, [GenerateRequest(messages, tools=tools, template_options=options)])


def read_detokenize(request: DetokenizeRequest) -> Generation:
    """Returns what a request asks for."""
    return Generation("tokenize", request.model, [GenerateRequest(prompt=request.tokens)])
