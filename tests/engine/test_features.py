"""The features executor: one reply or one error for each request."""

from __future__ import annotations

import pytest
import torch

from engine.executors import EXECUTORS, create_executor
from engine.executors.descriptors import describe_picture
from engine.executors.features import FeaturesExecutor
from engine.protocol import EncodeReply, EncodeRequest, Executor, Picture


def picture(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (40, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_each_request_is_answered_with_the_descriptors_of_its_pictures() -> None:
    requests = [EncodeRequest([Picture(picture(1)), Picture(picture(2))]), EncodeRequest([Picture(picture(3))])]
    replies = FeaturesExecutor().execute(requests)
    for request, reply in zip(requests, replies, strict=True):
        assert isinstance(reply, EncodeReply)
        expected = torch.stack([describe_picture(item.pixels) for item in request.pictures])
        assert torch.equal(reply.embeddings, expected)


@pytest.mark.parametrize(
    "bad",
    [
        EncodeRequest([]),
        EncodeRequest([Picture(torch.zeros(4, 4, 3))]),
        EncodeRequest([Picture(torch.zeros(4, 4, dtype=torch.uint8))]),
        EncodeRequest([Picture(torch.zeros(0, 4, 3, dtype=torch.uint8))]),
    ],
)
def test_a_bad_request_fails_alone(bad: EncodeRequest) -> None:
    good = EncodeRequest([Picture(picture(1))])
    before, error, after = FeaturesExecutor().execute([good, bad, good])
    assert isinstance(before, EncodeReply)
    assert isinstance(error, ValueError)
    assert error.__traceback__ is None, "its frames would keep the slots of the pictures"
    assert isinstance(after, EncodeReply)


def test_it_is_chosen_by_name() -> None:
    for name in EXECUTORS:
        executor = create_executor(name)
        assert isinstance(executor, Executor)
        assert executor.describe().executor == name
        executor.close()


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no executor 'nonsense'.*features"):
        create_executor("nonsense")
