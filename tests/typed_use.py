"""What type checkers know of values that come back: ``make types`` fails where this is not so. Nothing here is ever run.

An ignored error is one that has to be there: ``warn_unused_ignores`` is on.
"""

from __future__ import annotations

from typing import Any, assert_type

import msgspec
import torch

import shmring
from shmring import threads


class Question(msgspec.Struct):
    pixels: torch.Tensor


class Answer(msgspec.Struct):
    embedding: torch.Tensor


async def replies(client: shmring.Client) -> None:
    assert_type(await client.request(1), Any)
    assert_type(await client.request(1, reply_type=Answer, timeout=5), Answer)
    assert_type(await client.request(1, reply_type=list[Answer], key="session"), list[Answer])
    async for part in client.stream(1, reply_type=Answer, retry=1):
        assert_type(part, Answer)
    submission = await client.submit(1)
    assert_type(submission, shmring.Submission)
    assert_type(await submission.next(Answer), Answer)
    assert_type(await submission.result(Answer), Answer)
    assert_type(await submission.result(), Any)
    async with client.slot("63MiB") as slot:
        assert_type(slot, shmring.Slot)
    await client.request(1, time_out=5)  # type: ignore[call-overload]


async def kept_content(client: shmring.Client, kept: shmring.Kept) -> None:
    assert_type(kept.payload, Any)
    found = await client.find(b"k" * 32, payload_type=Question)
    assert found is not None
    assert_type(found.payload, Question)


async def claims() -> None:
    async with shmring.serve("vision", payload_type=Question, slab_nbytes="1GiB") as ring:
        assert_type((await ring.claim()).payload, Question)
        assert_type(ring.claim_nowait().payload, Question)
        assert_type((await ring.claim_many(2))[0].payload, Question)
        async for claim in ring:
            assert_type(claim.payload, Question)
            assert_type(await claim.to("cuda"), Question)

        async def answer(claim: shmring.Claim[Question]) -> None: ...

        await ring.run(answer)
    async with shmring.serve("vision") as plain:
        assert_type((await plain.claim()).payload, Any)
    shmring.serve("vision", slab_nbyte=3)  # type: ignore[call-overload]


async def messages() -> None:
    async with shmring.join("vision", 0, payload_type=Question) as worker:
        assert_type((await worker.receive()).payload, Question)
        async for message in worker:
            assert_type(message.payload, Question)


def without_a_loop(client: threads.Client) -> None:
    assert_type(client.request(1), Any)
    assert_type(client.request(1, reply_type=Answer, timeout=5), Answer)
    for part in client.stream(1, reply_type=Answer):
        assert_type(part, Answer)
    assert_type(client.submit(1).result(Answer), Answer)
    found = client.find(b"k" * 32, payload_type=Question)
    assert found is not None
    assert_type(found.payload, Question)
    with client.slot(100, engine="vision-0") as slot:
        assert_type(slot, threads.Slot)
    with threads.serve("vision", payload_type=Question) as ring:
        assert_type(ring.claim().payload, Question)
        for claim in ring:
            assert_type(claim.payload, Question)
    with threads.join("vision", 0, payload_type=Question) as worker:
        assert_type(worker.receive().payload, Question)
