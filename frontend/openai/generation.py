"""What requests for text have in common."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shmring.engine.protocol import SamplingParams
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.inference import Words
from shmring.frontend.openai.messages import INT64, Priority
from shmring.frontend.openai.structures import ResponseFormat, StructuredOutputs, structure_of
from shmring.frontend.openai.unsupported import only

__all__ = [
    "MAX_ANSWERS",
    "GenerationRequest",
    "GenerationWords",
    "Logprobs",
    "StreamOptions",
    "Token",
    "TokenCount",
    "sampling_of",
]

_MAX_TOKENS = 2**31 - 1
_MAX_STOP_TEXTS = 16  # four times as many as in OpenAI's API; each is searched for at every token
_MAX_STOP_CHARACTERS = 1024
_MAX_STOP_TOKENS = 128
#: Of a request, to all its prompts: as in OpenAI's API; an engine has a limit of its own.
MAX_ANSWERS = 128
MAX_LOGPROBS = 20  # as in OpenAI's API

TokenCount = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_StopText = Annotated[str, Meta(min_length=1, max_length=_MAX_STOP_CHARACTERS)]


class StreamOptions(msgspec.Struct):
    """What a stream is to tell besides the answer: with `include_usage`, its last chunk says how many tokens were used."""

    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=_MAX_STOP_TEXTS)] | None = None
    user: str | None = None
    priority: Priority | None = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on to max_tokens whatever the model says.")] = None
    n: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=_MAX_STOP_TOKENS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    length_penalty: Annotated[Any, only(1)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    bad_words: Annotated[Any, only([])] = None
    allowed_token_ids: Annotated[Any, only()] = None
    guided_json: Annotated[Any, only()] = None
    guided_regex: Annotated[Any, only()] = None
    guided_choice: Annotated[Any, only()] = None
    guided_grammar: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    logprob_token_ids: Annotated[Any, only([])] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    truncation_side: Annotated[Any, only()] = None
    thinking_token_budget: Annotated[Any, only()] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    watermarking: Annotated[Any, only(False)] = None
    repetition_detection: Annotated[Any, only()] = None
    return_token_ids: Annotated[Any, only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    return_token_offsets: Annotated[Any, only(False)] = None
    return_mm_kwargs: Annotated[Any, only(False)] = None
    kv_transfer_params: Annotated[Any, only()] = None
    ec_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only({})] = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None


class GenerationWords(Words):
    """Where a request has what it asks for.

    Args:
        request: without its messages or prompts, which are most of its memory.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request

    def name_of(self, capability: str) -> str:
        """Returns the field that asks for something that only some models can."""
        has_format = self._request.response_format is not None
        return "response_format" if has_format and capability == "structured_outputs" else capability

    def place_of_form(self, message: str) -> str:
        """Returns where the form stands that an executor has refused with this message."""
        if self._request.response_format is not None:
            return "response_format.json_schema.schema"
        return "tools" if self._request.structured_outputs is None else "structured_outputs"


def sampling_of(request: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Returns how a request's tokens are chosen.

    Args:
        request: any.
        max_tokens: how many, if the request says so in another field than ``max_tokens``.
        logprobs: as in the result.

    Raises:
        ApiError: its options do not fit together.
    """
    if request.stream_options is not None and not request.stream:
        raise ApiError(ErrorCode.INVALID_VALUE, "stream_options are for streams: set stream", param="stream_options")
    stop = request.stop or []
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        text = f"min_tokens is {request.min_tokens}, more than the {max_tokens} tokens that the answer may have"
        raise ApiError(ErrorCode.INVALID_VALUE, text, param="min_tokens")
    structure = structure_of(request.response_format, request.structured_outputs)
    if request.min_tokens and structure is not None:
        text = "min_tokens can't be asked for together with a form of the answer, which says when it ends"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="min_tokens")
    return SamplingParams(
        n=request.n or 1,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        seed=request.seed,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        structured_outputs=structure,
    )
