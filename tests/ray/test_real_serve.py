"""The frontend on Ray Serve, asked by the openai client: answers, streams, hang-ups, deaths, new versions, and the end."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.ray.conftest import Nodes, is_running, kill
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PICTURE = base64.b64encode((ROOT / "frontend/samples/chelsea.jpg").read_bytes()).decode()
ARGUMENTS = {
    "executor": "synthetic",
    "executor-options": {"step_s": 0.01, "tokens": 16},
    "slab-nbytes": "64MiB",
    "decoders": 1,
    "num-replicas": 2,
    "shutdown-timeout": 20,
}
MODEL = "shmring-synthetic"


pytestmark = pytest.mark.timeout(300)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class Application:
    """The application in a cluster, and its processes."""

    def __init__(self, nodes: Nodes) -> None:
        from ray import serve

        self.nodes = nodes
        self._serve = serve
        self.url = f"http://127.0.0.1:{free_port()}"
        serve.start(http_options={"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}, proxy_location="HeadOnly")

    def run(self, *, route_prefix: str = "/", **changes: Any) -> None:
        from shmring.frontend.ray import app

        arguments = ARGUMENTS | {name.replace("_", "-"): value for name, value in changes.items()}
        self._serve.run(app(arguments), name="shmring", route_prefix=route_prefix)

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def engines(self) -> dict[int, Any]:
        """The actors of engines, by the pid of their processes."""
        import msgspec
        import ray

        from shmring.integrations.ray.directory import NAMESPACE, Where

        found = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE:
                try:
                    handle = ray.get_actor(actor["name"], NAMESPACE)
                    found[msgspec.msgpack.decode(ray.get(handle.where.remote(), timeout=30), type=Where).process.pid] = handle
                except (ValueError, ray.exceptions.RayError):
                    continue  # it has just ended
        return found

    def frontends(self) -> set[int]:
        """The processes of replicas, below this one."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == ["ray::ServeReplica:shmring:shmring"]:
                    found.add(process.pid)
        return found

    def in_flight(self) -> int:
        import ray

        statistics = [ray.get(engine.statistics.remote(), timeout=30) for engine in self.engines().values()]
        return sum(each.running + each.waiting for each in statistics)

    def status(self) -> Any:
        return self._serve.status().applications["shmring"]

    def delete(self) -> None:
        self._serve.delete("shmring")


def check_the_end(application: Application, streams: list[Any]) -> None:
    """Deletes the application while it streams: the answers are complete, and nothing is left."""
    processes = {*application.engines(), *application.frontends()}
    for stream in streams:
        next(iter(stream))
    application.delete()
    for stream in streams:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    until(lambda: not [pid for pid in processes if is_running(pid)])
    assert not list(Path(f"/tmp/shmring-{os.getuid()}").glob("ray-*-shmring-*.sock"))
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shmring-")]


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] = "0"  # both replicas get requests
    nodes = Nodes(2)
    try:
        application = Application(nodes)
        application.run()
        yield application
        application._serve.shutdown()
    finally:
        del os.environ["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"]
        nodes.close()


class Load:
    """Asks all the time, on several threads; what each request ended with, and when."""

    def __init__(self, url: str, threads: int = 4) -> None:
        self.outcomes: list[tuple[float, int | str]] = []
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def _ask(self) -> None:
        body = {"model": MODEL, "input": "hello"}
        with httpx.Client(timeout=60) as client:
            while not self._is_over.is_set():
                try:
                    outcome: int | str = client.post(f"{self._url}/v1/embeddings", json=body).status_code
                except httpx.HTTPError as error:
                    outcome = type(error).__name__
                self.outcomes.append((time.monotonic(), outcome))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def answered(self, more: int) -> Callable[[], bool]:
        """Returns whether so many more have been answered since now."""
        before = self.good
        return lambda: self.good >= before + more

    @property
    def good(self) -> int:
        return sum(outcome == 200 for _, outcome in list(self.outcomes))

    @property
    def bad(self) -> list[tuple[float, int | str]]:
        return [outcome for outcome in list(self.outcomes) if outcome[1] != 200]


def picture() -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{PICTURE}"}},
        {"type": "text", "text": "what?"},
    ]
    return {"role": "user", "content": content}


def test_texts_and_pictures_are_answered(application: Application) -> None:
    client = application.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    said: Any = {"role": "user", "content": "hello"}
    answer = client.chat.completions.create(model=MODEL, messages=[said])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    seen: Any = picture()
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=[seen])
    assert int(raw.headers["x-shmring-slab-bytes"]) > 100_000, "it went through the slab"
    assert int(raw.headers["x-shmring-copies"]) == 0
    assert "[synthetic]" in str(raw.parse().choices[0].message.content)
    assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2


def test_an_answer_has_one_name(application: Application) -> None:
    answer = httpx.get(f"{application.url}/v1/models", headers={"x-request-id": "mine"}, timeout=30)
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert len(httpx.get(f"{application.url}/v1/models", timeout=30).headers.get_list("x-request-id")) == 1


def test_errors_are_those_of_the_server(application: Application) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        application.client().embeddings.create(model="no-such-model", input="a")
    answer = httpx.post(f"{application.url}/v1/embeddings", content=b"{}", timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert httpx.get(f"{application.url}/nothing", timeout=30).json()["error"]["code"] == "not_found"


def test_an_answer_is_streamed(application: Application) -> None:
    said: Any = {"role": "user", "content": "hello"}
    pieces = list(application.client().chat.completions.create(model=MODEL, messages=[said], stream=True))
    assert len([piece for piece in pieces if piece.choices and piece.choices[0].delta.content]) > 4
    assert pieces[-1].choices[0].finish_reason == "length"


def test_who_hangs_up_has_its_request_aborted(application: Application) -> None:
    said: Any = {"role": "user", "content": "hello"}
    stream = application.client().chat.completions.create(model=MODEL, messages=[said], stream=True, max_tokens=100_000)
    next(iter(stream))
    assert application.in_flight() == 1
    stream.close()
    until(lambda: application.in_flight() == 0)
    waiting = threading.Thread(target=hang_up, args=(application.url,))
    waiting.start()
    until(lambda: application.in_flight() == 1)
    waiting.join()
    until(lambda: application.in_flight() == 0)


def hang_up(url: str) -> None:
    """Asks for a long answer that is not streamed, and goes after three seconds."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100_000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=3)


def test_when_an_engine_dies_its_replica_does_and_the_other_answers(application: Application) -> None:
    until(lambda: len(application.engines()) == len(application.frontends()) == 2)
    engines, frontends = application.engines(), application.frontends()
    with Load(application.url) as load:
        until(load.answered(20))
        killed_at = kill(min(engines))
        until(lambda: len([pid for pid in frontends if is_running(pid)]) == 1)
        until(load.answered(20))
        until(lambda: len(application.engines().keys() - {min(engines)}) == 2)
        until(lambda: len(application.frontends() - frontends) == 1)
        until(load.answered(20))
    print("after the engine's end:", [(round(at - killed_at, 2), outcome) for at, outcome in load.bad])
    last = load.outcomes[-20:]
    assert {outcome for _, outcome in last} == {200}
    assert {outcome for _, outcome in load.bad} <= {500, 503}, "each caller got an answer"


def test_when_a_frontend_dies_its_engine_ends_and_gives_its_memory_back(application: Application) -> None:
    until(lambda: len(application.engines()) == len(application.frontends()) == 2)
    engines, frontends = application.engines(), application.frontends()
    sockets = Path(f"/tmp/shmring-{os.getuid()}")
    before = set(sockets.glob("ray-*-shmring-*"))
    with Load(application.url) as load:
        until(load.answered(20))
        kill(min(frontends))
        until(lambda: len([pid for pid in engines if is_running(pid)]) == 1)
        until(lambda: len(set(sockets.glob("ray-*-shmring-*.sock")) & before) == 1)
        until(load.answered(20))
        until(lambda: len(application.engines().keys()) == len(application.frontends()) == 2)
    assert {outcome for _, outcome in load.outcomes[-8:]} == {200}


def test_a_new_version_fails_no_request(application: Application) -> None:
    engines = application.engines()
    with Load(application.url) as load:
        until(load.answered(20))
        application.run(served_model_name=[MODEL, "the-new-one"])
        until(load.answered(20))
        until(lambda: not [pid for pid in engines if is_running(pid)])
        until(load.answered(20))
    assert load.bad == []
    assert {model.id for model in application.client().models.list()} == {MODEL, "the-new-one"}


def test_callers_need_a_key_if_there_are_any(application: Application, tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("the-key\n")
    keys.chmod(0o600)
    application.run(api_key_file=str(keys))
    with pytest.raises(openai.AuthenticationError):
        application.client().embeddings.create(model=MODEL, input="a")
    assert application.client("the-key").embeddings.create(model=MODEL, input="a").data
    assert httpx.get(f"{application.url}/health", timeout=30).status_code == 200


def test_it_can_be_below_a_path(application: Application) -> None:
    application.run(route_prefix="/llm")
    client = openai.OpenAI(base_url=f"{application.url}/llm/v1", api_key="none", max_retries=0, timeout=60)
    assert client.embeddings.create(model=MODEL, input="a").data
    assert httpx.get(f"{application.url}/v1/models", timeout=30).status_code == 404


def test_wrong_arguments_are_said_when_it_is_deployed(application: Application, tmp_path: Path) -> None:
    from shmring.frontend.ray import app

    with pytest.raises(ValueError, match="'max-pixel' can't be one: it may be 'max-pixels'"):
        app({"max-pixel": "1"})
    with pytest.raises(RuntimeError):
        application.run(api_key_file=str(tmp_path / "keys"))
    assert "keys' does not exist" in application.status().deployments["shmring"].message
    with pytest.raises(RuntimeError):
        application.run(executor_options={"colour": "red"})
    assert "colour" in application.status().deployments["shmring"].message


def test_the_command_of_the_page_deploys_it(application: Application) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    [command] = re.findall(r"^serve run (shmring\.frontend\.ray:app .*)$", page, re.MULTILINE)
    address = application.nodes.cluster.address
    options = ["run", "--address", address, "--name", "shmring", "--non-blocking"]
    program = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", *options]
    subprocess.run([*program, *command.split()], check=True, timeout=240)
    assert [model.id for model in application.client().models.list()] == ["shmring-fingerprints"]
    done = subprocess.run([*program, *command.split(), "max-pixel=1"], capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "the application's arguments: 'max-pixel' can't be one: it may be 'max-pixels'" in done.stderr
    assert application.client().embeddings.create(model="shmring-fingerprints", input="a").data, "the other one goes on"


def test_the_end_waits_for_requests_and_leaves_nothing(application: Application) -> None:
    application.run()
    assert len({*application.engines(), *application.frontends()}) == 4
    said: Any = {"role": "user", "content": "hello"}
    streams = [
        application.client().chat.completions.create(model=MODEL, messages=[said], stream=True, max_tokens=200)
        for _ in range(4)
    ]
    check_the_end(application, streams)
