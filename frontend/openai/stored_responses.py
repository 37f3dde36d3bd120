"""Responses that the server keeps (``store``): what callers go on from, refer to, ask for again, cancel and delete.

Two contents are kept of a response: the conversation, before the answer begins, and the answer, before its last event is sent.
A conversation has all that came before, so that one response is enough to go on from. The names of an answer and of its items
begin alike (:func:`~shmring.frontend.openai.responses_answer.number_of`), so that an item is found with its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.types import Scope

from shmring.frontend.callers.caller import caller_of
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.openai.input_items import ItemPage, list_items
from shmring.frontend.openai.messages import MAX_MESSAGES
from shmring.frontend.openai.response_memory import ResponseMemory
from shmring.frontend.openai.responses_answer import ResponsesAnswer, number_of, response_id_of
from shmring.frontend.openai.responses_request import Conversation, InputItem, ResponsesRequest, is_reference

__all__ = ["DeletedResponse", "StoredResponses", "account_of"]

_LARGE_NBYTES = 64 << 10  # what is larger is copied and read on a thread
_ANSWER, _CONVERSATION = "answer ", "conversation "

_Result = TypeVar("_Result")

_ITEMS = msgspec.json.Decoder(list[InputItem])


class DeletedResponse(msgspec.Struct):
    """The answer to `DELETE /v1/responses/{response_id}`."""

    id: str
    deleted: bool = True
    object: str = "response"


class _Output(msgspec.Struct):
    """Of an answer, its items."""

    output: list[InputItem]


_OUTPUT = msgspec.json.Decoder(_Output)


def account_of(scope: Scope) -> bytes:
    """Returns whose the responses of a caller are: the key's, or its owner's; without keys, the address's."""
    account: bytes | None = scope["state"].get("account")
    return hashlib.sha256(b"address " + caller_of(scope).encode()).digest() if account is None else account


class StoredResponses:
    """What is kept of the responses of one server.

    Args:
        memory: where; None: nothing is.
        lifetime_s: for how long, for errors.
    """

    def __init__(self, memory: ResponseMemory | None, lifetime_s: float) -> None:
        self._memory = memory
        self._lifetime_s = lifetime_s
        self._turn = asyncio.Lock()  # the memory is written by one thread at a time

    def close(self) -> None:
        """Lets go of the memory."""
        if self._memory is not None:
            self._memory.close()

    async def open(self, request: ResponsesRequest, account: bytes) -> Conversation:
        """Returns the conversation that a request goes on with: what it names, beside what it has itself.

        Raises:
            ApiError: it names what is not kept.
        """
        if request.store and self._memory is None:
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, f"{self._not_kept()}: {_INSTEAD}", param="store")
        before: list[InputItem] = []
        if request.previous_response_id is not None:
            before = await self._before(request.previous_response_id, account)
        found: dict[str, InputItem] = {}
        items = request.input if isinstance(request.input, list) else []
        outputs: dict[str, list[InputItem]] = {}
        for index, item in enumerate(items):
            if is_reference(item):
                name = item.id
                if name is None:
                    text = "an item_reference must have an id"
                    raise ApiError(ErrorCode.INVALID_VALUE, text, param=f"input[{index}].id")
                found[name] = await self._item(name, account, outputs, f"input[{index}]")
        if len(before) + len(items) > MAX_MESSAGES:
            text = f"the conversation has {len(before) + len(items)} items, at most {MAX_MESSAGES} are accepted"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param="previous_response_id")
        return Conversation(before, found)

    async def keep_conversation(
        self,
        answer: ResponsesAnswer,
        items: Sequence[InputItem],
        account: bytes,
        long_texts: Mapping[str, bytearray],
    ) -> None:
        """Keeps a conversation before its answer begins, if that is to be kept; otherwise the answer says so."""
        if not answer.store:
            return
        nbytes = sum(map(len, long_texts.values()))
        if self._memory is None or nbytes > self._memory.largest_nbytes:
            answer.store = False
            return

        def encode() -> bytes:
            content = msgspec.json.encode(items)
            for name, text in long_texts.items():  # which were cut out of the body
                content = content.replace(name.encode(), text)
            return content

        name = f"{_CONVERSATION}{number_of(answer.id)}"
        answer.store = await self._keep(account, name, encode, is_large=bool(nbytes))

    async def keep_answer(self, answer: ResponsesAnswer, account: bytes) -> None:
        """Keeps an answer that is complete, if its conversation is kept; it says so then."""
        if answer.store:
            name = f"{_ANSWER}{number_of(answer.id)}"
            answer.store = await self._keep(account, name, lambda: msgspec.json.encode(answer), is_large=answer.has_logprobs)

    async def find(self, response_id: str, account: bytes) -> bytes:
        """Returns an answer, as JSON.

        Raises:
            ApiError: 404, it is not kept.
        """
        content = self._find_response(account, response_id, _ANSWER)
        if content is None:
            raise self._not_found(response_id)
        return content

    async def list_input(self, response_id: str, account: bytes, page: ItemPage) -> bytes:
        """Returns a page of the items that were the input of a response, as JSON.

        Raises:
            ApiError: 404, it is not kept; 400, the page begins after no item.
        """
        await self.find(response_id, account)
        content = self._find(account, response_id, _CONVERSATION)
        if content is None:
            raise self._not_found(response_id)

        def listed(conversation: bytes) -> bytes:
            return msgspec.json.encode(list_items(_ITEMS.decode(conversation), number_of(response_id), page))

        return await _applied(listed, content)

    async def delete(self, response_id: str, account: bytes) -> DeletedResponse:
        """Forgets a response.

        Raises:
            ApiError: 404, it is not kept.
        """
        await self.find(response_id, account)
        assert self._memory is not None, "it is kept"
        for kind in (_ANSWER, _CONVERSATION):
            self._memory.drop(account, f"{kind}{number_of(response_id)}")
        return DeletedResponse(response_id)

    async def _before(self, response_id: str, account: bytes) -> list[InputItem]:
        conversation, answer = (self._find_response(account, response_id, kind) for kind in (_CONVERSATION, _ANSWER))
        if conversation is None or answer is None:
            text = self._missing(f"response {response_id[:64]!r}")
            raise ApiError(ErrorCode.PREVIOUS_RESPONSE_NOT_FOUND, text, param="previous_response_id")

        def decode(conversation: bytes) -> list[InputItem]:
            return _ITEMS.decode(conversation) + _OUTPUT.decode(answer).output

        return await _applied(decode, conversation, len(answer))

    async def _item(self, name: str, account: bytes, outputs: dict[str, list[InputItem]], param: str) -> InputItem:
        number = number_of(name)
        if number not in outputs:
            answer = self._find(account, name, _ANSWER)
            outputs[number] = [] if answer is None else (await _applied(_OUTPUT.decode, answer)).output
        for item in outputs[number]:
            if item.id == name:
                return item
        raise ApiError(ErrorCode.ITEM_NOT_FOUND, self._missing(f"item {name[:64]!r}"), param=f"{param}.id")

    def _find(self, account: bytes, name: str, kind: str) -> bytes | None:
        return None if self._memory is None else self._memory.find(account, f"{kind}{number_of(name)}")

    def _find_response(self, account: bytes, response_id: str, kind: str) -> bytes | None:
        """Returns what is kept of a response; the name of an item of it is none."""
        return self._find(account, response_id, kind) if response_id == response_id_of(number_of(response_id)) else None

    async def _keep(self, account: bytes, name: str, encode: Any, *, is_large: bool = False) -> bool:
        memory = self._memory
        assert memory is not None, "something is kept"
        async with self._turn:
            if is_large:
                return await asyncio.to_thread(lambda: memory.keep(account, name, encode()))
            return memory.keep(account, name, encode())

    def _not_found(self, response_id: str) -> ApiError:
        return ApiError(ErrorCode.RESPONSE_NOT_FOUND, self._missing(f"response {response_id[:64]!r}"), param="response_id")

    def _missing(self, what: str) -> str:
        if self._memory is None:
            return f"there is no {what}: {self._not_kept()}; {_INSTEAD}"
        return (
            f"there is no {what} of yours: they are kept for {self._lifetime_s:g} s, or until there is no room, unless they "
            f"say store: false; {_INSTEAD}"
        )

    @staticmethod
    def _not_kept() -> str:
        return "this server keeps no responses (--response-lifetime 0)"


async def _applied(function: Callable[[bytes], _Result], content: bytes, more_nbytes: int = 0) -> _Result:
    """Returns what a function makes of a content and of so many bytes more; on a thread, if they are many."""
    if len(content) + more_nbytes > _LARGE_NBYTES:
        return await asyncio.to_thread(function, content)
    return function(content)


_INSTEAD = "set store to false, and send the whole conversation as input"
