"""The OpenAPI document against the running server: Schemathesis makes requests from it, right ones and wrong ones, and compares
every answer with what the document says of it: its status, its type, its headers, its body.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck

MODEL = "shmring-synthetic"
EXAMPLES = 40

# What a request can be refused for is more than a schema can say: media that are damaged, another model.
REFUSALS = ["2xx", "400", "401", "404", "413", "503", "504"]
# What is wrong may also be too much, and is refused before anybody has looked at what it is.
ERRORS = ["400", "401", "404", "413", "503", "504"]


def check_operation(operation: Any, mode: str, headers: dict[str, str]) -> int:
    """Sends requests of one operation; returns how many. Runs on a thread, with requests that block."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode

    sent = 0

    @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    def check(case: Any) -> None:
        nonlocal sent
        sent += 1
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and sent % 4:
            case.body["model"] = MODEL  # most would be turned away at the door otherwise
        response = case.call(headers=headers, timeout=20)
        case.validate_response(response, excluded_checks=excluded, headers=headers)

    excluded = [not_a_server_error]  # 503 and 504 are answers; those that are not documented fail the check of statuses
    check()
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
async def test_every_answer_is_as_documented(open_core: Any, open_server: Any, mode: str) -> None:
    import schemathesis  # here: it takes a second, which every run of any test would wait for

    # As many tokens as the document allows would take a day; that is a 504 then.
    url = await open_server(await open_core({"tokens": 2}), request_timeout_s=1.0)
    expected = {"positive_data_acceptance": REFUSALS, "negative_data_rejection": ERRORS}
    checks = {check: {"expected-statuses": statuses} for check, statuses in expected.items()}
    config = schemathesis.Config.from_dict({"checks": checks})
    schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{url}/openapi.json", config=config)
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.label for operation in operations} == {
        "POST /v1/chat/completions",
        "POST /v1/responses",
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "GET /v1/responses/{response_id}",
        "DELETE /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "POST /v1/responses/{response_id}/cancel",
        "POST /v1/completions",
        "POST /tokenize",
        "POST /detokenize",
        "POST /v1/embeddings",
        "POST /score",
        "POST /v1/score",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
        "GET /v1/models",
        "GET /v1/models/{name}",
        "GET /health",
        "GET /ready",
        "GET /ping",
        "POST /ping",
        "GET /load",
        "GET /metrics",
        "GET /version",
    }
    for operation in operations:
        if mode == "negative" and (operation.method in ("get", "delete") or operation.path.endswith(("/ping", "/cancel"))):
            continue  # there is nothing in them that could be wrong
        sent = await asyncio.to_thread(check_operation, operation, mode, {})
        assert sent >= (EXAMPLES // 2 if operation.method == "post" else 1), operation.label
