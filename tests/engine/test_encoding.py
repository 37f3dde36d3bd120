"""What is encoded next, and when a step ends. Time stands still but for what encoding is said to take."""

from __future__ import annotations

import types
import weakref
from collections.abc import Generator
from typing import Any

import pytest
import torch

from shmring.engine.executors import encoding
from shmring.engine.executors.encoding import EncodingLine
from shmring.engine.executors.interface import ExecutorDeadError, StepOutput
from shmring.engine.protocol import EncodeReply, EncodeRequest, Picture, Text


class Bench:
    """A line whose inputs are texts: ``"a 3"`` takes 3 ms, ``"a 3 3"`` two steps of 3 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(encoding, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        self.order: list[str] = []
        self.line = EncodingLine(self._encode, lambda item: sum(_steps_of(item)) / 1000)
        self.running: dict[int, EncodeRequest] = {}
        self.parts: dict[int, list[EncodeReply]] = {}
        self.failed: dict[int, Exception] = {}

    def _encode(self, items: Any) -> Any:
        item = items[0]
        name, steps = item.text.split()[0], _steps_of(item)
        if name == "bad":
            raise ValueError("it is bad")
        if name == "dead":
            raise ExecutorDeadError("no more")
        embedded = torch.tensor([float(len(self.order))]), 2
        if len(steps) == 1:
            self._take(name, steps[0])
            return [embedded]

        def in_steps() -> Generator[None, None, Any]:
            for step in steps:
                self._take(name, step)
                yield
            return embedded

        return in_steps()

    def _take(self, name: str, step: float) -> None:
        self.order.append(name)
        self.now += step / 1000

    def add(self, number: int, *texts: str) -> None:
        self.running[number] = EncodeRequest([Text(text) for text in texts])

    def step(self) -> str:
        """Returns the names of what was encoded."""
        self.order.clear()
        for number, output in self.line.execute(self.running).items():
            if isinstance(output, Exception):
                self.failed[number] = output
            elif output.reply is not None:
                assert isinstance(output.reply, EncodeReply)
                self.parts.setdefault(number, []).append(output.reply)
                assert output.keep_inputs is not output.finished
            if isinstance(output, Exception) or output.finished:
                self.line.forget(number)
                del self.running[number]
        return "".join(self.order)


def _steps_of(item: Any) -> list[float]:
    return [float(step) for step in item.text.split()[1:]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_step_ends_when_its_time_is_over_and_goes_on_where_it_was(bench: Bench) -> None:
    bench.add(1, *(f"{name} 1.5" for name in "abcdefg"))
    assert [bench.step() for _ in range(3)] == ["abc", "def", "g"]
    assert bench.parts[1][0].embeddings.shape == (7, 1)
    assert bench.parts[1][0].prompt_tokens == 14
    assert bench.running == {}


def test_small_ones_come_first_and_end_the_step(bench: Bench) -> None:
    bench.add(1, "a 3", "a 3", "a 3", "a 3")
    bench.add(2, "b 1")
    bench.add(3, "c 1", "c 1")
    assert bench.step() == "bcc", "their answers are sent now"
    assert [*bench.running] == [1]
    assert bench.step() == "aa"


def test_who_has_had_least_is_next(bench: Bench) -> None:
    bench.add(1, *["a 2.5"] * 9)
    assert bench.step() == "aa"
    bench.add(2, *["b 1.25"] * 12)
    assert [bench.step() for _ in range(3)] == ["bbbb", "abb", "abb"]


def test_a_large_one_has_a_turn_however_many_small_ones_come(bench: Bench) -> None:
    bench.add(1, "a 3", "a 3")
    taken = ""
    for number in range(2, 16):
        bench.add(number, "b 3")
        taken += bench.step()
    assert taken.startswith("bbbba"), "more than 10 ms have passed"
    assert taken.count("a") == 2


def test_an_input_may_take_several_steps(bench: Bench) -> None:
    bench.add(1, "a 3 3 3", "b 1")
    assert bench.step() == "aa"
    bench.add(2, "c 1")
    assert bench.step() == "c"
    assert bench.step() == "ab"
    assert bench.parts[1][0].embeddings.shape == (2, 1)


def test_many_embeddings_come_in_parts(bench: Bench) -> None:
    bench.add(1, *["a 0"] * 255, *["a 4"] * 300)
    while bench.running:
        bench.step()
    assert [len(part.embeddings) for part in bench.parts[1]] == [256, 256, 43]
    assert [part.prompt_tokens for part in bench.parts[1]] == [512, 1024, 1110]


def test_what_fails_fails_alone_and_keeps_nothing(bench: Bench) -> None:
    bench.add(1, "a 1", "bad 1")
    bench.add(3, "c 1")
    bench.step()
    assert str(bench.failed[1]) == "it is bad"
    assert bench.failed[1].__traceback__ is None
    assert len(bench.parts[3]) == 1


def test_an_executor_that_is_dead_says_so(bench: Bench) -> None:
    bench.add(1, "dead 1")
    with pytest.raises(ExecutorDeadError):
        bench.step()


def test_a_bug_is_logged_and_fails_its_request(caplog: pytest.LogCaptureFixture) -> None:
    def encode(_: object) -> Any:
        raise KeyError("a bug")

    output = EncodingLine(encode, lambda _: 0.0).execute({1: EncodeRequest([Text("a")])})[1]
    assert isinstance(output, RuntimeError)
    assert str(output) == "KeyError: 'a bug'"
    assert "a request failed" in caplog.text
    assert "Traceback" in caplog.text


def test_of_large_requests_those_of_the_first_ones_owner_go_on_and_their_time_is_told() -> None:
    encoded: list[str] = []

    def encode(items: Any) -> list[Any]:
        encoded.extend(item.text for item in items)
        return [(torch.zeros(1), 1) for _ in items]

    line = EncodingLine(encode, lambda _: 1.0, slice_s=0)
    requests = {
        1: EncodeRequest([Text("a1"), Text("a2")], owner="a"),
        2: EncodeRequest([Text("a3"), Text("a4")], owner="a"),
        3: EncodeRequest([Text("b1"), Text("b2")], owner="b"),
    }
    outputs = line.execute(requests)
    outputs = line.execute({number: requests[number] for number in (3, 1, 2)})
    assert encoded == ["a1", "b1"], "though the first has had a turn, and others of its owner have not"
    output = outputs[3]
    assert isinstance(output, StepOutput)
    assert output.seconds > 0
    line.execute({number: requests[number] for number in (2, 1, 3)})
    assert encoded == ["a1", "b1", "a3"], "of one owner's, the one that has had least"


def test_small_requests_go_in_the_order_of_the_step() -> None:
    encoded: list[str] = []

    def encode(items: Any) -> list[Any]:
        encoded.extend(item.text for item in items)
        return [(torch.zeros(1), 1) for _ in items]

    line = EncodingLine(encode, lambda _: 0.0, slice_s=0)
    requests = {number: EncodeRequest([Text(str(number))]) for number in (1, 2, 3)}
    line.execute(requests)
    assert encoded == ["1"]
    line.execute({3: requests[3], 2: requests[2]})
    assert encoded == ["1", "3"]


def test_one_that_is_given_up_in_its_midst_keeps_no_view() -> None:
    def encode(items: Any) -> Generator[None, None, Any]:
        while True:
            items[0].pixels.sum()
            yield

    line = EncodingLine(encode, lambda _: 1.0, slice_s=0)
    request = EncodeRequest([Picture(torch.zeros(2, 2, 3, dtype=torch.uint8))])
    view = weakref.ref(request.inputs[0].pixels)  # type: ignore[union-attr]
    (output,) = line.execute({1: request}).values()
    assert isinstance(output, StepOutput)
    assert (output.finished, output.keep_inputs, output.reply) == (False, True, None)
    assert output.seconds > 0
    del request
    assert view() is not None
    line.forget(1)
    assert view() is None


class Together:
    """A line that encodes up to so many texts at once; what each call was offered, and took, is written down."""

    def __init__(self, takes: int, offered: int, slice_s: float = 0) -> None:
        self.takes = takes
        self.calls: list[tuple[str, str]] = []
        # Requests of one input are small.
        self.line = EncodingLine(self._encode, lambda _: 0.003, together=offered, slice_s=slice_s)

    def _encode(self, items: Any) -> list[Any]:
        names = [item.text for item in items]
        self.calls.append(("".join(names), "".join(names[: self.takes])))
        return [ValueError(name) if name == "!" else (torch.tensor([float(ord(name))]), 1) for name in names[: self.takes]]

    def run(self, **requests: str) -> dict[str, str]:
        """Executes steps until all requests are over; returns their embeddings as letters, or their errors."""
        running = {number: EncodeRequest([Text(text) for text in texts]) for number, texts in enumerate(requests.values())}
        names = list(requests)
        answers = dict.fromkeys(names, "")
        while running:
            for number, output in self.line.execute(running).items():
                if isinstance(output, Exception):
                    answers[names[number]] = f"error: {output}"
                elif output.reply is not None:
                    assert isinstance(output.reply, EncodeReply)
                    answers[names[number]] += "".join(chr(int(value)) for value in output.reply.embeddings[:, 0])
                if isinstance(output, Exception) or output.finished:
                    self.line.forget(number)
                    del running[number]
        return answers


def test_several_are_offered_in_their_order_and_as_many_as_are_taken_are_done() -> None:
    bench = Together(takes=3, offered=4)
    assert bench.run(one="abcdef", two="x", three="y") == {"one": "abcdef", "two": "x", "three": "y"}
    assert [taken for _, taken in bench.calls] == ["xya", "bcd", "ef"]
    assert max(len(offered) for offered, _ in bench.calls) == 4


def test_large_ones_share_what_is_encoded_together() -> None:
    bench = Together(takes=4, offered=4)
    assert bench.run(one="abcdef", two="uvwxyz") == {"one": "abcdef", "two": "uvwxyz"}
    assert {*bench.calls[0][1]} == {*"abuv"}


def test_an_error_among_several_fails_its_request_alone() -> None:
    bench = Together(takes=9, offered=9)
    assert bench.run(one="ab!c", two="x", three="!") == {"one": "error: !", "two": "x", "three": "error: !"}


def test_parts_of_a_reply_come_in_order_also_when_several_are_encoded_together() -> None:
    text = "".join(chr(ord("a") + number % 26) for number in range(600))
    assert Together(takes=100, offered=100).run(one=text) == {"one": text}
    assert Together(takes=100, offered=100, slice_s=60).run(one=text, two="x") == {"one": text, "two": "x"}
