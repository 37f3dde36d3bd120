"""Servers, engines and frontends that end under load, by SIGTERM, ``shmring drain`` or ``shmring restart``: none fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import shmring
from shmring.service.supervision import DRAIN_SIGNAL
from tests.integration.test_http_server import SAMPLES, Server, lives, messages_of, serving
from tests.segments import own_name, segments_of

pytestmark = pytest.mark.slow  # processes that import torch, again and again

NAME = own_name("draining")
MODEL = "shmring-synthetic"
LIMIT_S = 90.0
TOKENS = 40  # of 10 ms: a stream is in flight for longer than anything here takes to be told to end
OPTIONS = (
    *("--slab-nbytes=64MiB", "--executor=synthetic", '--executor-options={"step_s": 0.01}', "--api-server-count=2"),
    *("--heartbeat-timeout=0", f"--name={NAME}", "--decoders=2"),
)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    """Polls until it is true."""
    async with asyncio.timeout(LIMIT_S):
        while not (result := await condition()):
            await asyncio.sleep(0.02)
    return result


class Load:
    """Callers that ask without a pause, on connections that stay open and on new ones: streams, chats and pictures.

    Attributes:
        answered: how many requests were answered, all of it.
        failures: what went wrong.
        refused: connections that were refused, which is no failed request once a server has stopped listening.
    """

    def __init__(self, url: str) -> None:
        self.answered = 0
        self.refused = 0
        self.failures: list[str] = []
        self._url = url
        self._stopped = False
        picture = messages_of((SAMPLES / "coffee.jpg").read_bytes())
        text = [{"role": "user", "content": "Hello"}]
        bodies: list[dict[str, Any]] = [
            {"messages": text, "stream": True, "max_tokens": TOKENS},
            {"messages": picture, "stream": True, "max_tokens": TOKENS},
            {"messages": picture, "max_tokens": 2},
            {"messages": text, "max_tokens": 2},
        ]
        self.callers = [
            asyncio.create_task(self._call({"model": MODEL, **body}, keeps_connections=keeps))
            for body in bodies
            for keeps in (True, False)
        ]

    async def _call(self, body: dict[str, Any], *, keeps_connections: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=None if keeps_connections else 0)
        async with httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits) as http:
            while not self._stopped:
                try:
                    response = await http.post("/v1/chat/completions", json=body)
                except httpx.ConnectError:
                    self.refused += 1
                    return
                except httpx.TransportError as error:
                    self.failures.append(f"{error!r} (keeps connections: {keeps_connections}, stream: {'stream' in body})")
                    continue
                whole = "data: [DONE]" in response.text if "stream" in body else '"finish_reason":' in response.text
                if response.status_code == 200 and whole:
                    self.answered += 1
                else:
                    self.failures.append(f"{response.status_code}: {response.text[-300:]}")

    async def goes_on(self, answers: int = 24) -> None:
        """Returns when so many more requests were answered."""
        target = self.answered + answers

        async def are_answered() -> bool:
            assert not self.failures, self.failures
            return self.answered >= target

        await until(are_answered)

    async def stop(self) -> None:
        """Returns when the last answer has come."""
        self._stopped = True
        await self.ended()

    async def ended(self) -> None:
        """Returns when nobody calls any more."""
        await asyncio.wait_for(asyncio.gather(*self.callers), LIMIT_S)


@contextlib.asynccontextmanager
async def loaded(socket_dir: Path, *options: str) -> AsyncIterator[tuple[Server, Load]]:
    """A server under load. In the end, nothing has failed and nothing is left of it."""
    with serving(socket_dir, *OPTIONS, *options) as server:
        load = Load(server.url)
        try:
            await load.goes_on()
            yield server, load
            await load.stop()
        finally:
            for task in load.callers:
                task.cancel()
            await asyncio.gather(*load.callers, return_exceptions=True)
        assert load.failures == []
        assert await asyncio.to_thread(server.stop) == 0
        assert server.killed == []
    assert segments_of(NAME) == []
    assert not [path for path in socket_dir.iterdir() if path.suffix in (".sock", ".lock") or "metrics" in path.name]


async def run(command: str, socket_dir: Path, *options: str) -> tuple[int | None, str]:
    """Runs ``shmring COMMAND``; returns its exit code and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "shmring.frontend.cli", command, NAME, f"--socket-dir={socket_dir}", *options),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode, errors.decode()


async def pids_of(socket_dir: Path, engine: str) -> tuple[int, dict[str, int]]:
    """Returns the pid of an engine, and those of its frontends."""
    snapshot = await shmring.inspect(engine, socket_dir=str(socket_dir))
    return snapshot.pid, {client.name: client.pid for client in snapshot.clients if client.state == "connected"}


def warnings_in(socket_dir: Path) -> list[str]:
    """Returns the lines of a server's log at WARNING and above, which is its level."""
    lines = (socket_dir / "errors").read_text().splitlines()
    return [line for line in lines if not line.startswith("shmring: ")]  # what it says is no warning


async def no_slot_is_used(socket_dir: Path, *engines: str) -> None:
    """Returns when no slot of these engines is in use, and no memory is lost."""

    async def are_free() -> bool:
        numbers = [(await shmring.inspect(name, socket_dir=str(socket_dir))).statistics for name in engines]
        names = ("slots_published", "slots_claimed", "slots_draining", "quarantined_nbytes", "running", "waiting")
        return not any(number[name] for number in numbers for name in names)

    await until(are_free)


async def test_sigterm_ends_a_server_when_its_requests_have_ended(socket_dir: Path) -> None:
    async with loaded(socket_dir) as (server, load):
        os.kill(server.process.pid, signal.SIGTERM)
        await load.ended()
        assert load.refused == len(load.callers), "each of them has learned that the port is closed"
        assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0


async def test_a_load_balancer_has_time_to_notice(socket_dir: Path) -> None:
    async with loaded(socket_dir, "--shutdown-delay=4") as (server, load):
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.get("/ready")).status_code == 200
            os.kill(server.process.pid, signal.SIGTERM)

            async def says_so() -> bool:
                ready = await http.get("/ready")
                return ready.status_code == 503 and ready.json()["error"]["code"] == "shutting_down"

            await until(says_so)
            answer = await http.get("/version")
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        await load.stop()  # as if all traffic went elsewhere
        assert not load.refused, "until then, everybody was served"
        assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0


async def test_shmring_drain_ends_a_server(socket_dir: Path) -> None:
    async with loaded(socket_dir) as (server, _):
        for code, said in await asyncio.gather(run("drain", socket_dir), run("drain", socket_dir)):  # two operators
            # If the other one was much faster, there is no server any more, or it ends in this moment.
            assert said.splitlines()[-1] == "the server has ended" or " answers" in said or "ended; try again" in said, said
            assert code == ("the server has ended" not in said)
        assert not lives(server.process.pid)
        assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0


async def test_a_drained_frontend_is_replaced(socket_dir: Path) -> None:
    async with loaded(socket_dir) as (server, load):
        engine, before = await pids_of(socket_dir, NAME)
        for index in range(2):
            code, said = await run("drain", socket_dir, f"--frontend={index}")
            assert (code, said.splitlines()[-1]) == (0, f"frontend {index} was replaced")
            await load.goes_on()
        again, after = await pids_of(socket_dir, NAME)
        assert again == engine
        assert before.keys() == after.keys() == {"frontend 0", "frontend 1"}
        assert not set(before.values()) & set(after.values())
        code, said = await run("drain", socket_dir, "--frontend=2")
        assert (code, said) == (1, f"shmring drain: there is no frontend 2; {NAME} has frontend 0, frontend 1\n")
        code, said = await run("drain", socket_dir, "--engine=0")
        assert code == 1
        assert f"{NAME} has no other engine that takes requests" in said
        async with httpx.AsyncClient(base_url=server.url) as http:
            states = (await http.get("/health")).json()["frontends"]
            assert [state["restarts"] for state in states] == [0, 0], "nothing has gone wrong"
        await load.stop()
        assert warnings_in(socket_dir) == [], "looking at an engine is no connection that fails"
        await no_slot_is_used(socket_dir, NAME)


async def test_a_rolling_restart_of_engines_fails_no_request(socket_dir: Path) -> None:
    names = [f"{NAME}-{rank}" for rank in range(2)]
    async with loaded(socket_dir, "--data-parallel-size=2") as (_, load):
        before = [await pids_of(socket_dir, name) for name in names]
        code, said = await run("restart", socket_dir)
        assert code == 0, said
        assert [line for line in said.splitlines() if "replaced" in line] == [
            f"the engine {name} was replaced" for name in names
        ]
        await load.goes_on()
        after = [await pids_of(socket_dir, name) for name in names]
        assert not {pid for pid, _ in before} & {pid for pid, _ in after}
        assert [frontends for _, frontends in before] == [frontends for _, frontends in after]
        code, said = await run("drain", socket_dir, "--engine=1")
        assert code == 0, said
        code, said = await run("drain", socket_dir, "--engine=2")
        assert (code, said) == (1, f"shmring drain: there is no engine 2; {NAME} has 2, and 0 is the first\n")
        await load.stop()
        assert warnings_in(socket_dir) == []
        await no_slot_is_used(socket_dir, *names)


async def test_an_engine_that_is_killed_while_it_drains_leaves_nothing_behind(socket_dir: Path) -> None:
    names = [f"{NAME}-{rank}" for rank in range(2)]
    with serving(socket_dir, *OPTIONS, "--data-parallel-size=2") as server:
        load = Load(server.url)
        await load.goes_on()
        pid, _ = await pids_of(socket_dir, names[0])
        os.kill(pid, signal.SIGSTOP)  # so that it has requests when it is killed
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGKILL)

        async def is_back() -> bool:
            with contextlib.suppress(shmring.EngineDeadError, TimeoutError):
                now, frontends = await pids_of(socket_dir, names[0])
                return now != pid and len(frontends) == 2
            return False

        await until(is_back)
        await load.stop()
        # Answers that had begun, and media in the engine's slab: those are not sent to another engine.
        assert {text.split(":")[0] for text in load.failures} <= {"200", "503"}
        await no_slot_is_used(socket_dir, *names)
        assert await asyncio.to_thread(server.stop) == 0
    assert segments_of(NAME) == []


async def test_a_frontend_that_is_killed_while_it_drains_leaves_nothing_behind(socket_dir: Path) -> None:
    with serving(socket_dir, *OPTIONS) as server:
        load = Load(server.url)
        await load.goes_on()
        _, before = await pids_of(socket_dir, NAME)
        os.kill(before["frontend 0"], signal.SIGTERM)
        os.kill(before["frontend 0"], signal.SIGKILL)

        async def is_back() -> bool:
            _, now = await pids_of(socket_dir, NAME)
            return now.get("frontend 0", before["frontend 0"]) != before["frontend 0"]

        await until(is_back)
        await load.stop()
        await no_slot_is_used(socket_dir, NAME)
        assert await asyncio.to_thread(server.stop) == 0
    assert segments_of(NAME) == []


async def test_a_supervisor_that_is_killed_while_it_ends_takes_all_with_it(socket_dir: Path) -> None:
    with serving(socket_dir, *OPTIONS) as server:
        load = Load(server.url)
        await load.goes_on()
        os.kill(server.process.pid, signal.SIGTERM)
        os.kill(server.process.pid, signal.SIGKILL)
        await load.stop()

        async def are_gone() -> bool:
            return not any(map(lives, (*server.engines, *server.frontends)))

        await until(are_gone)
    assert segments_of(NAME) == []


async def test_a_second_signal_ends_it_at_once(socket_dir: Path) -> None:
    with serving(socket_dir, *OPTIONS, "--shutdown-timeout=600") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 100_000}
            async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                assert response.status_code == 200
                os.kill(server.process.pid, signal.SIGTERM)

                async def port_is_closed() -> bool:
                    try:
                        await http.get("/version")
                    except httpx.ConnectError:
                        return True
                    return False

                await until(port_is_closed)
                assert server.process.lives

                async def has_ended() -> bool:
                    server.process.send(signal.SIGINT)  # soon after the first, it would be one signal, said twice
                    return not server.process.lives

                await until(has_ended)
                assert server.process.returncode in (1, -signal.SIGINT)  # one may come when it has all but ended
                with contextlib.suppress(httpx.TransportError):
                    await response.aread()
    assert segments_of(NAME) == []


async def test_the_first_signal_for_a_server_is_no_second_one_for_a_frontend_that_drains(socket_dir: Path) -> None:
    with serving(socket_dir, *OPTIONS, "--shutdown-timeout=60", "--shutdown-delay=0.5") as server:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 400}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            streams = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(8)]

            async def all_run() -> bool:
                snapshot = await shmring.inspect(NAME, socket_dir=str(socket_dir))
                return bool(snapshot.statistics["running"] == 8)

            await until(all_run)
            _, frontends = await pids_of(socket_dir, NAME)
            os.kill(frontends["frontend 0"], DRAIN_SIGNAL)
            await asyncio.sleep(1.2)  # from here on, a signal would not be taken for the same one, said twice
            assert [(await http.get("/ready")).status_code for _ in range(5)] == [200] * 5, "the other one is ready"
            os.kill(server.process.pid, signal.SIGTERM)
            answers = await asyncio.gather(*streams)
            assert [answer.text[-200:] for answer in answers if "data: [DONE]" not in answer.text] == []
        assert await asyncio.to_thread(server.process.wait, LIMIT_S) == 0
    assert segments_of(NAME) == []


async def test_one_command_at_a_time_replaces_processes_and_none_does_while_engines_are_paused(socket_dir: Path) -> None:
    with serving(socket_dir, *OPTIONS, "--data-parallel-size=2", "--admin-key=admin") as server:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
            lock.bind(f"\0shmring-drain-{os.getuid()}-{server.process.pid}")
            for command in (("drain", "--frontend=0"), ("drain", "--engine=1"), ("restart",)):
                code, said = await run(command[0], socket_dir, *command[1:])
                assert (code, "of this server is at work" in said) == (1, True), said
        async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer admin"}) as http:
            assert (await http.post("/pause")).status_code == 200
        for command in (("drain",), ("drain", "--frontend=0"), ("drain", "--engine=1")):
            code, said = await run(command[0], socket_dir, *command[1:])
            assert (code, "is paused, so its requests would not end" in said) == (1, True), said
        assert await asyncio.to_thread(server.stop) == 0
    assert segments_of(NAME) == []


async def test_what_can_not_be_drained_is_said(socket_dir: Path, serve: Any) -> None:
    code, said = await run("drain", socket_dir)
    assert (code, said) == (1, f"shmring drain: no engine of a server '{NAME}' answers at {socket_dir}\n")
    ring = await serve(name=NAME, socket_dir=str(socket_dir))
    code, said = await run("restart", socket_dir)
    assert (code, said) == (1, f"shmring restart: no `shmring serve` runs '{NAME}'; end process {os.getpid()} with SIGTERM\n")
    await ring.close()
