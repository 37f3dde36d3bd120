"""``shmring serve --executor vllm``: a real server, whose engine core hosts vLLM's engine, and the openai client.

What can't be seen from outside, a program of its own looks at (:mod:`.hosted`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.servers import picture as data_url
from bench.vllm.server import QUIET_ENVIRONMENT
from shmring.frontend.commands.serve_process import ServerProcess
from tests.segments import own_name, segments_of
from tests.vllm.hosted import ENGINE, SIDE, TEXTS, TOKENS, write_model

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
NAME = own_name("vllm-executor")
START_S = 1500.0
GREEDY: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}


@contextlib.contextmanager
def serving(name: str, model: Path, directory: Path, engine: Mapping[str, Any] = ENGINE) -> Iterator[ServerProcess]:
    arguments = [
        *(str(model), "--executor", "vllm", "--executor-options", json.dumps(engine), "--port", "0"),
        *("--name", name, "--socket-dir", str(directory), "--api-server-count", "2", "--start-timeout", str(START_S)),
    ]
    environment = os.environ | QUIET_ENVIRONMENT
    errors = directory / f"{name}.log"
    with ServerProcess.start(arguments, environment=environment, errors=errors, stop_limit_s=60.0) as server:
        server.wait_until_ready(START_S)
        yield server


@pytest.fixture(scope="module")
def model(runtime_directory: Path) -> Path:
    write_model(runtime_directory / "tiny")
    return runtime_directory / "tiny"


@pytest.fixture(scope="module")
def server(model: Path, runtime_directory: Path) -> Iterator[ServerProcess]:
    with serving(NAME, model, runtime_directory) as server:
        yield server
        assert server.stop() == 0
        assert server.killed == []
    assert "is killed" not in server.last_words
    assert segments_of(NAME) == []


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[str, Any]:
    """What the program has seen."""
    return run_program(str(model))


def run_program(*arguments: str, program: str = "tests.vllm.hosted") -> dict[str, Any]:
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr[-4000:]
    [line] = re.findall(r"^seen (.*)$", done.stdout, re.MULTILINE)
    found: dict[str, Any] = json.loads(line)
    return found


def gauge(server: ServerProcess, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def content_of(text: str, *seeds: int) -> list[dict[str, Any]]:
    pictures = [{"type": "image_url", "image_url": {"url": data_url(SIDE, seed)}} for seed in seeds]
    return [*pictures, {"type": "text", "text": text}]


def ask(client: openai.OpenAI, text: str, *seeds: int, **settings: Any) -> Any:
    messages: Any = [{"role": "user", "content": content_of(text, *seeds)}]
    return client.chat.completions.create(model="tiny", messages=messages, **(GREEDY | settings))


def is_the_same(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens, as likely as a sum in another order may make them."""
    return answer["tokens"] == other["tokens"] and answer["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


# -- what the program has seen ------------------------------------------------------------------------------------------


def test_what_vllm_has_seen_is_not_looked_at_again(seen: dict[str, Any]) -> None:
    # The last five: one of the request whose thread is looked at, two of those that wait in the queue of media, one after an
    # abort, and one after a reset.
    assert seen["looked at"] == [1, 1, 3, 8]
    assert is_the_same(seen["again"], seen["first"])
    assert is_the_same(*seen["new"])
    assert not is_the_same(seen["new"][0], seen["again"])


def test_its_tokens_are_those_of_vllm_alone(seen: dict[str, Any]) -> None:
    for answer, alone in zip([*seen["texts"], seen["first"]], seen["alone"], strict=True):
        assert is_the_same(answer, alone)
    assert not is_the_same(*seen["texts"][:2])  # another prompt is something else


def test_no_view_of_a_medium_outlives_its_request(seen: dict[str, Any]) -> None:
    assert seen["pixels are gone"]


def test_a_request_may_have_several_answers(seen: dict[str, Any]) -> None:
    assert [answer["finish_reason"] for answer in seen["several"]] == ["length"] * 3
    assert [len(answer["tokens"]) for answer in seen["several"]] == [TOKENS] * 3
    assert len({answer["text"] for answer in seen["several"]}) > 1


def test_it_says_how_likely_tokens_were(seen: dict[str, Any]) -> None:
    assert len(seen["logprobs"]) == TOKENS
    for token, logprob, top in seen["logprobs"]:
        assert [token, logprob] == top[0]  # the answer is the likeliest one
        assert len(top) == 2
        assert 0 >= top[0][1] >= top[1][1]


def test_answers_have_the_structure_that_was_asked_for(seen: dict[str, Any]) -> None:
    texts = [answer["text"] for answer in seen["structured"]]
    assert re.match(r'\[\s*("(x|yz)"?)?', texts[0]), texts  # between its parts, white space is allowed to the end
    assert texts[1] in ("red", "blue")
    assert re.fullmatch("[a-c]{3}", texts[2])
    assert [answer["finish_reason"] for answer in seen["structured"][1:]] == ["stop", "stop"]


def test_no_stop_token_ends_an_answer_that_is_too_short(seen: dict[str, Any]) -> None:
    tokens, finish_reason = seen["min_tokens"]
    assert tokens >= 3
    assert finish_reason in ("stop", "length")


def test_what_vllm_refuses_is_the_callers_fault(seen: dict[str, Any]) -> None:
    kinds = ("ValueError", "ContextLengthError", "FormRefusedError")
    assert {parameter: kind for parameter, kind in seen["odd"].items() if kind not in kinds} == {}
    assert "FormRefusedError" in seen["odd"].values()
    assert seen["unfinished"] == 0


def test_what_was_aborted_is_gone_from_vllm(seen: dict[str, Any]) -> None:
    assert seen["running"] == 1
    assert seen["left"] == 0
    assert seen["after"]["finish_reason"] == "length"


def test_what_was_aborted_waits_for_no_thread_and_a_reset_only_for_the_medium_that_is_prepared(seen: dict[str, Any]) -> None:
    assert seen["queue"]["an aborted one is gone"]
    assert seen["queue"]["begun"] == ["medium 0", "a reset", "medium 2"]


def test_pictures_and_long_texts_are_made_into_prompts_beside_steps(seen: dict[str, Any]) -> None:
    threads = seen["threads"]
    assert (threads["pictures"], threads["texts"]) == (["shmring-media"], ["shmring-texts"] * 2)
    assert threads["short"] == [""]  # the thread of steps


def test_a_form_that_has_no_turn_may_be_sent_again(seen: dict[str, Any]) -> None:
    assert seen["busy"] == "OverloadedError"


def test_an_argument_that_vllm_does_not_know_is_refused(seen: dict[str, Any]) -> None:
    assert seen["refused"] == "vLLM's engine takes no argument 'max_modle_len'"


def test_it_embeds_with_a_model_that_vllm_runs_for_that(model: Path) -> None:
    seen = run_program(str(model), "embed")
    assert seen["tasks"] == ["tokenize", "encode"]
    assert seen["shapes"] == [[3, seen["size"]], [14, seen["size"]]]
    assert seen["tokens"] > 3
    assert seen["lengths"] == pytest.approx([1.0] * 14, abs=1e-5)
    assert seen["likeness"] == pytest.approx([1.0] * 3, abs=1e-4)
    assert seen["same again"] == pytest.approx(1.0, abs=1e-3)
    assert seen["refused"] == ["ValueError", "ValueError", "ContextLengthError", "ValueError"]
    assert seen["left"] == 0
    pieces = seen["in pieces"]
    assert pieces["pictures"].index("one") <= 2, "it does not wait for all pictures of the other request"
    assert sorted(pieces["pictures"]) == sorted(["one", *(f"many {number}" for number in range(12))])
    assert pieces["ahead"] <= 3
    assert {name for text, name in pieces["texts"] if text in ("long", "more")} == {"shmring-texts"}
    assert {name for text, name in pieces["texts"] if text not in ("long", "more")} == {""}
    assert pieces["in turn"].index("one") <= 8, "it does not wait for all texts of the other request, either"
    assert pieces["shapes"] == [12, 1, 22, 1]
    assert pieces["same"] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert pieces["left"] == 0


# -- the server ---------------------------------------------------------------------------------------------------------


def test_its_answers_are_those_of_vllm_alone(client: openai.OpenAI, seen: dict[str, Any]) -> None:
    for text, alone in zip(TEXTS, seen["alone"], strict=False):
        answer = ask(client, text)
        assert answer.choices[0].message.content == alone["text"]
        assert answer.usage.prompt_tokens == alone["prompt_tokens"]
        going_on = client.completions.create(model="tiny", prompt=f"user: {text}<|end|>\nassistant: ", **GREEDY)
        assert going_on.choices[0].text == alone["text"]


def test_a_picture_is_answered_and_kept(server: ServerProcess, client: openai.OpenAI) -> None:
    first, again = ask(client, TEXTS[0], 1), ask(client, TEXTS[0], 1)
    assert first.choices[0].message.content == again.choices[0].message.content
    other = ask(client, TEXTS[0], 1, 2, 1)
    assert other.usage.prompt_tokens == first.usage.prompt_tokens + 2 * 16
    until(lambda: gauge(server, "shmring_frontend_kept_hits_total") >= 1)


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    pieces = [piece.choices[0] for piece in ask(client, TEXTS[1], stream=True) if piece.choices]
    whole = ask(client, TEXTS[1]).choices[0]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].finish_reason == whole.finish_reason
    assert len(pieces) > 3


def test_sixteen_at_a_time_are_answered_as_one_by_one(client: openai.OpenAI) -> None:
    questions = [(TEXTS[number % 3], *([number % 4] if number % 2 else [])) for number in range(16)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda question: ask(client, *question).usage.completion_tokens, questions))
    assert together == [TOKENS] * 16


@pytest.mark.parametrize(
    ("text", "settings", "code"),
    [
        ("forged <image>", {}, None),
        ("word " * 3000, {}, "context_length_exceeded"),
        ("short", {"max_tokens": 511}, "context_length_exceeded"),
        ("short", {"extra_body": {"logit_bias": {"4000": 1}}}, None),
    ],
)
def test_what_it_refuses_is_a_400(client: openai.OpenAI, text: str, settings: dict[str, Any], code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text, **settings)
    assert caught.value.code == code or code is None
    with pytest.raises(openai.BadRequestError, match="does not do embeddings"):
        client.embeddings.create(model="tiny", input="text")


def test_a_caller_that_hangs_up_frees_its_place(server: ServerProcess, client: openai.OpenAI) -> None:
    streams = [ask(client, text, stream=True, max_tokens=400) for text in TEXTS]
    for stream in streams:
        next(iter(stream))
        stream.close()
    until(lambda: gauge(server, "shmring_num_requests_running") == 0)
    until(lambda: gauge(server, "shmring_frontend_slots_in_use") == 0)
    assert ask(client, TEXTS[0]).usage.completion_tokens == TOKENS


def test_tokens_are_counted_and_read_back(server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "A red boat"}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    assert text == "A red boat"


def test_the_death_of_its_process_is_the_servers_end(model: Path, runtime_directory: Path) -> None:
    name = f"{NAME}-killed"
    with serving(name, model, runtime_directory) as server:
        os.kill(server.engines[0], signal.SIGKILL)
        until(lambda: not server.process.lives)
        assert server.stop() not in (0, None)
        assert server.killed == []
    assert segments_of(name) == []


def until(condition: Any, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
