"""Pinning: whole or in chunks, all or nothing, never unmapped before it is unregistered, no error left behind."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shmring.gpu import pinned as pinned_module
from shmring.gpu.cuda import CudaError
from shmring.gpu.pinned import PinnedSlab, pin_slab
from shmring.memory.slab import Slab

PAGE = 4096
NBYTES = 64 * PAGE


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create("pinned", NBYTES, secrets.randbits(63), prefault=True)
    yield slab
    slab.close()


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    yield
    assert pinned_module._registered == set()


def is_mapped(slab: Slab) -> bool:
    start = f"{slab.address:x}-"
    return any(line.startswith(start) for line in open("/proc/self/maps"))


def test_the_whole_slab_is_registered_in_one_call(slab: Slab, cuda: Any) -> None:
    pinned = PinnedSlab.register(slab, cuda, 3)
    assert cuda.registered == {slab.address: NBYTES}
    assert (pinned.nbytes, pinned.chunks, pinned.device_index) == (NBYTES, [(slab.address, NBYTES)], 3)
    assert pinned.seconds > 0
    assert cuda.devices == {3}
    pinned.close()
    assert cuda.registered == {}
    assert (pinned.nbytes, pinned.chunks) == (0, [])


def test_what_one_call_cannot_take_is_registered_in_chunks(slab: Slab, cuda: Any) -> None:
    cuda.largest = 24 * PAGE
    pinned = PinnedSlab.register(slab, cuda, 0, chunk_nbytes=24 * PAGE)
    assert cuda.registered == {
        slab.address: 24 * PAGE,
        slab.address + 24 * PAGE: 24 * PAGE,
        slab.address + 48 * PAGE: 16 * PAGE,
    }
    assert pinned.nbytes == NBYTES
    assert cuda.pending == set(), "the first call's error is left for somebody else"
    pinned.close()
    assert cuda.unregistered == [slab.address + 48 * PAGE, slab.address + 24 * PAGE, slab.address]


def test_what_replies_are_in_is_registered_by_itself(cuda: Any) -> None:
    """It is mapped by itself, so to the kernel it is other memory, and no copy may cross the boundary."""
    slab = Slab.create("pinned", NBYTES, secrets.randbits(63), prefault=True, reply_nbytes=4 * PAGE)
    pinned = PinnedSlab.register(slab, cuda, 0)
    leased = NBYTES - 4 * PAGE
    assert cuda.registered == {slab.address: leased, slab.address + leased: 4 * PAGE}
    assert (pinned.nbytes, pinned.chunks) == (NBYTES, [(slab.address, leased), (slab.address + leased, 4 * PAGE)])
    pinned.close()
    cuda.largest = 24 * PAGE
    pinned = PinnedSlab.register(slab, cuda, 0, chunk_nbytes=24 * PAGE)
    assert [nbytes // PAGE for nbytes in cuda.registered.values()] == [24, 24, 12, 4]
    pinned.close()
    assert cuda.registered == {}
    slab.close()


@pytest.mark.parametrize("failing_call", [2, 3, 4])
def test_half_a_slab_is_never_left_pinned(slab: Slab, cuda: Any, failing_call: int) -> None:
    register = cuda.host_register

    def host_register(device: int, address: int, nbytes: int) -> None:
        if cuda.calls["host_register"] + 1 == failing_call:
            cuda.fail("host_register")
        register(device, address, nbytes)

    cuda.largest = 24 * PAGE
    cuda.host_register = host_register
    with pytest.raises(CudaError, match="host_register"):
        PinnedSlab.register(slab, cuda, 0, chunk_nbytes=24 * PAGE)
    assert cuda.registered == {}
    assert cuda.pending == set()
    assert cuda.calls["host_register"] == failing_call


def test_closing_twice_is_closing_once(slab: Slab, cuda: Any) -> None:
    pinned = PinnedSlab.register(slab, cuda, 0)
    pinned.close()
    pinned.close()
    assert cuda.calls["host_unregister"] == 1


def test_registered_memory_stays_mapped_though_nobody_closes_anything(slab: Slab, cuda: Any) -> None:
    pinned = PinnedSlab.register(slab, cuda, 0)
    slab.close()
    assert is_mapped(slab), "CUDA would read memory of whoever is mapped there next"
    pinned.close()
    assert not is_mapped(slab)


def test_what_cuda_does_not_give_back_stays_mapped(slab: Slab, cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    pinned = PinnedSlab.register(slab, cuda, 0)
    cuda.fail("host_unregister")
    pinned.close()
    assert f"{NBYTES} bytes of the slab stay pinned" in caplog.text
    assert cuda.pending == set()
    slab.close()
    assert is_mapped(slab)
    assert pinned in pinned_module._registered
    pinned_module._registered.discard(pinned)
    pinned._mapping = None


def test_a_gpu_in_trouble_is_said_and_the_failure_still_reported(slab: Slab, cuda: Any) -> None:
    cuda.fail("host_register")
    cuda.fail("clear_error")
    with pytest.raises(CudaError, match="host_register"):
        PinnedSlab.register(slab, cuda, 0)


# -- as configured ------------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_auto_pins_where_cuda_works(slab: Slab, cuda: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shmring.ring")
    pinned = pin_slab(slab, "auto", cuda, 0)
    assert pinned.nbytes == NBYTES
    assert warnings(caplog) == []
    assert f"pinned {NBYTES} bytes" in caplog.text
    pinned.close()


def test_auto_goes_on_unpinned_with_one_warning_where_cuda_refuses(
    slab: Slab, cuda: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.fail("host_register", 99)
    pinned = pin_slab(slab, "auto", cuda, 0)
    assert (pinned.nbytes, pinned.seconds, pinned.chunks) == (0, 0.0, [])
    (warning,) = warnings(caplog)
    assert "not pinned" in warning
    assert "host_register failed" in warning
    assert cuda.pending == set()
    pinned.close()


@pytest.mark.parametrize("reason", ["torch finds no CUDA device", "this torch was built without CUDA"])
def test_auto_says_so_without_a_warning_where_there_is_no_gpu(
    slab: Slab, cuda: Any, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    caplog.set_level(logging.INFO, "shmring.ring")
    cuda.reason = reason
    assert pin_slab(slab, "auto", cuda, 0).nbytes == 0
    assert warnings(caplog) == []
    assert caplog.text.count("not pinned") == 1
    assert reason in caplog.text


def test_on_fails_where_the_slab_cannot_be_pinned(slab: Slab, cuda: Any) -> None:
    cuda.fail("host_register", 99)
    with pytest.raises(CudaError, match=r"can't be pinned: host_register failed; pin='auto'") as caught:
        pin_slab(slab, "on", cuda, 0)
    assert (caught.value.code, caught.value.nbytes) == (999, NBYTES)
    cuda.reason = "torch finds no CUDA device"
    with pytest.raises(CudaError, match="torch finds no CUDA device"):
        pin_slab(slab, "on", cuda, 0)


def test_off_leaves_cuda_alone(slab: Slab, cuda: Any) -> None:
    pinned = pin_slab(slab, "off", cuda, 0)
    pinned.close()
    assert cuda.calls == {}


def test_an_unpinned_slab_is_unmapped_as_ever(slab: Slab, cuda: Any) -> None:
    pin_slab(slab, "off", cuda, 0)
    slab.close()
    assert not is_mapped(slab)


def test_errors_are_cleared_on_the_thread_that_made_them(slab: Slab, cuda: Any) -> None:
    cuda.fail("host_register", 99)
    thread = threading.Thread(target=pin_slab, args=(slab, "auto", cuda, 0))
    thread.start()
    thread.join()
    assert cuda.calls["clear_error"] == 1
    assert cuda.pending == set()
