"""An option means the same on the command line, in the environment and in the file of ``--config``; errors say which it was."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from shmring.engine.__main__ import main as engine
from shmring.engine.settings import DEFAULT_EXECUTOR, EXECUTORS
from shmring.frontend.__main__ import main as frontend
from shmring.frontend.commands import serve as serve_command
from shmring.frontend.documentation import openapi_document
from shmring.frontend.processes.supervisor import ServeError, ServeOptions
from shmring.frontend.settings import FrontendSettings
from shmring.service.flags import descriptions
from shmring.service.option_table import Option
from tests.pages import load_maker
from tests.tables import for_each

OPTIONS = [option for option in serve_command.serve.params if isinstance(option, Option)]
SERVED = [option for option in OPTIONS if option.name != "config"]

# Options that have a variable of another form: several keys, with spaces.
KEYS = {"api_keys": "SHMRING_API_KEY", "admin_keys": "SHMRING_ADMIN_KEY"}

# What is given for options whose type does not say what could be.
EXAMPLES = {
    "name": "another",
    "slab_nbytes": "32MiB",
    "host": "::1",
    "listen": "127.0.0.1:7000",
    "root_path": "/llm",
    "model": "owner/name",
    "executor": "synthetic",
    "executor_options": '{"a": [1, "b"], "c": {"d": null}}',
    "mm_processor_kwargs": '{"num_frames": 8}',
    "limit_mm_per_prompt": '{"image": 3}',
    "media_io_kwargs": '{"video": {"num_frames": 7}}',
    "allowed_media_domains": "a.org,*.b.org",
    "allowed_media_networks": "10.0.0.0/8",
    "allowed_origins": '["https://a.org"]',
    "allowed_methods": '["GET"]',
    "allowed_headers": '["a", "b"]',
    "api_keys": "key",
    "admin_keys": "key",
    "max_missing_share": "0.25",
    "otlp_traces_endpoint": "http://localhost:4317",
    "cert_reqs": "0",  # another needs certificates
}


@pytest.fixture(scope="module")
def make_reference() -> ModuleType:
    return load_maker("make_reference")


def run(*arguments: str, **environment: str) -> tuple[Result, ServeOptions | None]:
    """``shmring serve``, and what its supervisor would get."""
    received: list[ServeOptions] = []

    def receive(options: ServeOptions) -> None:
        received.append(options)
        raise ServeError("that was all")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_command, "run_server", receive)
        for name in ("SHMRING_API_KEY", "SHMRING_ADMIN_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("SHMRING_ENGINE_TOKEN", "a secret of the tests")  # --listen needs it
        result = CliRunner(env=environment).invoke(serve_command.serve, list(arguments))
    return result, received[0] if received else None


def accepted(*arguments: str, **environment: str) -> ServeOptions:
    result, options = run(*arguments, **environment)
    assert options is not None, result.output
    return options


def refused(*arguments: str, **environment: str) -> str:
    result, options = run(*arguments, **environment)
    assert (result.exit_code, options) == (2, None), result.output
    return result.output.strip().splitlines()[-1]


@pytest.fixture
def example_of(tmp_path: Path, certificate: tuple[Path, Path]) -> Any:
    (tmp_path / "keys").write_text("a-key\n")
    (tmp_path / "keys").chmod(0o600)
    files = {
        "certfile": certificate[0],
        "keyfile": certificate[1],
        "ca_certs": certificate[0],
        "api_key_file": tmp_path / "keys",
        "admin_key_file": tmp_path / "keys",
        "engine_token_file": tmp_path / "keys",
        "engine_certfile": certificate[0],
        "engine_keyfile": certificate[1],
    }

    def example(option: Option) -> str:
        if option.name in EXAMPLES:
            return EXAMPLES[str(option.name)]
        if isinstance(option.type, click.Path):
            return str(files.get(str(option.name), tmp_path))
        if isinstance(option.type, click.Choice):
            return str(option.type.choices[-1])
        return "true" if option.is_flag else "5000" if option.name == "max_payload_nbytes" else "7"

    return example


def test_each_option_means_the_same_in_all_places(example_of: Any, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """Help, page and settings are made of the same fields; a line of a file may be what YAML has instead of JSON."""
    default = accepted()
    file = tmp_path / "server.yaml"
    for option in SERVED:
        name, text = option.opts[0][2:], example_of(option)
        rest = () if option.name not in {"keyfile", "ca_certs"} else (f"--ssl-certfile={certificate[0]}",)
        if option.name == "ca_certs":
            rest = (*rest, f"--ssl-keyfile={certificate[1]}")
        if option.name == "certfile":
            rest = (f"--ssl-keyfile={certificate[1]}",)
        given = accepted(*rest, f"--{name}" if option.is_flag else f"--{name}={text}")
        assert given != default or option.name == "cert_reqs", name
        if option.name in KEYS:
            assert accepted(**{KEYS[option.name]: text}) == given
            continue
        assert accepted(*rest, **{"SHMRING_" + name.upper().replace("-", "_"): text}) == given, name
        file.write_text(f"# a comment\n{name}: {json.dumps(text) if text[0] in '[*' else text}\n")
        assert accepted(*rest, f"--config={file}") == given, name
        if text[0] in "[{":
            file.write_text(yaml.safe_dump({name: json.loads(text)}))
            assert accepted(*rest, f"--config={file}") == given, name
        if option.multiple:
            file.write_text(yaml.safe_dump({name: text.split(",")}))
            assert accepted(*rest, f"--config={file}") == given, name


def test_help_and_page_say_the_same_of_each_option(make_reference: ModuleType) -> None:
    output = " ".join(CliRunner().invoke(serve_command.serve, ["--help"], terminal_width=100).output.split())
    page = make_reference.PAGE.read_text().partition("### `shmring serve`")[2].partition("\n### ")[0]
    for option in OPTIONS:
        help_text = option.help or ""
        assert len(help_text) > 5, option.name
        assert re.sub(r"\W", "", help_text) in re.sub(r"\W", "", output), option.name
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{option.opts[0]}`")]
        assert re.sub(r"\W|default.*", "", help_text.partition("  [")[0]) in re.sub(r"\W|default.*", "", row), option.name
        assert option.envvar == (() if option.name in KEYS else "SHMRING_" + option.opts[0][2:].upper().replace("-", "_"))


def test_callers_are_told_the_limits_of_a_request_in_the_same_words() -> None:
    http = accepted("--max-pixels=1000", "--limit-mm-per-prompt=image=3").frontend.http
    limits = json.loads(json.dumps(openapi_document(http)["x-limits"]))
    helps = {option.opts[0][2:]: option.help for option in OPTIONS}
    assert limits
    assert {name: limit["description"] for name, limit in limits.items()} == {name: helps[name] for name in limits}
    assert limits["max-pixels"]["value"] == 1000
    assert limits["limit-mm-per-prompt"]["value"] == {"image": 3, "audio": 16, "video": 8}
    assert {"max-body-nbytes", "max-decode-time", "max-inputs"} <= limits.keys()


def test_help_is_what_the_docstring_says_first() -> None:
    [option] = [option for option in OPTIONS if option.name == "max_body_nbytes"]
    first, reason = descriptions(FrontendSettings)["max_body_nbytes"]
    assert (option.help, option.reasons) == (first, reason)


def test_help_names_every_executor_that_is_built_in() -> None:
    [option] = [option for option in OPTIONS if option.name == "executor"]
    assert [name for name in (*EXECUTORS, DEFAULT_EXECUTOR) if name not in (option.help or "")] == []


def test_the_command_line_counts_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\ndecoders: 1\nmodel: owner/first\nmax-inputs: 1\n")
    options = accepted(f"--config={file}", "--port=3", "owner/third", SHMRING_PORT="2", SHMRING_DECODERS="2")
    http = options.frontend.http
    assert (options.frontend.port, http.decoders, http.max_inputs) == (3, 2, 1)
    assert options.engines[0].model == "owner/third"
    assert accepted(SHMRING_CONFIG=str(file)).frontend.port == 1


def test_what_kubernetes_says_of_a_service_of_this_name_is_no_port() -> None:
    assert accepted(SHMRING_PORT="tcp://10.0.0.1:8000").frontend.port == 8000


@for_each("command", [engine, frontend], ids=["engine", "frontend"])
def test_a_process_without_a_supervisor_looks_at_variables(command: click.Command) -> None:
    result = CliRunner(env={"SHMRING_LOG_LEVEL": "nonsense"}).invoke(command, [])
    assert result.exit_code == 2
    assert "Invalid value for the variable SHMRING_LOG_LEVEL" in result.output


@for_each("command", [engine, frontend], ids=["engine", "frontend"])
def test_a_supervised_process_is_told_by_its_supervisor_alone(command: click.Command) -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    environment = {"SHMRING_LOG_LEVEL": "nonsense", "SHMRING_CONFIG": "/nonexistent"}
    result = CliRunner(env=environment).invoke(command, [f"--supervisor-fd={theirs.detach()}"])
    assert (result.exit_code, result.output.partition(": ")[2]) == (1, "the supervisor has gone\n")


@for_each(
    ("text", "complaint"),
    [
        ("decoders: 1\nport: 70000", "Invalid value for 'port' in FILE, line 2: 70000 is not in the range 0<=x<=65535."),
        ("port: 8.5", "Invalid value for 'port' in FILE, line 1: '8.5' is not a valid integer range."),
        ("port: [1, 2]", "'[1, 2]' is not a valid integer range."),
        ("\nmax-body-nbytes: much", "'max-body-nbytes' in FILE, line 2: 'much' is not a size; write bytes,"),
        ("allowed-origins: [a.org]", "'allowed-origins' in FILE, line 1: allowed-origins: 'a.org' is no origin"),
        ("max_pixels: 1", "'max_pixels' in FILE, line 1: no option that can stand there; it may be 'max-pixels'"),
        ("nonsense: 1", "'nonsense' in FILE, line 1: no option that can stand there"),
        ("api-key: secret", "'api-key' in FILE, line 1: no option that can stand there; it may be 'api-key-file'"),
        ("config: x.yaml", "'config' in FILE, line 1: no option that can stand there"),
        ("port: 1\nport: 2", "'port' in FILE, line 2: this option stands there twice"),
        ("model-name: a\nserved-model-name: b", "'served-model-name' in FILE, line 2: this option stands there twice"),
        ("port:", "'port' in FILE, line 1: no value"),
        ("executor-options: {a: 2026-01-01}", "'executor-options' in FILE, line 1: this is not what JSON has"),
        ("executor-options: &a [*a]", "'executor-options' in FILE, line 1: this is not what JSON has"),
        ("[port]: 1", "no option that can stand there"),
        ("mm-processor-cache-gb: 1e308", "'mm-processor-cache-gb' in FILE, line 1: cannot convert float infinity to integer"),
        (f"executor-options: {'[' * 2000}", "--config FILE can't be read: maximum recursion depth exceeded"),
        ("- port", "--config FILE: write options there, one in a line, such as max-pixels: 1000"),
        ("port: [", "--config FILE can't be read: while parsing a flow node"),
        ("port: \x00", "--config FILE can't be read:"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert complaint in refused(f"--config={file}").replace(str(file), "FILE")


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("# nothing yet\n")
    assert accepted(f"--config={file}") == accepted()


def test_what_is_wrong_in_the_environment_is_said_with_the_variable() -> None:
    assert refused(SHMRING_PORT="x") == "Error: Invalid value for the variable SHMRING_PORT: 'x' is not a valid integer range."
    assert "the variable SHMRING_DISABLE_MM_SHM: 'maybe' is not a valid boolean" in refused(SHMRING_DISABLE_MM_SHM="maybe")
    assert "the variable SHMRING_ROOT_PATH: 'a' is no path such as /llm" in refused(SHMRING_ROOT_PATH="a")
    assert refused("--port=x") == "Error: Invalid value for '--port': 'x' is not a valid integer range."
