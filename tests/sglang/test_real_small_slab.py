"""A slab with space for one picture, and not for two: SGLang sends the others in its messages, and no segment is made."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers import picture
from tests.sglang.server import Server, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)

PICTURES = [picture(672, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    environment = {"SHMRING_SGLANG": "1", "SHMRING_SGLANG_SLAB": "16MiB", "SHMRING_SGLANG_COPY": "1"}
    with serve(runtime_directory, environment=environment) as server:
        yield server


def test_what_has_no_space_goes_inline(server: Server) -> None:
    server.ask(picture(56, 0))
    until(lambda: "tensors go through shared memory" in server.log)
    assert "its tensors are copied out" in server.log
    alone = [server.ask(url) for url in PICTURES]
    assert len({*alone}) == len(PICTURES)
    assert server.tensors().get("inline space", 0) == 0
    with ThreadPoolExecutor(4) as threads:
        while "inline space" not in server.tensors():
            assert len({*threads.map(server.ask, PICTURES)}) == len(PICTURES)
    assert server.left_behind() == []


def test_what_is_larger_than_the_slab_goes_inline(server: Server) -> None:
    assert server.ask(picture(896, 0))  # 19 MB
    assert server.tensors()["inline size"] == 1
    assert server.report()["slots_in_use"] == 0  # a copy holds none
    assert server.report()["lost"] == 0
