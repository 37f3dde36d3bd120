"""Blocking twins of the calls for asyncio, declared instead of written: ``request = blocking(Client.request)``.

Theory of operation: a twin has the name, the arguments, the text and the errors of its method. It has that method carried out
in the loop (by a :class:`~shmring.threads.loop_calls.LoopRunner`), and waits. If the thread is interrupted meanwhile, the
method is cancelled. If the result lives in the loop, it is wrapped for the thread, in the loop, so that no result is lost: a
result that the thread does not take is undone.

Methods are found by their names on the object, so a subclass has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from shmring.door import timeout_of
from shmring.errors import WouldBlock
from shmring.threads.loop_calls import LoopCall, LoopRunner, keep
from shmring.uncopied import uncopied

__all__ = ["Blocking", "blocking", "blocking_stream", "done_in_loop", "handed_out", "like", "read_through", "tried_at_once"]

_InLoop = TypeVar("_InLoop")
_InLoop_co = TypeVar("_InLoop_co", covariant=True)
_Inner = TypeVar("_Inner")
_Outer = TypeVar("_Outer")
_Result = TypeVar("_Result")
_Value_co = TypeVar("_Value_co", covariant=True)
_Arguments = ParamSpec("_Arguments")

_BLOCKS = """

Here it blocks, and ``with`` and ``for`` take the place of ``async with`` and ``async for``. A thread that is interrupted
meanwhile gives up what it waits for. In the middle of the loop (in a callback) this raises ``LocalProtocolError``.
"""


class Blocking(Generic[_InLoop_co]):
    """What has twins: something that lives in a loop, in the hands of any thread."""

    __slots__ = ("__weakref__", "_in_loop", "_thread")

    _in_loop: _InLoop_co
    _thread: LoopRunner

    __reduce_ex__ = uncopied("it belongs to one process, whose threads may share it; open another one in the new process")

    def _after_gpu_uses(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that the loop calls for this thread; a subclass may add a call before it."""
        return function


def blocking(
    method: Callable[Concatenate[_InLoop, _Arguments], Awaitable[_Result]],
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], _Result]:
    """The twin of a method that is awaited."""
    return _waiting(method)


def tried_at_once(
    method: Callable[Concatenate[_InLoop, _Arguments], Awaitable[_Result]],
    at_once: Callable[Concatenate[_InLoop, ...], _Result],
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], _Result]:
    """The twin of an awaited method that mostly need not wait.

    Args:
        method: which.
        at_once: does the same without waiting and without ``timeout``, or raises ``WouldBlock``. If the caller runs the loop,
            it is tried first.
    """
    waiting, name = _waiting(method), at_once.__name__

    def twin(self: Blocking[Any], /, *arguments: Any, timeout: float | None = None, **named: Any) -> Any:
        if self._thread.is_direct:
            timeout = timeout_of(timeout)
            with contextlib.suppress(WouldBlock):
                return self._thread.at_once(getattr(self._in_loop, name), *arguments, **named)
        return waiting(self, *arguments, timeout=timeout, **named)

    return like(method, twin, adding=_BLOCKS)


def done_in_loop(
    method: Callable[Concatenate[_InLoop, _Arguments], _Result],
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], _Result]:
    """The twin of a method that never waits, and belongs to the loop."""
    name = method.__name__

    def twin(self: Blocking[Any], /, *arguments: Any, **named: Any) -> Any:
        return self._thread.at_once(self._after_gpu_uses(getattr(self._in_loop, name)), *arguments, **named)

    return like(method, twin, adding=_BLOCKS)


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    name = method.__name__

    def twin(self: Blocking[Any], /, *arguments: Any, **named: Any) -> Any:
        function = self._after_gpu_uses(getattr(self._in_loop, name))
        return self._thread.result_of(LoopCall(function, arguments, keep, named))

    return like(method, twin, adding=_BLOCKS)


@overload
def handed_out(
    method: Callable[Concatenate[_InLoop, _Arguments], Awaitable[_Inner]],
    wrap: Callable[[LoopRunner, _Inner], _Outer],
    undo: Callable[[_Outer], object],
    *,
    text_of: object = None,
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], _Outer]: ...


@overload
def handed_out(
    method: Callable[Concatenate[_InLoop, _Arguments], _Inner],
    wrap: Callable[[LoopRunner, _Inner], _Outer],
    undo: Callable[[_Outer], object],
    *,
    text_of: object = None,
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], _Outer]: ...


def handed_out(
    method: Callable[..., Any],
    wrap: Callable[[LoopRunner, Any], Any],
    undo: Callable[[Any], object],
    *,
    text_of: object = None,
) -> Callable[..., Any]:
    """The twin of a method whose result lives in the loop.

    Args:
        method: as of :func:`blocking`.
        wrap: what the thread gets of it; called in the loop.
        undo: called in the loop with a result that the thread does not take.
        text_of: the asyncio method, if ``method`` was made for threads.
    """
    name = method.__name__

    def twin(self: Blocking[Any], /, *arguments: Any, **named: Any) -> Any:
        function = self._after_gpu_uses(getattr(self._in_loop, name))
        return self._thread.result_of(_HandOut(self._thread, wrap, function, arguments, undo, named))

    return like(method, twin, text_of=text_of, adding=_BLOCKS)


class _HandOut(LoopCall):
    """A call whose result is wrapped for the thread.

    Args:
        thread: of the loop.
        wrap: what the thread gets of the result.
        function, arguments, undo, named: as of :class:`LoopCall`.
    """

    __slots__ = ("_thread", "_wrap")

    def __init__(
        self,
        thread: LoopRunner,
        wrap: Callable[[LoopRunner, Any], Any],
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        undo: Callable[[Any], object],
        named: dict[str, Any],
    ) -> None:
        super().__init__(function, arguments, undo, named)
        self._thread = thread
        self._wrap = wrap

    def answer(self, result: Any = None, *, error: BaseException | None = None) -> None:
        wrapped = None
        if error is None:
            try:
                wrapped = self._wrap(self._thread, result)
            except BaseException as failure:  # noqa: BLE001 - the thread that waits gets it, and the result goes as if dropped
                error = failure
        super().answer(wrapped, error=error)


def blocking_stream(
    method: Callable[Concatenate[_InLoop, _Arguments], AsyncGenerator[_Result, None]],
) -> Callable[Concatenate[Blocking[_InLoop], _Arguments], Generator[_Result, None, None]]:
    """The twin of a method that yields."""
    name = method.__name__

    def twin(self: Blocking[Any], /, *arguments: Any, **named: Any) -> Generator[Any, None, None]:
        stream = getattr(self._in_loop, name)(*arguments, **named)
        step = self._after_gpu_uses(_next_of)
        # A stream that raises, or is cancelled, has ended. If the thread leaves the stream between two replies, the stream is
        # ended.
        while came := self._thread.call(step, stream, undo=lambda _: _end(stream)):
            step = _next_of
            try:
                yield came.pop()  # or this frame would keep the reply's slot until the caller asks for the next reply
            except BaseException:
                self._thread.post(_end, stream)
                raise

    return like(method, twin, adding=_BLOCKS)


async def _next_of(stream: AsyncGenerator[Any, None]) -> list[Any]:
    """Returns what a stream yields next; nothing: it is at its end."""
    try:
        return [await anext(stream)]
    except StopAsyncIteration:
        return []


def _end(stream: AsyncGenerator[Any, None]) -> None:
    asyncio.get_running_loop().create_task(cast(Any, stream.aclose()))


class _ReadThrough(Protocol[_Value_co]):
    """A property, for type checkers."""

    def __get__(self, instance: object, owner: type | None = None, /) -> _Value_co: ...


def read_through(attribute: Callable[[_InLoop], _Value_co]) -> _ReadThrough[_Value_co]:
    """The twin of a property that any thread may read."""
    own: Any = attribute
    twin: Any = property(lambda self: own.__get__(self._in_loop), doc=own.__doc__)
    shown: _ReadThrough[_Value_co] = twin
    return shown


def like(method: Any, twin: Callable[..., _Result], *, text_of: Any = None, adding: str = "") -> Callable[..., _Result]:
    """Gives a twin the signature of a method, and its name and text: or those of another one, and some more text."""
    named, function = text_of or method, cast(Any, twin)
    function.__name__, function.__doc__ = named.__name__, inspect.cleandoc(named.__doc__ or "") + adding
    function.__wrapped__ = method
    return twin
