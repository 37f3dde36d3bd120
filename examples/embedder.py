"""A batching embedder: many callers send a picture each, and the model gets batches.

    python examples/embedder.py engine            # in one terminal
    python examples/embedder.py embed *.jpg       # in another

Put your model in the place of `Model`. Pictures are decoded by Pillow (`pip install pillow`).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

import shmring

NAME = "embedder"
SHAPE = (224, 224, 3)
MOST = 32  # pictures in a batch
LINGER_S = 0.005  # how long a batch that is not full waits for more


class Question(msgspec.Struct):
    """What callers send. The engine refuses anything else, with an error that says what is wrong."""

    pixels: torch.Tensor


class Model(torch.nn.Module):
    """Stands for a real one: what filters of random weights see in tiles of 16 x 16 pixels."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)  # each start of the engine gives the same embeddings
        self.tiles = torch.nn.Conv2d(3, size, 16, stride=16)

    @torch.inference_mode()
    def embed(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns an embedding of length 1 for each picture: float32 of shape (pictures, size)."""
        pixels = torch.stack(list(pictures)).permute(0, 3, 1, 2).float() / 255
        return torch.nn.functional.normalize(self.tiles(pixels).relu().mean(dim=(2, 3)), dim=1)


def fault_of(pixels: torch.Tensor) -> ValueError | None:
    """Returns why the model can't take these pixels; None: it can."""
    if pixels.shape == SHAPE and pixels.dtype == torch.uint8:
        return None
    return ValueError(f"pixels must be torch.uint8 of shape {SHAPE}, not {pixels.dtype} of shape {tuple(pixels.shape)}")


async def run_engine(name: str = NAME) -> None:
    """Answers requests until SIGTERM or Ctrl-C. Requests that have begun are answered before it ends."""
    model = Model()

    async def answer(claims: list[shmring.Claim[Question]]) -> list[object]:
        pictures = [claim.payload.pixels for claim in claims]  # views of the slab: no copy
        replies: list[object] = [fault_of(picture) for picture in pictures]  # an error fails its request, and not the batch
        good = [index for index, fault in enumerate(replies) if fault is None]
        if good:  # on a thread: the loop goes on reading requests while the model computes
            embeddings = await asyncio.to_thread(model.embed, [pictures[index] for index in good])
            for index, embedding in zip(good, embeddings, strict=True):
                replies[index] = {"embedding": embedding, "batch": len(good)}
        return replies

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with shmring.serve(name, payload_type=Question, slab_nbytes="256MiB") as ring:
        running = asyncio.create_task(ring.run_batches(answer, MOST, linger_s=LINGER_S))
        print(f"{name} is ready", flush=True)
        await stop.wait()
        await ring.drain(timeout=10)
        await ring.close("the engine stops")
        await running


def decode(path: Path, pixels: torch.Tensor) -> None:
    """Decodes a picture into a tensor of shape `SHAPE`."""
    with Image.open(path) as image:
        pixels.numpy()[:] = np.asarray(image.convert("RGB").resize((SHAPE[1], SHAPE[0])))


async def embed(client: shmring.Client, path: Path) -> dict[str, Any]:
    """Returns the engine's reply to a picture, which is decoded into the slab."""
    # drain: if this is cancelled, the thread still writes, and the memory is not used again before it has ended.
    async with client.slot(shmring.nbytes_for((SHAPE, torch.uint8)), drain=True) as slot:
        pixels = slot.tensor(SHAPE, torch.uint8)
        await asyncio.to_thread(decode, path, pixels)
        reply: dict[str, Any] = await client.request({"pixels": pixels}, timeout=30)  # it lies in the slot: no copy
    return reply


async def embed_all(paths: list[Path], name: str = NAME) -> None:
    """Embeds pictures, all at once, and prints how near each is to the first one."""
    async with shmring.connect(name) as client:
        replies = await asyncio.gather(*(embed(client, path) for path in paths))
    for path, reply in zip(paths, replies, strict=True):
        near = float(reply["embedding"] @ replies[0]["embedding"])
        print(f"{near:.3f}  in a batch of {reply['batch']:2}  {path}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine"]:
            asyncio.run(run_engine())
        case ["embed", *paths] if paths:
            asyncio.run(embed_all([Path(path) for path in paths]))
        case _:
            sys.exit(__doc__)
