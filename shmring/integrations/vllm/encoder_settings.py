"""What ``ec_connector_extra_config`` says to the connector for encoder outputs, read and checked when vLLM starts.

Each key is a field of :class:`EncoderSettings`. A value that can't be used is an error, and so is a key that nobody reads: a
server that runs with another setting than was meant is worse than one that does not start. ``docs/stages.md`` has a table of
them, which a test compares with this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shmring.door import parse_nbytes, seconds_of, shown, validate_name
from shmring.errors import CapacityError

__all__ = ["EncoderSettings"]

_MIN_SLAB_NBYTES = 16 << 20  # a slab of a few outputs; less is a typing error
_LONGEST_WAIT_S = 10.0  # the model waits meanwhile
_LONGEST_LOOK_S = 1.0  # and all requests of an engine
_MAX_CHARACTERS = 4096  # of a path, or of a text that stands in a key


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """The connector's settings.

    Attributes:
        store: the name of the store; empty: that of :func:`shmring.start_store`.
        start: whether the store is started if there is none.
        slab: memory in bytes of a store that is started here.
        socket_dir: where the store's socket lies; empty: in the user's runtime directory.
        wait_s: how long saving an output may wait for room in the store. The model waits meanwhile.
        look_s: how long the scheduler may wait for the store's answer.
        model: stands for the model in keys; empty: its name or path, and its revision.
        adapters: stands in keys for what the names of LoRA adapters mean; needed where adapters change encoders.
    """

    store: str = ""
    start: bool = False
    slab: int = 1 << 30
    socket_dir: str = ""
    wait_s: float = 0.2
    look_s: float = 0.05
    model: str = ""
    adapters: str = ""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> EncoderSettings:
        """Reads and checks all of them.

        Args:
            extra: ``ec_connector_extra_config``.

        Raises:
            ValueError: one can't be used, or there is no such setting.
        """
        return cls(**{name: _value(name, value) for name, value in extra.items()})


def _value(name: str, value: Any) -> Any:
    parse = _PARSERS.get(name)
    if parse is None:
        known = [*_PARSERS]
        raise ValueError(f"ec_connector_extra_config has {shown(name)}, which shmring does not know, but {', '.join(known)}")
    try:
        return parse(value)
    except (CapacityError, TypeError, ValueError) as error:
        raise ValueError(f"ec_connector_extra_config: {name} = {shown(value)} can't be used: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_CHARACTERS:
        raise ValueError(f"it has to be a text of at most {_MAX_CHARACTERS} characters")
    return value


def _name(value: Any) -> str:
    return validate_name(value) if value else _text(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it has to be true or false")
    return value


def _slab(value: Any) -> int:
    nbytes = parse_nbytes(value)
    if nbytes < _MIN_SLAB_NBYTES:
        raise ValueError("it has to be a size of 16MiB or more, such as 8GiB")
    return nbytes


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "store": _name,
    "start": _switch,
    "slab": _slab,
    "socket_dir": _text,
    "wait_s": lambda value: seconds_of(value, "it", most=_LONGEST_WAIT_S),
    "look_s": lambda value: seconds_of(value, "it", most=_LONGEST_LOOK_S),
    "model": _text,
    "adapters": _text,
}
