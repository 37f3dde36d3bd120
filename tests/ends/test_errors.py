"""The error tree: who derives from whom, and which values an error carries."""

from __future__ import annotations

import copy
import functools
import pickle
import re

import pytest

from shmring import errors
from shmring.gpu.cuda import CudaError
from tests.tables import for_each

# As in the design: each error and its base.
TREE = {
    "ShmringError": "Exception",
    "ClosedError": "ShmringError",
    "PeerLostError": "ShmringError",
    "EngineDeadError": "PeerLostError",
    "WouldBlock": "ShmringError",
    "CapacityError": "ShmringError",
    "StaleDescriptorError": "ShmringError",
    "AbortedError": "ShmringError",
    "RemoteError": "ShmringError",
    "ProtocolError": "ShmringError",
    "LocalProtocolError": "ProtocolError",
    "RemoteProtocolError": "ProtocolError",
    "SlabError": "ShmringError",
    "WorkerLostError": "PeerLostError",
    "WorkerFailedError": "RemoteError",
    "RankTakenError": "ShmringError",
    "WorkersBehindError": "TimeoutError",
}


@for_each(("name", "base"), TREE.items())
def test_an_error_derives_from_its_cause(name: str, base: str) -> None:
    assert [parent.__name__ for parent in getattr(errors, name).__bases__] == [base]


def test_every_error_is_public_and_in_the_tree() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(TREE) == set(errors.__all__) - {"fresh"}


def test_the_tree_that_the_module_draws_is_the_tree_it_has() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, str] = {}
    path: list[str] = ["Exception"]
    for indent, name in re.findall(r"^    ( *)([A-Z]\w+)(?:  |$)", errors.__doc__.split("::")[1], re.MULTILINE):
        path[len(indent) // 2 + 1 :] = [name]
        drawn[name] = path[-2]
    assert drawn == TREE | {"TimeoutError": "Exception"}


def test_only_the_timeout_that_names_workers_is_a_timeout_and_none_is_an_operating_system_error() -> None:
    timeouts = {name for name in TREE if issubclass(getattr(errors, name), OSError | TimeoutError)}
    assert timeouts == {"WorkersBehindError"}


def test_errors_about_workers_carry_their_ranks() -> None:
    assert errors.WorkersBehindError("late", ranks=(1, 2)).ranks == (1, 2)
    assert not errors.WorkersBehindError("late").sent
    assert errors.fresh(errors.WorkersBehindError("late", sent=True)).sent
    assert errors.WorkerLostError("dead", ranks=[3]).ranks == (3,)
    assert errors.RankTakenError("taken", rank=4).rank == 4
    failed = errors.WorkerFailedError("ValueError", "no such layer", rank=5)
    assert (failed.rank, str(failed)) == (5, "worker 5: ValueError: no such layer")


def test_capacity_error_carries_what_was_asked_and_the_limit() -> None:
    error = errors.CapacityError("too much", needed=7, capacity=5)
    assert (str(error), error.needed, error.capacity) == ("too much", 7, 5)


def test_aborted_error_carries_the_request_where_known() -> None:
    assert errors.AbortedError("gone", request_id=3).request_id == 3
    assert errors.AbortedError("gone").request_id is None
    assert str(errors.AbortedError("gone", request_id=3)) == "gone"


def test_remote_error_carries_the_type_and_the_message() -> None:
    error = errors.RemoteError("ValueError", "no such model")
    assert (str(error), error.type_name, error.message) == ("ValueError: no such model", "ValueError", "no such model")


def test_slab_error_carries_path_errno_and_size() -> None:
    error = errors.SlabError("full", path="/dev/shm/x", errno=28, nbytes=4096)
    assert (str(error), error.path, error.errno, error.nbytes) == ("full", "/dev/shm/x", 28, 4096)
    bare = errors.SlabError("full")
    assert (bare.path, bare.errno, bare.nbytes) == (None, None, None)


#: One of each, with a value of its own in each attribute.
EACH = [
    errors.ShmringError("broken"),
    errors.ClosedError("closed"),
    errors.PeerLostError("lost"),
    errors.EngineDeadError("dead", engine="vision"),
    errors.WorkerLostError("dead", ranks=[3, 4]),
    errors.WouldBlock("full"),
    errors.CapacityError("too much", needed=7, capacity=5),
    errors.StaleDescriptorError("old"),
    errors.AbortedError("gone", request_id=3),
    errors.RemoteError("ValueError", "no such model"),
    errors.WorkerFailedError("ValueError", "no such layer", rank=5),
    errors.WorkersBehindError("late", ranks=(1, 2), sent=True),
    errors.RankTakenError("taken", rank=4),
    errors.ProtocolError("wrong"),
    errors.LocalProtocolError("not now"),
    errors.RemoteProtocolError("not you"),
    errors.SlabError("full", path="/dev/shm/x", errno=28, nbytes=4096),
    CudaError("no memory", call="cudaMalloc", code=2, nbytes=64),
]


def test_there_is_one_of_each() -> None:
    assert {type(error).__name__ for error in EACH} == set(TREE) | {"CudaError"}


WAYS = {f"pickle protocol {number}": functools.partial(pickle.dumps, protocol=number) for number in range(6)}


@for_each("way", [*WAYS, "copy", "deepcopy"])
@for_each("error", EACH, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_process_with_all_that_it_says(error: Exception, way: str) -> None:
    error = copy.copy(error)
    error.add_note("seen in the third step")
    error.tries = 2  # somebody's own
    again = getattr(copy, way)(error) if way not in WAYS else pickle.loads(WAYS[way](error))  # noqa: S301 - our own
    assert again is not error
    assert (type(again), str(again), again.args, vars(again)) == (type(error), str(error), error.args, vars(error))
    assert again.__notes__ == ["seen in the third step"]


@for_each("error", EACH, ids=lambda error: type(error).__name__)
def test_a_fresh_error_is_the_same_without_the_frames_it_was_raised_in(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raise error
    again = errors.fresh(caught.value)
    assert again is not error
    assert (type(again), str(again), again.args, vars(again)) == (type(error), str(error), error.args, vars(error))
    assert error.__traceback__ is not None
    assert (again.__traceback__, again.__context__, again.__cause__) == (None, None, None)
