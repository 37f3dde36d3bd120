"""A prompt that comes as embeddings: from an API server to two workers with one copy."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.vllm.server import Server, serve
from bench.vllm.workers import OPTIONS

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

TOKENS, WIDTH = 1024, 4096
NBYTES = TOKENS * WIDTH * 2
EMBEDDINGS = (
    "--enable-prompt-embeds",
    "--max-model-len",
    "1040",
    "--hf-overrides",
    f'{{"text_config": {{"hidden_size": {WIDTH}}}}}',
)


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "256MiB", "SHMRING_VLLM_CHECK": "1", "SHMRING_VLLM_WAIT_S": "10"}
    options = (*OPTIONS, *EMBEDDINGS)
    with serve(runtime_directory, side=416, environment=environment, options=options, in_process=False) as server:
        yield server


def ask(server: Server, seed: int) -> Any:
    """Returns an answer with its logprobs."""
    file = io.BytesIO()
    torch.save(torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16), file)
    body = {"model": "tiny", "prompt_embeds": base64.b64encode(file.getvalue()).decode(), "max_tokens": 4, "temperature": 0}
    choice = server.post("/v1/completions", body | {"ignore_eos": True, "logprobs": 2}, 300)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_the_workers_read_it_where_the_api_server_has_put_it(server: Server) -> None:
    before = server.engine()
    answers = [ask(server, seed) for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]
    assert server.tensors() == {"copied": 3}
    after = server.engine()
    assert after["workers_in_place_bytes"] - before["workers_in_place_bytes"] == 3 * NBYTES
    assert after["workers_copied_bytes"] == before["workers_copied_bytes"]
    assert after["lost"] == 0  # each checksum was compared


def test_nothing_stays(server: Server) -> None:
    assert server.engine()["slots_in_use"] == 0
    assert "Traceback" not in server.log
