"""A GPU made of host memory, as ``bench gpu`` sees one; what shmring does with it goes to :mod:`tests.model.fake_cuda`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

import shmring
from bench.gpu.device import Gpu
from shmring.client.client import Client
from shmring.client.connecting import open_client
from shmring.config import ClientConfig, RingConfig
from shmring.opening import Opening
from shmring.ring.ring import Ring
from shmring.ring.serving import create_shell
from shmring.ring.shell import Shell
from tests.model.fake_cuda import FakeCuda, FakeMemory

NAME = "A GPU made of host memory"


class HostMemory(Gpu):
    """What measuring asks of a GPU, of host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.cuda = FakeCuda()
        self.memory = FakeMemory()

    def describe(self) -> str:
        return NAME

    def serve(self, name: str, **options: Any) -> AbstractAsyncContextManager[Ring]:
        async def create() -> Ring:
            return Ring(await create_shell(Shell, name, RingConfig(**options), cuda=self.cuda, device_memory=self.memory))

        return Opening(create)

    def connect(self, name: str, **options: Any) -> AbstractAsyncContextManager[shmring.Client]:
        config = ClientConfig(**options)
        return Opening(lambda: open_client(Client, [name], config, cuda=self.cuda, device_memory=self.memory))

    def page_locked(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def finish(self) -> None:
        pass
