"""Command line options of a frontend: what the supervisor writes is what a frontend understands."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest
from click.testing import CliRunner

from frontend.media.image import PictureLimits
from frontend.options import frontend_arguments, frontend_options, settings_of
from frontend.settings import FrontendSettings


def understood(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @click.command()
    @frontend_options
    def command(**values: Any) -> None:
        found.update(values)

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return found


def test_without_options_the_settings_are_the_defaults() -> None:
    assert settings_of(understood([])) == FrontendSettings()


def test_every_setting_has_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(FrontendSettings)} - {"picture_limits"}
    assert set(understood([])) == fields | {"max_pixels"}


def test_options_survive_being_handed_on() -> None:
    values = understood(
        [
            "--model-name",
            "a model",
            "--queue-timeout=1.5",
            "--max-body-nbytes",
            "3MiB",
            "--max-pixels=100",
            "--decode-threads=3",
        ]
    )
    assert understood(frontend_arguments(values)) == values
    settings = settings_of(values)
    assert settings.queue_timeout_s == 1.5
    assert settings.max_body_nbytes == 3 << 20
    assert settings.picture_limits == PictureLimits(max_pixels=100, max_nbytes=3 << 20)


@pytest.mark.parametrize(
    "argument", ["--max-body-nbytes=many", "--max-concurrent-requests=0", "--slot-timeout=0", "--max-pixels=-1"]
)
def test_nonsense_is_refused(argument: str) -> None:
    @click.command()
    @frontend_options
    def command(**values: Any) -> None:
        raise AssertionError("not reached")

    assert CliRunner().invoke(command, [argument]).exit_code == 2
