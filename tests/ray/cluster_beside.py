"""A program: a cluster of its own beside that of a test, with an engine of the same name, until its stdin ends.

It says in a line what a near and a far client of its engine get, and the processes of the engine and of both nodes.
"""

from __future__ import annotations

import json
import sys

import ray
import torch

from shmring.integrations.ray import EngineActor
from tests.ray.actors import Caller, handler
from tests.ray.conftest import DIRECTORY, Nodes
from tests.ray.test_real_deaths import pid_of


def main() -> None:
    nodes = Nodes(2, first_address=100)
    engine = EngineActor.options(**nodes.on(1)).remote("vision", handler, slab_nbytes="16MiB")
    sums = []
    for number in (1, 0):
        caller = ray.remote(Caller).options(**nodes.on(number)).remote()
        ray.get(caller.connect.remote("vision"))
        sums.append(ray.get(caller.request.remote({"do": "sum", "x": torch.ones(7)}))["sum"])
    processes = sorted(nodes.processes(0) | nodes.processes(1))
    print(json.dumps({"sums": sums, "engine": pid_of(engine), "processes": processes, "directory": str(DIRECTORY)}), flush=True)
    sys.stdin.read()
    nodes.close()


if __name__ == "__main__":
    main()
