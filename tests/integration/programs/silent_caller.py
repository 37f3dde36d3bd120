"""A frontend of an engine core that sends requests, stops itself before it reads a reply, and reads all when it goes on.

``silent_caller.py KIND NAME SOCKET_DIR COUNT SIZE``: ``generate`` asks for SIZE pieces of text, ``encode`` for an embedding.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import torch

import shmring
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    Picture,
    SamplingParams,
    TextPart,
)


def request_of(kind: str, size: int) -> GenerateRequest | EncodeRequest:
    if kind == "generate":
        return GenerateRequest([ChatMessage("user", [TextPart("Count")])], [], SamplingParams(max_tokens=size))
    return EncodeRequest([Picture(torch.full((16,), 7, dtype=torch.uint8))])


async def check(submission: shmring.Submission, kind: str, size: int) -> None:
    if kind == "encode":
        embeddings = (await submission.next(EncodeReply)).embeddings
        assert embeddings.shape == (1, size)
        assert bool((embeddings == 7).all())
        return
    tokens: list[int] = []
    while len(tokens) < size:
        tokens += (await submission.next(GenerateReply)).token_ids
    assert tokens == list(range(1, size + 1)), tokens


async def main(kind: str, name: str, socket_dir: str, count: int, size: int) -> None:
    async with shmring.connect(name, socket_dir=socket_dir, connect_timeout_s=60, description="silent") as client:
        submissions = [client.submit_nowait(request_of(kind, size)) for _ in range(count)]  # in one turn: nothing is read
        print("sent", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for submission in submissions:
            await check(submission, kind, size)
        print("read", flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
