"""What goes between nodes: a frame holds what was put into it, and its tensors lie where any dtype can be viewed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("ray")

from shmring.errors import AbortedError
from shmring.integrations.ray.wire import SMALL_NBYTES, Call, size_of, to_call, to_frame, to_outcome, to_sent
from shmring.memory.bundles import Bundle, bundle


def bundled(payload: object) -> Bundle:
    return bundle(payload, max_tensors=64, max_payload_nbytes=1 << 20, max_values=1 << 16)


CALL = Call("00ff", 7, {"request_id": "mine, für mich"}, 1.5)
PAYLOADS: list[Any] = [
    {"text": "no tensor", "n": [1, None, 2.5]},
    {
        "x": torch.arange(7, dtype=torch.uint8),
        "y": torch.arange(5, dtype=torch.float64),
        "z": torch.ones(3, dtype=torch.bfloat16),
    },
    {"x": np.arange(3, dtype=np.complex128), "none": np.zeros((0, 4), np.int16), "t": torch.zeros(2, 0)},
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    return bool(one == other)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_request_is_what_it_was(payload: Any) -> None:
    call, arrived = to_call(to_frame(CALL, [bundled(payload)]), None)
    assert call == CALL
    opened = arrived.open()
    assert opened.keys() == payload.keys()
    assert all(same(payload[key], opened[key]) for key in payload)


def test_a_large_payload_travels_beside_its_frame() -> None:
    payload = bundled({"x": torch.ones(1 << 16)})
    frame = to_frame(CALL, ())
    assert len(frame) < 100
    assert to_call(frame, payload) == (CALL, payload)


def test_tensors_lie_where_any_dtype_can_be_viewed() -> None:
    frame = to_frame(CALL, [bundled({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2), "c": torch.ones(1)})])
    start = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    _, arrived = to_call(frame, None)
    places = [np.frombuffer(buffer, np.uint8).__array_interface__["data"][0] - start for buffer in arrived.buffers]
    assert len(places) == 3
    assert all(place % 16 == 0 for place in places)


def test_replies_are_what_they_were_and_in_order() -> None:
    sent = to_sent([bundled(payload) for payload in PAYLOADS], None, (3, 1, True))
    assert isinstance(sent, bytes)
    replies, error, load = to_outcome(sent)
    assert (error, load) == (None, (3, 1, True))
    for payload, reply in zip(PAYLOADS, replies, strict=True):
        opened = reply.open()
        assert all(same(payload[key], opened[key]) for key in payload)


def test_the_end_of_replies_is_a_frame_too() -> None:
    assert to_outcome(to_sent([], None, (0, 0, False))) == ([], None, (0, 0, False))


def test_errors_and_large_replies_are_objects() -> None:
    error = AbortedError("request 7 was aborted", request_id=7)
    assert to_sent([], error, (0, 0, False)) == ([], error, (0, 0, False))
    large = bundled({"x": torch.zeros(SMALL_NBYTES, dtype=torch.uint8)})
    assert size_of(large) > SMALL_NBYTES
    assert to_outcome(to_sent([large], None, (0, 0, False))) == ([large], None, (0, 0, False))
