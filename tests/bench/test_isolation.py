"""``bench isolation``: it tells a wait beside a heavy caller from one beside none, and says what it allows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import main
from bench.isolation import heavy
from bench.isolation.attacks import ATTACKS
from bench.isolation.command import Isolation, _figures, _table, _verdicts
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, EmbeddingRequest
from tests.tables import for_each


def result(neutral_ms: float, heavy_ms: float, *, nbytes: int = 1000, longest_ms: float = 0.0) -> Isolation:
    return Isolation("much", nbytes, (1.0, neutral_ms, neutral_ms), (1.0, heavy_ms, max(heavy_ms, longest_ms)), {"200": 3})


def test_percentiles_are_of_all_waits() -> None:
    assert _figures([number / 1000 for number in range(1, 201)]) == (100.0, 198.0, 200.0)
    assert _figures([0.5]) == (500.0, 500.0, 500.0)


@for_each(
    ("one", "met"),
    [
        (result(5, 29), [True, True]),
        (result(5, 31), [False, True]),
        (result(20, 39), [True, True]),
        (result(5, 49, nbytes=2 << 20), [True, True]),
        (result(5, 51, nbytes=2 << 20), [False, True]),
        (result(5, 20, longest_ms=151), [True, False]),
        (result(200, 20, longest_ms=151), [True, True]),
    ],
)
def test_what_is_allowed(one: Isolation, met: list[bool]) -> None:
    assert [verdict.met for verdict in _verdicts([one])] == met
    assert _table([one]).rows[0][-1] == "3 x 200"


@for_each("name", [name for name in ATTACKS if not name.startswith(("empty", "numbers", "a picture of 56"))])
def test_what_is_not_refused_is_a_request(name: str) -> None:
    assert isinstance(EMBEDDING_PARSER.parse(ATTACKS[name].body()), EmbeddingRequest)


@for_each("hangs_up", [False, True])
async def test_the_heavy_caller_counts_what_it_is_answered(hangs_up: bool) -> None:
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
        writer.write(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        status = await heavy._post(f"{host}:{port}", b"x" * 600_000, hangs_up=hangs_up)
        assert status == ("hung up" if hangs_up else "413")
        while not got:
            await asyncio.sleep(0)
    assert got == [b"x" * 600_000]


@pytest.mark.slow  # it starts a server
def test_a_run_measures_both_and_stores_them(tmp_path: Path) -> None:
    path = tmp_path / "isolation.json"
    case = "2000 texts as parts, 4 at a time"
    arguments = ["isolation", "--case", case, "--repetitions", "1", "--seconds", "0.5", "--json", str(path)]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code in (0, 1), ran.output
    stored: dict[str, Any] = json.loads(path.read_text())
    [row] = stored["tables"][0]["rows"]
    assert row[0] == case
    assert row[-1] == "none yet" or row[-1].endswith(" x 200")
