"""The envelope of errors."""

from __future__ import annotations

import msgspec
import pytest

from frontend.errors import ApiError


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (499, "invalid_request_error"), (503, "server_error")]
)
def test_the_envelope_is_openais(status: int, kind: str) -> None:
    error = ApiError(status, "it went wrong", code="some_code", param="model", retry_after_s=1)
    assert msgspec.json.decode(msgspec.json.encode(error.envelope())) == {
        "error": {"message": "it went wrong", "type": kind, "param": "model", "code": "some_code"}
    }


def test_what_is_not_known_is_null() -> None:
    body = msgspec.to_builtins(ApiError(500, "it went wrong", code="x").envelope())
    assert body["error"]["param"] is None
