"""A DataLoader whose workers decode pictures, and have an engine embed them: here, to train a small classifier on top.

    python examples/embedder.py engine                # in one terminal
    python examples/data_loader.py PICTURES           # in another; PICTURES has a directory of JPEGs for each class

The engine has the large model, once. Each worker of the DataLoader is a process with a client of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

import shmring
import shmring.threads

NAME = "embedder"
SHAPE = (224, 224, 3)
SIZE = 64  # of an embedding
TIMEOUT_S = 60.0


class EmbeddedPictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures of a directory, as the engine sees them. The directory in which a picture lies is its class."""

    def __init__(self, directory: Path) -> None:
        self.classes = sorted(path.name for path in directory.iterdir() if path.is_dir())
        self.paths = sorted(directory.glob("*/*.jpg"))
        self.client: shmring.threads.Client | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        """Returns (embedding, class) of each picture. All of them are at the engine at once: so it gets whole batches."""
        assert self.client is not None
        submissions = [self._submit(self.client, self.paths[index]) for index in indices]
        embeddings = [submission.result(timeout=TIMEOUT_S)["embedding"] for submission in submissions]
        numbers = [self.classes.index(self.paths[index].parent.name) for index in indices]
        return list(zip(embeddings, numbers, strict=True))

    def _submit(self, client: shmring.threads.Client, path: Path) -> shmring.threads.Submission:
        with Image.open(path) as image, client.slot(shmring.nbytes_for((SHAPE, torch.uint8)), timeout=TIMEOUT_S) as slot:
            pixels = slot.tensor(SHAPE, torch.uint8)
            pixels.numpy()[:] = np.asarray(image.convert("RGB").resize((SHAPE[1], SHAPE[0])))
            return client.submit({"pixels": pixels}, timeout=TIMEOUT_S)


def connect_worker(number: int) -> None:
    """Connects a worker, in its own process. A client can't be handed to another process, so no client is made before."""
    worker = get_worker_info()
    assert worker is not None
    assert isinstance(worker.dataset, EmbeddedPictures)
    worker.dataset.client = shmring.threads.connect(NAME, connect_timeout_s=60, description=f"worker {number}")


def train(directory: Path, epochs: int = 20) -> None:
    """Trains a layer on the embeddings of a directory's pictures, and prints the loss of each epoch."""
    pictures = EmbeddedPictures(directory)
    loader = DataLoader(
        pictures, batch_size=16, shuffle=True, num_workers=2, worker_init_fn=connect_worker, persistent_workers=True
    )
    layer = torch.nn.Linear(SIZE, len(pictures.classes))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for epoch in range(epochs):
        losses = []
        for embeddings, numbers in loader:
            loss = torch.nn.functional.cross_entropy(layer(embeddings), numbers)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [directory]:
            train(Path(directory))
        case _:
            sys.exit(__doc__)
