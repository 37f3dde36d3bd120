"""A ring and a client exchange a tensor; prints the answer and the file of every compiled module, as JSON.

Run by tests/house/test_build.py with other installations than the one that runs the tests.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import sys
from importlib.machinery import ExtensionFileLoader

import torch

import shmring


def compiled_modules() -> dict[str, str]:
    """Returns the file of each compiled module of shmring, by name; all of them are imported."""
    files = {}
    for package in ("shmring.core", "shmring.memory"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            specification = importlib.util.find_spec(module.name)
            if isinstance(specification.loader, ExtensionFileLoader):
                files[module.name] = importlib.import_module(module.name).__file__
    return files


async def answer(socket_dir: str) -> float:
    """Returns the sum of a tensor of 8 MiB of ones, as the engine's end sees it: large enough for streaming stores."""
    async with (
        shmring.serve("built", slab_nbytes="64MiB", socket_dir=socket_dir) as ring,
        shmring.connect("built", socket_dir=socket_dir) as client,
    ):
        request = asyncio.ensure_future(client.request({"ones": torch.ones(2 << 20)}, timeout=30))
        claim = await anext(aiter(ring))
        with claim:
            await claim.reply({"sum": float(claim.payload["ones"].sum())})
        return (await request)["sum"]


if __name__ == "__main__":
    print(json.dumps({"sum": asyncio.run(answer(sys.argv[1])), "shmring": shmring.__file__, "compiled": compiled_modules()}))
