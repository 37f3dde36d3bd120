"""What an engine may say of itself to who attaches."""

from __future__ import annotations

import msgspec
import pytest

from shmring.core.messages import PROTOCOL_VERSION, DeviceHandle, Welcome, WorkerWelcome
from shmring.core.welcome import check_welcome, check_worker_welcome
from shmring.errors import RemoteProtocolError

WELCOME = Welcome(
    version=PROTOCOL_VERSION, epoch=2**64 - 1, client_id=1, slab_nbytes=16 * 4096, block_nbytes=4096, leasable_nbytes=12 * 4096,
    max_inflight=1, max_calls=1, max_leases=1, message_ring_nbytes=1 << 16, max_record_nbytes=1 << 14, inline_nbytes=1 << 13,
    max_payload_nbytes=1, max_tensors=1, max_values=1, base_lease=None,
)  # fmt: skip
WORKER_WELCOME = WorkerWelcome(PROTOCOL_VERSION, 7, 16 * 4096, 12 * 4096, 4096, 1 << 16, 1024, 1 << 16, 1, 1)


def test_the_least_that_an_engine_can_have_is_taken() -> None:
    check_welcome(WELCOME)
    check_welcome(msgspec.structs.replace(WELCOME, device_slab=DeviceHandle("GPU", bytes(64), 2 << 20)))
    check_worker_welcome(WORKER_WELCOME)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", PROTOCOL_VERSION + 1),
        ("client_id", 0),
        ("client_id", 2**24),
        ("client_id", 2**62),
        ("slab_nbytes", 0),
        ("slab_nbytes", 16 * 4096 + 1),
        ("slab_nbytes", 13 * 4096),  # nothing for replies
        ("slab_nbytes", 2**62),
        ("block_nbytes", 0),
        ("block_nbytes", 2 * 4096),
        ("leasable_nbytes", 0),
        ("leasable_nbytes", 12 * 4096 - 64),
        ("leasable_nbytes", 2**62),
        ("max_inflight", 0),
        ("max_calls", 0),
        ("max_leases", 0),
        ("max_tensors", 0),
        ("max_tensors", 2**32),
        ("max_values", 0),
        ("max_values", 2**32),
        ("message_ring_nbytes", 0),
        ("message_ring_nbytes", 1 << 17),
        ("max_record_nbytes", (1 << 14) + 1),
        ("inline_nbytes", (1 << 13) + 1),
        ("device_slab", DeviceHandle("GPU", bytes(64), 100)),
        ("device_slab", DeviceHandle("GPU", bytes(64), 2**62)),
    ],
)
def test_what_no_engine_has_is_refused(field: str, value: object) -> None:
    with pytest.raises(RemoteProtocolError, match=r"says what can.t be"):
        check_welcome(msgspec.structs.replace(WELCOME, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 0),
        ("slab_nbytes", 12 * 4096),
        ("slab_nbytes", 2**62),
        ("leased_nbytes", 0),
        ("leased_nbytes", 17 * 4096),
        ("broadcast_nbytes", 0),
        ("broadcast_nbytes", 2**62),
        ("max_tensors", 0),
        ("max_tensors", 2**40),
        ("max_values", 0),
        ("max_values", 2**32),
    ],
)
def test_what_no_engine_has_is_refused_by_workers_too(field: str, value: int) -> None:
    with pytest.raises(RemoteProtocolError, match=r"says what can.t be"):
        check_worker_welcome(msgspec.structs.replace(WORKER_WELCOME, **{field: value}))
