"""Tool calls in the answers of a model, and its reasoning, told apart from its text while it writes.

How a model writes them is said by its response template, which transformers has for it: the tokenizer's own one, or one by the
model's architecture. The parser is transformers' as well. It is given the text with its control tokens, since these are often
what marks a call.

A call that can't be read (half a call, or arguments that are no JSON) is text: from it on, all that the model writes is given
out as it is. But half a call at which a limit or a stop text has ended the answer is left out: its caller knows that the model
has not ended there, and markup is no answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shmring.engine.protocol import FinishReason, ToolCall

__all__ = ["Parts", "ResponseReader", "find_response_template", "read"]

_FIELD = "tool_calls"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_MOST_SPACE = 256  # characters: the parser's patterns take quadratic time in a run of white space


def find_response_template(tokenizer: Any, model: Any) -> Mapping[str, Any] | None:
    """Returns how a model writes its answers; None if transformers does not know it, or knows no calls of it.

    Args:
        tokenizer: of transformers.
        model: of which only ``config.model_type`` is asked.
    """
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        try:
            serving = importlib.import_module("transformers.cli.serving.utils")
        except ImportError:  # it needs packages that only transformers' own server does
            return None
        template = serving.get_response_template(tokenizer, model)
    return template if template is not None and _FIELD in template.get("fields", {}) else None


class Parts(msgspec.Struct):
    """What is new of an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ResponseReader:
    """Reads one answer.

    Args:
        template: how the model writes.
        prompt: the text before it, which may have begun the answer.
        tools: that the model may call. Arguments that are written as text get the types that their schemas name.
        parallel: whether it may call several; otherwise the answer ends with the first call.
        opening: what stands before each call, where that is to be noticed at once (:meth:`begun_call`); empty: it is not.

    Attributes:
        called: how many calls were read.
        begins_within: whether the prompt has begun reasoning, or a call.
        opening: as given.
    """

    def __init__(
        self, template: Any, prompt: str, tools: Sequence[dict[str, Any]], *, parallel: bool, opening: str = ""
    ) -> None:
        parsing = importlib.import_module("transformers.utils.chat_parsing.response_parser")
        spec = parsing.load_response_template(template)
        self._marks = spec.fields[_FIELD].open_re, spec.fields[_FIELD].close_re  # patterns
        self._parser: Any | None = parsing.ResponseParser(spec, prefix=prompt, tools=list(tools))
        kinds = [event["type"] for event in self._parser.initial_events if event["field"] != "content"]
        self.begins_within = kinds.count("region_open") > kinds.count("region_close")
        self._parallel = parallel
        self.opening = opening
        self._unsettled = ""  # the text from the last call that was read, or from the text that was given out, on
        self._within = False  # a call
        self.called = 0

    @property
    def complete(self) -> bool:
        """Whether the answer ends here."""
        return self.called > 0 and not self._parallel

    def begun_call(self) -> str | None:
        """Returns the text of a call so far, behind its opening mark; None: the text is within none.

        The parser says that a call has begun only when it has seen the character behind the mark.
        """
        _, mark, text = self._unsettled.partition(self.opening)
        return text if mark and self._parser is not None else None

    def push(self, text: str, *, ended: bool = False, cut: bool = False) -> Parts:
        """Takes the text that was written next, with its control tokens; returns what can be given out.

        Args:
            text: what is new.
            ended: whether the answer ends with it.
            cut: whether the model itself has not ended it.
        """
        parts = Parts()
        if self._parser is None:
            parts.text = text
            return parts
        self._unsettled += text
        if len(self._unsettled) - len(self._unsettled.rstrip()) > _MOST_SPACE:
            self._parser = None
            parts.text = self._unsettled
            return parts
        try:
            for event in self._parser.feed(text):
                self._take(event, parts)
            if ended and not (cut and self._is_within_call()):
                for event in self._parser.finalize()[1]:
                    self._take(event, parts)
        except Exception:  # noqa: BLE001 - what a model writes, or a schema of a caller's, the parser does not expect
            self._parser = None
            parts.text += self._unsettled
        return parts

    def _take(self, event: Mapping[str, Any], parts: Parts) -> None:
        kind, field, text = event["type"], event["field"], event.get("text", "")
        if field == _FIELD:
            self._within = kind != "region_close"
        if kind == "region_chunk":
            if field in _REASONING_FIELDS:
                parts.reasoning += text
            elif field == "content":
                parts.text += text
            if not event["dirty"]:
                self._settle(text)
        elif kind == "region_close" and field == _FIELD and not self.complete:
            value = event["value"]  # or a list of calls, where one region has all of them
            for one in value if isinstance(value, list) else [value]:
                if not self.complete:
                    parts.tool_calls.append(_call_of(one, self.called))
                    self.called += 1
            _, closing = self._marks
            closed = None if closing is None else closing.search(self._unsettled)
            self._unsettled = self._unsettled[closed.end() :] if closed is not None else ""

    def _is_within_call(self) -> bool:
        """Whether the text ends within a call, or within what stands before one. A single character of that may be text."""
        opening, closing = self._marks
        if self._within:
            return closing is None or closing.search(self._unsettled) is None  # a longer mark may still be waited for
        return len(self._unsettled.lstrip()) > 1 and opening.fullmatch(self._unsettled, partial=True) is not None

    def _settle(self, text: str) -> None:
        self._unsettled = self._unsettled.partition(text)[2] if text else self._unsettled


def read(
    reader: ResponseReader | None, text: str, finish_reason: FinishReason | None, *, stopped: bool = False
) -> tuple[Parts, FinishReason | None]:
    """Returns what is new of an answer, and why it ends; None: it goes on.

    Args:
        reader: of the answer; None: all of it is text.
        text: that was written next.
        finish_reason: why the text ends.
        stopped: whether at a stop text.
    """
    if reader is None:
        return Parts(text), finish_reason
    parts = reader.push(text, ended=finish_reason is not None, cut=finish_reason == "length" or stopped)
    is_call = reader.complete or (finish_reason == "stop" and reader.called > 0)
    return parts, "tool_calls" if is_call else finish_reason


def _call_of(value: Any, index: int) -> ToolCall:
    """Returns a call, which its caller can send back: its arguments are an object.

    Raises:
        ValueError: it is none.
    """
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise ValueError("a call of a tool names no function")
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    msgspec.json.decode(text, type=dict[str, Any])  # its error is a ValueError
    name.encode()
    return ToolCall(name, text, index=index)
