"""What requests take of vLLM's steps: their share of the tokens. (What needs vLLM itself is in ``tests/vllm``.)"""

from __future__ import annotations

from shmring.engine.executors.interface import StepOutput, priced
from shmring.engine.executors.vllm import _Answer, _Request
from shmring.engine.executors.vllm_engine import share_seconds


def request(prompt_tokens: int, *completion_tokens: int) -> _Request:
    answers = [_Answer(None, 0, completion_tokens=count) for count in completion_tokens]
    return _Request(prompt_tokens=prompt_tokens, answers=answers)


def test_a_prompt_weighs_its_tokens_and_answers_one_each() -> None:
    assert request(8000, 0).weight == 8000
    assert request(8000, 1).weight == 1
    assert request(8000, 5, 0, 9).weight == 3
    ended = request(10, 5, 9)
    ended.answers[0].ended = True
    assert ended.weight == 1
    assert request(300).weight == 300, "a request to encode"


def test_a_steps_time_is_shared_by_weight_among_those_whom_vllm_has() -> None:
    outputs = {1: StepOutput(finished=False), 2: StepOutput(finished=False), 3: ValueError("wrong"), 4: StepOutput()}
    shared = share_seconds(outputs, {1: 90, 2: 5, 3: 5}, 2.0)
    assert {number: output.seconds for number, output in shared.items() if isinstance(output, StepOutput)} == {1: 1.8, 2: 0.1}
    assert share_seconds(outputs, {}, 2.0) == {}


def test_what_a_request_took_in_several_places_is_added_up() -> None:
    output, error = StepOutput(finished=False, seconds=1.5), ValueError("wrong")
    assert priced(output, 0.5) == StepOutput(finished=False, seconds=2.0)
    assert priced(output, 0.0, 0.5) == StepOutput(finished=False, seconds=1.5, beside_s=0.5)
    assert priced(output, 0.0) is output
    assert priced(error, 1.0) is error
