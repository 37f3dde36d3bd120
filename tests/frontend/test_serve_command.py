"""``shmring serve``'s options: who gets which, and that they understand them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.__main__ import main as engine_command
from frontend import serve_command
from frontend.__main__ import main as frontend_command
from frontend.cli import main
from frontend.supervisor import ServeError, ServeOptions


@pytest.fixture
def options_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``options_of("--port=1")``: what the supervisor would be told."""
    told: list[ServeOptions] = []

    def tell(options: ServeOptions) -> None:
        told.append(options)
        raise ServeError("that was all")

    monkeypatch.setattr(serve_command, "run_server", tell)

    def run(*arguments: str) -> ServeOptions:
        result = CliRunner().invoke(main, ["serve", *arguments])
        assert (result.exit_code, result.output) == (1, "shmring: that was all\n")
        return told[-1]

    return run


def understood_by(command: Any, arguments: tuple[str, ...]) -> dict[str, Any]:
    """What a program makes of its command line; whatever it does not know or refuses is an error."""
    values: dict[str, Any] = command.make_context("test", list(arguments)).params
    return values


def test_without_options_the_engine_s_defaults_are_its_own(options_of: Any) -> None:
    options = options_of()
    assert options.engine_arguments == (f"--slab-nbytes={1 << 30}",)
    assert (options.host, options.port, options.frontends, options.name) == ("127.0.0.1", 8000, 2, "shmring")
    assert (options.start_timeout_s, options.shutdown_timeout_s) == (600, 2)


def test_every_option_of_the_engine_reaches_it(options_of: Any) -> None:
    given = {
        "--executor": "mine:Executor",
        "--model": "/models/a b",
        "--executor-options": '{"dtype": "float32"}',
        "--mm-processor-kwargs": '{"num_frames": 8}',
        "--slab-nbytes": "64MiB",
        "--reply-nbytes": "8MiB",
        "--max-num-seqs": "3",
        "--max-batch-nbytes": "5MiB",
        "--max-waiting": "7",
        "--step-timeout": "1.5",
        "--profiler-dir": "/traces",
    }
    assert set(given) == {option.opts[0] for option in serve_command._ENGINE}
    options = options_of(*(f"{option}={value}" for option, value in given.items()))
    values = understood_by(engine_command, (*options.shared_arguments(), *options.engine_arguments))
    expected = {
        "executor": "mine:Executor",
        "model": "/models/a b",
        "executor_options": {"dtype": "float32"},
        "mm_processor_kwargs": {"num_frames": 8},
        "max_num_seqs": 3,
        "max_waiting": 7,
        "step_timeout": 1.5,
        "profiler_dir": "/traces",
    }
    assert values | expected == values
    assert [int(values[name]) for name in ("slab_nbytes", "reply_nbytes", "max_batch_nbytes")] == [64 << 20, 8 << 20, 5 << 20]


def test_frontends_understand_theirs(options_of: Any) -> None:
    options = options_of(
        "--name=x", "--log-level=error", "--socket-dir=/run/x", "--request-timeout=7", "--max-image-nbytes=1MiB"
    )
    values = understood_by(frontend_command, (*options.shared_arguments(), *options.frontend_arguments))
    names = ("name", "log_level", "socket_dir", "request_timeout_s", "max_image_nbytes")
    assert [values[name] for name in names] == ["x", "error", "/run/x", 7, 1 << 20]


def test_keys_reach_frontends_and_no_command_line(options_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("from-a-file\n")
    options = options_of("--api-key=given", f"--api-key-file={tmp_path / 'keys'}")
    assert "given" not in f"{options}"
    for name, value in options.frontend_environment.items():
        monkeypatch.setenv(name, value)
    assert understood_by(frontend_command, options.frontend_arguments)["api_keys"] == ("given", "from-a-file")


def test_a_file_without_keys_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    result = CliRunner().invoke(main, ["serve", f"--api-key-file={tmp_path / 'keys'}"])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert result.output.startswith(f"shmring: {tmp_path / 'keys'} has no keys")


def test_the_supervisor_s_own(options_of: Any) -> None:
    options = options_of("--host=::", "--port=0", "--api-server-count=4", "--start-timeout=5", "--shutdown-timeout=0")
    assert (options.host, options.port, options.frontends) == ("::", 0, 4)
    assert (options.start_timeout_s, options.shutdown_timeout_s) == (5, 0)


def test_tensors_within_messages_need_an_engine_that_takes_such_messages(options_of: Any) -> None:
    assert not understood_by(frontend_command, options_of().frontend_arguments)["disable_mm_shm"]
    options = options_of("--disable-mm-shm")
    assert understood_by(frontend_command, options.frontend_arguments)["disable_mm_shm"]
    assert understood_by(engine_command, options.engine_arguments)["max_frame_nbytes"] == "256MiB"


def test_the_options_are_grouped() -> None:
    output = CliRunner().invoke(main, ["serve", "--help"]).output
    texts = ("Server:", "  --port ", "Engine:", "  --model ", "Frontends:", "  --request-timeout ")
    places = [output.index(f"\n{text}") for text in texts]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--slab-nbytes", "much"],
        ["--port", "70000"],
        ["--api-server-count", "0"],
        ["--nonsense"],
        ["--shutdown-timeout=-1"],
        ["--start-timeout=0"],
        ["--max-num-seqs=0"],
    ],
)
def test_nonsense_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["serve", *arguments]).exit_code == 2


@pytest.mark.parametrize("option", ["--executor-options", "--mm-processor-kwargs"])
@pytest.mark.parametrize(
    ("text", "complaint"), [("{num_frames: 8}", "malformed"), ("[8]", "Expected `object`"), ("", "truncated")]
)
def test_what_is_no_json_object_is_refused_at_once(option: str, text: str, complaint: str) -> None:
    result = CliRunner().invoke(main, ["serve", option, text])
    assert result.exit_code == 2
    assert complaint in result.output
    assert option in result.output
