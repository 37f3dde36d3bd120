"""A client on another host that is killed or stopped: sends tensors of one value each, four at a time, and says how they end.

``far_sender.py ADDRESS TOKEN`` prints ``attached``, then ``answered`` after each four, and ``lost`` when its engine has gone.
"""

from __future__ import annotations

import asyncio
import sys

import torch

import shmring


async def main(address: str, token: str) -> None:
    number = 0
    while True:
        async with shmring.connect(address, token=token) as client:
            print("attached", flush=True)
            while True:
                number += 1
                xs = [torch.full((1_500_000 + 64 * n,), (number + n) % 251, dtype=torch.uint8) for n in range(4)]
                asking = [client.request({"x": x, "value": int(x[0])}) for x in xs]
                outcomes = await asyncio.gather(*asking, return_exceptions=True)
                lost = [each for each in outcomes if isinstance(each, shmring.EngineDeadError)]
                answers = [each for each in outcomes if isinstance(each, int)]
                assert len(lost) + len(answers) == 4, outcomes
                assert answers == [int(x[0]) for x, each in zip(xs, outcomes, strict=True) if isinstance(each, int)]
                print("lost" if lost else "answered", flush=True)
                if lost:
                    break


asyncio.run(main(*sys.argv[1:]))
