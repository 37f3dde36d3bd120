"""Arguments of the frontend on Ray Serve: options of ``shmring serve`` that a replica has, checked by the same tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shmring.frontend.commands.ray_options import _OF_SERVE, ReplicaSettings, settings_of_arguments
from shmring.frontend.commands.serve import serve
from tests.tables import for_each


def settings(**arguments: Any) -> ReplicaSettings:
    return settings_of_arguments(arguments, here=False)


def refusal(arguments: dict[Any, Any], *, here: bool = False) -> str:
    with pytest.raises(ValueError, match=r"^the application's arguments: ") as caught:
        settings_of_arguments(arguments, here=here)
    return str(caught.value)


def test_arguments_are_what_options_are() -> None:
    """Whether they are texts, as ``serve run`` has them, or what YAML reads."""
    text = """
        max-pixels: 1000
        max_body_nbytes: 3MiB
        slab-nbytes: 256MiB
        request-timeout: 5.5
        executor: synthetic
        executor-options: {step_s: 0.5}
        disable-mm-shm: true
        disable-uvicorn-access-log: false
        allowed-origins: ["https://a.org"]
        served-model-name: [one, two]
        num-replicas: 2
        num-gpus: 1
        max-ongoing-requests: 8
    """
    given = yaml.safe_load(text)
    made = settings(**given)
    assert made.http.media_limits.max_image_pixels == 1000
    assert made.http.max_body_nbytes == 3 << 20
    assert made.engine.ring.slab_nbytes == 256 << 20
    assert made.http.request_timeout_s == 5.5
    assert (made.engine.executor, made.engine.executor_options) == ("synthetic", {"step_s": 0.5})
    assert made.http.disable_mm_shm
    assert made.http.access_log
    assert made.http.cors.allowed_origins == ("https://a.org",)
    assert made.http.served_model_name == ("one", "two")
    assert (made.deployment.num_replicas, made.deployment.num_gpus, made.deployment.max_ongoing_requests) == (2, 1, 8)
    texts = {name: str(value) for name, value in given.items() if not isinstance(value, dict | list)}
    others = {name: value for name, value in given.items() if isinstance(value, dict | list)}
    assert settings(**texts, **others) == made


@for_each(
    ("given", "expected", "config"),
    [
        ({}, 1, {}),
        ({"num-replicas": "3"}, 3, {}),
        ({"num-replicas": "auto"}, "auto", {}),
        (
            {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 8, "target_ongoing_requests": 32}},
            "auto",
            {"max_replicas": 8, "target_ongoing_requests": 32},
        ),
        ({"num-replicas": "auto", "autoscaling-config": '{"min_replicas": 0}'}, "auto", {"min_replicas": 0}),
    ],
)
def test_ray_serve_may_choose_how_many_replicas_there_are(given: dict[str, Any], expected: Any, config: Any) -> None:
    made = settings_of_arguments(given, here=False).deployment
    assert (made.num_replicas, made.autoscaling_config) == (expected, config)


def test_each_option_of_the_server_is_an_argument_or_says_who_does_the_same() -> None:
    from shmring.frontend.commands.ray_options import _BY_NAME

    names = {name[2:] for option in serve.params for name in (*option.opts, *option.secondary_opts) if name.startswith("--")}
    others = {"ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs", "uvicorn-log-level", "log-level"}
    assert names - set(_BY_NAME) - others == set(_OF_SERVE) - others


@for_each(
    "arguments, said",
    [
        ({"max-pixel": 1}, "'max-pixel' can't be one: it may be 'max-pixels'"),
        ({"max-pixels": "many"}, "Invalid value for '--max-pixels': 'many' is not a valid integer"),
        ({"max-pixels": -1}, "'--max-pixels': -1 is not in the range"),
        ({"max-pixels": True}, "'--max-pixels': 'True' is not"),
        ({"max-pixels": None}, "'max-pixels' has no value"),
        ({"max-pixels": 1, "max_pixels": 1}, "'max_pixels' is given twice"),
        ({"request-timeout": float("nan")}, "'--request-timeout'"),
        ({"port": 1}, "http_options"),
        ({"root_path": "/llm"}, "route_prefix"),
        ({"data-parallel-size": 2}, "num-replicas"),
        ({"api-key": "secret"}, "SHMRING_API_KEY, or api-key-file"),
        ({"admin_key": "secret"}, "SHMRING_ADMIN_KEY, or admin-key-file"),
        ({"disable-mm-shm": "maybe"}, "'disable-mm-shm' is true or false, not 'maybe'"),
        ({"executor-options": {1: {2, 3}}}, "'executor-options' is not what JSON has"),
        ({"executor": "fingerprint"}, "there is no executor 'fingerprint'"),
        ({"executor": "transformers"}, "needs a model"),
        ({"model": "owner/name", "executor": "fingerprints"}, "loads no model"),
        ({"name": "a/b"}, "can't name an engine"),
        ({"name": "a" * 64}, "name has more than"),
        ({"num-replicas": 0}, "'--num-replicas': '0' is neither a number of at least 1 nor auto"),
        ({"num-replicas": "Auto"}, "'Auto' is neither a number"),
        ({"num-replicas": 2, "autoscaling-config": {"max_replicas": 3}}, "autoscaling-config is for num-replicas: auto"),
        ({"num-replicas": "auto", "autoscaling-config": 3}, "write a JSON object"),
        ({"num-gpus": 0.5}, "'--num-gpus'"),
        ({5: 1}, "'5' can't be one"),
        ({"--host": "::"}, "'--host' can't be one"),
        ({"supervisor-fd": 3}, "'supervisor-fd' can't be one"),
        ({"x=y --port": "1"}, "can't be one"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(arguments: dict[Any, Any], said: str) -> None:
    text = refusal(arguments)
    assert said in text
    assert "secret" not in text


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "'executor-options' is not what JSON has" in refusal({"executor-options": {"a": deep}})


def test_a_text_that_looks_like_an_option_is_a_value() -> None:
    assert settings(**{"served-model-name": "--port=1"}).http.served_model_name == ("--port=1",)


def test_what_lies_on_the_replicas_node_is_looked_for_there(tmp_path: Path) -> None:
    """The head of a cluster has neither the model nor the keys."""
    arguments = {"model": str(tmp_path / "model"), "api-key-file": str(tmp_path / "keys")}
    assert settings(**arguments).engine.model == arguments["model"]
    assert "keys' does not exist" in refusal(arguments, here=True)
    (tmp_path / "keys").write_text("a-key\n")
    (tmp_path / "keys").chmod(0o600)
    assert "there is no directory" in refusal(arguments, here=True)
    assert settings_of_arguments({"api-key-file": arguments["api-key-file"]}).http.api_keys == ("a-key",)


def test_keys_come_from_the_replicas_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMRING_API_KEY", "one two")
    assert settings_of_arguments({}).http.api_keys == ("one", "two")


def test_an_argument_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMRING_MAX_PIXELS", "7")
    assert settings().http.media_limits.max_image_pixels == 7
    assert settings(max_pixels=8).http.media_limits.max_image_pixels == 8
