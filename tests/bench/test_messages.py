"""The check of the benchmark's messages: it accepts what was sent, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.messages import Cell, CheckError, Header, Phase, Sink, Source

CELL = Cell(nbytes=4096, window=4, warm_up_s=0.0, timed_s=0.0, limit_s=10.0, directory="")


def sent(cell: Cell = CELL) -> list[tuple[Header, torch.Tensor]]:
    source = Source(cell)
    messages = []
    while not source.finished:
        header = source.stamp()
        messages.append((header, source.tensor.clone()))
    return messages


def test_what_was_sent_is_accepted_and_measured() -> None:
    messages = sent()
    sink = Sink(CELL)
    assert [sink.take(*message) for message in messages] == [False] * (len(messages) - 1) + [True]
    timed = [header for header, _ in messages if header.phase == Phase.TIMED]
    measurement = sink.measurement()
    assert measurement.messages == len(timed) - 1
    assert len(measurement.latencies_ns) == len(timed)
    assert (measurement.latencies_ns > 0).all()
    assert measurement.messages_per_s > 0


def test_phases_follow_each_other_and_last_two_windows() -> None:
    phases = [header.phase for header, _ in sent()]
    assert phases == sorted(phases)
    assert phases.count(Phase.WARM_UP) >= 2 * CELL.window
    assert phases.count(Phase.TIMED) >= 2 * CELL.window
    assert phases.count(Phase.LAST) == 1


def test_stamps_go_where_the_producer_writes() -> None:
    source, sink = Source(CELL), Sink(CELL)
    slot = torch.full_like(source.tensor, 7.0)
    before = source.tensor.clone()
    sink.take(source.stamp(slot), slot)
    assert torch.equal(source.tensor, before)


def test_a_lost_message_is_noticed() -> None:
    messages, sink = sent(), Sink(CELL)
    sink.take(*messages[0])
    with pytest.raises(CheckError, match="message 2 came where message 1 was due"):
        sink.take(*messages[2])


def test_a_doubled_message_is_noticed() -> None:
    messages, sink = sent(), Sink(CELL)
    sink.take(*messages[0])
    with pytest.raises(CheckError, match="message 0 came"):
        sink.take(*messages[0])


@pytest.mark.parametrize("step", [-1, 1])
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
    for wrong in (tensor[:-1], tensor.view(2, -1), tensor.double()):
        with pytest.raises(CheckError, match="message 0 is torch"):
            Sink(CELL).take(header, wrong)


def test_a_message_can_be_spoiled_on_purpose() -> None:
    messages, sink = sent(dataclasses.replace(CELL, corrupt_sequence=3)), Sink(CELL)
    for message in messages[:3]:
        sink.take(*message)
    with pytest.raises(CheckError, match="message 3 holds"):
        sink.take(*messages[3])
