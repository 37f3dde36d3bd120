"""Two schedulers (``--dp 2``): each has a slab, and the tokenizer says in a request which one has its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.servers import picture
from tests.sglang.server import serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)

PICTURES = [picture(672, seed) for seed in range(6)]


def test_tensors_go_to_the_scheduler_that_gets_the_request(runtime_directory: Path) -> None:
    environment = {"SHMRING_SGLANG": "1", "SHMRING_SGLANG_SLAB": "128MiB"}
    with serve(runtime_directory, environment=environment, options=["--dp", "2"], ranks=2) as server:
        server.ask()
        until(lambda: server.log.count("tensors go through shared memory") == 2)
        alone = [server.ask(url) for url in PICTURES]
        assert len({*alone}) == len(PICTURES)
        assert [server.report(place)["taken"] for place in (0, 1)] == [3, 3]
        chosen = [server.ask(url, extra_body={"routed_dp_rank": 1}) for url in PICTURES]
        assert chosen == alone
        assert [server.report(place)["taken"] for place in (0, 1)] == [3, 9]
        assert [server.report(place)["lost"] for place in (0, 1)] == [0, 0]
        assert server.tensors() == {"copied": 12}
    assert server.left_behind() == []
