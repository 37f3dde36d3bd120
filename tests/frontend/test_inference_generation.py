"""Several answers to a request, and how likely their tokens were, over HTTP, with a small handler as engine."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

import shmring
from shmring.engine.protocol import GenerateReply, TokenLogprobs
from shmring.frontend.openai import choices
from tests.frontend.talking import OpenTalk, data_events

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}


async def three(claim: shmring.Claim) -> None:
    """Three answers at the same time, of which the first one ends first."""
    for index in (0, 1, 2):
        await claim.reply(GenerateReply(f"a{index}", [1], 5, 1, index=index))
    await claim.reply(GenerateReply("!", [2], 5, 2, "stop"))
    for index in (2, 1):
        await claim.reply(GenerateReply(f"b{index}", [3, 4], 5, 3, "length", index=index))


PARTS = [(b"\xf0\x9f", -1.5), (b"\xf0\x9f\x99", -2.0), ("\ufffd".encode(), -2.5), ("Hé".encode(), -3.0)]
TOKENS = [TokenLogprobs("Hé".encode(), -0.5, [("Hé".encode(), -0.5), *PARTS]), TokenLogprobs(b"x", -9999.0, [(b"y", -0.25)])]


async def likely(claim: shmring.Claim) -> None:
    await claim.reply(GenerateReply("H", [1], 5, 1, logprobs=TOKENS[:1]))  # the rest may become a stop text
    await claim.reply(GenerateReply("éx", [2], 5, 2, "stop", logprobs=TOKENS[1:]))


def text_of(choice: Any) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, COMPLETION)])
async def test_a_request_has_several_answers(open_talk: OpenTalk, path: str, body: Any) -> None:
    talk = await open_talk(three)
    expected = [("a0!", "stop"), ("a1b1", "length"), ("a2b2", "length")]
    usage = {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    whole = await talk.ask(path, body, n=3)
    found = [(choice["index"], text_of(choice), choice["finish_reason"]) for choice in whole["choices"]]
    assert found == [(index, *answer) for index, answer in enumerate(expected)]
    assert whole["usage"] == usage
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 3, "nobody has asked for them"
    *events, last = data_events(await talk.ask(path, body, n=3, stream=True, stream_options={"include_usage": True}))
    choices = [event["choices"][0] for event in events]
    for index, (text, reason) in enumerate(expected):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(map(text_of, mine)) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]
    assert last["usage"] == usage
    roles = [choice["index"] for choice in choices if choice.get("delta", {}).get("role")]
    assert roles == ([0, 1, 2] if path == CHATS else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_missing_or_too_many_is_the_engines_fault(open_talk: OpenTalk, stream: bool) -> None:
    talk = await open_talk(three)
    for n in (2, 4):
        response = await talk.send(CHATS, CHAT | {"n": n, "stream": stream})
        assert (response.status_code == 500) != stream
        assert '"engine_error"' in response.text
        assert "[DONE]" not in response.text


async def test_how_likely_tokens_of_a_chat_were(open_talk: OpenTalk) -> None:
    talk = await open_talk(likely)
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    [choice] = (await talk.ask(CHATS, body))["choices"]
    expected = [
        {
            "token": "Hé",
            "logprob": -0.5,
            "bytes": [72, 195, 169],
            "top_logprobs": [
                {"token": "Hé", "logprob": -0.5, "bytes": [72, 195, 169]},
                {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0, 0x9F]},
                {"token": "\ufffd", "logprob": -2.0, "bytes": [0xF0, 0x9F, 0x99]},
                {"token": "\ufffd", "logprob": -2.5, "bytes": [0xEF, 0xBF, 0xBD]},
                {"token": "Hé", "logprob": -3.0, "bytes": [72, 195, 169]},
            ],
        },
        {
            "token": "x",
            "logprob": -9999.0,
            "bytes": [120],
            "top_logprobs": [{"token": "y", "logprob": -0.25, "bytes": [121]}],
        },
    ]
    assert choice["logprobs"] == {"content": expected}
    events = data_events(await talk.ask(CHATS, body, stream=True))
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for part in streamed if part for entry in part["content"]] == expected


async def test_parts_of_characters_are_told_by_their_bytes(open_talk: OpenTalk) -> None:
    """Callers join them; the types are those of OpenAI's client."""
    text = "é🙂x"
    pieces = ["é".encode(), b"\xf0\x9f", b"\x99\x82", b"x"]

    async def say(claim: shmring.Claim) -> None:
        tokens = [TokenLogprobs(piece, -0.5, [(piece, -0.5)]) for piece in pieces]
        await claim.reply(GenerateReply(text, [1, 2, 3, 4], 5, 4, "stop", logprobs=tokens))

    talk = await open_talk(say)
    answer = await talk.ask(CHATS, CHAT | {"logprobs": True, "top_logprobs": 1})
    [choice] = ChatCompletion.model_validate(answer).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode() == text
    completion = Completion.model_validate(await talk.ask(COMPLETIONS, COMPLETION | {"logprobs": 1}))
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["é", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "x"]
    assert [list(top) for top in logprobs.top_logprobs or []] == [[token] for token in logprobs.tokens]
    assert logprobs.text_offset == [0, 1, 2, 2]


async def test_how_likely_tokens_of_a_completion_were(open_talk: OpenTalk) -> None:
    talk = await open_talk(likely)
    body = COMPLETION | {"logprobs": 2}
    [choice] = (await talk.ask(COMPLETIONS, body))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hé", "x"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [
            {
                "Hé": -0.5,
                r"bytes:\xf0\x9f": -1.5,
                r"bytes:\xf0\x9f\x99": -2.0,
                "\ufffd": -2.5,
                r"bytes:\x48\xc3\xa9": -3.0,
            },
            {"y": -0.25, "x": -9999.0},
        ],
        "text_offset": [0, 2],
    }
    events = data_events(await talk.ask(COMPLETIONS, body, stream=True))
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    joined = {name: [entry for part in streamed for entry in part[name]] for name in choice["logprobs"]}
    assert joined == choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_so_many_logprobs_at_most(open_talk: OpenTalk, stream: bool) -> None:
    """They are held until their caller has read them: 16 answers of 4096 tokens with 20 others each would be 93 MB. (More are
    refused: test_refused_bodies.py.)
    """
    talk = await open_talk(likely)
    for most in ({"max_tokens": (256 << 10) // 21}, {}):
        await talk.ask(CHATS, CHAT, logprobs=True, top_logprobs=20, stream=stream, **most)


async def test_logprobs_are_held_in_one_form_only(open_talk: OpenTalk, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    add = choices._Part.add

    def noted(parts: Any, piece: Any) -> Any:
        result = add(parts, piece)
        held.extend(piece.logprobs for piece in parts.pieces)
        return result

    monkeypatch.setattr(choices._Part, "add", noted)
    talk = await open_talk(likely)
    await talk.ask(CHATS, CHAT, logprobs=True)
    assert held == [[], [], []]
