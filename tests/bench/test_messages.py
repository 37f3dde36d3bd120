"""The check of the benchmark's messages: it accepts what was sent, and nothing else; and what is counted, and when."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
import torch

from bench.messages import DTYPES, Cell, Header, Phase, Sink, Source
from bench.meter import Meter, resident_nbytes
from bench.stamps import CheckError
from tests.tables import for_each

CELL = Cell(nbytes=4096, window=4, warm_up_s=0.0, timed_s=0.0, limit_s=10.0, directory="")

Message = tuple[Header, torch.Tensor]


def sent(cell: Cell = CELL) -> list[Message]:
    return list(messages_of(Source(cell)))


def messages_of(source: Source) -> list[Message]:
    messages = []
    while not source.finished:
        header = source.stamp()
        messages.append((header, source.tensor.clone()))
    return messages


@for_each("dtype", DTYPES)
def test_what_was_sent_is_accepted_and_measured(dtype: str) -> None:
    cell = msgspec.structs.replace(CELL, dtype=dtype)
    messages = sent(cell)
    assert messages[0][1].dtype is DTYPES[dtype]
    assert messages[0][1].nbytes == cell.nbytes
    sink = Sink(cell)
    assert [sink.take(*message) for message in messages] == [False] * (len(messages) - 1) + [True]
    timed = [header for header, _ in messages if header.phase == Phase.TIMED]
    measurement = sink.measurement()
    assert measurement.messages == len(timed) - 1
    assert len(measurement.latencies_ns) == len(timed)
    assert (measurement.latencies_ns > 0).all()
    assert measurement.messages_per_s > 0
    assert [cost.messages for cost in measurement.consumer] == [len(timed)]


def test_phases_follow_each_other_and_last_two_windows() -> None:
    phases = [header.phase for header, _ in sent()]
    assert phases == sorted(phases)
    assert phases.count(Phase.WARM_UP) >= 2 * CELL.window
    assert phases.count(Phase.TIMED) >= 2 * CELL.window
    assert phases.count(Phase.LAST) == 1


def test_the_timed_phase_lasts_as_long_as_it_is_to() -> None:
    first_ns: dict[int, int] = {}
    for header, _ in sent(msgspec.structs.replace(CELL, timed_s=0.02)):
        first_ns.setdefault(header.phase, header.sent_ns)
    assert first_ns[Phase.LAST] - first_ns[Phase.TIMED] >= 20_000_000


@for_each("dtype", DTYPES)
def test_stamps_go_where_the_producer_writes(dtype: str) -> None:
    cell = msgspec.structs.replace(CELL, dtype=dtype)
    source, sink = Source(cell), Sink(cell)
    slot = torch.full_like(source.tensor, 7)
    before = source.tensor.clone()
    sink.take(source.stamp(slot), slot)
    assert torch.equal(source.tensor.view(torch.uint8), before.view(torch.uint8))


def test_the_array_is_the_tensor() -> None:
    source = Source(msgspec.structs.replace(CELL, dtype="bfloat16"))
    source.stamp()
    assert source.array.nbytes == CELL.nbytes
    assert source.array.tobytes() == bytes(source.tensor.view(torch.uint8).tolist())


@for_each("sequence", [0, 2])
def test_a_lost_or_doubled_message_is_noticed(sequence: int) -> None:
    messages, sink = sent(), Sink(CELL)
    sink.take(*messages[0])
    with pytest.raises(CheckError, match=f"message {sequence} came where message 1 was due"):
        sink.take(*messages[sequence])


@for_each("step", [-1, 1])
def test_the_content_of_another_message_is_noticed(step: int) -> None:
    messages, sink = sent(), Sink(CELL)
    for message in messages[:5]:
        sink.take(*message)
    with pytest.raises(CheckError, match="message 5 holds"):
        sink.take(messages[5][0], messages[5 + step][1])


def test_a_torn_message_is_noticed() -> None:
    messages, sink = sent(), Sink(CELL)
    sink.take(*messages[0])
    torn = torch.cat([messages[0][1][:512], messages[1][1][512:]])
    with pytest.raises(CheckError, match="corrupted"):
        sink.take(messages[1][0], torn)


def test_another_shape_or_dtype_is_noticed() -> None:
    header, tensor = sent()[0]
    for wrong in (tensor[:-1], tensor.view(2, -1), tensor.double(), tensor.view(torch.int32), torch.cat([tensor] * 2)[::2]):
        with pytest.raises(CheckError, match="message 0 is torch"):
            Sink(CELL).take(header, wrong)


# -- several producers ----------------------------------------------------------------------------------------------------

TWO = msgspec.structs.replace(CELL, producers=2, window=1)


def test_producers_have_sequences_of_their_own() -> None:
    first, second = (messages_of(Source(TWO, producer)) for producer in range(2))
    sink = Sink(TWO)
    for message in [*first, *second[:-1]]:
        assert not sink.take(*message)
    assert sink.take(*second[-1])


def test_the_message_of_another_producer_is_noticed() -> None:
    first, second = (messages_of(Source(TWO, producer)) for producer in range(2))
    with pytest.raises(CheckError, match=r"message 0 holds .* it is corrupted \(of producer 1\)"):
        Sink(TWO).take(second[0][0], first[0][1])
    with pytest.raises(CheckError, match="is of producer 2; there are 2"):
        Sink(TWO).take(second[0][0]._replace(producer=2), second[0][1])


def test_producers_warm_up_until_all_have_been_seen_and_are_timed_until_all_are() -> None:
    moments = [0, 0]
    sink = Sink(TWO, moments)
    first, second = (Source(TWO, producer, moments) for producer in range(2))

    def send(source: Source, messages: int) -> list[int]:
        headers = []
        for _ in range(messages):
            headers.append(source.stamp())
            sink.take(headers[-1], source.tensor)
        return [header.phase for header in headers]

    assert set(send(first, 20)) == {Phase.WARM_UP}  # the second is missing
    assert set(send(second, 1)) == {Phase.WARM_UP}
    assert moments[Phase.WARM_UP]
    assert send(first, 10)[-1] == Phase.TIMED  # and stays there: the second is not timed
    assert not moments[Phase.TIMED]
    assert send(second, 3)[-1] == Phase.TIMED
    assert moments[Phase.TIMED]
    assert send(first, 1) == [Phase.LAST]
    while not second.finished:
        send(second, 1)
    measurement = sink.measurement()
    assert measurement.messages == 1  # of two that came while both were timed
    assert first.meter.cost is not None
    assert first.meter.cost.messages >= 9


def test_a_measurement_of_nothing_is_an_error() -> None:
    sink = Sink(TWO)
    for producer in range(2):
        for message in messages_of(Source(TWO, producer)):
            sink.take(*message)  # one after the other: never were both timed
    with pytest.raises(CheckError, match="0 messages came while all producers were timed"):
        sink.measurement()


# -- what it costs ----------------------------------------------------------------------------------------------------------


def test_a_meter_counts_cpu_time_and_memory_that_is_not_shared() -> None:
    meter = Meter(own_nbytes=1 << 20)
    meter.start()
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    held = torch.ones(64 << 20, dtype=torch.uint8)
    meter.stop(10)
    assert meter.cost is not None
    assert meter.cost.messages == 10
    assert 0.05 <= meter.cost.cpu_s < 5
    assert meter.cost.resident_nbytes >= held.nbytes
    assert meter.cost.stall_ms is None


def test_shared_memory_is_not_resident_memory() -> None:
    before = resident_nbytes()
    shared = torch.zeros(64 << 20, dtype=torch.uint8).share_memory_()
    shared.fill_(1)
    assert resident_nbytes() - before < 32 << 20


@pytest.mark.parametrize("runs_s", [0.03, 0.0])  # before the stall and after it: or it never comes back
async def test_a_stalled_loop_is_noticed(runs_s: float) -> None:
    meter = Meter(own_nbytes=0)
    with meter.watched():
        meter.start()
        if runs_s:
            await asyncio.sleep(runs_s)
        time.sleep(0.05)  # stalls the loop
        if runs_s:
            await asyncio.sleep(runs_s)
        meter.stop(1)
    assert meter.cost is not None
    assert meter.cost.stall_ms is not None
    assert meter.cost.stall_ms >= 40
