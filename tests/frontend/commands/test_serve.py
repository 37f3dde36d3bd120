"""``shmring serve``'s options: who gets which, and what is refused before anything is started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from shmring.config import RingConfig
from shmring.engine import settings as engine_settings
from shmring.engine.options import ENGINE_OPTIONS
from shmring.engine.settings import EngineSettings, ListenSettings
from shmring.frontend.cli import main
from shmring.frontend.commands import serve as serve_command
from shmring.frontend.processes.supervisor import ServeError, ServeOptions
from shmring.frontend.settings import ProcessSettings, TlsSettings
from tests.tables import for_each


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``options_of("--port=1")``: the options that the supervisor would get."""
    received: list[ServeOptions] = []

    def tell(options: ServeOptions) -> None:
        received.append(options)
        raise ServeError("that was all")

    monkeypatch.setattr(serve_command, "run_server", tell)

    def run(*arguments: str) -> ServeOptions:
        result = CliRunner().invoke(main, ["serve", *arguments])
        said = json.loads(result.output)["message"] if "json" in " ".join(arguments) else result.output.rstrip("\n")
        assert (result.exit_code, said) == (1, "shmring: that was all")
        return received[-1]

    return run


def refused(*arguments: str) -> str:
    """What is said, in one line."""
    result = CliRunner(env={"COLUMNS": "300"}).invoke(main, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_without_options_all_is_as_it_is_by_itself(options_of: Any) -> None:
    options = options_of()
    [engine] = options.engines
    assert engine == EngineSettings(log_level="warning", ring=RingConfig(slab_nbytes=1 << 30, max_payload_nbytes=16 << 20))
    assert options.frontend == ProcessSettings(log_level="warning", connect_timeout_s=600.0)
    assert (options.frontends, options.start_timeout_s, options.heartbeat_timeout_s) == (2, 600, 30)


def test_every_option_of_the_engine_reaches_it(options_of: Any, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    (tmp_path / "mine.py").touch()
    (token := tmp_path / "token").touch(0o600)
    token.write_text("a secret of the tests\n")
    options_given = {
        "--executor": "mine:Executor",
        "--executor-path": str(tmp_path),
        "--model": "/models/a b",
        "--executor-options": '{"dtype": "float32"}',
        "--dtype": "float32",
        "--max-model-len": "8K",
        "--mm-processor-kwargs": '{"num_frames": 8}',
        "--slab-nbytes": "64MiB",
        "--slab-backing": "memfd",
        "--reply-nbytes": "8MiB",
        "--mm-processor-cache-gb": "0.5",
        "--listen": "127.0.0.1:7000",
        "--engine-token-file": str(token),
        "--engine-certfile": str(certificate[0]),
        "--engine-keyfile": str(certificate[1]),
        "--engine-tls": "auto",
        "--max-num-seqs": "3",
        "--max-batch-nbytes": "5MiB",
        "--max-waiting": "7",
        "--max-clients": "9",
        "--max-payload-nbytes": "1MiB",
        "--step-timeout": "1.5",
        "--profiler-dir": "/traces",
    }
    shared = {"--name", "--socket-dir", "--log-level", "--log-format", "--shutdown-timeout", "--otlp-traces-endpoint"}
    assert set(options_given) == {option.opts[0] for option in ENGINE_OPTIONS} - shared
    [engine] = options_of(*(f"{option}={value}" for option, value in options_given.items())).engines
    assert engine == EngineSettings(
        executor="mine:Executor",
        executor_path=str(tmp_path),
        model="/models/a b",
        executor_options={"dtype": "float32", "max_model_len": 8192},
        mm_processor_kwargs={"num_frames": 8},
        ring=RingConfig(
            slab_nbytes=64 << 20,
            backing="memfd",
            reply_nbytes=8 << 20,
            kept_nbytes=512 << 20,
            max_clients=9,
            max_payload_nbytes=1 << 20,
        ),
        listening=ListenSettings(
            listen="127.0.0.1:7000",
            engine_token_file=str(token),
            engine_certfile=str(certificate[0]),
            engine_keyfile=str(certificate[1]),
            engine_token="a secret of the tests",
        ),
        max_num_seqs=3,
        max_batch_nbytes=5 << 20,
        max_waiting=7,
        step_timeout_s=1.5,
        profiler_dir="/traces",
        log_level="warning",
    )
    assert msgspec.json.decode(msgspec.json.encode(engine), type=EngineSettings) == engine


def test_what_people_type_for_vllm_is_understood(options_of: Any) -> None:
    options = options_of(
        *("--executor=synthetic", "--uvicorn-log-level=warning", "--disable-uvicorn-access-log", "-dp", "2"),
        *("--max_model_len=8k", "--served_model_name", "a", "--api_server_count=3"),
    )
    assert (options.frontend.log_level, options.frontend.http.access_log, options.frontends) == ("warning", False, 3)
    assert options.frontend.http.served_model_name == ("a",)
    assert [engine.executor_options for engine in options.engines] == [{"max_model_len": 8000}] * 2


@for_each("text", ["8x", "0", "-1", "auto", "0.5", "1.0001k", "9" * 400, "nan", "inf", ""])
def test_a_number_of_tokens_that_is_none_is_refused(text: str) -> None:
    assert "no number of tokens" in refused(f"--max-model-len={text}")


def test_frontends_get_theirs_and_what_both_ends_must_agree_on(options_of: Any) -> None:
    options = options_of(
        *(
            "--name=x",
            "--log-level=error",
            "--log-format=json",
            "--socket-dir=/run/x",
            "--otlp-traces-endpoint=http://localhost:4317",
        ),
        *("--request-timeout=7", "--max-image-nbytes=1MiB", "--access-log", "--shutdown-timeout=4"),
    )
    for settings in (options.engines[0], options.frontend):
        assert (settings.name, settings.log_level, settings.log_format) == ("x", "error", "json")
        assert settings.shutdown_timeout_s == 4
        assert settings.otlp_traces_endpoint == "http://localhost:4317"
    assert options.frontend.http.access_log
    assert options.engines[0].ring.socket_dir == options.frontend.socket_dir == "/run/x"
    http = options.frontend.http
    assert (http.request_timeout_s, http.media_limits.max_image_nbytes) == (7, 1 << 20)


def test_several_engines_have_names_of_their_own_and_frontends_know_of_them(options_of: Any) -> None:
    options = options_of("--name=x", "--data-parallel-size=3", "--engine-retries=2")
    assert [engine.name for engine in options.engines] == ["x-0", "x-1", "x-2"]
    assert {engine.data_parallel_size for engine in options.engines} == {3}
    assert (options.frontend.name, options.frontend.data_parallel_size) == ("x", 3)
    assert options.frontend.http.engine_retries == 2
    [engine] = options_of("--name=x", "--data-parallel-size=1").engines
    assert engine.name == "x"
    assert "can't name an engine" in refused(f"--name={'x' * 63}", "--data-parallel-size=2")


def test_keys_reach_frontends_and_are_not_shown(options_of: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("from-a-file\n")
    (tmp_path / "keys").chmod(0o600)
    options = options_of("--api-key=given", f"--api-key-file={tmp_path / 'keys'}")
    assert options.frontend.http.api_keys == ("given", "from-a-file")
    assert "given" not in f"{options}"
    assert "from-a-file" not in f"{options}"


def test_a_file_without_keys_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "keys").touch(0o600)
    said = refused(f"--api-key-file={tmp_path / 'keys'}")
    assert said.endswith(f"Error: {tmp_path / 'keys'} has no keys; write one in a line")


def test_the_supervisor_s_own(options_of: Any) -> None:
    options = options_of(
        "--host=::", "--port=0", "--api-server-count=4", "--start-timeout=5", "--shutdown-timeout=0", "--heartbeat-timeout=0"
    )
    assert (options.frontend.host, options.frontend.port, options.frontends) == ("::", 0, 4)
    assert (options.start_timeout_s, options.frontend.connect_timeout_s, options.frontend.shutdown_timeout_s) == (5, 5, 0)
    assert [engine.shutdown_timeout_s for engine in options.engines] == [0]
    assert (options.heartbeat_timeout_s, options.heartbeat_s) == (0, 0)
    assert options.lifeline_fd is None
    assert options_of("--stop-with-stdin").lifeline_fd == 0
    assert options.ready_fd is None


def test_the_descriptor_for_the_ready_line_is_looked_at_before_anything_starts(options_of: Any) -> None:
    reading, writing = os.pipe()
    try:
        assert options_of(f"--ready-fd={writing}").ready_fd == writing
        assert "can only be read" in refused(f"--ready-fd={reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert "is no open descriptor" in refused(f"--ready-fd={writing}")
    assert "--ready-fd" in refused("--ready-fd=1"), "stdout goes on"


def test_where_it_listens_and_how(options_of: Any, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    certfile, keyfile = map(str, certificate)
    frontend = options_of(
        f"--uds={tmp_path}/s",
        f"--ssl-certfile={certfile}",
        f"--ssl-keyfile={keyfile}",
        f"--ssl-ca-certs={certfile}",
        "--ssl-cert-reqs=2",
        "--root-path=/a/b",
        "--timeout-keep-alive=75",
    ).frontend
    assert frontend.uds == f"{tmp_path}/s"
    assert frontend.tls == TlsSettings(certfile=certfile, keyfile=keyfile, ca_certs=certfile, cert_reqs=2)
    assert (frontend.root_path, frontend.timeout_keep_alive_s) == ("/a/b", 75)
    assert msgspec.json.decode(msgspec.json.encode(frontend), type=ProcessSettings) == frontend


def test_certificates_are_checked_before_a_process_is_started(certificate: tuple[Path, Path]) -> None:
    certfile, keyfile = map(str, certificate)
    for arguments, complaint in (
        ([f"--ssl-keyfile={keyfile}"], "--ssl-keyfile needs --ssl-certfile"),
        ([f"--ssl-certfile={keyfile}"], "can't be used"),
        ([f"--ssl-certfile={certfile}", f"--ssl-keyfile={keyfile}", "--ssl-cert-reqs=1"], "--ssl-ca-certs must say"),
        (["--root-path=a"], "is no path such as /llm"),
        (["--root-path=/a/"], "is no path such as /llm"),
    ):
        assert complaint in refused(*arguments)


def test_tensors_within_messages_need_an_engine_that_takes_such_messages(options_of: Any) -> None:
    assert not options_of().frontend.http.disable_mm_shm
    options = options_of("--disable-mm-shm")
    assert options.frontend.http.disable_mm_shm


# -- which executor -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_a_model_alone_is_served(options_of: Any, model: str) -> None:
    for arguments in ([model], ["--model", model], [model, "--model", model]):
        options = options_of(*arguments)
        assert (options.engines[0].executor, options.engines[0].model, options.notice) == ("transformers", model, "")
    assert options_of("Qwen/Qwen2-VL-2B-Instruct").engines[0].executor == "transformers"


def test_without_a_model_a_notice_says_what_is_served_and_how_to_serve_a_model(options_of: Any) -> None:
    options = options_of()
    assert options.engines[0].executor == "fingerprints"
    assert "fingerprints of media and texts are served" in options.notice
    assert "to serve a model: shmring serve PATH_OR_HUB_NAME" in options.notice
    assert options_of("--executor=fingerprints").notice == ""


@for_each(
    ("arguments", "complaint"),
    [
        ("--executor=features", "there is no executor 'features'; choose one of fingerprints, synthetic, transformers, vllm"),
        ("--executor=mine:", "there is no executor 'mine:'"),
        ("--executor=no_such_module:Executor", "there is no module 'no_such_module' for the executor"),
        ("--executor=transformers", "needs a model"),
        ("--executor=synthetic a/model", "the executor 'synthetic' loads no model"),
        ("a/model --model=another/model", "two models are named"),
        ("--model=/nonexistent", "there is no directory '/nonexistent'"),
        ("./nonexistent", "there is no directory './nonexistent'"),
        ("some/deep/path", "there is no directory 'some/deep/path', and a model on the Hugging Face hub is"),
        ("--model=", "needs a model"),
        ("/tmp", "holds no model: it has no config.json"),
        (
            '--max-model-len=8k --executor-options={"max_model_len":9}',
            "--max-model-len is 8000, and --executor-options say max_model_len: 9",
        ),
        ("--max-payload-nbytes=1", "max_payload_nbytes must be at least 4096"),
        ("--name=../x", "can't name an engine"),
        ("--slab-nbytes=1", "a slab of 1 bytes has no room for leases"),
        (f"--ssl-certfile={__file__}", "; they must be PEM: the certificate, and its key there or in --ssl-keyfile"),
        *((f"--{option}", "Error") for option in ("slab-nbytes=much", "port=70000", "api-server-count=0", "nonsense")),
        *((f"--{option}", "Error") for option in ("shutdown-timeout=-1", "start-timeout=0", "max-num-seqs=0")),
        *((f"--heartbeat-timeout={seconds}", "Error") for seconds in ("-1", "0.5")),
    ],
)
def test_what_can_not_be_is_refused_before_a_process_is_started(arguments: str, complaint: str) -> None:
    assert complaint in refused(*arguments.split())


@for_each(
    ("executor", "advice"),
    [
        ("transformers", "pip install -e '.[transformers]' in a checkout of shmring"),
        ("vllm", "install shmring in an environment that has vLLM"),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(executor: str, advice: str, model: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_settings._THEIR_PACKAGES, executor, (("click", "no_such_package"), advice))
        assert f"serving a model needs no_such_package: {advice}" in refused(model, f"--executor={executor}")


def test_the_options_are_grouped() -> None:
    output = CliRunner().invoke(main, ["serve", "--help"]).output
    texts = ("Server:", "  --port ", "Engine:", "  --model ", "Frontends:", "  --request-timeout ")
    places = [output.index(f"\n{text}") for text in texts]
    assert places == sorted(places)


@for_each("option", ["--executor-options", "--mm-processor-kwargs"])
@for_each(("text", "complaint"), [("{num_frames: 8}", "malformed"), ("[8]", "Expected `object`"), ("", "truncated")])
def test_what_is_no_json_object_is_refused_at_once(option: str, text: str, complaint: str) -> None:
    said = refused(option, text)
    assert complaint in said
    assert option in said
