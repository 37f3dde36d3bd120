"""The connector as vLLM-Omni uses it: made by its factory from YAML, called by its loops, with its serializer and a real store.

The files of vLLM-Omni are its own, unchanged (:mod:`tests.omni.layer`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.integrations.omni import CONNECTOR
from shmring.integrations.omni.contract import CHECKS, find_hooks
from shmring.integrations.promises import broken
from tests.omni.chunks import HANGS_S, MB, chunk, number_of
from tests.omni.conftest import NAME
from tests.omni.test_frames import assert_same
from tests.running_threads import Thread
from tests.stores import end_stores
from tests.tables import for_each
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


def got(connector: Any, key: str) -> tuple[Any, int]:
    """What was put, however busy the machine is."""
    result: tuple[Any, int] | None = connector.get_with_deadline("0", "1", key, deadline=time.monotonic() + HANGS_S)
    assert result is not None
    return result


def deliveries(directory: Path) -> dict[str, Any]:
    counts = asyncio.run(shmring.inspect(NAME, socket_dir=str(directory))).statistics
    return {what: counts[f"deliveries_{what}"] for what in ("untaken", "taken", "withdrawn")} | {
        "waiting": counts["kept_waits"]
    }


# -- made by the factory -------------------------------------------------------------------------------------------------------

YAML = """
connectors:
  through_a_store:
    name: ShmringOmniConnector
    extra:
      shmring_store: {name}
      shmring_socket_dir: {directory}
      shmring_start: false
      codec_chunk_frames: 25
stages:
  - stage_id: 0
    output_connectors: {{to_stage_1: through_a_store}}
  - stage_id: 1
    input_connectors: {{from_stage_0: through_a_store}}
"""


def test_this_vllm_omni_is_as_the_connector_needs_it(omni: SimpleNamespace) -> None:
    assert broken(find_hooks, CHECKS) == []


def test_the_factory_makes_it_from_yaml(omni: SimpleNamespace, store: Any, socket_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(YAML.format(name=NAME, directory=socket_dir))
    config = omni.configuring.load_omni_transfer_config(path)
    made = omni.configuring.create_connectors_from_config(config.connectors)
    connector = made["0", "1"]
    try:
        assert type(connector).__name__ == CONNECTOR
        assert isinstance(connector, omni.shared_memory), "it is not told of aborts otherwise"
        for_stage = omni.configuring.get_connectors_config_for_stage(config, 1)["from_stage_0"]["spec"]
        receiver = omni.factory.create_connector(omni.spec(for_stage["name"], for_stage["extra"]))
        assert connector.put("0", "1", "r_0_0", chunk(5))[0]
        assert number_of(got(receiver, "r_0_0")[0]) == 5
        receiver.close()
    finally:
        connector.close()


@for_each(
    "extra, text",
    [
        ({"shmring_stor": "x"}, "shmring_stor is no setting of this connector"),
        ({"shmring_store": "nobody", "shmring_start": False}, "nobody"),
    ],
)
def test_what_keeps_it_from_being_made_is_said(
    omni: SimpleNamespace, extra: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch, socket_dir: Path
) -> None:
    monkeypatch.setattr("shmring.integrations.omni.exchange._CONNECT_S", 0.2)
    with pytest.raises(ValueError, match=text):
        omni.factory.create_connector(omni.spec(CONNECTOR, {"shmring_socket_dir": str(socket_dir), **extra}))


def test_a_vllm_omni_that_has_changed_is_named(omni: SimpleNamespace, connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(omni.serializer.encoder.__class__, "_enc_hook", lambda self, value: "something else")
    with pytest.raises(ValueError, match="is not as the connector needs it: the serializer makes 'something else' of a slice"):
        connector(0)


# -- what comes --------------------------------------------------------------------------------------------------------------


class Payload(msgspec.Struct):
    codes: dict[str, Any]
    meta: Any = None


@dataclasses.dataclass
class Information:
    ids: list[int]
    picture: Any = None


def payloads(omni: SimpleNamespace) -> dict[str, Any]:
    from PIL import Image
    from vllm.outputs import CompletionOutput

    return {
        "a dict": {"x": torch.arange(10), "y": [np.arange(4), {"z": torch.ones(2, 3)}], "n": None, "t": (1, 2)},
        "a struct": Payload({"audio": torch.ones(5, dtype=torch.int32)}, {"finished": torch.tensor(True)}),
        "a dataclass": {"information": Information([1, 2], torch.ones(2))},
        "a picture": [Image.new("RGB", (5, 4), (1, 2, 3))],
        "an output": {"o": CompletionOutput(0, "text", [1], 0.5, None, finish_reason="stop")},
        "no tensor": {"engine_inputs": [1, 2], "sampling_params": {"n": 1}},
        "a tensor": torch.ones(3),
        "bytes": b"123",
        "a slice": {"s": slice(1, 2)},
    }


def test_what_comes_is_what_their_own_serializer_would_bring(omni: SimpleNamespace, store: Any, connector: Any) -> None:
    sender, receiver = connector(0), connector(1)
    for what, data in payloads(omni).items():
        expected = omni.serializer.deserialize(omni.serializer.serialize(data))
        done, nbytes, _ = sender.put("0", "1", what, data)
        assert done
        came, size = got(receiver, what)
        assert size == nbytes > 0
        if what in ("a picture", "an output"):
            came, expected = repr(came)[:40], repr(expected)[:40]
        assert_same(came, expected)


def test_large_tensors_are_views_whose_memory_is_free_when_they_die(
    omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path
) -> None:
    sender, receiver = connector(0), connector(1)
    held = []
    for number in range(6):
        assert sender.put("0", "1", f"r_{number}", chunk(number))[0]
        held.append(got(receiver, f"r_{number}")[0])
    assert (receiver.health()["copied"], receiver.health()["viewed_bytes"] // MB) == (3, 3), "a quarter of 14 MiB"
    for number in range(40):
        assert sender.put("0", "1", f"s_{number}", chunk(100))[0]
        assert number_of(got(receiver, f"s_{number}")[0]) == 100
    assert [number_of(data) for data in held] == list(range(6))
    held.clear()
    gc.collect()
    assert receiver.health()["viewed_bytes"] == 0
    until(lambda: asyncio.run(shmring.inspect(NAME, socket_dir=str(socket_dir))).statistics["kept_pinned"] == 0)


def test_chunks_that_the_loop_does_not_copy_come_as_others_do(omni: SimpleNamespace, start_store: Any, connector: Any) -> None:
    start_store("--slab=32MiB")
    sender, receiver = connector(0), connector(1)
    for number, nbytes in enumerate((4 * MB - 4096, 4 * MB, 6 * MB)):
        assert sender.put("0", "1", f"r_{number}", chunk(number, nbytes))[0]
        data, came = got(receiver, f"r_{number}")
        assert (number_of(data), came > nbytes) == (number, True)
        del data


def test_small_chunks_hold_nothing_of_the_store_when_they_have_come(
    omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path
) -> None:
    sender, receiver = connector(0), connector(1)
    assert [receiver.get("0", "1", f"r_{number}") for number in range(20)] == [None] * 20
    for number in range(20):
        assert sender.put("0", "1", f"r_{number}", chunk(number, 60_000))[0]
    until(lambda: deliveries(socket_dir)["taken"] == 20)
    until(lambda: asyncio.run(shmring.inspect(NAME, socket_dir=str(socket_dir))).statistics["kept"] == 0)
    assert [number_of(got(receiver, f"r_{number}")[0]) for number in range(20)] == list(range(20))
    assert receiver.health()["copied"] == receiver.health()["viewed_bytes"] == 0


def test_a_key_is_got_once_and_by_the_stages_that_it_is_for(
    omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path
) -> None:
    sender, receiver, stranger = connector(0), connector(1), connector(1, shmring_namespace="another server")
    assert receiver.get("0", "1", "r") is None
    assert sender.put("0", "1", "r", chunk(1))[0]
    assert stranger.get("0", "1", "r") is None
    assert receiver.get("0", "2", "r") is None
    until(lambda: deliveries(socket_dir)["untaken"] == 0)  # it has come to who had asked
    assert number_of(got(receiver, "r")[0]) == 1
    assert receiver.get("0", "1", "r") is None
    done, _, metadata = sender.put("0", "2", "r", chunk(2))
    assert done
    assert number_of(receiver.get("0", "2", "r", {"r": metadata})[0]) == 2


def test_the_name_of_a_request_may_be_used_anew(omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path) -> None:
    """vLLM-Omni's names for requests are those that callers give, and callers try again."""
    sender, receiver = connector(0), connector(1)
    for number in range(5):
        assert sender.put("0", "1", "r_0_0", chunk(number))[0]
        assert number_of(got(receiver, "r_0_0")[0]) == number
    assert sender.put("0", "1", "r_0_0", chunk(7))[0]
    sender.cleanup("r_0_0")
    sender.cleanup("r_0_1")
    assert deliveries(socket_dir)["untaken"] == 0
    assert receiver.get("0", "1", "r_0_0") is None
    receiver.abandon_get("r_0_0")
    until(lambda: deliveries(socket_dir)["waiting"] == 0)
    for number in (8, 9):
        assert sender.put("0", "1", "r_0_0", chunk(number))[0]
    assert number_of(got(receiver, "r_0_0")[0]) == 9, "the later one stands"


# -- waiting -----------------------------------------------------------------------------------------------------------------


def test_who_waits_is_woken(omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path) -> None:
    sender, receiver = connector(0), connector(1)
    assert receiver.get_with_deadline("0", "1", "r", deadline=time.monotonic() - 1) is None
    waiting = Thread(lambda: receiver.get_with_deadline("0", "1", "s", deadline=time.monotonic() + HANGS_S))
    until(lambda: deliveries(socket_dir)["waiting"] == 2)
    sender.put("0", "1", "s", chunk(3))
    assert number_of(waiting.ended(HANGS_S)[0]) == 3


def test_one_of_two_threads_gets_it_and_who_gives_a_key_up_wakes_the_others(
    omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path
) -> None:
    sender, receiver = connector(0), connector(1)
    for number in range(2):
        waiting = [
            Thread(lambda: receiver.get_with_deadline("0", "1", "r", deadline=time.monotonic() + HANGS_S)) for _ in range(2)
        ]
        until(lambda: len(receiver._exchange._changed._waiters) == 2)
        if number == 0:
            assert sender.put("0", "1", "r", chunk(3))[0]
        else:
            receiver.abandon_get("r")
        came = [each.ended(HANGS_S / 2) for each in waiting]
        assert [number_of(each[0]) for each in came if each is not None] == ([3] if number == 0 else [])
    assert receiver._exchange.waiting == 0


def test_what_a_thread_waits_for_is_not_forgotten_before_its_deadline(
    omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.integrations.omni.exchange._ASKED_S", 0.0)
    sender, receiver = connector(0), connector(1)
    assert receiver.get("0", "1", "of nobody any more") is None
    waiting = Thread(lambda: receiver.get_with_deadline("0", "1", "r", deadline=time.monotonic() + HANGS_S))
    until(lambda: deliveries(socket_dir)["waiting"] == 2)
    receiver._exchange._forget_old()
    assert receiver._exchange.waiting == 1
    assert sender.put("0", "1", "r", chunk(3))[0]
    assert number_of(waiting.ended(HANGS_S)[0]) == 3


def test_a_round_in_vain_waits_for_anything(omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path) -> None:
    sender, receiver = connector(0), connector(1, shmring_poll_wait_s=HANGS_S)
    assert [receiver.get("0", "1", key) for key in ("a", "b")] == [None, None]
    waiting = Thread(lambda: [receiver.get("0", "1", key) for key in ("a", "b")])
    until(lambda: deliveries(socket_dir)["waiting"] == 2)
    sender.put("0", "1", "b", chunk(4))
    first, second = waiting.ended(HANGS_S)
    assert first is None
    assert number_of(second[0]) == 4


def test_closing_lets_whoever_waits_go_on(omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path) -> None:
    receiver = connector(1)
    waiting = Thread(lambda: receiver.get_with_deadline("0", "1", "r", deadline=time.monotonic() + HANGS_S))
    until(lambda: deliveries(socket_dir)["waiting"] == 1)
    receiver.close()
    receiver.close()
    assert waiting.ended(HANGS_S) is None
    assert receiver.get("0", "1", "r") is None
    assert receiver.put("0", "1", "r", chunk(1)) == (False, 0, None)
    assert receiver.health()["status"] == "unhealthy"


class Stage:
    """vLLM-Omni's loops around a connector: they ask for chunks, and put them, in threads of their own."""

    def __init__(self, loops: type[Any], connector: Any, chunks: int = 0) -> None:
        came: list[tuple[str, int]] = []
        calls = itertools.count()

        class Loops(loops):  # type: ignore[misc,valid-type]
            def _poll_single_request(self, request: Any) -> bool:
                next(calls)
                result = connector.get("0", "1", f"{request.request_id}_0_{request.chunk}")
                if result is None:
                    return False
                came.append((request.request_id, number_of(result[0])))
                request.chunk += 1
                return request.chunk == chunks  # otherwise it is asked for again

            def _send_single_request(self, task: tuple[str, int]) -> None:
                request, number = task
                assert connector.put("0", "1", f"{request}_0_{number}", chunk(number))[0]

        self.came = came
        self.calls = calls
        self.loops = Loops(None)
        self.loops.connector = connector

    def expect(self, *names: str) -> None:
        self.loops._pending_load_reqs.extend(SimpleNamespace(request_id=name, chunk=0) for name in names)

    def send(self, name: str, number: int) -> None:
        self.loops._pending_save_reqs.append((name, number))
        with self.loops._save_cond:
            self.loops._save_cond.notify()

    def end(self) -> None:
        self.loops.shutdown()
        for thread in (self.loops.recv_thread, self.loops.save_thread):
            thread.join(HANGS_S)
            assert not thread.is_alive()


def test_their_loops_pass_streams_of_chunks(omni: SimpleNamespace, store: Any, connector: Any) -> None:
    names, chunks = [f"request-{number}" for number in range(8)], 10
    sender, receiver = Stage(omni.loops, connector(0)), Stage(omni.loops, connector(1), chunks)
    receiver.expect(*names)
    for number in range(chunks):
        for name in names:
            sender.send(name, number)
    until(lambda: len(receiver.came) == len(names) * chunks, HANGS_S)
    for name in names:
        assert [number for of, number in receiver.came if of == name] == list(range(chunks))
    assert not receiver.loops._pending_load_reqs
    sender.end()
    receiver.end()


def test_a_loop_that_waits_asks_seldom(omni: SimpleNamespace, store: Any, connector: Any) -> None:
    receiver = Stage(omni.loops, connector(1, shmring_poll_wait_s=HANGS_S), 1)
    receiver.expect("a", "b", "c")
    until(lambda: receiver.loops.connector._exchange.waiting == 3)
    time.sleep(0.3)  # of what is measured: a loop that asks each millisecond asks 900 times meanwhile
    assert next(receiver.calls) <= 7, "a round of questions, and one that waits"
    receiver.end()


# -- full, missing, gone -------------------------------------------------------------------------------------------------------


def test_a_full_store_is_a_put_that_was_not_possible(
    omni: SimpleNamespace, start_store: Any, connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start_store("--slab=8MiB")
    sender, receiver = connector(0, shmring_wait_s=0.2), connector(1)
    done = [sender.put("0", "1", f"r_{number}", chunk(number))[0] for number in range(12)]
    count = done.index(False)
    assert 3 <= count <= 7
    assert not any(done[count:])
    assert caplog.text.count("were not passed on (store stages): TimeoutError") == 1
    for number in range(count):
        assert number_of(got(receiver, f"r_{number}")[0]) == number
    assert sender.put("0", "1", "later", chunk(77))[0]
    assert number_of(got(receiver, "later")[0]) == 77


def test_what_can_never_be_sent_is_an_error_that_says_why(omni: SimpleNamespace, start_store: Any, connector: Any) -> None:
    start_store("--slab=4MiB")
    sender = connector(0)
    with pytest.raises(shmring.CapacityError):
        sender.put("0", "1", "r", chunk(1, 8 * MB))
    with pytest.raises(TypeError, match="not serializable"):
        sender.put("0", "1", "r", {"x": object()})


def test_a_store_that_dies_is_waited_for(
    omni: SimpleNamespace, start_store: Any, connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = start_store()
    sender, receiver = connector(0, shmring_wait_s=0.2), connector(1)
    assert sender.put("0", "1", "r", chunk(1))[0]
    held = got(receiver, "r")[0]
    assert receiver.get("0", "1", "s") is None
    os.kill(store.pid, signal.SIGKILL)
    until(lambda: sender.health()["status"] == receiver.health()["status"] == "unhealthy")
    assert sender.put("0", "1", "s", chunk(2)) == (False, 0, None)
    assert receiver.get("0", "1", "s") is None
    assert number_of(held) == 1, "what a stage has got it keeps"
    start_store()
    until(lambda: sender.health()["status"] == receiver.health()["status"] == "healthy")
    assert sender.put("0", "1", "s", chunk(3))[0]
    result = receiver.get_with_deadline("0", "1", "s", deadline=time.monotonic() + HANGS_S) or receiver.get_with_deadline(
        "0", "1", "s", deadline=time.monotonic() + HANGS_S
    )
    assert number_of(result[0]) == 3
    assert "not passed on" in caplog.text


def test_a_store_is_started_and_started_again(
    omni: SimpleNamespace, connector: Any, socket_dir: Path, no_new_segments: None
) -> None:
    started = {"shmring_start": True, "shmring_slab": "16MiB"}
    sender, receiver = connector(0, **started, shmring_wait_s=HANGS_S), connector(1, **started)

    def pid() -> int:
        found: int = asyncio.run(shmring.inspect(NAME, socket_dir=str(socket_dir))).program["store"]["pid"]
        return found

    first = pid()
    try:
        assert sender.put("0", "1", "r", chunk(1))[0]
        assert number_of(got(receiver, "r")[0]) == 1
        os.kill(first, signal.SIGKILL)
        until(lambda: sender.health()["status"] == "unhealthy")
        assert sender.put("0", "1", "s", chunk(2))[0]
        assert pid() != first
        assert number_of(got(receiver, "s")[0]) == 2
    finally:
        for each in (sender, receiver):
            each.close()
        end_stores(socket_dir)


def test_what_nobody_got_goes_with_the_connector(omni: SimpleNamespace, store: Any, connector: Any, socket_dir: Path) -> None:
    sender = connector(0)
    for number in range(3):
        assert sender.put("0", "1", f"r_{number}", chunk(number))[0]
    assert deliveries(socket_dir)["untaken"] == 3
    sender.close()
    assert (deliveries(socket_dir)["untaken"], deliveries(socket_dir)["withdrawn"]) == (0, 3)


def test_many_threads_put_and_get(omni: SimpleNamespace, store: Any, connector: Any) -> None:
    sender, receiver = connector(0), connector(1)
    failures: list[object] = []

    def pass_on(thread: int) -> None:
        for number in range(20):
            key = f"{thread}_{number}"
            if not sender.put("0", "1", key, chunk(number, 200_000))[0]:
                failures.append(key)
            result = receiver.get_with_deadline("0", "1", key, deadline=time.monotonic() + HANGS_S)
            if number_of(result[0]) != number:
                failures.append((key, number_of(result[0])))

    threads = [threading.Thread(target=pass_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    assert not failures
