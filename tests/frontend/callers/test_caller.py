"""Who a request's caller is, what the engine is told of it, and how urgent its requests may be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx

import shmring
from shmring.engine.protocol import EncodeRequest, GenerateReply, GenerateRequest
from shmring.frontend.callers.caller import caller_of
from shmring.frontend.callers.keys import KeyOwner
from tests.frontend.test_inference_chats import GENERATING
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]
CHAT = {"model": "shmring-synthetic", "messages": [{"role": "user", "content": "Hi"}]}
KEYS: dict[str, Any] = {
    "api_keys": ("k1", "k2", "plain"),
    "key_owners": (KeyOwner(name="alice", keys=("k1", "k2"), max_priority=5),),
}


@for_each(
    ("address", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("not:an:address", "not:an:address"),
    ],
)
def test_without_keys_a_caller_is_an_address_and_of_ipv6_a_network(address: str, expected: str) -> None:
    scope: dict[str, Any] = {"state": {}, "client": (address, 80), "headers": [(b"authorization", b"Bearer anything")]}
    assert caller_of(scope) == expected


def test_a_caller_at_a_unix_socket_is_a_local_process() -> None:
    assert caller_of({"state": {}, "client": None, "headers": []}) == "a local process"


async def test_the_engine_is_told_whose_a_request_is_and_no_key(open_engine: Any, open_app: OpenApp) -> None:
    owners: list[str] = []

    async def note(claim: shmring.Claim) -> None:
        request: GenerateRequest | EncodeRequest = claim.payload
        owners.append(request.owner)
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(note, GENERATING), **KEYS)
    for key in ("k1", "k2", "plain"):
        response = await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, response.text
    assert owners[:2] == ["alice", "alice"]
    assert owners[2].startswith("key ")
    assert "plain" not in owners[2]


async def test_a_request_is_as_urgent_as_its_caller_may_say(open_engine: Any, open_app: OpenApp) -> None:
    async def reply(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(reply, GENERATING), **KEYS)
    for key, priority, status in (("k1", -5, 200), ("k1", -6, 400), ("plain", 0, 200), ("plain", -1, 400), ("plain", 9, 200)):
        headers = {"authorization": f"Bearer {key}"}
        response = await http.post("/v1/chat/completions", json=CHAT | {"priority": priority}, headers=headers)
        assert response.status_code == status, (key, priority, response.text)
        if status == 400:
            error = response.json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_value", "priority")
            assert "max-priority" in error["message"]


async def test_an_operator_may_let_all_callers_say_that_a_request_is_urgent(open_engine: Any, open_app: OpenApp) -> None:
    async def reply(claim: shmring.Claim) -> None:
        await claim.reply(GenerateReply("yes", [1], 1, 1, "stop"))

    http = await open_app(await open_engine(reply, GENERATING), max_priority=2)
    statuses = [(await http.post("/v1/chat/completions", json=CHAT | {"priority": -n})).status_code for n in (1, 2, 3)]
    assert statuses == [200, 200, 400]
