"""What errors of Ray mean to a client of an engine on another node."""

from __future__ import annotations

import pytest

import shmring
from shmring.integrations.ray.directory import Where
from shmring.integrations.ray.far_client import FarClient
from shmring.transport.liveness import ProcessId

exceptions = pytest.importorskip("ray.exceptions")

WHERE = Where("node", "ring", "/tmp", ProcessId(1, 1), 8, 16, 1 << 20, 1 << 20, 150 << 20)


def translated(error: Exception, nbytes: int = 7) -> Exception:
    return FarClient("vision", None, WHERE, 1 << 20)._translated(error, nbytes)


def test_an_engine_that_is_dead_or_perhaps_is() -> None:
    for error in (
        exceptions.RayActorError(),
        exceptions.ActorDiedError(),
        exceptions.ActorUnavailableError("it does not answer", b"x" * 16),
        exceptions.OwnerDiedError("00" * 28, None, ""),
        exceptions.ObjectLostError("00" * 28, None, ""),
    ):
        found = translated(error)
        assert type(found) is shmring.EngineDeadError
        assert found.engine == "vision"


def test_a_store_that_is_full() -> None:
    for error in (exceptions.ObjectStoreFullError("full"), exceptions.OutOfDiskError("full")):
        found = translated(error)
        assert type(found) is shmring.CapacityError
        assert (found.needed, found.capacity) == (7, 150 << 20)


def test_the_others() -> None:
    assert type(translated(exceptions.TaskCancelledError())) is shmring.AbortedError
    assert type(translated(exceptions.GetTimeoutError("late"))) is TimeoutError
    assert type(translated(exceptions.PendingCallsLimitExceeded("many"))) is shmring.WouldBlock
    found = translated(exceptions.RayTaskError("request", "a traceback", ImportError("no module named model")))
    assert type(found) is shmring.RemoteError
    assert (found.type_name, found.message) == ("ImportError", "no module named model")
    assert type(translated(exceptions.RaySystemError("odd"))) is shmring.RemoteError
