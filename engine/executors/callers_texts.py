"""What callers may write in a prompt, and how a template is given it: texts are only text, and no longer than a model reads.

A text that looks like a control token, such as ``<|im_end|>`` or ``<image>``, must not become one: it would close a message, or
forge the place of a medium. A tokenizer makes such texts harmless, or they are refused here. Texts that can't fit the model are
refused before they are made into tokens: for megabytes that takes seconds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shmring.engine.executors.forms import Form, form_of_request, opening_mark
from shmring.engine.executors.interface import ContextLengthError, StepOutput
from shmring.engine.executors.tool_calls import ResponseReader, find_response_template
from shmring.engine.protocol import ChatMessage, GenerateReply, GenerateRequest, Medium, MediumPart, TextPart

__all__ = ["CallersTexts", "count_characters"]


# What takes as long as so many characters of a text, measured: a message is laid out and cleaned, a call is read from JSON and
# written as JSON, and so is each value.
_OF_MESSAGE = 80
_OF_PART = 2
_OF_CALL = 160
_OF_VALUE = 16
_ENOUGH = 64 << 10  # several times what fits a step


class CallersTexts:
    """Checks the texts of requests.

    Args:
        name: of the model, for errors.
        tokenizer: of transformers.
        vocabulary_size: how many tokens the model knows.
        max_model_len: tokens that it reads.
        template: its chat template; or several, by name; None: it has none.
        model: of which only ``config.model_type`` is asked.
        processor: its processor, if it has one.
        sanitizes: whether control tokens in texts are made harmless.

    Attributes:
        has_template: whether conversations can be laid out.
        variables: of its chat template, which callers may set.
        has_effort: whether ``reasoning_effort`` is one of them.
        response_template: how the model writes answers with calls; None: conversations can't have tools, because the template
            does not write them, or calls in answers can't be read.
        message_tokens: that the template writes for a message in which nothing stands, as far as that is known.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        vocabulary_size: int,
        max_model_len: int,
        *,
        template: Any,
        model: Any,
        processor: Any | None = None,
        sanitizes: bool = False,
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self.has_template = bool(template)
        self.response_template = find_response_template(tokenizer, model) if "tools" in str(template) else None
        self.variables = _find_variables(template, tokenizer, processor)
        self.has_effort = "reasoning_effort" in self.variables
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._sanitizes = sanitizes
        self.message_tokens = 1
        self._longest_token = _find_longest_token(tokenizer)
        self._control_tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    @property
    def has_tools(self) -> bool:
        """Whether conversations can have tools."""
        return self.response_template is not None

    def open_conversation(self, request: GenerateRequest) -> tuple[list[Medium], dict[str, Any]]:
        """Checks a conversation: its texts, its tools and its template options.

        Returns:
            Its media in the order of their places, and what the template is given besides.

        Raises:
            ValueError: the model takes no such thing; or a text has a control token that nothing makes harmless; or a medium
                has no place, or several.
            ContextLengthError: they are too long, whatever tokens they are made of.
        """
        if not request.messages:
            raise ValueError("a conversation has at least one message")
        if not self.has_template:
            raise ValueError(f"the model {self._name!r} has no chat template, so it can't be asked in messages")
        self.check_length(request)
        further = [str(value) for value in (request.tools, request.template_options) if value]
        for message in request.messages:
            further += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
            further.append(message.tool_call_id or "")
        self.check_characters(_length_of(request) + sum(map(len, further)), request.sampling.max_tokens)
        if not self._sanitizes:
            for message in request.messages:
                for text in [message.role, *(part.text for part in message.parts if isinstance(part, TextPart))]:
                    self.check_text(text)
        calls = [_tool_fields(message) for message in request.messages]
        for value in (request.tools, request.template_options, calls):
            self._refuse_control_tokens_in(value)
        if request.needs_tools and not self.has_tools:
            raise ValueError(f"the model {self._name!r} takes no tools: its template has none, or its calls can't be read")
        for variable in request.template_options:
            if variable not in self.variables:
                raise ValueError(f"the chat template of the model {self._name!r} has no variable {variable!r}")
        return _media_in_order(request), request.template_options | ({"tools": request.tools} if request.tools else {})

    def form_of(self, request: GenerateRequest) -> Form:
        """Returns the form that an answer must have, of a request that needs one.

        Raises:
            ValueError: as of :func:`.forms.form_of_request`.
        """
        return form_of_request(request, self.response_template, self._name)

    def readers_of(self, request: GenerateRequest, prompt: Sequence[int]) -> list[ResponseReader | None]:
        """Returns what reads each answer to a request with tools, whose tokens are given; None: its text is given out as it
        is."""
        count, template = request.sampling.n, self.response_template
        if not request.tools:
            return [None] * count
        before, parallel = self._tokenizer.decode(prompt), request.parallel_tool_calls
        are_bound = bool(request.strict_tools) and request.sampling.structured_outputs is None  # otherwise all of the answer is
        opening = opening_mark(template) if template is not None and are_bound else ""
        return [ResponseReader(template, before, request.tools, parallel=parallel, opening=opening) for _ in range(count)]

    @staticmethod
    def lay_out(
        messages: Sequence[ChatMessage], media: Sequence[Medium], place: Callable[[Medium], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Returns messages as templates take them.

        Args:
            messages: of a conversation.
            media: that they name.
            place: returns the part of a message that stands for a medium.
        """
        return [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part.text} if isinstance(part, TextPart) else place(media[part.index])
                    for part in message.parts
                ],
            }
            | _tool_fields(message)
            for message in messages
        ]

    def check_length(self, request: GenerateRequest) -> None:
        """Checks a request by its messages and characters: a template writes tokens for a message that is empty, too.

        Raises:
            ContextLengthError: it is too long, whatever tokens it is made of.
        """
        max_tokens = request.sampling.max_tokens
        fewest_tokens = self.message_tokens * len(request.messages)
        if fewest_tokens > self._max_model_len:
            raise ContextLengthError(fewest_tokens, max_tokens, self._max_model_len, estimated=True)
        self.check_characters(_length_of(request), max_tokens)

    def check_characters(self, characters: int, max_tokens: int | None) -> None:
        """Checks a text by its length.

        Raises:
            ContextLengthError: it is too long.
        """
        fewest_tokens = -(-characters // self._longest_token)
        if fewest_tokens > self._max_model_len:
            raise ContextLengthError(fewest_tokens, max_tokens, self._max_model_len, estimated=True)

    def check_text(self, text: str) -> None:
        """Checks a text in which nothing makes control tokens harmless.

        Raises:
            ValueError: it has one.
        """
        token = next((token for token in self._control_tokens if token in text), None)
        if token is not None:
            raise ValueError(f"{token!r} is a control token of the model {self._name!r} and can't be part of a text")

    def check_prompt(self, prompt: str | list[int], max_tokens: int | None, what: str = "a prompt") -> None:
        """Checks a text that is a whole prompt by its length, or its tokens; ``what`` it is stands in an error.

        Raises:
            ContextLengthError: it is too long.
            ValueError: it is empty, or the model does not know one of the tokens.
        """
        if isinstance(prompt, str):
            self.check_characters(len(prompt), max_tokens)
        elif len(prompt) > self._max_model_len:
            raise ContextLengthError(len(prompt), max_tokens, self._max_model_len)
        else:
            self.check_tokens(prompt)
        if not prompt:
            raise ValueError(f"{what} can't be empty")

    def check_tokens(self, tokens: list[int]) -> None:
        """Checks tokens.

        Raises:
            ValueError: the model does not know one of them.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocabulary_size):
            wrong = next(token for token in tokens if not 0 <= token < self._vocabulary_size)
            raise ValueError(f"the model {self._name!r} has no token {wrong}; its tokens are 0 to {self._vocabulary_size - 1}")

    def tell_tokens(self, request: GenerateRequest, tokens_of: Callable[[GenerateRequest], Sequence[int]]) -> StepOutput:
        """Returns what a caller is told of tokens: those of its request, or the text of the tokens that are its prompt.

        Args:
            request: asks for them.
            tokens_of: returns the tokens of a request that is not in tokens.

        Raises:
            ValueError: the model does not know one of the tokens.
        """
        tokens, text = list[int](), ""
        if isinstance(request.prompt, list):
            self.check_tokens(request.prompt)
            text = self._tokenizer.decode(request.prompt)
        else:
            tokens = list(tokens_of(request))
        return StepOutput(GenerateReply(text, tokens, len(tokens), 0, "stop"))

    def _refuse_control_tokens_in(self, value: Any) -> None:
        """Refuses them in names, which nothing makes harmless, and in texts if nothing does."""
        if isinstance(value, str) and not self._sanitizes:
            self.check_text(value)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self.check_text(name)
                self._refuse_control_tokens_in(item)
        elif isinstance(value, list):
            for item in value:
                self._refuse_control_tokens_in(item)


def _length_of(request: GenerateRequest) -> int:
    """Returns how many characters the texts of a request have."""
    if request.prompt is not None:
        return len(request.prompt) if isinstance(request.prompt, str) else 0
    return sum(len(part.text) for message in request.messages for part in message.parts if isinstance(part, TextPart))


def count_characters(request: GenerateRequest) -> int:
    """Returns how many characters a text has that takes as long as a request does, to be laid out and made into tokens.

    A template walks through more than texts: messages, calls, tools, values in one another. Counting stops when it is enough.
    """
    count = len(request.prompt or ())
    for message in request.messages:
        count += _OF_MESSAGE + len(message.role) + len(message.tool_call_id or "")
        count += sum(_OF_PART + (len(part.text) if isinstance(part, TextPart) else 0) for part in message.parts)
        # Values in arguments are told by their commas: none is a step's work if they are many.
        count += sum(
            _OF_CALL + len(call.id) + len(call.name) + len(call.arguments) + _OF_VALUE * call.arguments.count(",")
            for call in message.tool_calls
        )
        if count > _ENOUGH:
            return count
    left: list[Any] = [request.tools, request.template_options]
    while left and count <= _ENOUGH:
        value = left.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, Mapping):
            left += [*value, *value.values()]
            count += 2 * _OF_VALUE * len(value)
        elif isinstance(value, list):
            left += value
            count += _OF_VALUE * len(value)
    return count


def _find_variables(template: Any, tokenizer: Any, processor: Any | None) -> frozenset[str]:
    """Returns the variables of a chat template that callers may set.

    They don't set what transformers or other fields of a request do, or what is jinja's. They set nothing else either: what is
    no variable of the template, transformers would give to the processor, which fetches URLs.
    """
    utils = importlib.import_module("transformers.utils.chat_template_utils")
    templates = template.values() if isinstance(template, Mapping) else [template]
    found = frozenset[str]().union(*(utils._get_template_variables(text) for text in templates if isinstance(text, str)))
    owner = tokenizer if processor is None else processor
    taken = {"messages", *utils._compile_jinja_template("").globals, *inspect.signature(owner.apply_chat_template).parameters}
    taken.update(tokenizer.SPECIAL_TOKENS_ATTRIBUTES, tokenizer.special_tokens_map)
    if processor is not None:
        taken.update(inspect.signature(type(processor).__call__).parameters)
    return found - taken


def _media_in_order(request: GenerateRequest) -> list[Medium]:
    media = request.media
    places = [part.index for message in request.messages for part in message.parts if isinstance(part, MediumPart)]
    if sorted(places) != list(range(len(media))):
        raise ValueError(f"each of the {len(media)} media has one place in the messages, got places {places}")
    return [media[place] for place in places]


def _tool_fields(message: ChatMessage) -> dict[str, Any]:
    """Returns what a message has of tools, as templates take it: arguments are values there."""
    calls = [
        {
            "type": "function",
            "id": call.id,
            "function": {"name": call.name, "arguments": msgspec.json.decode(call.arguments, type=dict[str, Any])},
        }
        for call in message.tool_calls
    ]
    answered = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    return ({"tool_calls": calls} if calls else {}) | answered


def _find_longest_token(tokenizer: Any) -> int:
    """Returns the most characters that one token of a text can stand for.

    A vocabulary spells characters beyond ASCII in one letter or more for each, so none stands for more than its spelling has.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return max((len(token) for token in tokenizer.get_vocab() if token not in special), default=1)
