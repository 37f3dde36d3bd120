"""The messages between frontends and the engine: media, the model's description, requests and replies.

These are the payloads of the ring's requests and replies. Frontends import this module and :mod:`shmring.engine.client`, and
nothing else of the engine.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from msgspec import UNSET, UnsetType

from shmring.engine.inputs import Feature, InputSpec, PictureSpec, ProcessorSpec, SoundSpec, VideoSpec, places_of

__all__ = [
    "CAPABILITIES",
    "MAX_CHOICES",
    "MAX_FORM_CHARACTERS",
    "Calls",
    "ChatMessage",
    "EncodeReply",
    "EncodeRequest",
    "EngineRequestPayload",
    "Feature",
    "Features",
    "FinishReason",
    "GenerateReply",
    "GenerateRequest",
    "InputSpec",
    "Medium",
    "MediumPart",
    "ModelDescription",
    "Picture",
    "PictureSpec",
    "FrontendReport",
    "ProcessorSpec",
    "SamplingParams",
    "SoundSpec",
    "Spectrogram",
    "SpeechParams",
    "SpeechSegment",
    "SpeechWord",
    "StructuredOutputsParams",
    "Text",
    "TextPart",
    "TokenLogprobs",
    "ToolCall",
    "Video",
    "VideoSpec",
    "Waveform",
    "checksum_of",
    "parameters_of",
    "tensor_of",
]


class Calls:
    """Names of the engine's control calls. :class:`shmring.engine.client.EngineClient` has their arguments and
    results."""

    HEALTH = "health"
    DESCRIBE = "describe"
    STATISTICS = "statistics"
    TIMES = "times"
    PAUSE = "pause_generation"
    RESUME = "resume_generation"
    IS_PAUSED = "is_paused"
    ABORT_REQUESTS = "abort_requests"
    NEXT_ABORTS = "next_aborts"
    TELL_ENGINES = "tell_engines"
    RESET_MM_CACHE = "reset_mm_cache"
    COLLECTIVE_RPC = "collective_rpc"
    LOG_STATS = "do_log_stats"
    START_PROFILE = "start_profile"
    STOP_PROFILE = "stop_profile"


class FrontendReport(msgspec.Struct, frozen=True):
    """What a frontend tells engines, for people: of requests that are on their way to one, and how late its loop is.

    Attributes:
        frontend: a name that no other frontend has.
        title: what people call it.
        callers: for each caller, how many such requests it has, and the seconds that it had decoders since the last report.
        decoders: how many the frontend may have.
        busy: how many of these work.
        waiting: media that wait for one. (Large ones leave the last decoder to small ones.)
        lag_s: how late its loop was at most, in the last 15 to 30 seconds.
        lag_ago_s: how many seconds before the report that was over.
    """

    frontend: str
    title: str
    callers: dict[str, tuple[int, float]]
    decoders: int
    busy: int
    waiting: int
    lag_s: float
    lag_ago_s: float


# -- media --------------------------------------------------------------------------------------------------------------


class Text(msgspec.Struct, tag="text"):
    """A text to be embedded, or its tokens."""

    text: str | list[int]


class PreparedMedium(msgspec.Struct, kw_only=True):
    """What every medium has.

    Attributes:
        checksum: as :func:`checksum_of` says.
        shortfall: what of its file was damaged or missing.
        key: a hash of its file, and of how it was prepared: media with the same key are the same.
    """

    checksum: int | None = None
    shortfall: str | None = None
    key: str | None = None


class Picture(PreparedMedium, tag="picture"):
    """A decoded picture: ``pixels`` of shape (height, width, 3), uint8, RGB."""

    pixels: torch.Tensor


class Features(PreparedMedium, tag="features"):
    """A picture as the model's image processor makes it: tensors in one piece of memory.

    Attributes:
        content: shape (bytes,), uint8.
        layout: which tensors lie there, one after the other.
    """

    content: torch.Tensor
    layout: list[Feature]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns views of the content, by name."""
        starts, _ = places_of(self.layout)
        views: dict[str, torch.Tensor] = {}
        for feature, start in zip(self.layout, starts, strict=True):
            dtype: torch.dtype = getattr(torch, feature.dtype)
            end = start + dtype.itemsize * torch.Size(feature.shape).numel()
            views[feature.name] = self.content[start:end].view(dtype).view(feature.shape)
        return views


class Waveform(PreparedMedium, tag="waveform"):
    """A decoded recording: ``samples`` of shape (samples,), float32, mono, full scale is 1; ``sample_rate`` in Hz."""

    samples: torch.Tensor
    sample_rate: int


class Spectrogram(PreparedMedium, tag="spectrogram"):
    """A recording as the ear hears it.

    Attributes:
        log_mel: shape (frames, mel bands), float32: natural logarithm of the power in each band, floored at ``log(1e-10)``.
            100 frames a second, windows of 25 ms.
        duration_s: of the recording.
    """

    log_mel: torch.Tensor
    duration_s: float


class Video(PreparedMedium, tag="video"):
    """Frames of a clip.

    Attributes:
        frames: shape (frames, height, width, 3), uint8, RGB, in order of time.
        timestamps_s: when each of them is shown, in seconds from the start.
        duration_s: of the whole clip.
    """

    frames: torch.Tensor
    timestamps_s: list[float]
    duration_s: float


Medium: TypeAlias = Picture | Features | Waveform | Spectrogram | Video


def tensor_of(medium: Medium) -> torch.Tensor:
    """Returns a medium's tensor."""
    match medium:
        case Picture():
            return medium.pixels
        case Features():
            return medium.content
        case Waveform():
            return medium.samples
        case Spectrogram():
            return medium.log_mel
        case Video():
            return medium.frames


def checksum_of(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of a tensor's bytes, which must be contiguous. It releases the interpreter lock."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def parameters_of(function: str) -> str:
    """Returns what the schema of a function's parameters is called in an error."""
    return f"the parameters of {function!r}"


# -- what an executor takes, so that frontends prepare it -----------------------------------------------------------------


class ModelDescription(msgspec.Struct, frozen=True):
    """What the engine's executor does.

    Attributes:
        executor: its name.
        model: the name of the model in requests, unless the server has another name for it.
        tasks: what it can be asked for: ``"encode"``; ``"generate"``, an answer to a conversation; ``"complete"``, a text that
            goes on from a prompt; ``"tokenize"``; ``"transcribe"`` and ``"translate"``, what is said in a recording.
        input: the inputs that it takes, and how they are prepared.
        max_batch_size: requests it takes in one step.
        embedding_size: dimensions of an embedding; None if it does not encode.
        max_model_len: tokens of prompt and answer together; None if there is no such limit.
        tools: whether conversations can have tools, which its answers call.
        template_options: whether :attr:`GenerateRequest.template_options` have an effect.
        reasoning_effort: whether ``reasoning_effort`` is one of them.
        strict_tools: whether :attr:`GenerateRequest.strict_tools` has one.
        word_times: whether it can say when each word of a recording is said.
        capabilities: what else of a request has an effect that not every executor gives it: of :data:`CAPABILITIES`.
        synthetic: whether its answers are made up, for load tests. A program that shows them must say so.
        pauses: whether a request that was begun need not be part of each step: others may have their turn.
    """

    executor: str
    model: str
    tasks: list[str]
    input: InputSpec
    max_batch_size: int
    embedding_size: int | None = None
    max_model_len: int | None = None
    synthetic: bool = False
    pauses: bool = False
    tools: bool = False
    template_options: bool = False
    reasoning_effort: bool = False
    strict_tools: bool = False
    word_times: bool = False
    capabilities: list[str] = []


#: Fields of :class:`SamplingParams`, and ``tool_choice`` of :class:`GenerateRequest`, that an executor may not know. Frontends
#: refuse them, unless they have their default or the executor's description names them.
CAPABILITIES = (
    "n",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "logprobs",
    "structured_outputs",
    "tool_choice",
)


# -- requests and replies -------------------------------------------------------------------------------------------------

#: Of the form of an answer; OpenAI's API takes 120,000.
MAX_FORM_CHARACTERS = 128 << 10
MAX_CHOICES = 1024

# Of all tokens of all answers to a request, since they are held until its caller has read them: 18 MB of JSON.
_MAX_LOGPROBS = 256 << 10


class EncodeRequest(msgspec.Struct, tag="encode"):
    """Asks for one embedding per input.

    Attributes:
        inputs: what to embed.
        priority: lower is sooner.
        deadline: time of ``time.monotonic()``, which all processes of a host share, after which the request is aborted.
        trace_headers: the context of its trace, as headers (W3C). Unset: it is not traced.
        owner: whose it is: those who have used least of the engine's steps come first. Empty: the process's that sent it.
    """

    inputs: list[Text | Picture | Features | Waveform | Spectrogram | Video]
    priority: int = 0
    deadline: float | None = None
    trace_headers: dict[str, str] | UnsetType = UNSET
    owner: str = ""


class EncodeReply(msgspec.Struct, tag="encoded"):
    """The embeddings: shape (inputs, embedding size), float32, each of length 1, in the order of the request."""

    embeddings: torch.Tensor
    prompt_tokens: int = 0


class TextPart(msgspec.Struct, tag="text"):
    """Text in a message."""

    text: str


class MediumPart(msgspec.Struct, tag="medium"):
    """The place of a medium in a message: its index in :attr:`GenerateRequest.media`."""

    index: int


class ToolCall(msgspec.Struct):
    """A call of a tool.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
        id: its caller's name for it, in a conversation.
        index: which one of the answer's calls.
    """

    name: str
    arguments: str
    id: str = ""
    index: int = 0


class ChatMessage(msgspec.Struct):
    """A message of a conversation.

    Attributes:
        role: whose it is.
        parts: what it says.
        tool_calls: of an earlier answer.
        tool_call_id: of what a tool has returned: which call that was.
    """

    role: str
    parts: list[TextPart | MediumPart]
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """What an answer must be; one of the fields is set. Names as in vLLM.

    Attributes:
        json: a value of this JSON schema, which is JSON in a text.
        json_object: any JSON object.
        regex: a text that all of this pattern matches.
        choice: one of these texts.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] = []


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """How tokens are chosen; fields as in OpenAI's and vLLM's APIs.

    Attributes:
        n: answers to the same prompt.
        max_tokens: of an answer; None: up to the model's limit.
        min_tokens: before which no token and no text ends an answer.
        temperature: 0 is greedy.
        top_p: share of probability that is sampled from.
        top_k: tokens that are sampled from, the likeliest; 0 and -1: all.
        min_p: tokens with less than this share of the likeliest token's probability are left out.
        presence_penalty: taken from the logit of each token that the answer has already.
        frequency_penalty: the same, times how often the answer has it.
        repetition_penalty: above 1, tokens that the prompt or the answer has already are less likely.
        logit_bias: by token: what is added to its logit, -100 to 100.
        seed: makes the answer repeatable.
        stop: texts at which the answer ends; they are not part of it.
        stop_token_ids: tokens at which it ends; their text is not part of it.
        ignore_eos: go on to ``max_tokens`` whatever the model says; for benchmarks.
        logprobs: of how many of the likeliest tokens replies say how likely they were, beside the one that was chosen; None:
            of none.
        structured_outputs: what the answer must be.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def max_described_tokens(self, prompts: int = 1) -> int | None:
        """Returns how many tokens an answer may have, since they are described; None: any number.

        Args:
            prompts: of the request.

        Raises:
            ValueError: ``max_tokens`` is more.
        """
        if self.logprobs is None:
            return None
        most = max(1, _MAX_LOGPROBS // (max(1, prompts * self.n) * (1 + max(0, self.logprobs))))
        if self.max_tokens is not None and self.max_tokens > most:
            answers = f" of {prompts * self.n} answers" if prompts * self.n > 1 else ""
            raise ValueError(
                f"{self.max_tokens} tokens{answers}, each with {1 + self.logprobs} logprobs, are more than the {_MAX_LOGPROBS} "
                f"logprobs that a request may have: lower max_tokens to {most}, or n, or how many logprobs a token has"
            )
        return most


class SpeechParams(msgspec.Struct, omit_defaults=True):
    """What is to be written of a recording.

    Attributes:
        task: ``"transcribe"``, what is said in it; ``"translate"``, the same in English.
        language: that is spoken, as ISO 639-1 has it (``"en"``), or in English; None: it is found out.
        words: whether segments say when each word is said.
    """

    task: Literal["transcribe", "translate"] = "transcribe"
    language: str | None = None
    words: bool = False


class SpeechWord(msgspec.Struct):
    """A word, and when it is said, in seconds from the beginning of the recording."""

    text: str
    start_s: float
    end_s: float


class SpeechSegment(msgspec.Struct):
    """A part of what is said in a recording, a sentence or so.

    Attributes:
        start_s, end_s: when it is said, in seconds from the beginning.
        text: what is said; it may begin with a space.
        tokens: of it, marks of time included.
        window_s: where the part of the recording begins that the model heard for it.
        avg_logprob: of its tokens, on average.
        no_speech_prob: how likely it is that nobody speaks there.
        words: of the text, if they are wanted.
    """

    start_s: float
    end_s: float
    text: str
    tokens: list[int]
    window_s: float
    avg_logprob: float
    no_speech_prob: float
    words: list[SpeechWord] = []


class GenerateRequest(msgspec.Struct, tag="generate"):
    """Asks for an answer to a conversation, streamed, or for a text that goes on from a prompt. ``priority``, ``deadline``,
    ``trace_headers`` and ``owner`` as in :class:`EncodeRequest`.

    Attributes:
        prompt: a text or its tokens, in place of ``messages``.
        tools: that the answer may call, as chat templates take them.
        tool_choice: ``"required"``: it must call one of them, and does nothing else.
        strict_tools: the tools, by name, whose calls keep to their schemas although no call is required.
        parallel_tool_calls: whether it may have several calls.
        template_options: variables of the chat template.
        add_special_tokens: whether a text gets the tokens that the tokenizer puts at its ends.
        speech: write down what is said in the one medium; ``prompt`` is what was said before. None: answer.
        tokenize: make no answer. The one reply has the tokens of the conversation or text, or the text of tokens.
        stream: whether its caller reads the answer as it is made. If not, it comes when it is complete; before that, if it
            takes long or has media, its first piece, and what follows once a second.
    """

    messages: list[ChatMessage] = []
    media: list[Picture | Features | Waveform | Spectrogram | Video] = []
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    priority: int = 0
    deadline: float | None = None
    prompt: str | list[int] | None = None
    add_special_tokens: bool = True
    tokenize: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "required"] = "auto"
    strict_tools: list[str] = []
    parallel_tool_calls: bool = True
    template_options: dict[str, Any] = {}
    trace_headers: dict[str, str] | UnsetType = UNSET
    stream: bool = True
    owner: str = ""
    speech: SpeechParams | None = None

    @property
    def needs_tools(self) -> bool:
        """Whether only a model that knows tools can answer it."""
        return bool(self.tools) or any(message.tool_calls or message.role == "tool" for message in self.messages)

    @property
    def needs_form(self) -> bool:
        """Whether the answer can't be just any text."""
        return self.sampling.structured_outputs is not None or self.tool_choice == "required" or bool(self.strict_tools)


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class TokenLogprobs(msgspec.Struct, array_like=True):
    """How likely a token was, before anything but the model had a say.

    Attributes:
        token: its bytes: a text, or a part of a character.
        logprob: the natural logarithm of its probability.
        top: of the likeliest tokens, in that order, the same.
    """

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]]

    @property
    def characters(self) -> int:
        """How many characters begin in it."""
        return sum(byte & 0xC0 != 0x80 for byte in self.token)


class GenerateReply(msgspec.Struct, tag="generated", omit_defaults=True):
    """A piece of an answer.

    Attributes:
        text: what is new.
        token_ids: what is new, as the model numbers it.
        prompt_tokens: of the request, media included.
        completion_tokens: of this answer so far.
        finish_reason: on the last piece of this answer: the model (or a stop text) ended it, or a limit did, or it calls tools.
        tool_calls: what is new; each comes whole.
        reasoning: what is new of what the model wrote for itself, where that is told apart.
        index: which of the request's ``n`` answers it is a piece of.
        logprobs: of each of ``token_ids``, if they were asked for.
        stop_text: on the last piece: the stop text that ended the answer, if one did.
        first_at: on a piece that may have waited with the first token of its answer: when that token came, as a time of
            ``time.monotonic()``.
        segments: of a recording: what ``text`` is made of.
        language: of a recording: its name in English, if that is known.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCall] = []
    reasoning: str = ""
    index: int = 0
    logprobs: list[TokenLogprobs] = []
    stop_text: str | None = None
    first_at: float = 0.0
    segments: list[SpeechSegment] = []
    language: str | None = None


EngineRequestPayload: TypeAlias = EncodeRequest | GenerateRequest
