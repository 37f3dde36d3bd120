"""In debug mode: which views outlive their claim or slot, where that was left, and which variables hold the views.

The garbage collector knows all objects, and which objects refer to which; asking it takes a part of a second in a large
program. It does not know variables of running functions, numpy's arrays, and frozen objects (gc.freeze), such as modules. So
this file also searches variables and modules, and looks for arrays in the objects that the collector knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CellType, CoroutineType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import msgspec
import numpy as np
import torch

from shmring.core.compiled import Content
from shmring.core.messages import TENSOR_EXTENSION
from shmring.memory.tensors import children

__all__ = ["Lent", "lent_tensors", "report"]

_OURS = f"{Path(__file__).parents[1]}/"
_ASYNCIO = f"{Path(asyncio.__file__).parent}/"
_DEEPEST = 4  # levels of holders of holders of a view
_MOST_HOLDERS = 3


class Lent(msgspec.Struct, frozen=True):
    """Memory that was lent out. ``name``: what lay there, such as ``payload.pixel_values``."""

    name: str
    address: int
    nbytes: int


def lent_tensors(content: Content, slab_address: int, content_offset: int) -> list[Lent]:
    """Returns the tensors of a payload that lie in slots, by their paths in it.

    Args:
        content: of the submission.
        slab_address: where the slab is in this process.
        content_offset: of a slot's content in the slot.
    """
    paths = [path for path, _ in _tensors(msgspec.msgpack.decode(content.payload, ext_hook=_Extension), "payload")]
    slots = content.slots
    return [
        Lent(path, slab_address + slots[ref.region - 1].offset + content_offset + ref.offset, ref.nbytes)
        for path, ref in zip(paths, content.tensors, strict=True)
        if ref.region
    ]


class _Extension:
    """In place of a tensor, where only its path is wanted."""

    def __init__(self, code: int, data: memoryview) -> None:
        self.is_tensor = code == TENSOR_EXTENSION


def _tensors(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, _Extension):
        if value.is_tensor:
            yield path, value
        return
    for step, child in children(value):
        yield from _tensors(child, path + step)


def report(lent: Iterable[Lent]) -> str:
    """Says which views of memory are alive, where it was left, and what holds them. Keeps none of them alive.

    Args:
        lent: that memory.
    """
    names, views = _living(list(lent))
    search = _Search(views)
    lines = []
    for number, name in enumerate(names):
        kind = "array" if isinstance(views[number], np.ndarray) else "tensor"
        shape = f"{str(views[number].dtype).removeprefix('torch.')}{list(views[number].shape)}"
        lines.append(f"  {name}: {kind} {shape}, held by {search.holders(views[number])}")
    found = "\n".join(lines) or "  views that Python does not see: buffers, or what another library holds"
    return f"left {_place()}\n{found}"


def _living(lent: list[Lent]) -> tuple[list[str], list[Any]]:
    """Returns the views of this memory, and their names."""
    names: list[str] = []
    views: list[Any] = []
    for thing in itertools.chain(gc.get_objects(), map(vars, list(sys.modules.values()))):
        inside = (thing,) if type(thing) is torch.Tensor else gc.get_referents(thing) if _may_hold_arrays(thing) else ()
        for view in inside:
            address = _address(view)
            for each in lent:
                is_inside = address is not None and each.address <= address < each.address + each.nbytes
                if is_inside and all(view is not other for other in views):
                    names.append(each.name)
                    views.append(view)
    return names, views


def _may_hold_arrays(thing: object) -> bool:
    return type(thing) in (dict, list, tuple, CoroutineType) or hasattr(type(thing), "__dict__")


def _address(view: object) -> int | None:
    if type(view) is np.ndarray:
        return int(view.__array_interface__["data"][0])
    if type(view) is torch.Tensor and not view.is_sparse:
        with contextlib.suppress(RuntimeError):  # one of a transformation, which has no memory
            return view.data_ptr()
    return None


def _place() -> str:
    """Says where in the user's code memory is left just now: what runs the loop is not meant."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_ASYNCIO):
        if not frame.f_code.co_filename.startswith(_OURS):
            return f"at {_where(frame)}"
        if "handler" in frame.f_locals:  # of what calls a user's handler, and leaves its claim afterwards
            return f"when {_function(frame.f_locals['handler'])} had ended"
        frame = frame.f_back
    return "by no code of yours: a finaliser, or another thread"


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


def _function(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{name}()" if code is None else f"{name}() ({code.co_filename}:{code.co_firstlineno})"


class _Search:
    """Searches for the holders of a view.

    Args:
        views: a list of them all, which is the search's own.
    """

    def __init__(self, views: list[Any]) -> None:
        self._views = views
        self._own = {id(views)}  # lists of the search itself that refer to what is searched for, while they live
        self._globals = {id(value) for module in list(sys.modules.values()) for value in list(vars(module).values())}

    def holders(self, view: object) -> str:
        """Names a few objects that refer to a view."""
        found = []
        for other in self._views:  # in no function of its own, whose cell would refer to the view
            if other is not view and (other.base if isinstance(other, np.ndarray) else other._base) is view:
                found = ["what was made of it"]
        found = list(dict.fromkeys(found + self._held_by(view, 0)))
        more = f"; and {len(found) - _MOST_HOLDERS} others" if len(found) > _MOST_HOLDERS else ""
        return ("; ".join(found[:_MOST_HOLDERS]) or "what Python does not see") + more

    def _held_by(self, thing: object, depth: int) -> list[str]:
        found = [*_variables(thing), *(_globals(thing) if id(thing) in self._globals else ())]
        if depth == _DEEPEST:
            return found
        referrers = gc.get_referrers(thing)
        self._own.add(id(referrers))
        for number in range(len(referrers)):  # an iterator would refer to the list
            if id(referrers[number]) not in self._own:
                found += self._named(referrers[number], thing, depth)
        self._own.remove(id(referrers))
        return found

    def _named(self, holder: object, thing: object, depth: int) -> list[str]:
        """Names what refers to a thing."""
        if isinstance(holder, FrameType):
            return []  # which is running: see _variables
        if isinstance(holder, CoroutineType | GeneratorType):
            return _variables_of(holder.cr_frame if isinstance(holder, CoroutineType) else holder.gi_frame, thing)
        if isinstance(holder, dict):
            return self._named_dict(holder, thing, depth)
        if isinstance(holder, list | tuple | set | frozenset):
            return self._within(f"a {type(holder).__name__} of {len(holder)}", holder, depth)
        if isinstance(holder, CellType | FunctionType):
            return self._within("a function that uses it", holder, depth)
        names = [name for name, value in _attributes(holder) if value is thing]
        return [f"attribute {names[0]!r} of a {_kind(holder)}" if names else f"a {_kind(holder)}"]

    def _named_dict(self, holder: dict[Any, Any], thing: object, depth: int) -> list[str]:
        keys = [key for key, value in holder.items() if value is thing]
        owners = gc.get_referrers(holder)
        for number in range(len(owners)):
            if isinstance(owners[number], FrameType) or getattr(owners[number], "__dict__", None) is not holder or not keys:
                continue
            if isinstance(owners[number], ModuleType):
                return []  # see _globals
            return [f"attribute {keys[0]!r} of a {_kind(owners[number])}"]
        del owners  # or it would be found
        return self._within(f"key {keys[0]!r} of a dict", holder, depth) if keys else []

    def _within(self, step: str, holder: object, depth: int) -> list[str]:
        return [f"{step} in {outer}" for outer in self._held_by(holder, depth + 1)] or [step]


def _variables(thing: object) -> list[str]:
    """Says which variables of running functions have a thing."""
    found = []
    for first in sys._current_frames().values():
        frame: FrameType | None = first
        while frame is not None:
            found += _variables_of(frame, thing)
            frame = frame.f_back
    del first  # it may be the frame of this function, which would keep itself, and the thing, until garbage is collected
    return found


def _globals(thing: object) -> list[str]:
    """Says which modules have a thing."""
    return [
        f"the global variable {name!r} of module {module.__name__}"
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if value is thing
    ]


def _variables_of(frame: FrameType | None, thing: object) -> list[str]:
    if frame is None or frame.f_code.co_filename == __file__ or not frame.f_code.co_flags & CO_OPTIMIZED:
        return []  # variables of modules are found as their dicts
    variables = frame.f_locals
    found = [f"the variable {name!r} at {_where(frame)}" for name, value in variables.items() if value is thing]
    if isinstance(variables, dict):
        variables.clear()  # a copy, which the frame would keep; from Python 3.13 on it is none
    return found


def _attributes(holder: object) -> Iterator[tuple[str, object]]:
    yield from getattr(holder, "__dict__", {}).items()
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with contextlib.suppress(AttributeError):
                yield name, getattr(holder, name)


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
