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
from bench.isolation.attacks import EMBEDDING_ATTACKS, NUMBER
from bench.isolation.chats import CHAT_ATTACKS
from bench.isolation.command import PLAN, Waits
from bench.results import Findings
from shmring.frontend.openai.chat import CHAT_PARSER, read_chat
from shmring.frontend.openai.completions import COMPLETION_PARSER, read_completion
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, EmbeddingRequest
from tests.tables import for_each

SMALL, LARGE = "2000 texts as parts, 4 at a time", "a text of 15 MB, 1 at a time"


def judged(neutral_ms: float, heavy_ms: float, case: str = SMALL, longest_ms: float = 0.0) -> Findings:
    """Of waits of which most are short: these are their 99th percentiles, and the longest one beside the heavy caller."""
    neutral = [1.0] * 80 + [neutral_ms] * 20
    heavy = [1.0] * 797 + [heavy_ms] * 202 + [max(heavy_ms, longest_ms)]
    return PLAN.findings(
        {case: {"beside a neutral load": [Waits(neutral, {})], "beside a heavy caller": [Waits(heavy, {"200": 3})]}}
    )


def test_percentiles_are_of_all_waits() -> None:
    parts = [Waits([float(number) for number in range(start, 201, 2)], {}) for start in (2, 1)]
    findings = PLAN.findings({SMALL: {"beside a heavy caller": parts}})
    [row] = findings.tables[0].rows
    assert row[0].startswith(f"{SMALL}: ")
    assert row[1:] == ["beside a heavy caller", "100.5", "198.0", "200.0", "", ""]
    assert [verdict.met for verdict in findings.targets] == [False, False]


@for_each(
    ("waits", "met"),
    [
        ((5, 29), [True, True]),
        ((5, 31), [False, True]),
        ((20, 39), [True, True]),
        ((5, 49, LARGE), [True, True]),
        ((5, 51, LARGE), [False, True]),
        ((5, 20, SMALL, 151), [True, False]),
        ((200, 20, SMALL, 151), [True, True]),
    ],
)
def test_what_is_allowed(waits: tuple[Any, ...], met: list[bool]) -> None:
    findings = judged(*waits)
    assert [verdict.met for verdict in findings.targets] == met
    assert [row[-1] for row in findings.tables[0].rows] == ["", "3 x 200"]


_REFUSED = ("empty", "numbers", "a picture of 56", "1 MB in chunks")


@for_each("attack", [attack for attack in EMBEDDING_ATTACKS if not attack.title.startswith(_REFUSED)])
def test_what_is_not_refused_is_a_request(attack: Any) -> None:
    assert isinstance(EMBEDDING_PARSER.parse(attack.body()), EmbeddingRequest)


@for_each("attack", CHAT_ATTACKS)
def test_chats_are_requests_and_so_are_those_beside_them(attack: Any) -> None:
    if attack.path == "/v1/completions":
        assert read_completion(COMPLETION_PARSER.parse(attack.body())).requests
    else:
        assert read_chat(CHAT_PARSER.parse(attack.body())).requests
    assert read_chat(CHAT_PARSER.parse(attack.small)).requests


@for_each(("hangs_up_after_s", "chunked"), [(None, False), (0.0, False), (None, True)])
async def test_the_heavy_caller_counts_what_it_is_answered(hangs_up_after_s: float | None, chunked: bool) -> None:
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/path HTTP/1.1\r\n")
        assert b"Authorization: Bearer heavy\r\n" in head
        if chunked:
            body = b""
            while (size := await reader.readline()) != b"0\r\n":
                assert size == b"1\r\n"
                body += (await reader.readexactly(3))[:1]
            got.append(body)
        else:
            got.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
        writer.write(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        body = b"x" * (600 if chunked else 600_000)
        posted = heavy.Heavy(f"{host}:{port}", "/v1/path", "heavy", 1, hangs_up_after_s, chunked)
        status = await heavy._post(posted, body)
        assert status == ("413" if hangs_up_after_s is None else "hung up")
        while not got:
            await asyncio.sleep(0)
    assert got == [body]


async def test_a_number_in_what_the_heavy_caller_posts_is_another_one_each_time() -> None:
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        got.append(await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        posted = heavy.Heavy(f"{host}:{port}", "/v1/path", "heavy")
        assert [await heavy._post(posted, f"f{NUMBER}".encode()) for _ in range(2)] == ["200", "200"]
    assert len(set(got)) == 2
    assert all(part[:1] == b"f" and part[1:].isdigit() for part in got)


@pytest.mark.slow  # it starts a server
def test_a_run_measures_both_and_stores_them(tmp_path: Path) -> None:
    path = tmp_path / "isolation.json"
    case = "2000 texts as parts, 4 at a time"
    arguments = ["isolation", "--case", case, "--repetitions", "1", "--seconds", "0.5", "--json", str(path)]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code in (0, 1), ran.output
    stored: dict[str, Any] = json.loads(path.read_text())
    neutral, heavy = stored["tables"][0]["rows"]
    assert neutral[0] == heavy[0]
    assert neutral[0].startswith(case)
    assert neutral[-1] == ""
    assert heavy[-1] == "" or heavy[-1].endswith(" x 200")
