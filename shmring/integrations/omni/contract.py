"""What the connector relies on in vLLM-Omni: ``CHECKS`` for :mod:`~shmring.integrations.promises`.

The base class and the factory are vLLM-Omni's interface for connectors. That a class derived from ``SharedMemoryConnector`` is
told of aborts, and how the serializer is asked for single values, is no public interface; it is as vLLM-Omni 0.30 has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shmring.integrations.promises import parameters_differ

__all__ = ["CHECKS", "Hooks", "find_hooks"]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What of vLLM-Omni is used.

    Attributes:
        base: ``OmniConnectorBase``.
        shared_memory: ``SharedMemoryConnector``, which the connector is derived from.
        factory: ``OmniConnectorFactory``.
        serializer: ``OmniSerializer``.
    """

    base: Any
    shared_memory: Any
    factory: Any
    serializer: Any


def find_hooks() -> Hooks:
    """Imports what is used.

    Raises:
        ImportError: this vLLM-Omni has no such thing.
    """
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase
    from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

    return Hooks(OmniConnectorBase, SharedMemoryConnector, OmniConnectorFactory, OmniSerializer)


def _methods(hooks: Hooks) -> Iterator[str]:
    """Connectors are called as this one expects it."""
    base = hooks.base
    yield from parameters_differ(
        [
            (base.put, ["self", "from_stage", "to_stage", "put_key", "data"]),
            (base.get, ["self", "from_stage", "to_stage", "get_key", "metadata"]),
            (base.get_with_deadline, ["self", "from_stage", "to_stage", "get_key", "metadata", "deadline"]),
            (base.abandon_get, ["self", "get_key"]),
            (base.reap_consumed, ["self"]),
            (base.cleanup, ["self", "request_id"]),
            (hooks.factory.register_connector, ["name", "constructor"]),
        ]
    )
    if not issubclass(hooks.shared_memory, base):
        yield "SharedMemoryConnector is no OmniConnectorBase"
    known = {"put", "get", "cleanup", "health", "close"}
    if unknown := set(base.__abstractmethods__) - known:
        yield f"a connector has to have {', '.join(sorted(unknown))}"


def _serializer(hooks: Hooks) -> Iterator[str]:
    """What is no tensor can be asked of the serializer, and comes as it would come by itself."""
    encode, decode = hooks.serializer.encoder._enc_hook, hooks.serializer.decoder._post_process
    if (encoded := encode(slice(1, 2, 3))) != (1, 2, 3):
        yield f"the serializer makes {encoded!r} of a slice"
    sent = {"a": [1, {"b": b"2"}]}
    if (came := decode(hooks.serializer.decoder.decoder.decode(hooks.serializer.serialize(sent)))) != sent:
        yield f"the serializer makes {came!r} of {sent!r}"


CHECKS = (_methods, _serializer)
