"""How failures become statuses, and the envelope that callers get."""

from __future__ import annotations

import logging

import msgspec
import pytest
from starlette.exceptions import HTTPException

import shmring
from shmring.frontend.errors import ApiError, ErrorCode, api_error_of, report
from tests.tables import for_each


@for_each(
    ("code", "kind"),
    [
        (ErrorCode.INVALID_VALUE, "invalid_request_error"),
        (ErrorCode.RATE_LIMIT_EXCEEDED, "rate_limit_error"),
        (ErrorCode.HEAD_TOO_LARGE, "invalid_request_error"),
        (ErrorCode.ENGINE_ERROR, "server_error"),
        (ErrorCode.OVERLOADED, "server_error"),
    ],
)
def test_the_envelope_is_openais(code: ErrorCode, kind: str) -> None:
    error = ApiError(code, "it went wrong", param="model", retry_after_s=1)
    assert msgspec.json.decode(msgspec.json.encode(error.envelope())) == {
        "error": {"message": "it went wrong", "type": kind, "param": "model", "code": code}
    }


def test_what_is_not_known_is_null() -> None:
    body = msgspec.to_builtins(ApiError(ErrorCode.ENGINE_ERROR, "it went wrong").envelope())
    assert body["error"]["param"] is None


@for_each(
    ("error", "status", "code"),
    [
        (ApiError(ErrorCode.PROFILER, "it runs"), 409, "profiler"),
        (HTTPException(404), 404, "not_found"),
        (HTTPException(405), 405, "method_not_allowed"),
        (shmring.RemoteError("ValueError", "no"), 400, "rejected_by_engine"),
        (shmring.RemoteError("ValidationError", "no"), 400, "rejected_by_engine"),
        (shmring.RemoteError("ContextLengthError", "no"), 400, "context_length_exceeded"),
        (shmring.RemoteError("FormError", "no"), 400, "form_too_complex"),
        (shmring.RemoteError("FormRefusedError", "no"), 400, "rejected_by_engine"),
        (shmring.RemoteError("OverloadedError", "full"), 503, "overloaded"),
        (shmring.RemoteError("PausedError", "paused"), 503, "paused"),
        (shmring.RemoteError("ClosedError", "stopping"), 503, "engine_unavailable"),
        (shmring.RemoteError("ExecutorDeadError", "dead"), 503, "engine_unavailable"),
        (shmring.RemoteError("RuntimeError", "broke"), 500, "engine_error"),
        (shmring.RemoteError("UnexpectedReply", "the engine's executor answered something else"), 500, "engine_error"),
        (shmring.RemoteError("CapacityError", "a reply can never fit"), 413, "slab_too_small"),
        (shmring.CapacityError("large", needed=2, capacity=1), 413, "slab_too_small"),
        (shmring.EngineDeadError("gone"), 503, "engine_unavailable"),
        (shmring.ClosedError("closed"), 503, "engine_unavailable"),
        (shmring.AbortedError("aborted"), 503, "engine_unavailable"),
        (TimeoutError(), 504, "request_timeout"),
        (KeyError("bug"), 500, "internal_error"),
    ],
)
def test_each_failure_has_its_status(error: Exception, status: int, code: str) -> None:
    answer = api_error_of(error)
    assert (answer.status, answer.code) == (status, code)
    assert ("retry-after" in answer.headers) is (status == 503)


def test_what_is_the_server_s_fault_is_logged_without_its_frames(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        report(ApiError(ErrorCode.INVALID_VALUE, "yours"), "id-1")
        assert caplog.records == []
        with pytest.raises(KeyError) as raised:
            raise KeyError("a bug")
        assert "a bug" not in str(report(raised.value, "id-2"))
        report(shmring.EngineDeadError("gone"), "id-3")
    first, second = caplog.records
    assert "id-2" in first.getMessage()
    assert "KeyError: 'a bug'" in first.getMessage()
    assert (second.levelname, second.getMessage()) == ("WARNING", "the request id-3 failed: gone")
    assert {record.exc_info for record in caplog.records} == {None}
