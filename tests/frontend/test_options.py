"""Command line options of a frontend, and the settings that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from click.testing import CliRunner, Result

from shmring.frontend.media.fetch import FetchSettings
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
from shmring.frontend.options import FRONTEND_OPTIONS, settings_of
from shmring.frontend.settings import CorsSettings, FrontendSettings, MediaCounts, ProcessSettings
from tests.tables import for_each


def parsed(arguments: Sequence[str], environment: dict[str, str] | None) -> tuple[Result, list[FrontendSettings]]:
    settings: list[FrontendSettings] = []
    command = click.Command("test", params=[*FRONTEND_OPTIONS], callback=lambda **values: settings.append(settings_of(values)))
    environment = {"SHMRING_API_KEY": None, "SHMRING_ADMIN_KEY": None, **(environment or {})}  # type: ignore[dict-item]
    return CliRunner(env=environment).invoke(command, arguments), settings


def understood(arguments: list[str], environment: dict[str, str] | None = None) -> FrontendSettings:
    result, settings = parsed(arguments, environment)
    assert result.exit_code == 0, result.output
    return settings[0]


def refused(*arguments: str, environment: dict[str, str] | None = None) -> str:
    result, _ = parsed(arguments, environment)
    assert result.exit_code == 2, result.output
    return result.output


def test_without_options_the_settings_are_the_defaults() -> None:
    assert understood([]) == FrontendSettings()


def test_every_setting_has_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(FrontendSettings)} - {"media_limits", "fetch", "cors", "key_owners"}
    without = {"max_coded_frames", "max_decoded_pixels", "max_video_expansion", "max_image_scans", "max_image_chunks"}
    limits = {field.name for field in dataclasses.fields(MediaLimits)} - without
    fetch = {field.name for field in dataclasses.fields(FetchSettings)} - {"max_redirects"}
    cors = {field.name for field in dataclasses.fields(CorsSettings)}
    assert {option.name for option in FRONTEND_OPTIONS} == fields | limits | fetch | cors | {"api_key_file", "admin_key_file"}


def test_settings_survive_being_handed_on(tmp_path: Path) -> None:
    settings = understood(
        [
            *(
                "--model-name",
                "a model",
                "--queue-timeout=1.5",
                "--max-body-nbytes",
                "3MiB",
                "--max-pixels=100",
                "--decoders=3",
            ),
            *("--max-concurrent-media=5", "--disable-mm-shm", "--limit-mm-per-prompt=image=3", "--max-video-duration=7.5"),
            *('--media-io-kwargs={"video": {"num_frames": 7}}', "--media-fetch-timeout=2"),
            *("--allowed-media-domains=a.org,*.b.org", "--allowed-media-domains=c.org:9000"),
            *("--allowed-media-networks=10.0.0.0/8", f"--allowed-local-media-path={tmp_path}"),
            *('--allowed-origins=["https://a.org", "http://b.org:3000"]', "--allow-credentials"),
            *("--allowed-methods=GET,POST", '--allowed-headers=["authorization"]'),
        ]
    )
    process = ProcessSettings(http=settings)
    assert msgspec.json.decode(msgspec.json.encode(process), type=ProcessSettings) == process
    assert settings == FrontendSettings(
        served_model_name=("a model",),
        queue_timeout_s=1.5,
        max_body_nbytes=3 << 20,
        decoders=3,
        max_concurrent_media=5,
        disable_mm_shm=True,
        limit_mm_per_prompt=MediaCounts(image=3),
        media_io_kwargs=MediaIoKwargs(num_frames=7),
        media_limits=MediaLimits(max_image_pixels=100, max_video_duration_s=7.5),
        cors=CorsSettings(
            allowed_origins=("https://a.org", "http://b.org:3000"),
            allow_credentials=True,
            allowed_methods=("GET", "POST"),
            allowed_headers=("authorization",),
        ),
        fetch=FetchSettings(
            allowed_media_domains=("a.org", "*.b.org", "c.org:9000"),
            allowed_media_networks=("10.0.0.0/8",),
            allowed_local_media_path=str(tmp_path),
            fetch_timeout_s=2,
        ),
    )


@for_each("who", ["api", "admin"])
def test_keys_of_all_three_places_are_accepted(who: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("from-a-file\n\n another \n")
    variable = f"SHMRING_{who.upper()}_KEY"
    given = [f"--{who}-key=one", f"--{who}-key", "two", f"--{who}-key-file={file}"]
    settings = understood(given, {variable: "of-the-environment one"})
    expected = ("one", "two", "of-the-environment", "from-a-file", "another")
    assert settings == FrontendSettings(**{f"{who}_keys": expected})  # type: ignore[arg-type] # of either name
    assert "from-a-file" not in repr(settings)
    assert understood([], {variable: "one two"}) == FrontendSettings(**{f"{who}_keys": ("one", "two")})  # type: ignore[arg-type]
    assert f"{variable} is set and holds no key" in refused(environment={variable: " "})
    assert f"--{who}-key: a key has visible ASCII characters only" in refused(f"--{who}-key=two words")


def test_keys_of_operators_are_others() -> None:
    assert "callers of /v1 could pause the server" in refused("--api-key=same", "--admin-key=same")


@for_each("text", ["", "  "])
def test_an_empty_variable_is_no_open_server(text: str) -> None:
    output = refused(environment={"SHMRING_API_KEY": text})
    assert "SHMRING_API_KEY is set and holds no key; unset it to serve without keys" in output


@for_each(
    "argument",
    [
        *("max-body-nbytes=many", "max-concurrent-requests=0", "max-concurrent-media=0", "slot-timeout=0", "max-pixels=-1"),
        *("limit-mm-per-prompt=images=3", "media-io-kwargs={", 'media-io-kwargs={"video": {"frames": 3}}'),
        *("allowed-media-domains=http://a.org", "allowed-media-networks=10.0.0.0/99"),
        *("allowed-local-media-path=/does/not/exist", "allowed-origins=https://a.org/", "allowed-origins=a.org"),
        *('allowed-origins=["https://a.org"', "allowed-origins=[1]", "allowed-methods=two words", "allowed-headers=[[]]"),
        *("api-key=", "api-key-file=/does/not/exist"),
    ],
)
def test_nonsense_is_refused(argument: str) -> None:
    assert "Error" in refused(f"--{argument}")
