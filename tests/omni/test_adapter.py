"""vLLM-Omni's own adapter between a scheduler and its connector, unchanged, with this connector: streams, and aborts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmring.integrations.omni import CONNECTOR
from tests.omni.chunks import HANGS_S, chunk, number_of
from tests.omni.test_connector import deliveries
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


class Request(SimpleNamespace):
    """What the adapter uses of vLLM's."""

    def is_finished(self) -> bool:
        return bool(self.finished)


def request(name: str) -> Request:
    return Request(
        request_id=f"{name}-inside",
        external_req_id=name,
        finished=False,
        resumable=False,
        num_computed_tokens=0,
        additional_information=None,
        prompt_token_ids=[],
    )


@pytest.fixture
def adapter(omni: SimpleNamespace, store: Any, settings: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """``adapter(stage)``: made as a scheduler makes it; ended with the test."""
    made: list[Any] = []

    def make(stage: int) -> Any:
        model = SimpleNamespace(
            stage_connector_config={"name": CONNECTOR, "extra": {**settings, "stage_id": stage}},
            stage_id=stage,
            async_chunk=True,
            worker_type="ar",
            max_model_len=0,
            custom_process_next_stage_input_func="tests.omni.chunks.next_stage_input",
        )
        config = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=8))
        made.append(omni.adapter(config))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
        for thread in (each.recv_thread, each.save_thread):
            thread.join(HANGS_S)


def send(adapter: Any, of: Request, number: int, *, last: bool = False) -> None:
    """A scheduler's step has made a chunk."""
    of.hidden = chunk(number, 200_000)["hidden"]
    of.num_computed_tokens += 1
    of.finished = last
    adapter.save_async({}, of)


def receive(adapter: Any, of: Request) -> tuple[int, bool]:
    """A scheduler waits for the next chunk: returns its number, and whether it is the last one."""
    adapter.load_async(of)
    until(lambda: of.request_id in adapter._finished_load_reqs, HANGS_S)
    adapter._finished_load_reqs.discard(of.request_id)
    _, payload, *_ = adapter._pending_ar_prompt_updates.pop(of.request_id)
    return number_of(payload), of.request_id in adapter.upstream_exhausted_requests


def test_a_stream_comes_in_order_and_to_its_end(adapter: Callable[..., Any], socket_dir: Path) -> None:
    first, second = adapter(0), adapter(1)
    for attempt in range(2):  # a caller that tries again has the same name for its request
        sending = [request(f"request-{number}") for number in range(3)]
        receiving = [request(f"request-{number}") for number in range(3)]
        for number in range(5):
            for place, one in enumerate(sending):
                send(first, one, 100 * attempt + 10 * place + number, last=number == 4)
        for place, one in enumerate(receiving):
            expected = [(100 * attempt + 10 * place + number, number == 4) for number in range(5)]
            assert [receive(second, one) for _ in range(5)] == expected
            second.cleanup_receiver(one.request_id)
        until(lambda: not first._sender_tokens, HANGS_S)
    until(lambda: deliveries(socket_dir)["untaken"] == 0)
    assert first.connector.health()["failures"] == second.connector.health()["failures"] == 0


def test_an_aborted_request_gives_back_what_nobody_will_get(adapter: Callable[..., Any], socket_dir: Path) -> None:
    first, second = adapter(0), adapter(1)
    aborted, other = request("aborted"), request("other")
    for number in range(4):
        send(first, aborted, number)
    send(first, other, 7)
    until(lambda: deliveries(socket_dir)["untaken"] == 5, HANGS_S)
    assert receive(second, request("aborted")) == (0, False)
    first.cleanup_sender("aborted")
    second.cleanup_receiver("aborted-inside")
    until(lambda: deliveries(socket_dir)["withdrawn"] == 3, HANGS_S)
    assert receive(second, request("other")) == (7, False)
    until(lambda: deliveries(socket_dir)["untaken"] == 0)


def test_a_put_that_is_not_possible_is_the_requests_failure_with_its_reason(adapter: Callable[..., Any]) -> None:
    first = adapter(0)
    large = request("large")
    large.hidden = chunk(1, 64 << 20)["hidden"]
    large.num_computed_tokens = 1
    first.save_async({}, large)
    failures: dict[str, str] = {}
    until(lambda: failures.update(first.collect_failed_send_request_ids()) or failures, HANGS_S)
    assert list(failures) == ["large-inside"]
    assert failures["large-inside"].startswith("CapacityError: ")
