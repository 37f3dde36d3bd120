"""Sends one request and times its answer.

The client is aiohttp, whose parser is compiled: for an event of a stream it took a third of the CPU that httpx and httpcore
took, 23 microseconds. A server needs several times as long to make one. Whether the generator was the bottleneck after all is
measured in each run.

Times are those at which pieces came out of the socket, and several events in one piece came at one time. A token is what an
event with text is, unless the server's own count at the end says otherwise.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import io
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bench.children import BenchError
from bench.serving.plan import Endpoint

_PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "embeddings": "/v1/embeddings"}
_DATA = b"data:"  # each event of these servers is one such line
_JSON = {"content-type": "application/json"}
_KEEP_ALIVE_S = 2.0  # uvicorn closes what was idle for 5 s; a request sent at that very moment would fail
_SHOWN = 200  # characters of an error
_GET_TIMEOUT_S = 10.0  # it takes milliseconds


@dataclasses.dataclass(slots=True)
class Exchange:
    """A request and its answer, by ``time.perf_counter``: when its turn had come, each event with text, when it was whole."""

    began: float
    ended: float = 0.0
    token_times: array.array[float] = dataclasses.field(default_factory=lambda: array.array("d"))
    output_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    """Whatever the server sends: a chunk of a stream, embeddings, or an error."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    data: list[msgspec.Raw] = []
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)


class Client:
    """A server at a URL, without ``/v1``, as a caller sees it. Made in a running loop; used with ``async with``.

    Args:
        connections: at most. 0: as many as requests, since a load says how many there are, and a limit would hide it.
        keep_alive_s: after which a connection that is idle is not used again.
    """

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        timeout_s: float,
        *,
        connections: int = 0,
        keep_alive_s: float = _KEEP_ALIVE_S,
    ) -> None:
        self._base = url
        self._url = url + _PATHS[endpoint]
        self._answer = {"chat": self._chat, "embeddings": self._embed}[endpoint]
        self._timeout_s = timeout_s
        kept: dict[str, Any] = {"keepalive_timeout": keep_alive_s} if keep_alive_s else {"force_close": True}
        connector = aiohttp.TCPConnector(limit=connections, **kept)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> bytes:
        """Returns what it answers at a path; raises BenchError if it does not, or with an error."""
        url = f"{self._base}{path}"
        try:
            async with asyncio.timeout(_GET_TIMEOUT_S), self._session.get(url) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{url} does not answer ({type(error).__name__}); does the server run?") from None
        if response.status != 200:
            raise BenchError(f"{url} answers HTTP {response.status}")
        return body

    async def exchange(self, body: bytes, began: float) -> Exchange:
        """Sends a request, and returns when its answer is whole; raises BenchError if it has none.

        A load of which something failed is no measurement: others had less to share a server with.
        """
        exchange = Exchange(began)
        try:
            # Read in pieces: bytes of a megabyte would be handed to the socket at once, with nothing else served meanwhile.
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(self._url, data=io.BytesIO(body), headers=_JSON) as response,
            ):
                if response.status != 200:
                    raise BenchError(f"HTTP {response.status}: {(await response.text(errors='replace'))[:_SHOWN]}")
                await self._answer(response, exchange)
        except TimeoutError:
            raise BenchError(f"no whole answer within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, ConnectionError, msgspec.DecodeError) as error:
            raise BenchError(f"no whole answer: {type(error).__name__}: {error}") from error
        exchange.ended = time.perf_counter()
        return exchange

    async def _chat(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        done, rest = False, b""
        async for piece in response.content.iter_any():  # aiohttp's own lines take three times the CPU
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(_DATA):
                    continue  # between two events, or a comment
                data = line[len(_DATA) :].strip()
                if data == b"[DONE]":
                    done = True
                    continue
                chunk = _ANSWER.decode(data)
                if chunk.error is not None:
                    raise BenchError(f"in the stream: {chunk.error}")
                if chunk.choices and chunk.choices[0].delta is not None and chunk.choices[0].delta.content:
                    exchange.token_times.append(now)
                if chunk.usage is not None and chunk.usage.completion_tokens:
                    exchange.output_tokens = chunk.usage.completion_tokens
        if not done:
            raise BenchError("the stream ended before [DONE]")
        if not exchange.token_times:
            raise BenchError("the stream had no tokens")
        exchange.output_tokens = exchange.output_tokens or len(exchange.token_times)

    async def _embed(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        if not _ANSWER.decode(await response.read()).data:
            raise BenchError("the answer had no embeddings")
