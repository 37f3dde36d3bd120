"""Embedding requests by way of the service: what the engine gets, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.engine.protocol import EncodeReply, EncodeRequest, InputSpec, ModelDescription, Picture, PictureSpec, Text
from shmring.frontend.admission import Admission, Admitted
from shmring.frontend.errors import ApiError
from shmring.frontend.inference import Inference
from shmring.frontend.intake import MediaIntake
from shmring.frontend.metrics import AnswerStatistics
from shmring.frontend.openai.embeddings import EmbeddingInputs, EmbeddingRequest, EmbeddingResponse
from shmring.frontend.served_model import ServedModel
from shmring.frontend.settings import FrontendSettings

PIXELS = np.random.default_rng(5).integers(0, 256, (3, 20, 30, 3), np.uint8)

BOTH = ModelDescription(
    executor="test",
    model="shmring-fingerprints",
    tasks=["encode"],
    input=InputSpec(text=True, picture=PictureSpec()),
    max_batch_size=8,
    embedding_size=2,
)


@pytest.fixture
def request_of(body_of: Any) -> Any:
    """``request_of(pixels, ...)``: a parsed request."""

    def make(*pictures: Any, **fields: Any) -> EmbeddingRequest:
        return msgspec.convert(body_of(*pictures, **fields), EmbeddingRequest)

    return make


@pytest.fixture
def admitted() -> Admitted:
    """A request that was just admitted."""
    admission = Admission(FrontendSettings())
    return admission.new_request()


@pytest.fixture
async def open_service() -> AsyncIterator[Any]:
    """``open_service(engine, **settings)``: a service, closed at the end."""
    intakes: list[MediaIntake] = []

    def make(engine: Any, **settings: Any) -> Inference:
        frontend_settings = FrontendSettings(**settings)
        intakes.append(MediaIntake(engine.client, frontend_settings))
        return Inference(engine.client, ServedModel(engine.client, ()), intakes[-1], frontend_settings, AnswerStatistics())

    yield make
    for intake in intakes:
        await intake.close()


def response_of(pieces: list[bytes]) -> EmbeddingResponse:
    return msgspec.json.decode(b"".join(pieces), type=EmbeddingResponse)


async def test_pictures_are_sent_from_their_slots_and_none_is_copied(
    open_engine: Any, open_service: Any, request_of: Any, embedding_of: Any, eventually: Any, admitted: Admitted
) -> None:
    engine = await open_engine()
    request = request_of(*PIXELS)
    pieces, facts = await open_service(engine).embed(request, admitted, "the-id")
    np.testing.assert_allclose(
        [item.embedding for item in response_of(pieces).data], [embedding_of(pixels) for pixels in PIXELS], rtol=1e-6
    )
    assert (facts.slab_nbytes, facts.copies, facts.synthetic) == (PIXELS.nbytes, 0, False)
    assert request.messages is None
    statistics = engine.client.ring.statistics()
    assert (statistics.in_place, statistics.copies, statistics.inline_payloads) == (3, 0, 0)
    assert statistics.slot_nbytes_submitted == PIXELS.nbytes
    await eventually(lambda: engine.client.ring.statistics().slots_in_use == 0)


async def test_texts_and_media_stay_in_order(open_engine: Any, open_service: Any, request_of: Any, admitted: Admitted) -> None:
    async def note(claim: shmring.Claim) -> None:
        request: EncodeRequest = claim.payload
        kinds = [item.text if isinstance(item, Text) else item.pixels.sum().item() for item in request.inputs]
        assert all(isinstance(item, Text | Picture) for item in request.inputs)
        received.append(kinds)
        await claim.reply(EncodeReply(torch.eye(2)[[0, 1, 0]], 5))

    received: list[Any] = []
    service = open_service(await open_engine(note, BOTH))
    request = request_of(PIXELS[0], PIXELS[1])
    request.messages[0].content.insert(1, msgspec.convert({"type": "text", "text": "between"}, dict))
    request = msgspec.convert(msgspec.to_builtins(request), EmbeddingRequest)
    pieces, _ = await service.embed(request, admitted, "x")
    assert received == [[PIXELS[0].sum(), "between", PIXELS[1].sum()]]
    assert response_of(pieces).usage.prompt_tokens == 5
    assert response_of(pieces).usage.inputs == EmbeddingInputs(text=1, image=2)
    assert [item.embedding for item in response_of(pieces).data] == [[1, 0], [0, 1], [1, 0]]


async def test_texts_need_no_slot(open_engine: Any, open_service: Any, admitted: Admitted) -> None:
    async def answer(claim: shmring.Claim) -> None:
        await claim.reply(EncodeReply(torch.eye(2), 2))

    engine = await open_engine(answer, BOTH)
    pieces, facts = await open_service(engine).embed(EmbeddingRequest("shmring-fingerprints", ["a", "b"]), admitted, "x")
    assert (facts.slab_nbytes, len(response_of(pieces).data)) == (0, 2)


async def test_tokens_are_sent_to_a_model_that_has_them(open_engine: Any, open_service: Any, admitted: Admitted) -> None:
    async def note(claim: shmring.Claim) -> None:
        received.extend(claim.payload.inputs)
        await claim.reply(EncodeReply(torch.eye(2), 3))

    received: list[Any] = []
    description = msgspec.structs.replace(BOTH, input=InputSpec(text=True, tokens=True))
    service = open_service(await open_engine(note, description))
    pieces, _ = await service.embed(EmbeddingRequest("shmring-fingerprints", [[5, 6], "a"]), admitted, "x")
    assert response_of(pieces).usage.inputs == EmbeddingInputs(text=2)
    assert received == [Text([5, 6]), Text("a")]


async def test_tokens_are_refused_where_the_model_has_none(open_engine: Any, open_service: Any, admitted: Admitted) -> None:
    service = open_service(await open_engine(description=BOTH))
    with pytest.raises(ApiError, match="does not embed tokens"):
        await service.embed(EmbeddingRequest("shmring-fingerprints", [[5, 6], "a"]), admitted, "x")


async def test_what_the_model_does_not_do_is_refused(open_engine: Any, open_service: Any, admitted: Admitted) -> None:
    engine = await open_engine()
    for request, param in (
        (EmbeddingRequest("shmring-fingerprints", "text"), "input"),
        (EmbeddingRequest("shmring-fingerprints", "text", dimensions=5), "dimensions"),
        (EmbeddingRequest("another", "text"), "model"),
        (EmbeddingRequest("shmring-fingerprints", [[1, 2]]), "input"),
    ):
        with pytest.raises(ApiError) as raised:
            await open_service(engine).embed(request, admitted, "x")
        assert raised.value.param == param
    assert engine.client.ring.statistics().submitted == 0


async def test_the_engine_knows_the_request_by_its_id(
    open_engine: Any, open_service: Any, request_of: Any, admitted: Admitted
) -> None:
    names = []

    async def note(claim: shmring.Claim) -> None:
        names.append(claim.name)
        raise ValueError("enough")

    with pytest.raises(shmring.RemoteError):
        await open_service(await open_engine(note)).embed(request_of(PIXELS[0]), admitted, "the-id")
    assert names == ["the-id"]
